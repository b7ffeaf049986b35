"""PyTorch's scaled_dot_product_attention, forward and backward, for the cases of ../cases.json.

Arrays are [1, heads, tokens, D] and contiguous, the fastest layout of PyTorch. For packed
documents, the program calls PyTorch once for each document, because PyTorch has no packed attention
on the CPU (a boolean mask is ten times slower). GF/s count causal attention as half, and backward
as 2.5 times forward.
"""

import common
import torch
import torch.nn.functional as F


def documents(c: dict) -> list[tuple[int, int]]:
    """Returns the range of tokens [lo, hi) of each document."""
    cu = c.get("cu_seqlens") or [0, c["tokens"]]
    return list(zip(cu, cu[1:]))


def flops(c: dict) -> float:
    """Returns the floating-point operations of the forward pass."""
    pairs = sum((b - a) ** 2 for a, b in documents(c)) / (2 if c["causal"] else 1)
    return 4.0 * pairs * c["heads"] * c["head_dim"]


def make(c: dict, dtype: torch.dtype):
    """Returns two functions for a case: the forward pass, and both passes."""
    g = torch.Generator().manual_seed(0)
    t, d = c["tokens"], c["head_dim"]
    q, dout = (torch.randn(1, c["heads"], t, d, generator=g).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, c["kv_heads"], t, d, generator=g).to(dtype) for _ in range(2))
    for x in (q, k, v):
        x.requires_grad_()
    gqa = c["heads"] != c["kv_heads"]
    docs = documents(c)

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, is_causal=c["causal"], enable_gqa=gqa)

    def forward():
        if len(docs) == 1:
            return attend(q, k, v)
        # The gradient of split is one concatenation. The gradient of slices would be a sum of the
        # size of the whole sequence for each document.
        lengths = [b - a for a, b in docs]
        return torch.cat([attend(*x) for x in zip(*(y.split(lengths, 2) for y in (q, k, v)))], 2)

    return common.passes(forward, [q, k, v], dout)


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("--forward", action="store_true", help="also time the forward pass alone")
    a = p.parse_args()
    torch.set_num_threads(a.threads)
    for name, c in common.cases("attention", a.cases).items():
        forward, both = make(c, common.dtype(a))
        n = flops(c)
        timed = [("forward+backward", both, 3.5 * n)]
        if a.forward:
            timed.insert(0, ("forward", forward, n))
        for op, f, operations in timed:
            m = common.measure(f, a.repeat)
            common.emit(
                "torch sdpa",
                name,
                op=op,
                threads=a.threads,
                dtype=a.dtype,
                gflops=operations / m["min_s"] / 1e9,
                **m,
            )


if __name__ == "__main__":
    main()
