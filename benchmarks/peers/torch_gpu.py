"""PyTorch on a GPU in bf16, for the gpu_* cases of ../cases.json.

    gpu_attention  scaled_dot_product_attention with the flash and the cuDNN backend
    gpu_layer      a Llama decoder layer of transformers with each backend: forward + backward
    gpu_ops        torch.mm on the products of the layer
    gpu_delta      the gated delta rule of flash-linear-attention (package fla-core) if it is
                   installed, otherwise that of transformers, compiled
    gpu_loss       the head and the loss in chunks, without all logits in memory, as in Liger's
                   form: the gradient of a chunk's logits is computed beside its loss

CUDA events measure as many calls as take about 30 milliseconds, after a warm-up of half a second.
TFLOP/s count causal attention as half, and backward as 2.5 times forward. If a backend refuses a
case, its error is printed and the case is left out.
"""

import argparse
import contextlib
import math
import sys
import time

import common
from common import emit_plain as emit

try:
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError as e:
    print(f"torch_gpu: no PyTorch ({e}); nothing was measured", file=sys.stderr)
    sys.exit(77)

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(f, repeat: int) -> dict:
    """Returns the summary of `repeat` timings of f, in seconds a call."""

    def calls(n: int) -> float:
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) / 1e3 / n

    n, end = 1, time.time() + 0.5
    while True:
        n = max(1, min(1000, math.ceil(0.03 / calls(n))))
        if time.time() > end:
            break
    return common.summary(calls(n) for _ in range(repeat))


def attention(c: dict, backend: str, repeat: int) -> None:
    t, d = c["tokens"], c["head_dim"]
    make = lambda heads: torch.randn(1, t, heads, d, device="cuda", dtype=torch.bfloat16).transpose(
        1, 2
    )
    q, k, v, dout = make(c["heads"]), make(c["kv_heads"]), make(c["kv_heads"]), make(c["heads"])
    for x in (q, k, v):
        x.requires_grad_()
    if uneven := c.get("kv_head"):
        # No backend accepts such heads, so keys and values are copied for each query head.
        index = torch.tensor(uneven, device="cuda")
        attend = lambda: F.scaled_dot_product_attention(
            q, k.index_select(1, index), v.index_select(1, index), is_causal=c["causal"]
        )
    else:
        gqa = c["heads"] != c["kv_heads"]
        attend = lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=c["causal"], enable_gqa=gqa
        )
    flops = 4.0 * t * t * c["heads"] * d / (2 if c["causal"] else 1)
    with sdpa_kernel(BACKENDS[backend]):
        with torch.no_grad():
            m = measure(attend, repeat)
        emit(backend, c["name"], op="forward", tflops=flops / m["median_s"] / 1e12, **m)
        out = attend()

        def backward():
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        m = measure(backward, repeat)
        emit(backend, c["name"], op="backward", tflops=2.5 * flops / m["median_s"] / 1e12, **m)


