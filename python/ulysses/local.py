"""Attention of the caller between the two all-to-alls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from . import _struct
from ._eager import eager
from .attention import LAYOUTS, Call, check_gradient, plan_and_batch
from .context import Context
from .errors import InternalError, InvalidArgument
from .plan import Batch, Plan
from .tensors import (
    NAMES,
    empty,
    is_torch,
    stream_of,
    torch_or_none,
    view,
    without_zero_strides,
)
from .tensors import (
    block as memory,
)


@dataclass
class LocalTensors:
    """The arguments of a caller's own attention: the whole sequences, for this rank's heads.

    The arrays are views of the call's memory, which is valid only during the call. On a GPU, the
    function enqueues its work on the current stream of PyTorch, on which the arrays are ready.

    Attributes:
        q: [B, seq, h, D]
        k: [B, kv_seq, hkv, D]
        v: [B, kv_seq, hkv, Dv]
        out: [B, seq, h, Dv]; the forward function writes it
        heads, kv_heads: the ranges [lo, hi) of these heads among all heads
        dout: [B, seq, h, Dv], gradient of out; backward only
        dq, dk, dv: gradients of q, k and v; the backward function writes them
    """

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


def _array(pointer: Any, blocks: Sequence[Any]) -> Any:
    """Returns a view of the memory of a ulysses_tensor, which lies in one of the blocks.

    The blocks are the memory of the call, uint8 arrays of NumPy or tensors of PyTorch on any
    device. A view of such a tensor has its device and keeps its memory.
    """
    if not pointer:
        return None
    t = pointer.contents
    shape, strides = ([side[i] for i in range(t.ndim)] for side in (t.shape, t.strides))
    dtype, size = NAMES[t.code | t.bits << 8], t.bits // 8
    n = (sum((d - 1) * s for d, s in zip(shape, strides)) + 1) * size
    for block in blocks:
        at = t.data + t.byte_offset - view(block).data
        if 0 <= at <= block.shape[0] - n:
            if is_torch(block):
                typed = block[at : at + n].view(getattr(torch_or_none(), dtype))
                return typed.as_strided(shape, strides, typed.storage_offset())
            return np.lib.stride_tricks.as_strided(
                block[at : at + n].view(dtype), shape, [s * size for s in strides]
            )
    raise InternalError("ulysses.local_attention: a tensor lies outside of the call's memory")


def _call_local(
    name: str,
    plan: Plan,
    batch: Batch,
    args: Any,
    rest: tuple,
    function: Callable[[LocalTensors], None],
    saved: Any,
    like: Any,
) -> None:
    """Calls a function of the library that calls `function` between its two all-to-alls.

    Collective. If `function` raises on a rank, every rank raises InvalidArgument.

    Args:
        name: the function of the library; `rest` are its arguments after `args`
        saved: the saved memory, or None
        like: an array of the library and on the device of the call
    """
    sizes = _struct.Sizes()
    plan.context._call("ulysses_local_sizes", plan.handle, batch.handle, ctypes.byref(sizes))
    workspace = memory(like, sizes.workspace)
    args.workspace, args.workspace_bytes = view(workspace).data, sizes.workspace
    args.stream = stream_of(like)
    blocks = [workspace]
    if saved is not None:
        args.saved, args.saved_bytes = view(saved).data, saved.shape[0]
        blocks.append(saved)
    failed: list[BaseException] = []

    def call(user: Any, pointer: Any) -> int:
        try:
            c = pointer.contents
            names = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
            arrays = {name: _array(getattr(c, name), blocks) for name in names}
            heads, kv_heads = (c.head_lo, c.head_hi), (c.kv_head_lo, c.kv_head_hi)
            function(LocalTensors(heads=heads, kv_heads=kv_heads, **arrays))
            return 0
        except BaseException as e:  # an exception must not pass through C
            failed.append(e)
            # The other ranks wait in the second all-to-all, so the failure is raised after it.
            return 0

    plan.context._call(
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
                f"{name}: the function raised {type(failed[0]).__name__}: {failed[0]}"
            ) from failed[0]
        return {}, (), None

    plan.context.agree(name, prepare)


class LocalCall(Call):
    """The result of `local_attention_forward` that the backward pass needs.

    It has the attributes of `Call`.
    """


@eager
def local_attention_forward(
    q: Any,
    k: Any,
    v: Any,
    function: Callable[[LocalTensors], None],
    *,
    seq: int | None = None,
    kv_seq: int | None = None,
    layout: str = "BSHD",
    save: bool = True,
    context: Context | None = None,
) -> tuple[Any, LocalCall]:
    """Calls a caller's own attention between the two all-to-alls. Collective.

    Args:
        q, k, v: as in `attention`
        function: function(tensors) with `LocalTensors` computes attention of tensors.q, tensors.k
            and tensors.v, and writes tensors.out. Masks, documents and scale are up to it. It is
            not called on a rank without heads
        seq, kv_seq, layout, context: as in `attention`
        save (bool): save the activations that `local_attention_backward` needs. Default: True

    Returns:
        (out, call): out [B, rows, H, Dv] in the layout of q, and the `LocalCall` for
        `local_attention_backward`.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, arguments differ between ranks, or
            function raised on a rank
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    options = dict(seq=seq, kv_seq=kv_seq, layout=layout, context=context)
    plan, batch, _ = plan_and_batch("ulysses.local_attention", q, k, v, save=save, options=options)
    axes, number = LAYOUTS[layout], plan.context.agreed
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    out, sizes = empty(q, tuple(q.shape[:-1]) + (plan.v_dim,)), _struct.Sizes()
    plan.context._call("ulysses_local_sizes", plan.handle, batch.handle, ctypes.byref(sizes))
    saved = memory(q, max(sizes.saved, 64)) if save else None
    views = [view(x).permute(*axes) for x in (q, k, v, out)]
    args = _struct.AttentionArgs(
        **{name: x.pointer() for name, x in zip(("q", "k", "v", "out"), views)}
    )
    _call_local("ulysses_local_forward", plan, batch, args, (), function, saved, q)
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    return out, LocalCall(plan, batch, layout, saved, shapes, number=number)


