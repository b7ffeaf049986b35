"""The chunked gated delta rule of transformers in f32, for the cases of ../cases.json.

torch_chunk_gated_delta_rule of Qwen3-Next is what such a model runs without CUDA. The program times
the forward pass, whose line has the name of the case and "-forward", and forward and backward with
autograd. For packed documents, the program calls the function once for each document.
"""

import common
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


def make(c: dict):
    """Returns two functions for a case: the forward pass, and both passes."""
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
        lengths = [b - a for a, b in zip(cu, cu[1:])]
        documents = zip(*(x.split(lengths, 1) for x in (q, k, v, decay, beta)))
        return torch.cat(
            [torch_chunk_gated_delta_rule(*d, use_qk_l2norm_in_kernel=True)[0] for d in documents],
            1,
        )

    return common.passes(forward, inputs, dout)


def main() -> None:
    a = common.parser(__doc__).parse_args()
    torch.set_num_threads(a.threads)
    for name, c in common.cases("gdn", a.cases).items():
        forward, both = make(c)
        common.emit(
            "transformers",
            name + "-forward",
            threads=a.threads,
            **common.measure(forward, a.repeat),
        )
        common.emit("transformers", name, threads=a.threads, **common.measure(both, a.repeat))


if __name__ == "__main__":
    main()
