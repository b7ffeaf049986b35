"""A whole attention layer over ranks, and a caller's own attention between the two exchanges."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from . import _struct
from .agreement import describe
from .attention import LAYOUTS, check_gradient, settle
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .plan import Batch, Lengths, Plan
from .tensors import (
    block,
    dense,
    dtype_of,
    empty,
    is_torch,
    one_library,
    stream_of,
    torch_or_none,
    view,
    without_zero_strides,
)

WEIGHTS = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "q_norm", "k_norm")
INPUTS = ("x", *WEIGHTS, "cos", "sin")


@dataclass
class LayerCall:
    """What a layer's forward pass leaves for its backward pass."""

    plan: Plan
    batch: Batch
    saved: Any
    inputs: dict[str, Any]  # x, the weights, cos and sin
    eps: float


def _args(
    plan: Plan, inputs: dict[str, Any], eps: float
) -> tuple[_struct.AttentionLayerArgs, list[Any]]:
    views = {name: view(x) for name, x in inputs.items() if x is not None}
    args = _struct.AttentionLayerArgs(
        hidden=inputs["x"].shape[2],
        eps=eps,
        stream=stream_of(inputs["x"]),
        **{name: v.pointer() for name, v in views.items()},
    )
    return args, list(views.values())


def attention_layer_forward(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    *,
    heads: int,
    kv_heads: int = 0,
    bq: Any = None,
    bk: Any = None,
    bv: Any = None,
    bo: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    cos: Any = None,
    sin: Any = None,
    eps: float = 0.0,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    deterministic: bool = False,
    save: bool = True,
    context: Context | None = None,
) -> tuple[Any, LayerCall]:
    """The layer, and what its backward needs. Collective. Arguments are those of `attention_layer`. Returns (y, LayerCall)."""
    ctx = current(context)
    given = dict(
        x=x,
        wq=wq,
        wk=wk,
        wv=wv,
        wo=wo,
        bq=bq,
        bk=bk,
        bv=bv,
        bo=bo,
        q_norm=q_norm,
        k_norm=k_norm,
        cos=cos,
        sin=sin,
    )

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        for name in ("x", *WEIGHTS[:4]):
            if not hasattr(given[name], "shape"):
                raise InvalidArgument(
                    f"ulysses.attention_layer: {name} is {type(given[name]).__name__}, no array: give NumPy arrays or PyTorch tensors"
                )
        one_library(**given)
        if len(x.shape) != 3 or heads < 1 or len(wq.shape) != 2 or len(wv.shape) != 2:
            raise InvalidArgument(
                f"ulysses.attention_layer: x {tuple(x.shape)}, wq {tuple(wq.shape)}, wv {tuple(wv.shape)}, {heads} heads: x is [B, rows, hidden], weights are "
                "[heads * features, hidden]"
            )
        kv = kv_heads or heads
        if wq.shape[0] % heads or wv.shape[0] % kv:
            raise InvalidArgument(
                f"ulysses.attention_layer: wq of {wq.shape[0]} and wv of {wv.shape[0]} rows for {heads} and {kv} heads: each head has as many"
            )
        tokens = x.shape[0] * x.shape[1]
        for name in ("cos", "sin"):
            if given[name] is not None and (
                len(given[name].shape) != 2 or given[name].shape[0] != tokens
            ):
                raise InvalidArgument(
                    f"ulysses.attention_layer: {name} of shape {tuple(given[name].shape)}: give [{tokens}, rotary/2], a row for each of this rank's tokens"
                )
        lengths = Lengths.of(ctx, x.shape[0], x.shape[1], None, seq, None, cu_seqlens)
        if lengths.given is not None and lengths.given.kv_seq is not None:
            lengths = replace(lengths, given=None)
        planned = dict(
            heads=heads,
            kv_heads=kv,
            head_dim=wq.shape[0] // heads,
            v_dim=wv.shape[0] // kv,
            dtype=dtype_of(x),
            causal=bool(causal),
            window=window,
            scale=None if scale is None else float(scale),
            deterministic=bool(deterministic),
        )
        free = {"x": (1,), "cos": (0,), "sin": (0,)}
        same = {
            **planned,
            **lengths.same(),
            **{name: describe(t, free=free.get(name, ())) for name, t in given.items()},
            "eps": float(eps),
            "save": bool(save),
        }
        return same, lengths.counts(), (planned, lengths)

    (planned, lengths), counts = ctx.agree("ulysses.attention_layer", prepare)
    sequences = lengths.settle(counts)
    plan, batch = ctx._plan(**planned), ctx._batch(sequences)
    inputs = {name: None if t is None else dense(t) for name, t in given.items()}
    y = empty(x, x.shape)
    args, keep = _args(plan, inputs, eps)
    out, sizes = view(y), _struct.Sizes()
    args.y = out.pointer()
    ctx._call(
        "ulysses_attention_layer_sizes",
        plan.handle,
        batch.handle,
        ctypes.byref(args),
        ctypes.byref(sizes),
    )
    saved, workspace = block(x, max(sizes.saved, 64)) if save else None, block(x, sizes.workspace)
    args.workspace, args.workspace_bytes = view(workspace).data, sizes.workspace
    if save:
        args.saved, args.saved_bytes = view(saved).data, max(sizes.saved, 64)
    ctx._call("ulysses_attention_layer_forward", plan.handle, batch.handle, ctypes.byref(args))
    return y, LayerCall(plan, batch, saved, inputs, eps)


