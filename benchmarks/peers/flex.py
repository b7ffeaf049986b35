"""PyTorch's FlexAttention on the CPU, compiled, for the cases `masks` of ../cases.json.

On the CPU, FlexAttention has no backward pass, so it is timed forward alone. Its times compare with
the cases of our side whose names end in -forward.
"""

import common
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


def attention(c: dict, device: str):
    """Returns a function of q, k and v [1, H, T, D] that computes attention with a case's masks."""
    window, block, every = c.get("window", 0), c.get("block", 0), c.get("every", 1)
    cap, slope = c.get("softcap", 0.0), c.get("slope", 0.0)

    def keep(b, h, i, j):
        kept = j <= i
        if window:
            kept = kept & (j > i - window)
        if block:
            kept = kept & ((i // block == j // block) | ((i // block + j // block) % every == 0))
        return kept

    def score(s, b, h, i, j):
        if cap:
            s = cap * torch.tanh(s / cap)
        return s + slope * (j - i) if slope else s

    size = block or 128
    mask = create_block_mask(keep, None, None, c["tokens"], c["tokens"], device, BLOCK_SIZE=size)
    torch._dynamo.reset()  # otherwise it makes numbers of the cases into variables
    attend = torch.compile(flex_attention, dynamic=False)
    options = dict(score_mod=score if cap or slope else None, block_mask=mask)
    return lambda q, k, v: attend(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **options)


def case(c: dict):
    """Returns a function that computes a case."""
    g = torch.Generator().manual_seed(0)
    shape = (1, c["heads"], c["tokens"], c["head_dim"])
    q, k, v = (torch.randn(*shape, generator=g) for _ in range(3))
    attend = attention(c, "cpu")

    def forward():
        with torch.no_grad():
            attend(q, k, v)

    return forward


def main() -> None:
    a = common.parser(__doc__).parse_args()
    torch.set_num_threads(a.threads)
    for name, c in common.cases("masks", a.cases).items():
        if c.get("sinks"):
            continue
        m = common.measure(case(c), a.repeat)
        common.emit("torch flex_attention", name + "-forward", op="forward", threads=a.threads, **m)


if __name__ == "__main__":
    main()
