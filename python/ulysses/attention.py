"""Attention over sequences that are cut across ranks (Ulysses: Jacobs et al. 2023, arXiv:2309.14509).

Each rank holds its rows of all heads. The library's one all-to-all gives it all rows of its heads, attention runs there, a second gives
the rows back. Heads, key heads, rows and ranks need not divide each other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import _struct
from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, Lengths, Plan
from .tensors import (
    NAMES,
    View,
    block,
    dtype_of,
    empty,
    is_torch,
    one_library,
    stream_of,
    view,
    without_zero_strides,
)

# Axes of each layout, by their place in [B, S, H, D].
LAYOUTS = {"BSHD": (0, 1, 2, 3), "SBHD": (1, 0, 2, 3), "BHSD": (0, 2, 1, 3), "THD": (0, 1, 2)}


@dataclass
class Call:
    """What a forward pass leaves for its backward pass."""

    plan: Plan
    batch: Batch
    layout: str
    saved: Any  # plain bytes, free to be moved and offloaded in between
    shapes: tuple[tuple[int, ...], ...]  # of q, k, v


def settle(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq: int | None = None,
    kv_seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    kv_cu_seqlens: Sequence[int] | None = None,
    layout: str = "BSHD",
    deterministic: bool = False,
    context: Context | None = None,
    operation: str = "ulysses.attention",
    save: bool = True,
) -> tuple[Plan, Batch]:
    """The plan and the batch of a call. Collective; the context keeps both."""
    ctx = current(context)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        if layout not in LAYOUTS:
            raise InvalidArgument(f"ulysses: layout {layout!r}: give one of {', '.join(LAYOUTS)}")
        for x in (q, k, v):
            if not hasattr(x, "shape"):
                raise InvalidArgument(
                    f"ulysses: {type(x).__name__} is no array: give NumPy arrays or PyTorch tensors"
                )
        one_library(q=q, k=k, v=v)
        if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
            raise InvalidArgument(
                f"ulysses: window {window!r}: give (left, right), keys on either side, -1 = unbounded"
            )
        shapes = [tuple(x.shape) for x in (q, k, v)]
        if any(len(s) != len(layout) for s in shapes):
            raise InvalidArgument(
                f"ulysses: q {shapes[0]}, k {shapes[1]}, v {shapes[2]} in layout {layout}: each needs {len(layout)} axes"
            )
        axis = {name: layout.index(name) for name in layout}
        rows_axis = axis["T"] if layout == "THD" else axis["S"]
        batch = 1 if layout == "THD" else shapes[0][axis["B"]]
        rows, kv_rows = shapes[0][rows_axis], shapes[1][rows_axis]
        if kv_rows != shapes[2][rows_axis]:
            raise InvalidArgument(
                f"ulysses: k {shapes[1]}, v {shapes[2]} in layout {layout}: {kv_rows} rows of keys and {shapes[2][rows_axis]} of values: "
                "each key has its value"
            )
        lengths = Lengths.of(ctx, batch, rows, kv_rows, seq, kv_seq, cu_seqlens, kv_cu_seqlens)
        planned = dict(
            heads=shapes[0][axis["H"]],
            kv_heads=shapes[1][axis["H"]],
            head_dim=shapes[0][-1],
            v_dim=shapes[2][-1],
            dtype=dtype_of(q),
            causal=bool(causal),
            window=None if window is None else tuple(int(n) for n in window),
            scale=None if scale is None else float(scale),
            deterministic=bool(deterministic),
        )
        same = {
            **planned,
            **lengths.same(),
            "layout": layout,
            **{name: describe(x, free=(rows_axis,)) for name, x in (("q", q), ("k", k), ("v", v))},
            "save": save,
        }
        return same, lengths.counts(), (planned, lengths)

    (planned, lengths), counts = ctx.agree(operation, prepare)
    sequences = lengths.settle(counts)
    plan = ctx._plan(**planned, cross=sequences.kv_seq is not None)
    return plan, ctx._batch(sequences)


def check_gradient(operation: str, call: Any, dout: Any, shape: tuple[int, ...]) -> None:
    """Raises on every rank if one cannot go backward. Collective.

    A rank needs the memory that forward saved and a gradient of the output's shape and type."""

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if call.saved is None:
            raise InvalidArgument(
                f"{operation}: the forward was called with save=False: keep what it saves"
            )
        if tuple(getattr(dout, "shape", ())) != shape or dtype_of(dout) != call.plan.dtype:
            raise InvalidArgument(
                f"{operation}: a gradient of shape {tuple(getattr(dout, 'shape', ()))} and type {getattr(dout, 'dtype', type(dout).__name__)}: give one "
                f"of {shape} and {NAMES[call.plan.dtype]}, as the result has"
            )
        return (
            {"plan": call.plan.key, "lengths": call.batch.sequences, "device": describe(dout)[1]},
            (),
            None,
        )

    call.plan.context.agree(operation, prepare)


