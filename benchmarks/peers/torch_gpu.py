"""PyTorch on a GPU in bf16, for the gpu_* cases of ../cases.json.

    gpu_attention  scaled_dot_product_attention with the flash and the cuDNN backend
    gpu_masks      FlexAttention, compiled; flash with deterministic algorithms. It has no sinks
    gpu_wgmma      the same
    gpu_layer      a Llama decoder layer of transformers with each backend: forward + backward
    gpu_ops        torch.mm on the products of the layer
    gpu_delta      the gated delta rule, the convolution and the gated norm of
                   flash-linear-attention (package fla-core) if it is installed, otherwise the
                   rule of transformers and compiled PyTorch; the gates are compiled PyTorch
    gpu_hybrid     a layer of linear attention of transformers' Qwen3.5, with
                   flash-linear-attention if it is installed
    gpu_loss       the head and the loss in chunks, without all logits in memory, as in Liger's
                   form: the gradient of a chunk's logits is computed beside its loss

CUDA events measure as many calls as take about 30 milliseconds, after a warm-up of half a second.
TFLOP/s count causal attention as half, and backward as 2.5 times forward. If a backend refuses a
case, its error is printed and the case is left out. --device cpu runs the same code without a GPU,
for tests.
"""

import argparse
import contextlib
import importlib.util
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

with contextlib.suppress(ImportError):  # backward passes of compiled functions run repeatedly
    import torch._functorch.config

    torch._functorch.config.donated_buffer = False

DEVICE = "cuda"  # or "cpu"
LONGEST = 0.0  # seconds that the calls of a case may take; 0 = no limit
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def measure(f, repeat: int) -> dict:
    """Returns the summary of `repeat` timings of f, in seconds a call."""

    def calls(n: int) -> float:
        if DEVICE == "cpu":
            return sum(common.seconds(f, n)) / n
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) / 1e3 / n

    n, end = 1, time.time() + (0.5 if DEVICE == "cuda" else 0)
    while True:
        n = max(1, min(1000, math.ceil(0.03 / calls(n))))
        if time.time() > end:
            break
    times, end = [calls(n)], time.time() + LONGEST
    while len(times) < repeat and (not LONGEST or time.time() < end):
        times.append(calls(n))
    return common.summary(times)


def attention(c: dict, backend: str, repeat: int) -> None:
    t, d = c["tokens"], c["head_dim"]
    make = lambda heads: torch.randn(1, t, heads, d, device=DEVICE, dtype=torch.bfloat16).transpose(
        1, 2
    )
    q, k, v, dout = make(c["heads"]), make(c["kv_heads"]), make(c["kv_heads"]), make(c["heads"])
    for x in (q, k, v):
        x.requires_grad_()
    if uneven := c.get("kv_head"):
        # No backend accepts such heads, so keys and values are copied for each query head.
        index = torch.tensor(uneven, device=DEVICE)
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


def masks(c: dict, _: str, repeat: int) -> None:
    import flex

    if c.get("sinks"):
        raise RuntimeError("FlexAttention has no sinks")
    make = lambda heads: torch.randn(
        1,
        heads,
        c["tokens"],
        c["head_dim"],
        device=DEVICE,
        dtype=torch.bfloat16,
        requires_grad=True,
    )
    q, k, v, dout = make(c["heads"]), make(c["kv_heads"]), make(c["kv_heads"]), make(c["heads"])
    deterministic = c.get("deterministic", False)
    if deterministic:
        name = "flash"
        attend = lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    else:
        name, attend = "flex", flex.attention(c, DEVICE)
    torch.use_deterministic_algorithms(deterministic)
    with sdpa_kernel(BACKENDS["flash"]):
        with torch.no_grad():
            emit(name, c["name"], op="forward", **measure(lambda: attend(q, k, v), repeat))
        out = attend(q, k, v)
        back = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        emit(name, c["name"], op="backward", **measure(back, repeat))
    torch.use_deterministic_algorithms(False)


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
    block = LlamaDecoderLayer(config, 0).to(DEVICE, torch.bfloat16)
    with sdpa_kernel(BACKENDS[backend]):
        time_layer(backend, c, block, LlamaRotaryEmbedding(config).to(DEVICE), repeat)


