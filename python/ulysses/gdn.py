"""The gated delta rule over sequences that are cut across ranks (Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464).

Two ways: "heads", one exchange to all rows of this rank's heads and one back, with the bits of one rank; and "state", where rows stay and states travel
from rank to rank, a number of bytes that does not grow with the sequence. "auto" takes the one that sends fewer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _struct
from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, DeltaPlan, Lengths
from .tensors import (
    NAMES,
    block,
    dtype_of,
    empty,
    is_torch,
    one_library,
    stream_of,
    torch_or_none,
    view,
    without_zero_strides,
)


@dataclass
class DeltaCall:
    """What a forward pass leaves for its backward pass."""

    plan: DeltaPlan
    batch: Batch
    saved: Any  # plain bytes, free to be moved and offloaded in between
    initial_state: Any  # as it was given


def _float32(x: Any) -> Any:
    """x in F32, dense."""
    return (
        x.to(torch_or_none().float32).contiguous()
        if is_torch(x)
        else np.ascontiguousarray(x, np.float32)
    )


def gated_delta_rule_forward(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    seq: int | None = None,
    strategy: str = "auto",
    chunk_size: int = 0,
    save: bool = True,
    context: Context | None = None,
) -> tuple[Any, Any, DeltaCall]:
    """The rule, and what its backward needs. Collective. Arguments are those of `chunk_gated_delta_rule`; save = keep what
    gated_delta_rule_backward needs. Returns (o, final_state or None, DeltaCall). Errors: InvalidArgument, Unsupported, CommError."""
    ctx = current(context)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        for name, x, axes in (
            ("q", q, 4),
            ("k", k, 4),
            ("v", v, 4),
            ("g", g, 3),
            ("beta", beta, 3),
        ):
            if not hasattr(x, "shape") or len(x.shape) != axes:
                raise InvalidArgument(
                    f"ulysses: {name} is {tuple(getattr(x, 'shape', ()))}: it must be an array of {axes} axes, "
                    f"[B, rows, heads{', features' if axes == 4 else ''}]"
                )
        one_library(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        rows = {
            name: x.shape[1] for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
        }
        if len(set(rows.values())) > 1:
            raise InvalidArgument(
                f"ulysses.chunk_gated_delta_rule: rows of {rows}: all inputs have as many"
            )
        lengths = Lengths.of(ctx, q.shape[0], q.shape[1], None, seq, None, cu_seqlens)
        if lengths.given is not None and lengths.given.kv_seq is not None:
            lengths = replace(lengths, given=None)
        planned = dict(
            qk_heads=q.shape[2],
            v_heads=v.shape[2],
            qk_dim=q.shape[3],
            v_dim=v.shape[3],
            dtype=dtype_of(q),
            strategy=strategy,
            scale=None if scale is None else float(scale),
            l2norm=bool(use_qk_l2norm_in_kernel),
            chunk=int(chunk_size),
            states=initial_state is not None or bool(output_final_state),
        )
        same = {
            **planned,
            **lengths.same(),
            **{
                name: describe(x, free=(1,))
                for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
            },
            "initial_state": describe(initial_state),
            "output_final_state": bool(output_final_state),
            "save": bool(save),
        }
        return same, lengths.counts(), (planned, lengths)

    (planned, lengths), counts = ctx.agree("ulysses.chunk_gated_delta_rule", prepare)
    sequences = lengths.settle(counts)
    plan, batch = (
        ctx._delta_plan(**planned, tokens=sequences.batch * sequences.seq),
        ctx._batch(sequences),
    )
    rows, hv, dk, dv = q.shape[1], plan.v_heads, plan.qk_dim, plan.v_dim
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    g, beta = _float32(g), _float32(beta)
    initial_state = None if initial_state is None else _float32(initial_state)
    out = empty(q, (q.shape[0], rows, hv, dv))
    final = empty(q, (batch.info.docs, hv, dk, dv), _struct.F32) if output_final_state else None
    sizes = plan.sizes(batch)
    saved = block(q, sizes.saved) if save else None
    views = [
        None if x is None else view(x) for x in (q, k, v, g, beta, initial_state, out, final)
    ]  # keep what the struct points to
    names = ("q", "k", "v", "g", "beta", "state_in", "out", "state_out")
    args = _struct.GDNArgs(
        stream=stream_of(q),
        **{name: None if x is None else x.pointer() for name, x in zip(names, views)},
    )
    if save:
        args.saved, args.saved_bytes = view(saved).data, sizes.saved
    ctx._call("ulysses_gdn_forward", plan.handle, batch.handle, ctypes.byref(args))
    return out, final, DeltaCall(plan, batch, saved, initial_state)


def gated_delta_rule_backward(
    call: DeltaCall, do: Any, dfinal_state: Any = None
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """(dq, dk, dv, dg, dbeta, dinitial_state) from the gradients of o and, where one was returned, of the final state, the same on every rank. dg and dbeta
    are F32; the last is whole on every rank, None where no initial state was given. Collective."""
    plan, batch = call.plan, call.batch
    states = (batch.info.docs, plan.v_heads, plan.qk_dim, plan.v_dim)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if call.saved is None:
            raise InvalidArgument(
                "ulysses.gated_delta_rule_backward: the forward was called with save=False: keep what it saves"
            )
        for name, x, shape, dtype in (
            ("do", do, (batch.sequences.batch, batch.rows, plan.v_heads, plan.v_dim), plan.dtype),
            ("dfinal_state", dfinal_state, states, None),
        ):
            if (x is not None or name == "do") and (
                tuple(getattr(x, "shape", ())) != shape or (dtype or dtype_of(x)) != dtype_of(x)
            ):
                raise InvalidArgument(
                    f"ulysses.gated_delta_rule_backward: {name} of shape {tuple(getattr(x, 'shape', ()))} and type {getattr(x, 'dtype', type(x).__name__)}: "
                    f"give one of {shape}" + (f" and {NAMES[dtype]}" if dtype else "")
                )
        same = {
            "plan": plan.key,
            "lengths": batch.sequences,
            "device": describe(do)[1],
            "initial_state": call.initial_state is not None,
            "dfinal_state": dfinal_state is not None,
        }
        return same, (), None

    plan.context.agree("ulysses.gated_delta_rule_backward", prepare)
    do = without_zero_strides(do)
    b, rows = do.shape[:2]
    keys, values, gates = (
        (b, rows, plan.qk_heads, plan.qk_dim),
        (b, rows, plan.v_heads, plan.v_dim),
        (b, rows, plan.v_heads),
    )
    grads = [
        empty(do, keys),
        empty(do, keys),
        empty(do, values),
        empty(do, gates, _struct.F32),
        empty(do, gates, _struct.F32),
    ]
    dinitial = (
        None
        if call.initial_state is None
        else empty(do, tuple(call.initial_state.shape), _struct.F32)
    )
    dfinal = None if dfinal_state is None else _float32(dfinal_state)
    views = [
        None if x is None else view(x) for x in (do, *grads, dinitial, dfinal, call.initial_state)
    ]
    dout, dq, dk, dv, dg, dbeta, din, dend, state = (
        None if x is None else x.pointer() for x in views
    )
    args = _struct.GDNArgs(
        state_in=state,
        saved=view(call.saved).data,
        saved_bytes=call.saved.shape[0],
        stream=stream_of(do),
    )
    g = _struct.GDNGrads(
        dout=dout, dstate_out=dend, dq=dq, dk=dk, dv=dv, dg=dg, dbeta=dbeta, dstate_in=din
    )
    plan.context._call(
        "ulysses_gdn_backward", plan.handle, batch.handle, ctypes.byref(args), ctypes.byref(g)
    )
    return (*grads, dinitial)


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    *,
    seq: int | None = None,
    strategy: str = "auto",
    chunk_size: int = 0,
    context: Context | None = None,
) -> tuple[Any, Any]:
    """The gated delta rule over the whole sequence, of which each rank brings its rows. Collective; differentiable for PyTorch. Per value head, token after
    token of a document:  S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q.  Argument names are FLA's (fla.ops.gated_delta_rule).

    q, k       [B, rows, H, K], this rank's rows; F32, or BF16 where the device computes in it; NumPy or PyTorch, last axis dense
    v          [B, rows, HV, V]; H divides HV
    g, beta    [B, rows, HV]; g is the natural logarithm of the decay, at most 0. Other types than F32 are turned into it
    scale      of q; None = 1/sqrt(K)
    initial_state  [N, HV, K, V], one for each of the N documents, whole on every rank; None = zeros
    output_final_state  also return the states behind the documents, [N, HV, K, V] F32, whole on every rank
    use_qk_l2norm_in_kernel  q and k are divided by sqrt(sum of squares + 1e-6)
    cu_seqlens document starts over B*seq tokens of all ranks, from 0, then B*seq; the same on all ranks; None = one document a sequence
    seq        tokens of the whole sequence; None = what Context.use set, else the sum of the ranks' rows. Uneven: the first seq mod ranks hold one row more
    strategy   "heads", "state", or "auto"
    chunk_size at most so many tokens a chunk, 16 or more; 0 = the device's choice

    Returns (o [B, rows, HV, V], final_state or None). What is computed from final_state must be the same on every rank, and so its gradient; the gradient of
    initial_state is whole on every rank. Errors: InvalidArgument, Unsupported, CommError. Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    options: dict[str, Any] = dict(
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        seq=seq,
        strategy=strategy,
        chunk_size=chunk_size,
        context=context,
    )
    if is_torch(q):
        from ._torch import differentiable, wants_gradient

        def run(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, tuple, Any]:
            out, final, call = gated_delta_rule_forward(
                q, k, v, g, beta, initial_state=state, save=True, **options
            )
            saved = call.saved, call.initial_state
            kept = replace(call, saved=None, initial_state=None)
            like, shape = out.new_empty(0), out.shape
            dtypes = [None if x is None else x.dtype for x in (g, beta, state)]

            def back(saved: tuple, do: Any, dfinal: Any) -> tuple:
                call = replace(kept, saved=saved[0], initial_state=saved[1])
                do = like.new_zeros(shape) if do is None else do
                dq, dk, dv, *rest = gated_delta_rule_backward(call, do, dfinal)
                return dq, dk, dv, *(x if x is None else x.to(t) for x, t in zip(rest, dtypes))

            return (out, final), saved, back

        if wants_gradient(q, k, v, g, beta, initial_state):
            return differentiable(run, q, k, v, g, beta, initial_state)
    return gated_delta_rule_forward(
        q, k, v, g, beta, initial_state=initial_state, save=False, **options
    )[:2]
