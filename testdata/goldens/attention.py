"""Cases of attention: inputs and results for jobs of kind "attention".

The results are PyTorch's in float64: dense attention with autograd.
"""

import math
import pathlib

import torch
from safetensors.torch import save_file

CASES = {
    "attention-gqa-packed": dict(
        what="causal, 6 query heads on 2 key heads, four documents, one of a single token",
        sq=67,
        sk=67,
        hq=6,
        hkv=2,
        d=8,
        dv=8,
        causal=True,
        cu=[0, 21, 22, 50, 67],
        cu_k=None,
        scale=0.0,
    ),
    "attention-cross": dict(
        what="query and key lengths differ by document, aligned bottom-right; eight queries of the last see no key",
        sq=37,
        sk=83,
        hq=4,
        hkv=2,
        d=16,
        dv=16,
        causal=True,
        cu=[0, 7, 20, 37],
        cu_k=[0, 30, 74, 83],
        scale=0.0,
    ),
    "attention-dv": dict(
        what="not causal, value width other than key width, odd heads on one key head, a scale of its own",
        sq=41,
        sk=41,
        hq=3,
        hkv=1,
        d=24,
        dv=40,
        causal=False,
        cu=None,
        cu_k=None,
        scale=0.3,
    ),
}


def dense(q, k, v, c):
    """Returns out [Sq, Hq, Dv] and lse [Sq, Hq]. A query that sees no key gives 0 and -inf."""
    group = c["hq"] // c["hkv"]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    s = torch.einsum("qhd,khd->hqk", q, k) * (c["scale"] or 1 / math.sqrt(c["d"]))
    cu_q = c["cu"] or [0, c["sq"]]
    cu_k = c["cu_k"] or c["cu"] or [0, c["sk"]]
    see = torch.zeros(c["sq"], c["sk"], dtype=torch.bool)
    for (a, b), (e, f) in zip(zip(cu_q, cu_q[1:]), zip(cu_k, cu_k[1:])):
        block = torch.ones(b - a, f - e, dtype=torch.bool)
        see[a:b, e:f] = block.tril((f - e) - (b - a)) if c["causal"] else block
    blind = ~see.any(1)
    s = s.masked_fill(~see, -math.inf)
    lse = s.logsumexp(-1)
    p = torch.softmax(s.masked_fill(blind[None, :, None], 0), -1).masked_fill(
        blind[None, :, None], 0
    )
    return torch.einsum("hqk,khd->qhd", p, v), lse.transpose(0, 1)


def write_case(folder: pathlib.Path, c: dict, seed: int) -> str:
    """Writes in.safetensors and expected.safetensors, and returns the text of the job."""
    g = torch.Generator().manual_seed(seed)
    shapes = dict(
        q=(c["sq"], c["hq"], c["d"]),
        k=(c["sk"], c["hkv"], c["d"]),
        v=(c["sk"], c["hkv"], c["dv"]),
        dout=(c["sq"], c["hq"], c["dv"]),
    )
    t = {n: 1.5 * torch.randn(*s, generator=g) for n, s in shapes.items()}
    x = {n: v.double().requires_grad_(n != "dout") for n, v in t.items()}
    out, lse = dense(x["q"], x["k"], x["v"], c)
    out.backward(x["dout"])
    expected = dict(out=out, lse=lse, dq=x["q"].grad, dk=x["k"].grad, dv=x["v"].grad)
    if c["cu"] is None:  # check against torch's own kernel
        h = [y.transpose(0, 1)[None] for y in (x["q"], x["k"], x["v"])]
        own = torch.nn.functional.scaled_dot_product_attention(
            *h, is_causal=c["causal"], scale=c["scale"] or None, enable_gqa=True
        )
        assert (own[0].transpose(0, 1) - out).abs().max() < 1e-12
    if c["cu"] is not None:
        t["cu_seqlens"] = torch.tensor(c["cu"], dtype=torch.int32)
    if c["cu_k"] is not None:
        t["cu_seqlens_k"] = torch.tensor(c["cu_k"], dtype=torch.int64)
    save_file(t, folder / "in.safetensors")
    save_file(
        {n: v.detach().float().contiguous() for n, v in expected.items()},
        folder / "expected.safetensors",
    )
    return (
        f'# {c["what"]}\nkind = "attention"\n[device]\nbackend = "cpu"\n[attention]\ninput = "in.safetensors"\noutput = "out.safetensors"\n'
        f"causal = {str(c['causal']).lower()}\nscale = {c['scale']}\n"
    )
