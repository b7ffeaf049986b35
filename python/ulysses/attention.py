"""Attention over sequences that are sharded over ranks.

Before attention, one all-to-all re-shards q, k and v from tokens to heads, so each rank computes on
the whole sequence for a subset of the heads. A second all-to-all restores token sharding. Heads,
key heads and tokens need not be multiples of the number of ranks.

Source: DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from . import _struct
from ._eager import eager
from .agreement import describe, flag
from .context import Context, current
from .errors import InvalidArgument
from .options import OptionTensors, draw_seed, plan_options, same_options
from .plan import Batch, Lengths, Plan
from .tensors import (
    NAMES,
    View,
    compute_dtype_of,
    dtype_of,
    empty,
    is_torch,
    one_library,
    stream_of,
    view,
    without_zero_strides,
)
from .tensors import (
    block as memory,
)

# For each layout, the axes of an array in the order B, S, H, D.
LAYOUTS = {"BSHD": (0, 1, 2, 3), "SBHD": (1, 0, 2, 3), "BHSD": (0, 2, 1, 3), "THD": (0, 1, 2)}


@dataclass
class Call:
    """The result of a forward pass that its backward pass needs.

    Attributes:
        plan, batch: the plan and the batch of the call
        layout: the order of the axes
        saved: saved activations as plain bytes. The caller may move or offload them before
            backward; None if the forward pass had save=False
        shapes: the shapes of q, k and v
        options: sinks, slopes, block mask and seed
        number: of the forward pass among the calls of the context, equal on all ranks
    """

    plan: Plan
    batch: Batch
    layout: str
    saved: Any
    shapes: tuple[tuple[int, ...], ...]
    options: OptionTensors = OptionTensors()
    number: int = 0


def _with_defaults(options: Mapping[str, Any]) -> SimpleNamespace:
    """Returns keyword arguments of `attention`, with its defaults for those that are not given."""
    bound = inspect.signature(attention).bind_partial(**options)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


def plan_and_batch(
    operation: str, q: Any, k: Any, v: Any, *, save: bool, options: Mapping[str, Any]
) -> tuple[Plan, Batch, OptionTensors]:
    """Checks the arguments of a call. Collective.

    Args:
        operation: the name of the call, for messages
        save: whether the call saves activations
        options: keyword arguments of `attention`

    Returns:
        (plan, batch, options): the seed of options is rank 0's, on every rank
    """
    o = _with_defaults(options)
    ctx, layout = current(o.context), o.layout

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        if layout not in tuple(LAYOUTS):  # a tuple, because a list has no hash
            raise InvalidArgument(
                f"{operation}: layout {layout!r}; give one of {', '.join(LAYOUTS)}"
            )
        for x in (q, k, v):
            if not hasattr(x, "shape"):
                raise InvalidArgument(
                    f"{operation}: {type(x).__name__} is not an array; give NumPy arrays or "
                    "PyTorch tensors"
                )
        one_library(q=q, k=k, v=v)
        compute_dtype_of(operation, q, k, v)
        shapes = [tuple(x.shape) for x in (q, k, v)]
        if any(len(s) != len(layout) for s in shapes):
            raise InvalidArgument(
                f"{operation}: q {shapes[0]}, k {shapes[1]}, v {shapes[2]} in layout {layout}; "
                f"give arrays of {len(layout)} axes"
            )
        axis = {name: layout.index(name) for name in layout}
        rows_axis = axis["T"] if layout == "THD" else axis["S"]
        batch = 1 if layout == "THD" else shapes[0][axis["B"]]
        rows, kv_rows = shapes[0][rows_axis], shapes[1][rows_axis]
        if kv_rows != shapes[2][rows_axis]:
            raise InvalidArgument(
                f"{operation}: k {shapes[1]}, v {shapes[2]} in layout {layout}: {kv_rows} rows of "
                f"keys and {shapes[2][rows_axis]} rows of values; give as many values as keys"
            )
        lengths = Lengths.of(
            ctx, batch, rows, kv_rows, o.seq, o.kv_seq, o.cu_seqlens, o.kv_cu_seqlens
        )
        heads = shapes[0][axis["H"]]
        planned = dict(
            heads=heads,
            kv_heads=shapes[1][axis["H"]],
            head_dim=shapes[0][-1],
            v_dim=shapes[2][-1],
            **plan_options(operation, o, heads, q),
        )
        same = {
            **planned,
            **lengths.same(),
            "layout": layout,
            **{name: describe(x, free=(rows_axis,)) for name, x in (("q", q), ("k", k), ("v", v))},
            "save": flag(operation, "save", save),
            **same_options(operation, o),
        }
        return same, (*lengths.counts(), draw_seed(o, q)), (planned, lengths)

    (planned, lengths), counts = ctx.agree(operation, prepare)
    sequences = lengths.sequences(operation, counts)
    plan = ctx._plan(**planned, cross=sequences.kv_seq is not None)
    return plan, ctx._batch(sequences), OptionTensors.of(o, counts[0][2])


def check_gradient(operation: str, call: Any, dout: Any, shape: tuple[int, ...]) -> None:
    """Raises on every rank if the backward pass is impossible on one rank. Collective.

    A backward pass needs saved activations, and a gradient with the shape and dtype of the output.
    """

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if call.saved is None:
            raise InvalidArgument(
                f"{operation}: the forward pass had save=False; call it with save=True"
            )
        if tuple(getattr(dout, "shape", ())) != shape or dtype_of(dout) != call.plan.dtype:
            raise InvalidArgument(
                f"{operation}: the gradient has shape {tuple(getattr(dout, 'shape', ()))} and "
                f"dtype {getattr(dout, 'dtype', type(dout).__name__)}; give shape {shape} and "
                f"dtype {NAMES[call.plan.dtype]}, as the output has"
            )
        return (
            {
                "plan": call.plan.key,
                "lengths": call.batch.sequences,
                "device": describe(dout)[1],
                "number of the forward pass": call.number,
            },
            (),
            None,
        )

    call.plan.context.agree(operation, prepare)


@eager
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
    """Computes attention, and returns what the backward pass needs. Collective.

    Args:
        q, k, v: as in `attention`
        save (bool): save the activations that `attention_backward` needs. Default: True
        lse (bool): also return the logarithm of the sum of exponentials of each query. This adds
            its bytes to the second all-to-all. Default: False
        layout (str): order of the axes, as in `attention`. Default: "BSHD"
        options: the other keyword arguments of `attention`

    Returns:
        (out, lse, call): out [B, rows, H, Dv] in the layout of q; lse [B, rows, H], float32,
        natural logarithm, or None; the `Call` for `attention_backward`. For a query that sees no
        key, out is 0 and lse is -inf, or with sinks the sink of its head.

    Raises:
        InvalidArgument, Unsupported, CommError: as in `attention`
    """
    plan, batch, tensors = plan_and_batch(
        "ulysses.attention", q, k, v, save=save, options={**options, "layout": layout}
    )
    ctx = plan.context
    axes = LAYOUTS[layout]
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    out = empty(q, tuple(q.shape[:-1]) + (plan.v_dim,))
    sums = empty(q, (batch.sequences.batch, batch.rows, plan.heads), _struct.F32) if lse else None
    if sums is not None and layout == "THD":
        sums = sums[0]
    # A rank without heads saves nothing, but memory tells the library that backward will follow.
    saved_bytes = max(plan.sizes(batch).saved, 64)
    saved = memory(q, saved_bytes) if save else None
    views = [view(x).permute(*axes) for x in (q, k, v, out)]
    args = _struct.AttentionArgs(
        q=views[0].pointer(),
        k=views[1].pointer(),
        v=views[2].pointer(),
        out=views[3].pointer(),
        stream=stream_of(q),
    )
    if sums is not None:
        lse_view = view(sums)
        args.lse = lse_view.pointer()
    if save:
        args.saved, args.saved_bytes = view(saved).data, saved_bytes
    shapes = tuple(tuple(x.shape) for x in (q, k, v))
    call = Call(plan, batch, layout, saved, shapes, tensors, ctx.agreed)
    kept = tensors.set(args)
    ctx._call("ulysses_attention_forward", plan.handle, batch.handle, ctypes.byref(args))
    del kept
    return out, sums, call


@eager
def attention_backward(call: Call, dout: Any) -> tuple[Any, ...]:
    """Returns the gradients of q, k and v, and of sinks and slopes if the call had any. Collective.

    Args:
        call: the result of `attention_forward`
        dout: gradient of out, [B, rows, H, Dv] in the layout of q, with the dtype of q

    Returns:
        (dq, dk, dv) with the shapes, layout and dtype of q, k and v. If the forward pass had sinks
        or alibi: (dq, dk, dv, dsinks, dalibi), of which the last two are this rank's share, so that
        the sum over the ranks is the gradient, or None.

    Raises:
        InvalidArgument: the forward pass had save=False, or dout has a wrong shape or dtype
        CommError: the communicator failed
    """
    check_gradient(
        "ulysses.attention_backward", call, dout, tuple(call.shapes[0][:-1]) + (call.plan.v_dim,)
    )
    plan, batch, axes = call.plan, call.batch, LAYOUTS[call.layout]
    dout = without_zero_strides(dout)
    grads = [empty(dout, shape) for shape in call.shapes]
    views: list[View] = [view(x).permute(*axes) for x in (dout, *grads)]
    args = _struct.AttentionArgs(
        saved=view(call.saved).data, saved_bytes=call.saved.shape[0], stream=stream_of(dout)
    )
    g = _struct.AttentionGrads(
        dout=views[0].pointer(), dq=views[1].pointer(), dk=views[2].pointer(), dv=views[3].pointer()
    )
    sinks, alibi = call.options.sinks, call.options.alibi
    kept = call.options.set(args)
    shares: list[Any] = [None if x is None else empty(x, tuple(x.shape)) for x in (sinks, alibi)]
    for name, x in zip(("dsinks", "dalibi"), shares):
        if x is not None:
            kept.append(view(x))
            setattr(g, name, kept[-1].pointer())
    plan.context._call(
        "ulysses_attention_backward", plan.handle, batch.handle, ctypes.byref(args), ctypes.byref(g)
    )
    del kept
    if sinks is None and alibi is None:
        return grads[0], grads[1], grads[2]
    return grads[0], grads[1], grads[2], shares[0], shares[1]


@eager
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
    softcap: float = 0.0,
    sinks: Any = None,
    alibi: Any = None,
    block_mask: Any = None,
    block: int | tuple[int, int] | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    context: Context | None = None,
) -> Any:
    """Computes softmax(scale * q k^T) v over whole sequences that are sharded over ranks.

    Collective; differentiable in PyTorch. On the CPU and without a ring, results are bitwise equal
    to the results of one rank, except the gradients of a key head whose query heads lie on several
    ranks.

    Args:
        q: [B, rows, H, D], this rank's tokens; float32, or bfloat16 if the device has it
        k: [B, kv_rows, Hkv, D]; H must be a multiple of Hkv
        v: [B, kv_rows, Hkv, Dv]
        causal (bool): a query sees the keys up to its own position. The last query of a document is
            aligned with its last key. Default: False
        window (tuple of int, optional): (left, right), the number of keys that a query sees before
            and after its own position; -1 = unbounded. Default: None, all keys
        scale (float, optional): Default: 1/sqrt(D)
        seq (int, optional): tokens of each sequence over all ranks. If it is not a multiple of the
            ranks, the first seq mod ranks hold one token more (see `shard_rows`, and `Layout` for a
            zigzag). Default: the length that Context.use has set, else the sum of the ranks' rows
        kv_seq (int, optional): the same for the keys, for cross-attention. Default: None
        cu_seqlens (sequence of int, optional): the start of each document over B*seq tokens, then
            B*seq; equal on all ranks. Attention does not cross documents. Default: None, each
            sequence is one document
        kv_cu_seqlens (sequence of int, optional): the same for the keys. Default: None
        layout (str): order of the axes of q, k, v and out: "BSHD", "SBHD", "BHSD", or "THD" for one
            sequence of packed documents without the axis B. Default: "BSHD"
        deterministic (bool): gradients on a GPU are bitwise reproducible, as they are on the CPU.
            This is slower. Default: False
        softcap (float): c > 0: a scaled score x becomes c*tanh(x/c). Default: 0, off
        sinks: [H], float32 or the dtype of q: the logit of a key without a value, which every query
            of the head sees; equal on all ranks. Its gradient is this rank's share: the sum over
            the ranks is the gradient, as for the weights around the call. Default: None
        alibi: [H], float32 or the dtype of q: a key j positions before the query has the bias
            -alibi*j; equal on all ranks; `alibi_slopes` makes the usual ones. The gradient is as
            for sinks. Default: None
        block_mask: bool or uint8 [H or 1, blocks of queries, blocks of keys] over whole sequences,
            equal on all ranks; 0 hides a block (see `ulysses.patterns`). Default: None
        block (int or tuple of int, optional): the queries and keys of a block. Default: None
        dropout (float): probability that a softmax weight becomes 0. Default: 0
        seed (int, optional): chooses the dropout with head, query and key, whatever the number of
            ranks is. Give another one in each layer and step. Default: None, drawn on rank 0 from
            the generator of PyTorch or NumPy
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        out [B, rows, H, Dv] in the layout, dtype and library of q.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: no kernel of the device has these sizes or options
        CommError: the communicator failed

    Source: Jacobs et al. 2023, arXiv:2309.14509.

    Example::

        >>> ctx = ulysses.Context(MPI.COMM_WORLD)
        >>> lo, hi = ulysses.shard_rows(4096, ctx.size, ctx.rank)
        >>> q, k, v = (np.ones((1, hi - lo, heads, 64), np.float32) for heads in (8, 2, 2))
        >>> out = ulysses.attention(q, k, v, causal=True, context=ctx)  # [1, hi - lo, 8, 64]
    """
    # All keyword arguments, which attention_forward checks.
    options = {name: value for name, value in locals().items() if name not in ("q", "k", "v")}
    if is_torch(q):
        from ._torch import differentiable, wants_gradient

        def run(q: Any, k: Any, v: Any, sinks: Any, alibi: Any) -> tuple[Any, tuple, Any]:
            out, _, call = attention_forward(
                q, k, v, save=True, **{**options, "sinks": sinks, "alibi": alibi}
            )
            o = call.options
            saved = (call.saved, o.sinks, o.alibi, o.block_mask)
            rest = replace(o, sinks=None, alibi=None, block_mask=None)
            kept = replace(call, saved=None, options=rest)

            def back(s: Any, dout: Any) -> tuple[Any, ...]:
                options = replace(rest, sinks=s[1], alibi=s[2], block_mask=s[3])
                call = replace(kept, saved=s[0], options=options)
                return (*attention_backward(call, dout), None, None)[:5]

            return out, saved, back

        if wants_gradient(q, k, v, sinks, alibi):
            return differentiable(run, q, k, v, sinks, alibi)
    return attention_forward(q, k, v, save=False, **options)[0]