def attention_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    save: bool = True,
    lse: bool = False,
    layout: str = "BSHD",
    **options: Any,
) -> tuple[Any, Any, Call]:
    """Attention, and what its backward needs. Collective.

    q        [B, rows, H, D], this rank's rows: F32, or BF16 where the device computes in it; NumPy or PyTorch, any strides, last axis dense
    k, v     [B, rows, Hkv, D], [B, rows, Hkv, Dv]; Hkv divides H
    save     keep what attention_backward needs
    lse      also return the logarithm of the sum of exponents, natural, F32 [B, rows, H]: its bytes travel
    layout   order of the axes of q, k, v and out: BSHD, SBHD, BHSD, or THD for one row of packed documents
    options  those of `attention`

    Returns (out, lse or None, Call). out is [B, rows, H, Dv] in the layout of q. A row that sees no key is 0, its lse -inf.
    Errors: InvalidArgument, Unsupported, CommError.
    """
    plan, batch = settle(q, k, v, layout=layout, save=bool(save), **options)
    ctx = plan.context
    axes = LAYOUTS[layout]
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    out = empty(q, tuple(q.shape[:-1]) + (plan.v_dim,))
    table = (
        empty(
            q,
            ((1,) if layout == "THD" else (batch.sequences.batch,)) + (batch.rows, plan.heads),
            _struct.F32,
        )
        if lse
        else None
    )
    sizes = plan.sizes(batch)
    saved = (
        block(q, max(sizes.saved, 64)) if save else None
    )  # a rank without heads saves nothing, and says by memory that it will go backward
    views = [view(x).permute(*axes) for x in (q, k, v, out)]
    args = _struct.AttentionArgs(
        q=views[0].pointer(),
        k=views[1].pointer(),
        v=views[2].pointer(),
        out=views[3].pointer(),
        stream=stream_of(q),
    )
    if table is not None:
        lse_view = view(table if layout != "THD" else table[0])
        args.lse = lse_view.pointer()
    if save:
        args.saved, args.saved_bytes = _address(saved), max(sizes.saved, 64)
    ctx._call("ulysses_attention_forward", plan.handle, batch.handle, ctypes.byref(args))
    call = Call(plan, batch, layout, saved, tuple(tuple(x.shape) for x in (q, k, v)))
    if table is not None and layout == "THD":
        table = table[0]
    return out, table, call


def attention_backward(call: Call, dout: Any) -> tuple[Any, Any, Any]:
    """Gradients of q, k and v, in their layout, from the gradient of out [.., Dv]. Collective. An expanded gradient is copied first."""
    check_gradient(
        "ulysses.attention_backward", call, dout, tuple(call.shapes[0][:-1]) + (call.plan.v_dim,)
    )
    plan, batch, axes = call.plan, call.batch, LAYOUTS[call.layout]
    dout = without_zero_strides(dout)
    grads = [empty(dout, shape) for shape in call.shapes]
    views: list[View] = [view(x).permute(*axes) for x in (dout, *grads)]
    args = _struct.AttentionArgs(
        saved=_address(call.saved), saved_bytes=call.saved.shape[0], stream=stream_of(dout)
    )
    g = _struct.AttentionGrads(
        dout=views[0].pointer(), dq=views[1].pointer(), dk=views[2].pointer(), dv=views[3].pointer()
    )
    plan.context._call(
        "ulysses_attention_backward", plan.handle, batch.handle, ctypes.byref(args), ctypes.byref(g)
    )
    return grads[0], grads[1], grads[2]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq: int | None = None,
    kv_seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    kv_cu_seqlens: Sequence[int] | None = None,
    layout: str = "BSHD",
    deterministic: bool = False,
    context: Context | None = None,
) -> Any:
    """softmax(scale * q k^T) v over the whole sequence, of which each rank brings its rows. Collective; differentiable for PyTorch.

    q          [B, rows, H, D]; k [B, rows, Hkv, D]; v [B, rows, Hkv, Dv]: this rank's rows, in `layout`
    causal     the last query of a document sees its last key
    window     (left, right) keys around the key aligned to a query, -1 = unbounded
    scale      of q k^T; None = 1/sqrt(D)
    seq        tokens of the whole sequence; None = what Context.use set, else the sum of the ranks' rows. Uneven: the first seq mod ranks
               hold one row more
    kv_seq     the same of the keys, for cross-attention
    cu_seqlens document starts over B*seq tokens, from 0, then B*seq; the same on all ranks. Documents do not see each other
    deterministic  gradients repeat to the bit on a GPU too, as they do on the CPU: slower there. Unsupported where no such kernel serves the heads
    context    None = what ulysses.use set

    Returns out [B, rows, H, Dv] in the layout of q. Errors: InvalidArgument, Unsupported, CommError. Source: Jacobs et al. 2023,
    arXiv:2309.14509. Results are those of one rank bit for bit, except gradients of a key head whose query heads lie on several ranks.
    """
    options: dict[str, Any] = dict(
        causal=causal,
        window=window,
        scale=scale,
        seq=seq,
        kv_seq=kv_seq,
        cu_seqlens=cu_seqlens,
        kv_cu_seqlens=kv_cu_seqlens,
        layout=layout,
        deterministic=deterministic,
        context=context,
    )
    if is_torch(q):
        from ._torch import differentiable, wants_gradient

        def run(q: Any, k: Any, v: Any) -> tuple[Any, tuple, Any]:
            out, _, call = attention_forward(q, k, v, save=True, **options)
            saved, kept = (call.saved,), replace(call, saved=None)
            return out, saved, lambda s, dout: attention_backward(replace(kept, saved=s[0]), dout)

        if wants_gradient(q, k, v):
            return differentiable(run, q, k, v)
    return attention_forward(q, k, v, save=False, **options)[0]


def _address(memory: Any) -> int:
    return view(memory).data
