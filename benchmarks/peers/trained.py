#!/usr/bin/env python3
"""Gradients and token losses of a trained model, compared with transformers in float64.

    benchmarks/peers/trained.py MODEL-FOLDER TEXT [TOKENS]

Run it in the root of the repository after make, with a Python that has requirements.txt. It takes
the first TOKENS (1024) of TEXT as one sequence, and runs `verify` in F32 on several meshes. Peers
are transformers in F32, as it is, and with the loss computed in float64. The error of a tensor is
max|Δ| / max|ref|.
"""

import pathlib
import statistics
import subprocess
import sys
import tempfile

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python" / "tests"))
from families import float64  # noqa: E402

MESHES = {"ulysses 2": (2, 1), "ulysses 3": (3, 1), "ulysses 2 x ring 2": (2, 2), "ring 4": (1, 4)}

JOB = """
device = {{ backend = "cpu", dtype = "f32" }}
model = {{ path = "{model}" }}
data = {{ path = "{text}", sequence = {tokens}, shuffle = false }}
optimizer = {{ name = "sgd", lr = 1e-5, clip = 0.0, warmup = 0 }}
train = {{ steps = 1 }}
"""


def ours(job: pathlib.Path, ulysses: int, ring: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a step on a mesh."""
    out = job.with_name("tensors.safetensors")
    out.unlink(missing_ok=True)
    mesh = ("--set", f"parallel.ulysses={ulysses}", "--set", f"parallel.ring={ring}")
    command = [ROOT / "bin/ulysses-mpi", "verify", job, "--ranks", str(ulysses * ring), *mesh]
    done = subprocess.run([*command, "--tensors", out, "--quiet"], check=False)
    assert done.returncode in (0, 8), done.returncode
    return load_file(out)


def gradients(model: str, ids: torch.Tensor, dtype: torch.dtype, loss_in: torch.dtype):
    """Returns the loss of each token, and the gradients of their mean, in float64."""
    m = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(dtype)
    logits = m(input_ids=ids[None], use_cache=False).logits[0, :-1]
    losses = torch.nn.functional.cross_entropy(logits.to(loss_in), ids[1:], reduction="none")
    losses.mean().backward()
    named = {name: p.grad.double() for name, p in m.named_parameters()}
    return losses.detach().double(), named


def row(name: str, losses: torch.Tensor, got: dict[str, torch.Tensor], want) -> str:
    exact, exact_gradients = want
    errors = []
    for key, reference in exact_gradients.items():
        size = reference.abs().max()
        errors.append(float((got[key].double() - reference).abs().max() / size))
    off = float((losses - exact).abs().max() / exact.abs().max())
    mean = abs(float(losses.mean() - exact.mean()))
    return (
        f"| {name} | {off:.1e} | {mean:.1e} | {statistics.median(errors):.1e} | {max(errors):.1e} |"
    )


def main() -> None:
    model, text = (str(pathlib.Path(word).resolve()) for word in sys.argv[1:3])
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 1024
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        job = pathlib.Path(folder) / "job.toml"
        job.write_text(JOB.format(model=model, text=text, tokens=tokens))
        runs = {name: ours(job, *mesh) for name, mesh in MESHES.items()}
    ids = next(iter(runs.values()))["input_ids"].flatten()[:tokens].long()
    with float64():
        want = gradients(model, ids, torch.float64, torch.float64)
    for name, dtype in (
        ("transformers, F32", torch.float32),
        ("with the loss in float64", torch.float64),
    ):
        rows.append(row(name, *gradients(model, ids, torch.float32, dtype), want))
    for name, tensors in runs.items():
        got = {key: tensors[key + " gradient"] for key in want[1]}
        logits = tensors["logits"].reshape(-1, tensors["logits"].shape[-1])[: len(ids) - 1]
        losses = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")
        rows.append(row("ours, " + name, losses, got, want))
    print(
        "| | losses of tokens | mean loss | gradients, median | gradients, worst |\n|---|---:|---:|---:|---:|"
    )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
