"""PyTorch's matrix products over ../cases.json: mm for batch 1, bmm otherwise, into memory that is already there."""

import json
import pathlib

import common
import torch

CASES = pathlib.Path(__file__).resolve().parent.parent / "cases.json"


def make(c: dict, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    b, m, k, n = c["batch"], c["m"], c["k"], c["n"]
    lead = () if b == 1 else (b,)
    x = torch.randn(*lead, m, k, generator=g).to(dtype)
    # "nt" is y = x·Wᵀ with W [n, k], the layout of a linear layer's weight; "tn" its weight's gradient, xᵀ·y.
    if c["form"] == "tn":
        x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    w = torch.randn(*lead, k, n, generator=g).to(dtype)
    if c["form"] == "nt":
        w = w.transpose(-1, -2).contiguous().transpose(-1, -2)
    out = torch.empty(*lead, m, n, dtype=dtype)
    op = torch.mm if b == 1 else torch.bmm
    return lambda: op(x, w, out=out)


def main() -> None:
    a = common.parser(__doc__).parse_args()
    torch.set_num_threads(a.threads)
    cases = {c["name"]: c for c in json.loads(CASES.read_text())["gemm"]}
    for name in common.chosen(list(cases), a.cases):
        c = cases[name]
        m = common.measure(make(c, common.dtype(a)), a.repeat)
        n = 2.0 * c["batch"] * c["m"] * c["k"] * c["n"]
        common.emit(
            "torch mm", name, dtype=a.dtype, threads=a.threads, gflops=n / m["min_s"] / 1e9, **m
        )


if __name__ == "__main__":
    main()