def attention_layer_backward(call: LayerCall, dy: Any) -> dict[str, Any]:
    """The gradients by name: "x", and F32 ones of every weight that was given, this rank's share: their sum over the ranks is the gradient. Collective."""
    check_gradient("ulysses.attention_layer_backward", call, dy, tuple(call.inputs["x"].shape))
    plan, batch, ctx = call.plan, call.batch, call.plan.context
    dy = without_zero_strides(dy)
    dy = dense(dy)
    grads = {"x": empty(dy, call.inputs["x"].shape)}
    for name in WEIGHTS:
        if call.inputs[name] is not None:
            grads[name] = empty(dy, call.inputs[name].shape, _struct.F32)
            grads[name][...] = 0
    args, keep = _args(plan, call.inputs, call.eps)
    sizes = _struct.Sizes()
    ctx._call(
        "ulysses_attention_layer_sizes",
        plan.handle,
        batch.handle,
        ctypes.byref(args),
        ctypes.byref(sizes),
    )
    workspace = block(dy, sizes.workspace)
    args.workspace, args.workspace_bytes = view(workspace).data, sizes.workspace
    args.saved, args.saved_bytes = view(call.saved).data, call.saved.shape[0]
    views = {name: view(t) for name, t in grads.items()}
    g = _struct.AttentionLayerGrads(
        dy=view(dy).pointer(), **{"d" + name: v.pointer() for name, v in views.items()}
    )
    ctx._call(
        "ulysses_attention_layer_backward",
        plan.handle,
        batch.handle,
        ctypes.byref(args),
        ctypes.byref(g),
    )
    return grads


def attention_layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    """y = attention(rope(norm(x wq^T + bq)), rope(norm(x wk^T + bk)), x wv^T + bv) wo^T + bo. Collective; differentiable for PyTorch.

    x          [B, rows, hidden], this rank's rows; F32, or BF16 where the device computes in it
    wq, wk, wv, wo  [H*D, hidden], [Hkv*D, hidden], [Hkv*Dv, hidden], [hidden, H*Dv], as torch.nn.Linear has them, of x's type
    heads, kv_heads  H and Hkv; Hkv divides H, 0 = H
    bq, bk, bv, bo   biases; None = none
    q_norm, k_norm   [D], RMS norms of heads with `eps` (0 = 1e-6); both or neither
    cos, sin   [B*rows, rotary/2] F32 of this rank's positions, halves paired i, i + rotary/2; both or neither
    causal, window, scale, seq, cu_seqlens, deterministic, context  as for `attention`

    Returns y [B, rows, hidden]. Gradients of weights are this rank's share: sum them over the ranks. Errors: InvalidArgument, Unsupported, CommError.
    """
    names = [n for n in (*WEIGHTS[4:], "cos", "sin") if options.get(n) is not None]
    tensors = dict(zip(INPUTS, (x, wq, wk, wv, wo))) | {n: options.pop(n) for n in names}
    if is_torch(x):
        from ._torch import differentiable, wants_gradient

        def run(*given: Any) -> tuple[Any, tuple, Any]:
            y, call = attention_layer_forward(**dict(zip(tensors, given)), **options)
            saved = (call.saved, *(call.inputs[name] for name in names))
            kept = replace(call, saved=None, inputs={})

            def back(saved: tuple, dy: Any) -> tuple:
                inputs = {**dict.fromkeys(INPUTS), **dict(zip(names, saved[1:]))}
                grads = attention_layer_backward(replace(kept, saved=saved[0], inputs=inputs), dy)
                return tuple(
                    grads[name].to(inputs[name].dtype) if name in grads else None for name in names
                )

            return y, saved, back

        names = list(tensors)
        if wants_gradient(*tensors.values()):
            return differentiable(run, *tensors.values())
    return attention_layer_forward(**tensors, save=False, **options)[0]