def time_layer(name: str, c: dict, block, rotary, repeat: int) -> None:
    """Times a layer, forward and backward. rotary gives its position embeddings."""
    x = torch.randn(
        1, c["tokens"], c["hidden"], device=DEVICE, dtype=torch.bfloat16, requires_grad=True
    )
    rope = rotary(x, torch.arange(c["tokens"], device=DEVICE)[None])
    dy = torch.randn_like(x)

    def step():
        x.grad = None
        for p in block.parameters():
            p.grad = None
        y = block(x, position_embeddings=rope, attention_mask=None)
        (y[0] if isinstance(y, tuple) else y).backward(dy)

    m = measure(step, repeat)
    emit(name, c["name"], op="forward+backward", tokens_per_second=c["tokens"] / m["median_s"], **m)


def hybrid(c: dict, _: str, repeat: int) -> None:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=c["hidden"],
        intermediate_size=c["ffn"],
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        num_attention_heads=c["heads"],
        num_key_value_heads=c["kv_heads"],
        head_dim=c["head_dim"],
        linear_num_key_heads=c["kv_heads"],
        linear_num_value_heads=c["heads"],
        linear_key_head_dim=c["head_dim"],
        linear_value_head_dim=c["head_dim"],
        max_position_embeddings=c["tokens"],
    )
    block = qwen.Qwen3_5DecoderLayer(config, 0).to(DEVICE, torch.bfloat16)
    rotary = qwen.Qwen3_5TextRotaryEmbedding(config).to(DEVICE)
    if has_fla():  # transformers calls it where it is installed
        time_layer("fla", c, block, rotary, repeat)
    else:
        time_layer("transformers", c, block, rotary, repeat)


def has_fla() -> bool:
    if importlib.util.find_spec("fla") is None:
        return False
    # On Hopper, fla refuses its backward pass with Triton 3.4 to 3.7.0, whose results are wrong
    # (flash-linear-attention issue 640). Its time is measured all the same: the same kernels run.
    from fla.ops.common import chunk_o

    if hasattr(chunk_o, "TRITON_ABOVE_3_7_1"):
        chunk_o.TRITON_ABOVE_3_7_1 = True
    return True


def products(c: dict, _: str, repeat: int) -> None:
    t, h, f = c["tokens"], c["hidden"], c["ffn"]
    make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
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


