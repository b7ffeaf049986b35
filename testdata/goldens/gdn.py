"""Cases of the gated delta rule: inputs and results for jobs of kind "gdn".

The results are PyTorch's in float64: the recurrence, token after token, with autograd.
"""

import pathlib

import torch
from safetensors.torch import save_file

CASES = {
    "gdn-plain": dict(
        what="one document, twice as many value heads as key heads, key and value widths differ",
        s=150,
        hk=2,
        hv=4,
        dk=16,
        dv=24,
        cu=None,
        norm=True,
        scale=0.0,
        decay=0.5,
        states=False,
    ),
    "gdn-packed": dict(
        what="documents of one token, on and beside the cuts of 2, 3 and 4 ranks, some that span several; the decay is strong",
        s=96,
        hk=1,
        hv=3,
        dk=12,
        dv=8,
        cu=[0, 1, 23, 24, 31, 32, 33, 48, 49, 95, 96],
        norm=True,
        scale=0.0,
        decay=20.0,
        states=False,
    ),
    "gdn-states": dict(
        what="four documents that continue others: states before them and behind them, and gradients through both; q and k not normalised",
        s=61,
        hk=2,
        hv=2,
        dk=8,
        dv=8,
        cu=[0, 9, 10, 40, 61],
        norm=False,
        scale=0.7,
        decay=0.1,
        states=True,
    ),
}


def recurrence(x, c):
    """Returns out [S, Hv, Dv] and the last state of each document [N, Hv, Dk, Dv].

    The arithmetic is that of transformers' torch_recurrent_gated_delta_rule."""
    q, k = x["q"], x["k"]
    if c["norm"]:
        q, k = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    group = c["hv"] // c["hk"]
    q, k = (t.repeat_interleave(group, dim=1) for t in (q, k))
    q = q * (c["scale"] or c["dk"] ** -0.5)
    cu, out, states = c["cu"] or [0, c["s"]], [], []
    for i, (a, b) in enumerate(zip(cu, cu[1:])):
        state = (
            x["state_in"][i]
            if c["states"]
            else torch.zeros(c["hv"], c["dk"], c["dv"], dtype=q.dtype)
        )
        for t in range(a, b):
            state = state * x["g"][t].exp()[:, None, None]
            u = x["beta"][t][:, None] * (x["v"][t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], u)
            out.append(torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
    return torch.stack(out), torch.stack(states)


def write_case(folder: pathlib.Path, c: dict, seed: int) -> str:
    """Writes in.safetensors and expected.safetensors, and returns the text of the job."""
    g = torch.Generator().manual_seed(seed)
    s, hk, hv, dk, dv = (c[n] for n in ("s", "hk", "hv", "dk", "dv"))
    n = len(c["cu"] or [0, s]) - 1
    t = {
        name: torch.randn(*shape, generator=g)
        for name, shape in dict(
            q=(s, hk, dk), k=(s, hk, dk), v=(s, hv, dv), dout=(s, hv, dv)
        ).items()
    }
    if not c["norm"]:  # with keys of a norm above 1 the state would grow
        t["k"] = torch.nn.functional.normalize(t["k"], dim=-1)
    t["g"] = -c["decay"] * torch.rand(s, hv, generator=g)
    t["beta"] = torch.rand(s, hv, generator=g)
    if c["states"]:
        t["state_in"], t["dstate_out"] = (torch.randn(n, hv, dk, dv, generator=g) for _ in range(2))
    given = ("dout", "dstate_out")
    x = {name: v.double().requires_grad_(name not in given) for name, v in t.items()}
    out, states = recurrence(x, c)
    loss = (out * x["dout"]).sum()
    if c["states"]:
        loss = loss + (states * x["dstate_out"]).sum()
    loss.backward()
    expected = dict(
        out=out,
        state_out=states,
        **{("d" + name): v.grad for name, v in x.items() if name not in given},
    )
    if c["cu"] is not None:
        t["cu_seqlens"] = torch.tensor(c["cu"], dtype=torch.int32)
    save_file(t, folder / "in.safetensors")
    save_file(
        {name: v.detach().float().contiguous() for name, v in expected.items()},
        folder / "expected.safetensors",
    )
    return (
        f'# {c["what"]}\nkind = "gdn"\n[device]\nbackend = "cpu"\n[gdn]\ninput = "in.safetensors"\noutput = "out.safetensors"\n'
        f"qk_l2norm = {str(c['norm']).lower()}\nscale = {c['scale']}\n"
    )