@eager
def local_attention_backward(
    call: LocalCall, dout: Any, function: Callable[[LocalTensors], None]
) -> tuple[Any, Any, Any]:
    """Returns the gradients of q, k and v of `local_attention_forward`. Collective.

    Args:
        call: the result of `local_attention_forward`
        dout: gradient of out, [B, rows, H, Dv] in the layout of q, with the dtype of q
        function: function(tensors) with `LocalTensors` reads q, k, v, out and dout, and writes dq,
            dk and dv. It is not called on a rank without heads

    Returns:
        (dq, dk, dv) with the shapes and layout of q, k and v.

    Raises:
        InvalidArgument: the forward pass had save=False, dout has another shape or dtype than out,
            or function raised on a rank
        CommError: the communicator failed
    """
    check_gradient(
        "ulysses.local_attention_backward",
        call,
        dout,
        tuple(call.shapes[0][:-1]) + (call.plan.v_dim,),
    )
    plan, batch, axes = call.plan, call.batch, LAYOUTS[call.layout]
    dout = without_zero_strides(dout)
    grads = [empty(dout, shape) for shape in call.shapes]
    views = [view(x).permute(*axes) for x in (dout, *grads)]
    args = _struct.AttentionArgs()
    g = _struct.AttentionGrads(
        **{name: x.pointer() for name, x in zip(("dout", "dq", "dk", "dv"), views)}
    )
    rest = (ctypes.byref(g),)
    _call_local("ulysses_local_backward", plan, batch, args, rest, function, call.saved, dout)
    return grads[0], grads[1], grads[2]


@eager
def local_attention(
    q: Any, k: Any, v: Any, function: Callable[[Any, Any, Any], Any], **options: Any
) -> Any:
    """Calls function(q, k, v) on whole sequences for this rank's heads, between two all-to-alls.

    Collective; differentiable in PyTorch.

    Args:
        q, k, v: as in `attention`
        function: function(q, k, v) receives q [B, seq, h, D], k [B, kv_seq, hkv, D] and
            v [B, kv_seq, hkv, Dv]: this rank's query heads, and their key heads. It returns
            out [B, seq, h, Dv]. Masks, documents and scale are up to it. It is not called on a rank
            without heads. With PyTorch, the backward pass calls it again, with the same random
            numbers and autocast, and differentiates it with respect to q, k and v; it must not use
            other tensors that need a gradient. On a GPU it enqueues its work on PyTorch's current
            stream
        options: layout, seq, kv_seq and context, as in `attention`

    Returns:
        out [B, rows, H, Dv] in the layout of q.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, arguments differ between ranks, or
            function raised on a rank or returned another shape
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    if is_torch(q):
        return _local_torch(q, k, v, function, options)

    def write(t: LocalTensors) -> None:
        t.out[...] = _checked(function(t.q, t.k, t.v), t)

    return local_attention_forward(q, k, v, write, save=False, **options)[0]


def _checked(out: Any, t: LocalTensors) -> Any:
    """Returns the result of the caller's function. Assignments would broadcast another shape."""
    shape = getattr(out, "shape", None)
    if shape is None or tuple(shape) != tuple(t.out.shape):
        got = type(out).__name__ if shape is None else f"an array of shape {tuple(shape)}"
        raise InvalidArgument(
            f"ulysses.local_attention: the function returned {got}; it must return out, an array "
            f"of shape {tuple(t.out.shape)}"
        )
    return out


def _local_torch(q: Any, k: Any, v: Any, function: Callable[..., Any], options: dict) -> Any:
    """`local_attention` of PyTorch tensors. Backward runs function again to differentiate it."""
    import torch

    from ._tiled import Run, leaves
    from ._torch import differentiable, wants_gradient

    first: list[Run] = []  # of the forward pass, on a rank that has heads

    def write(t: LocalTensors) -> None:
        first.append(Run.of((t.q,)))
        with torch.no_grad():
            t.out.copy_(_checked(function(t.q, t.k, t.v), t))

    def write_grads(t: LocalTensors) -> None:
        with first[0].again():
            inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
            out = function(*inputs)
            others = [tuple(x.shape) for x in leaves(out, 0) if all(x is not y for y in inputs)]
            if others:
                raise InvalidArgument(
                    f"ulysses.local_attention: the function uses tensors of shapes {others} that "
                    "need a gradient, but only q, k and v get one; detach the others"
                )
            grads = torch.autograd.grad(out, inputs, t.dout, allow_unused=True)
        for target, grad in zip((t.dq, t.dk, t.dv), grads):
            target.zero_() if grad is None else target.copy_(grad)

    def run(q: Any, k: Any, v: Any) -> tuple[Any, tuple, Any]:
        out, call = local_attention_forward(q, k, v, write, **options)
        saved, kept = (call.saved,), replace(call, saved=None)

        def back(saved: tuple, dout: Any) -> tuple:
            return local_attention_backward(replace(kept, saved=saved[0]), dout, write_grads)

        return out, saved, back

    if wants_gradient(q, k, v):
        return differentiable(run, q, k, v)
    return local_attention_forward(q, k, v, write, save=False, **options)[0]