def passes(name: str, case: str, f, inputs: list, repeat: int, ops=("forward", "backward")) -> None:
    """Times both passes of f. ops are (case, op) pairs, or the two ops of `case`."""
    rows = [(case, op) if isinstance(op, str) else op for op in ops]
    with torch.no_grad():
        emit(name, rows[0][0], op=rows[0][1], **measure(lambda: f(*inputs), repeat))
    out = f(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    douts = [torch.randn_like(x) for x in outs]
    backward = lambda: torch.autograd.grad(outs, inputs, douts, retain_graph=True)
    emit(name, rows[1][0], op=rows[1][1], **measure(backward, repeat))


def delta(c: dict, _: str, repeat: int) -> None:
    t, d, h = c["tokens"], c["head_dim"], c["heads"]
    make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    g = -0.1 * torch.randn(1, t, h, device=DEVICE).abs()
    q, k = make(1, t, c["kv_heads"], d), make(1, t, c["kv_heads"], d)
    inputs = [q, k, make(1, t, h, d), g, torch.rand(1, t, h, device=DEVICE)]
    inputs = [x.requires_grad_() for x in inputs]
    cu = c.get("cu_seqlens")
    more = {}
    if has_fla():
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule

        name = "fla"
        if cu:
            more["cu_seqlens"] = torch.tensor(cu, device=DEVICE)
    else:
        if t > 1 << 16 or cu and c["name"] != "dry-run":
            raise RuntimeError("needs fla-core")
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

        # not compiled: its loops over chunks and rows would be unrolled
        name, rule = "transformers", torch_chunk_gated_delta_rule
        inputs[:2] = [
            x.detach().repeat_interleave(h // c["kv_heads"], 2).requires_grad_() for x in (q, k)
        ]
    call = lambda *x: rule(*x, use_qk_l2norm_in_kernel=True, **more)[0]
    passes(name, c["name"], call, inputs, repeat)


def delta_others(c: dict, repeat: int) -> None:
    """Times the other operations of the layer: convolution, gates, gated norm."""
    t, d, h = c["tokens"], c["head_dim"], c["heads"]
    make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    channels = (2 * c["kv_heads"] + h) * d

    def conv(x, w):
        padding = w.shape[1] - 1
        y = F.conv1d(x.transpose(1, 2), w[:, None], padding=padding, groups=channels)
        return F.silu(y[..., :t]).transpose(1, 2)

    def gates(a, b, a_log, dt_bias):
        return -a_log.float().exp() * F.softplus(a.float() + dt_bias), b.float().sigmoid()

    def norm(x, gate, w):
        y = F.rms_norm(x.float(), (d,), eps=1e-6).to(x.dtype) * w
        return (y * F.silu(gate.float())).to(x.dtype)

    def sigmoid(x, gate):
        return x * gate.sigmoid()

    calls = {"delta gates": ("compiled", torch.compile(gates))}
    calls["sigmoid gate"] = "compiled", torch.compile(sigmoid)
    if has_fla():
        from fla.modules.convolution import causal_conv1d
        from fla.modules.fused_norm_gate import rms_norm_gated

        def fla_conv(x, w):
            y = causal_conv1d(x, w, activation="silu")
            return y[0] if isinstance(y, tuple) else y

        calls["conv1d"] = "fla", fla_conv
        calls["gated norm"] = "fla", lambda x, gate, w: rms_norm_gated(x, gate, w, None, eps=1e-6)
    else:
        calls["conv1d"] = "compiled", torch.compile(conv)
        calls["gated norm"] = "compiled", torch.compile(norm)
    per_head = lambda: torch.randn(h, device=DEVICE).requires_grad_()
    operands = {
        "conv1d": lambda: [make(1, t, channels), make(channels, 4)],
        "delta gates": lambda: [make(1, t, h), make(1, t, h), per_head(), per_head()],
        "gated norm": lambda: [make(1, t, h, d), make(1, t, h, d), make(d)],
        "sigmoid gate": lambda: [make(1, t, h, d), make(1, t, h, d)],
    }
    for case, (name, f) in calls.items():
        rows = ((case, "memory"), (f"{case} backward", "memory"))
        passes(name, case, f, operands[case](), repeat, rows)


def loss(c: dict, _: str, repeat: int) -> None:
    t, h, v, rows = c["tokens"], c["hidden"], c["vocab"], 2048
    make = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
    x, w, norm = make(t, h), make(v, h), make(h)
    dw, dx = torch.zeros(v, h, device=DEVICE), torch.empty_like(x)
    targets = torch.arange(t, device=DEVICE) % v

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
    p.add_argument("--longest", type=float, default=0, help="seconds of a case; 0 = no limit")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    a = p.parse_args()
    global DEVICE, LONGEST
    DEVICE, LONGEST = a.device, a.longest
    if DEVICE == "cuda" and not torch.cuda.is_available():
        print("torch_gpu: no GPU; nothing was measured", file=sys.stderr)
        sys.exit(77)
    emit(
        "device",
        torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE,
        torch=torch.__version__,
        cudnn=torch.backends.cudnn.version() if DEVICE == "cuda" else None,
        cuda=torch.version.cuda,
    )
    words = [w for w in a.cases.split(",") if w]
    for suite in a.suite.split(","):
        run = dict(
            gpu_attention=attention,
            gpu_masks=masks,
            gpu_wgmma=masks,
            gpu_layer=layer,
            gpu_ops=products,
            gpu_delta=delta,
            gpu_hybrid=hybrid,
            gpu_loss=loss,
        )[suite]
        chosen = [
            c
            for c in common.cases("gpu_layer" if suite == "gpu_ops" else suite).values()
            if any(w in c["name"] for w in words) or not words and c["name"] != "dry-run"
        ]
        for i, c in enumerate(chosen[:1] if suite == "gpu_ops" else chosen):
            for backend in BACKENDS if suite in ("gpu_attention", "gpu_layer") else ["torch"]:
                attempt(backend, c["name"], lambda: run(c, backend, a.repeat))
            if suite == "gpu_delta" and i == 0:
                attempt("torch", "conv1d, gates and norm", lambda: delta_others(c, a.repeat))


def attempt(backend: str, case: str, f) -> None:
    """Calls f, and prints the error if it cannot run a case."""
    try:
        f()
    except (RuntimeError, ImportError, torch.OutOfMemoryError) as e:
        print(f"{backend} {case}: {str(e).splitlines()[0]}", file=sys.stderr)
    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
