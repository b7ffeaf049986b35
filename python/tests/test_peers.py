"""The peers of the GPU benchmarks run all their suites on the CPU, on small shapes."""

import json
import pathlib
import subprocess
import sys
import unittest

from need import need_torch

PEER = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "peers" / "torch_gpu.py"
WANT = {
    "gpu_attention": {"forward", "backward"},
    "gpu_layer": {"forward+backward"},
    "gpu_ops": {"product"},
    "gpu_delta": {"forward", "backward", "memory"},
    "gpu_hybrid": {"forward+backward"},
    "gpu_loss": {"forward+backward"},
}


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


if __name__ == "__main__":
    unittest.main()