@dataclass
class LocalTensors:
    """What a caller's own attention works on: all rows of this rank's heads, views of the library's memory that live for the call.

    q, out are [B, seq, h, D], k, v [B, kv_seq, hkv, D]; heads and kv_heads are the ranges of these among all heads. Backward has dout as well, and writes
    dq, dk, dv; forward writes out."""

    q: Any
    k: Any
    v: Any
    out: Any
    heads: tuple[int, int]
    kv_heads: tuple[int, int]
    dout: Any = None
    dq: Any = None
    dk: Any = None
    dv: Any = None


def _seen(pointer: Any, torch: Any) -> Any:
    """A tensor of the library's as an array over the same memory."""
    if not pointer:
        return None
    t = pointer.contents
    shape, strides = [t.shape[i] for i in range(t.ndim)], [t.strides[i] for i in range(t.ndim)]
    size = t.bits // 8
    n = sum((d - 1) * s for d, s in zip(shape, strides)) + 1
    memory = (ctypes.c_uint8 * (n * size)).from_address(t.data + t.byte_offset)
    if torch is not None:
        flat = torch.frombuffer(
            memory, dtype={(2, 32): torch.float32, (4, 16): torch.bfloat16}[t.code, t.bits]
        )
        return flat.as_strided(shape, strides)
    return np.lib.stride_tricks.as_strided(
        np.frombuffer(memory, np.float32), shape, [s * size for s in strides]
    )


def _run(
    ctx: Context,
    name: str,
    plan: Plan,
    batch: Batch,
    args: Any,
    rest: tuple,
    function: Callable[[LocalTensors], None],
    torch: Any,
) -> None:
    failed: list[BaseException] = []

    def call(user: Any, pointer: Any) -> int:
        try:
            c = pointer.contents
            names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
            arrays = {name: _seen(getattr(c, name), torch) for name in names}
            heads, kv_heads = (c.head_lo, c.head_hi), (c.kv_head_lo, c.kv_head_hi)
            function(LocalTensors(heads=heads, kv_heads=kv_heads, **arrays))
            return 0
        except BaseException as e:  # it must not cross C
            failed.append(e)
            return 0  # the peers wait for the second exchange: the failure is every rank's after it

    ctx._call(
        name,
        plan.handle,
        batch.handle,
        ctypes.byref(args),
        *rest,
        _struct.LocalAttention(call),
        None,
    )

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if failed:
            raise InvalidArgument(
                f"{name}: the function failed: {type(failed[0]).__name__}: {failed[0]}"
            ) from failed[0]
        return {}, (), None

    ctx.agree(name, prepare)


@dataclass
class LocalCall:
    """What the forward pass around a caller's own attention leaves for its backward pass."""

    plan: Plan
    batch: Batch
    layout: str
    saved: Any
    shapes: tuple[tuple[int, ...], ...]


def local_attention_forward(
    q: Any,
    k: Any,
    v: Any,
    function: Callable[[LocalTensors], None],
    *,
    save: bool = True,
    layout: str = "BSHD",
    **options: Any,
) -> tuple[Any, LocalCall]:
    """A caller's own attention between the library's two exchanges. Collective. q, k, v, layout and lengths are those of `attention`; masks, documents and scale
    are the function's business, which writes `out` of its argument. A rank without heads does not call it. On the CPU. Returns (out, LocalCall)."""
    plan, batch = settle(
        q, k, v, layout=layout, operation="ulysses.local_attention", save=bool(save), **options
    )
    if is_torch(q) and q.is_cuda:
        raise Unsupported(
            "ulysses.local_attention: tensors on CUDA: the callback's memory is shown as the host's here: call ulysses_local_forward from C"
        )
    axes, torch = LAYOUTS[layout], torch_or_none() if is_torch(q) else None
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    out, sizes = empty(q, tuple(q.shape[:-1]) + (plan.v_dim,)), _struct.Sizes()
    plan.context._call("ulysses_local_sizes", plan.handle, batch.handle, ctypes.byref(sizes))
    saved, workspace = block(q, max(sizes.saved, 64)) if save else None, block(q, sizes.workspace)
    views = [view(x).permute(*axes) for x in (q, k, v, out)]
    args = _struct.AttentionArgs(
        **{name: x.pointer() for name, x in zip(("q", "k", "v", "out"), views)},
        workspace=view(workspace).data,
        workspace_bytes=sizes.workspace,
    )
    if save:
        args.saved, args.saved_bytes = view(saved).data, max(sizes.saved, 64)
    _run(plan.context, "ulysses_local_forward", plan, batch, args, (), function, torch)
    return out, LocalCall(plan, batch, layout, saved, tuple(tuple(x.shape) for x in (q, k, v)))


