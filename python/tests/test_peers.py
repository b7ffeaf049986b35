"""The peers of the GPU benchmarks run all their suites on the CPU, on small shapes.

The peer of a training step has the gradients of our job.
"""

import json
import pathlib
import subprocess
import sys
import unittest

from need import need_torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
PEER = ROOT / "benchmarks" / "peers" / "torch_gpu.py"
MOE = ROOT / "examples" / "moe.toml"
WANT = {
    "gpu_attention": {"forward", "backward"},
    "gpu_layer": {"forward+backward"},
    "gpu_ops": {"product"},
    "gpu_delta": {"forward", "backward", "memory"},
    "gpu_hybrid": {"forward+backward"},
    "gpu_loss": {"forward+backward"},
}

# Compares a step of train_step.py with the gradients of transformers' own loss, which includes the
# loss that balances experts. It is a process of its own because train_step.py imports another
# module named reference than the tests do.
BALANCE = """
import json, pathlib, sys, torch
sys.path.append(sys.argv[1])
import train_step
sizes = ["model.new.num_hidden_layers=1", "data.sequence=64", "optimizer.clip=0.0"]
job = train_step.read_job(pathlib.Path(sys.argv[2]), sizes)
rows = torch.arange(64)[None]
torch.manual_seed(1)
trainer = train_step.Trainer(job, rows, "f32", torch.float32)
want = trainer.model(input_ids=rows, labels=rows)
want.loss.backward()
gradients = [p.grad.clone() for p in trainer.model.parameters()]
printed = trainer.step(0.0)
pairs = zip(trainer.model.parameters(), gradients)
error = max(float((p.grad - g).abs().max() / g.abs().max()) for p, g in pairs)
nll = float(want.loss - job["model"]["new"]["router_aux_loss_coef"] * want.aux_loss)
print(json.dumps(dict(printed=printed, nll=nll, error=error)))
"""


class Peers(unittest.TestCase):
    @need_torch
    def test_suites(self):
        """Every suite prints a line for each operation; an operation that fails has none."""
        for suite, ops in WANT.items():
            with self.subTest(suite):
                flags = ["--device", "cpu", "--cases", "dry-run", "--repeat", "1", "--suite", suite]
                r = subprocess.run(
                    [sys.executable, PEER, *flags], capture_output=True, text=True, timeout=600
                )
                self.assertEqual(r.returncode, 0, r.stderr)
                lines = [json.loads(x) for x in r.stdout.splitlines() if x.startswith("{")]
                self.assertEqual({x["op"] for x in lines if "op" in x}, ops, r.stderr)
                if suite == "gpu_delta":
                    self.assertEqual(sum(x.get("op") == "memory" for x in lines), 8, r.stderr)
                self.assertTrue(all(x["median_s"] > 0 for x in lines if "op" in x))

    @need_torch
    def test_balance(self):
        """A step of the peer includes the loss that balances experts; the printed loss does not."""
        argv = [sys.executable, "-c", BALANCE, PEER.parent, MOE]
        r = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
        self.assertEqual(r.returncode, 0, r.stderr)
        x = json.loads(r.stdout)
        self.assertTrue(abs(x["printed"] - x["nll"]) < 1e-5, x)
        self.assertTrue(x["error"] <= 1e-6, x)


if __name__ == "__main__":
    unittest.main()
