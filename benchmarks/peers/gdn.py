"""transformers' chunked gated delta rule (torch_chunk_gated_delta_rule of Qwen3-Next) in f32, over ../cases.json: forward, and forward with
backward through autograd.

It is what a model of that kind runs where there is no CUDA. Packed documents are a loop over the documents. Lines of a case's forward pass alone
have its name and "-forward".
"""

import json
import pathlib

import common
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

CASES = pathlib.Path(__file__).resolve().parent.parent / "cases.json"


def make(c: dict):
    g = torch.Generator().manual_seed(0)
    t, d, group = c["tokens"], c["head_dim"], c["heads"] // c["kv_heads"]
    q, k = (torch.randn(1, t, c["kv_heads"], d, generator=g) for _ in range(2))
    v, dout = (torch.randn(1, t, c["heads"], d, generator=g) for _ in range(2))
    decay, beta = (
        -0.1 * torch.randn(1, t, c["heads"], generator=g).abs(),
        torch.rand(1, t, c["heads"], generator=g),
    )
    inputs = [x.requires_grad_() for x in (q, k, v, decay, beta)]
    cu = c.get("cu_seqlens") or [0, t]

    def forward():
        q, k, v, decay, beta = inputs
        if group > 1:
            q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
        parts = zip(
            *(x.split([b - a for a, b in zip(cu, cu[1:])], 1) for x in (q, k, v, decay, beta))
        )
        return torch.cat(
            [torch_chunk_gated_delta_rule(*p, use_qk_l2norm_in_kernel=True)[0] for p in parts], 1
        )

    def both():
        for x in inputs:
            x.grad = None
        forward().backward(dout)

    def forward_only():
        with torch.no_grad():
            forward()

    return forward_only, both


def main() -> None:
    a = common.parser(__doc__).parse_args()
    torch.set_num_threads(a.threads)
    cases = {c["name"]: c for c in json.loads(CASES.read_text())["gdn"]}
    for name in common.chosen(list(cases), a.cases):
        forward, both = make(cases[name])
        common.emit(
            "transformers",
            name + "-forward",
            threads=a.threads,
            **common.measure(forward, a.repeat),
        )
        common.emit("transformers", name, threads=a.threads, **common.measure(both, a.repeat))


if __name__ == "__main__":
    main()