def layer(c: dict, backend: str, repeat: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=c["hidden"],
        intermediate_size=c["ffn"],
        num_attention_heads=c["heads"],
        num_key_value_heads=c["kv_heads"],
        head_dim=c["head_dim"],
        max_position_embeddings=c["tokens"],
        rope_theta=500000.0,
    )
    config._attn_implementation = "sdpa"
    block = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16)
    x = torch.randn(
        1, c["tokens"], c["hidden"], device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    positions = torch.arange(c["tokens"], device="cuda")[None]
    rope = LlamaRotaryEmbedding(config).to("cuda")(x, positions)
    dy = torch.randn_like(x)

    def step():
        x.grad = None
        for p in block.parameters():
            p.grad = None
        y = block(x, position_embeddings=rope, attention_mask=None)
        (y[0] if isinstance(y, tuple) else y).backward(dy)

    with sdpa_kernel(BACKENDS[backend]):
        m = measure(step, repeat)
    emit(
        backend,
        c["name"],
        op="forward+backward",
        tokens_per_second=c["tokens"] / m["median_s"],
        **m,
    )


def products(c: dict, _: str, repeat: int) -> None:
    t, h, f = c["tokens"], c["hidden"], c["ffn"]
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    heads = c["heads"] * c["head_dim"]
    for name, i, o in (
        ("qkv", h, heads + 2 * c["kv_heads"] * c["head_dim"]),
        ("out", heads, h),
        ("gate and up", h, 2 * f),
        ("down", f, h),
    ):
        x, w, dy = make(t, i), make(o, i), make(t, o)
        y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(w)
        ways = {
            "forward": lambda: torch.mm(x, w.t(), out=y),
            "to the input": lambda: torch.mm(dy, w, out=dx),
            "to the weights": lambda: torch.mm(dy.t(), x, out=dw),
        }
        for way, product in ways.items():
            emit("torch", f"{name} {way}", op="product", **measure(product, repeat))


def delta(c: dict, _: str, repeat: int) -> None:
    t, d = c["tokens"], c["head_dim"]
    make = lambda heads: torch.randn(1, t, heads, d, device="cuda", dtype=torch.bfloat16)
    q, k, v, dout = make(c["kv_heads"]), make(c["kv_heads"]), make(c["heads"]), make(c["heads"])
    g = -0.1 * torch.randn(1, t, c["heads"], device="cuda").abs()
    beta = torch.rand(1, t, c["heads"], device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    cu = c.get("cu_seqlens")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        name, more = "fla", {}
        if cu:
            more["cu_seqlens"] = torch.tensor(cu, device="cuda")
    except ImportError as e:
        if t > 1 << 16 or cu:
            raise RuntimeError(f"needs fla-core ({e})") from e
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        name, more, chunk_gated_delta_rule = (
            "compiled",
            {},
            torch.compile(torch_chunk_gated_delta_rule),
        )
        repeats = c["heads"] // c["kv_heads"]
        inputs[:2] = [x.detach().repeat_interleave(repeats, 2).requires_grad_() for x in (q, k)]
    forward = lambda: chunk_gated_delta_rule(*inputs, use_qk_l2norm_in_kernel=True, **more)[0]
    with torch.no_grad():
        emit(name, c["name"], op="forward", **measure(forward, repeat))
    out = forward()
    backward = lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)
    emit(name, c["name"], op="backward", **measure(backward, repeat))


def loss(c: dict, _: str, repeat: int) -> None:
    t, h, v, rows = c["tokens"], c["hidden"], c["vocab"], 2048
    make = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    x, w, norm = make(t, h), make(v, h), make(h)
    dw, dx = torch.zeros(v, h, device="cuda"), torch.empty_like(x)
    targets = torch.arange(t, device="cuda") % v

    @torch.compile
    def gradient(logits, targets):
        """Returns the losses of a chunk, and the gradient of its logits."""
        logits = logits.float()
        p = torch.softmax(logits, -1)
        nll = -torch.log(p.gather(1, targets[:, None]))
        p = p.scatter_add(1, targets[:, None], torch.full_like(nll, -1.0)) / t
        return nll.sum(), p.to(torch.bfloat16)

    def both():
        a = x.detach().requires_grad_()
        y = F.rms_norm(a, (h,), norm, 1e-5)
        total = 0
        with torch.no_grad():
            for lo in range(0, t, rows):
                nll, d = gradient(y[lo : lo + rows] @ w.t(), targets[lo : lo + rows])
                total = total + nll
                dx[lo : lo + rows] = d @ w
                dw.add_(d.t() @ y[lo : lo + rows])
        y.backward(dx)
        return total

    emit("torch", c["name"], op="forward+backward", **measure(both, repeat))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--suite", default="gpu_attention,gpu_layer")
    p.add_argument("--cases", default="", help="only cases whose name contains one of these words")
    p.add_argument("--repeat", type=int, default=7)
    a = p.parse_args()
    if not torch.cuda.is_available():
        print("torch_gpu: no GPU; nothing was measured", file=sys.stderr)
        sys.exit(77)
    emit(
        "device",
        torch.cuda.get_device_name(),
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version(),
        cuda=torch.version.cuda,
    )
    words = [w for w in a.cases.split(",") if w]
    for suite in a.suite.split(","):
        run = dict(
            gpu_attention=attention,
            gpu_layer=layer,
            gpu_ops=products,
            gpu_delta=delta,
            gpu_loss=loss,
        )[suite]
        chosen = [
            c
            for c in common.cases("gpu_layer" if suite == "gpu_ops" else suite).values()
            if any(w in c["name"] for w in words) or not words and c["name"] != "dry-run"
        ]
        for c in chosen[:1] if suite == "gpu_ops" else chosen:
            for backend in BACKENDS if suite in ("gpu_attention", "gpu_layer") else ["torch"]:
                try:
                    run(c, backend, a.repeat)
                except (RuntimeError, torch.OutOfMemoryError) as e:
                    print(f"{backend} {c['name']}: {str(e).splitlines()[0]}", file=sys.stderr)
                with contextlib.suppress(Exception):
                    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
