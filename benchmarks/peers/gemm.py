"""PyTorch's matrix products for the cases of ../cases.json, into memory that is already allocated.

The function is torch.mm for batch 1, else torch.bmm.
"""

import common
import torch


def make(c: dict, dtype: torch.dtype):
    """Returns a function that computes the product of a case."""
    g = torch.Generator().manual_seed(0)
    b, m, k, n = c["batch"], c["m"], c["k"], c["n"]
    lead = () if b == 1 else (b,)
    x = torch.randn(*lead, m, k, generator=g).to(dtype)
    # "nt" is y = x·Wᵀ with W [n, k], a linear layer. "tn" is xᵀ·y, the gradient of its weight.
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
    for name, c in common.cases("gemm", a.cases).items():
        m = common.measure(make(c, common.dtype(a)), a.repeat)
        n = 2.0 * c["batch"] * c["m"] * c["k"] * c["n"]
        common.emit(
            "torch mm", name, dtype=a.dtype, threads=a.threads, gflops=n / m["min_s"] / 1e9, **m
        )


if __name__ == "__main__":
    main()