def local_attention_backward(
    call: LocalCall, dout: Any, function: Callable[[LocalTensors], None]
) -> tuple[Any, Any, Any]:
    """(dq, dk, dv); the function writes dq, dk, dv of its argument from q, k, v, out and dout of it. Collective."""
    check_gradient(
        "ulysses.local_attention_backward",
        call,
        dout,
        tuple(call.shapes[0][:-1]) + (call.plan.v_dim,),
    )
    plan, batch, axes = call.plan, call.batch, LAYOUTS[call.layout]
    dout, sizes = without_zero_strides(dout), _struct.Sizes()
    plan.context._call("ulysses_local_sizes", plan.handle, batch.handle, ctypes.byref(sizes))
    grads, workspace = [empty(dout, shape) for shape in call.shapes], block(dout, sizes.workspace)
    views = [view(x).permute(*axes) for x in (dout, *grads)]
    args = _struct.AttentionArgs(
        saved=view(call.saved).data,
        saved_bytes=call.saved.shape[0],
        workspace=view(workspace).data,
        workspace_bytes=sizes.workspace,
    )
    g = _struct.AttentionGrads(
        **{name: x.pointer() for name, x in zip(("dout", "dq", "dk", "dv"), views)}
    )
    _run(
        plan.context,
        "ulysses_local_backward",
        plan,
        batch,
        args,
        (ctypes.byref(g),),
        function,
        torch_or_none() if is_torch(dout) else None,
    )
    return grads[0], grads[1], grads[2]


def local_attention(
    q: Any, k: Any, v: Any, function: Callable[[Any, Any, Any], Any], **options: Any
) -> Any:
    """function(q, k, v) on all rows of this rank's heads, between the library's two exchanges. Collective; differentiable for PyTorch.

    q, k, v    this rank's rows of all heads, as for `attention`, with its layout, seq, kv_seq and context
    function   gets q [B, seq, h, D], k [B, kv_seq, hkv, D], v [B, kv_seq, hkv, Dv], this rank's heads and the key heads under them, and returns
               out [B, seq, h, Dv]. With PyTorch it is differentiated by q, k and v, by calling it again in backward; other tensors that need a
               gradient are an error there. Masks, documents and scale are its business

    Returns out [B, rows, H, Dv] in the layout of q. A rank without heads does not call it. Errors: InvalidArgument, Unsupported (CUDA), CommError.
    """
    if is_torch(q):
        return _local_torch(q, k, v, function, options)

    def write(t: LocalTensors) -> None:
        t.out[...] = function(t.q, t.k, t.v)

    return local_attention_forward(q, k, v, write, save=False, **options)[0]


def _local_torch(q: Any, k: Any, v: Any, function: Callable[..., Any], options: dict) -> Any:
    """`local_attention` of PyTorch tensors. Backward calls the function again and differentiates it."""
    import torch

    from ._tiled import leaves
    from ._torch import differentiable, wants_gradient

    def write(t: LocalTensors) -> None:
        with torch.no_grad():
            t.out.copy_(function(t.q, t.k, t.v))

    def write_grads(t: LocalTensors) -> None:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
            out = function(*inputs)
            lost = [tuple(x.shape) for x in leaves(out, 0) if all(x is not own for own in inputs)]
            if lost:
                raise InvalidArgument(
                    f"ulysses.local_attention: the function uses tensors of shapes {lost} that need a gradient; only q, k and v get one: detach the others"
                )
            grads = torch.autograd.grad(out, inputs, t.dout, allow_unused=True)
        for to, grad in zip((t.dq, t.dk, t.dv), grads):
            to.zero_() if grad is None else to.copy_(grad)

    def run(q: Any, k: Any, v: Any) -> tuple[Any, tuple, Any]:
        out, call = local_attention_forward(q, k, v, write, **options)
        saved, kept = (call.saved,), replace(call, saved=None)

        def back(saved: tuple, dout: Any) -> tuple:
            return local_attention_backward(replace(kept, saved=saved[0]), dout, write_grads)

        return out, saved, back

    if wants_gradient(q, k, v):
        return differentiable(run, q, k, v)
    return local_attention_forward(q, k, v, write, save=False, **options)[0]
