"""The gated delta rule over sequences that are sharded over ranks.

There are two strategies. "heads" re-shards from tokens to heads by an all-to-all, and back by a
second one. Its results are bitwise equal to the results of one rank. "state" keeps the tokens on
their ranks and passes recurrent states between ranks. Its number of bytes does not depend on the
length of the sequence. "auto" chooses the strategy that sends fewer bytes.

Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from . import _struct
from ._eager import eager
from .agreement import describe, flag, number, whole
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, DeltaPlan, Lengths
from .tensors import (
    NAMES,
    block,
    compute_dtype_of,
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
    """The result of a forward pass that its backward pass needs.

    Attributes:
        plan, batch: the plan and the batch of the call
        saved: saved activations as plain bytes. The caller may move or offload them before
            backward; None if the forward pass had save=False
        initial_state: the initial states of the call in float32, or None
        number: of the forward pass among the calls of the context, equal on all ranks
    """

    plan: DeltaPlan
    batch: Batch
    saved: Any
    initial_state: Any
    number: int = 0


def _float32(x: Any) -> Any:
    """Returns x as a row-major float32 array."""
    return (
        x.to(torch_or_none().float32).contiguous()
        if is_torch(x)
        else np.ascontiguousarray(x, np.float32)
    )


@eager
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
    """Computes the gated delta rule, and returns what the backward pass needs. Collective.

    Args:
        save (bool): save the activations that `gated_delta_rule_backward` needs. Default: True

    `chunk_gated_delta_rule` describes the other arguments.

    Returns:
        (o, final_state, call): o and final_state as in `chunk_gated_delta_rule`, and the
        `DeltaCall` for `gated_delta_rule_backward`.

    Raises:
        InvalidArgument, Unsupported, CommError: as in `chunk_gated_delta_rule`
    """
    ctx, operation = current(context), "ulysses.chunk_gated_delta_rule"

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
                    f"{operation}: {name} has shape {tuple(getattr(x, 'shape', ()))}; give an "
                    f"array of {axes} axes, [B, rows, heads{', features' if axes == 4 else ''}]"
                )
        one_library(q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
        rows = {
            name: x.shape[1] for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
        }
        if len(set(rows.values())) > 1:
            raise InvalidArgument(
                f"{operation}: numbers of rows {rows}; give the same number in all inputs"
            )
        lengths = Lengths.of(
            ctx, q.shape[0], q.shape[1], seq=seq, cu_seqlens=cu_seqlens, ignore_cross=True
        )
        final = flag(operation, "output_final_state", output_final_state)
        planned = dict(
            qk_heads=q.shape[2],
            v_heads=v.shape[2],
            qk_dim=q.shape[3],
            v_dim=v.shape[3],
            dtype=compute_dtype_of(operation, q, k, v),
            strategy=strategy,
            scale=None if scale is None else number(operation, "scale", scale),
            l2norm=flag(operation, "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel),
            chunk=whole(operation, "chunk_size", chunk_size, 0, 1 << 16),
            states=initial_state is not None or final,
        )
        same = {
            **planned,
            **lengths.same(),
            **{
                name: describe(x, free=(1,))
                for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta))
            },
            "initial_state": describe(initial_state),
            "output_final_state": final,
            "save": flag(operation, "save", save),
        }
        return same, lengths.counts(), (planned, lengths)

    (planned, lengths), counts = ctx.agree(operation, prepare)
    sequences = lengths.sequences(operation, counts)
    plan = ctx._delta_plan(**planned, tokens=sequences.batch * sequences.seq)
    batch = ctx._batch(sequences)
    rows, hv, dk, dv = q.shape[1], plan.v_heads, plan.qk_dim, plan.v_dim
    q, k, v = (without_zero_strides(x) for x in (q, k, v))
    g, beta = _float32(g), _float32(beta)
    initial_state = None if initial_state is None else _float32(initial_state)
    out = empty(q, (q.shape[0], rows, hv, dv))
    final = empty(q, (batch.info.docs, hv, dk, dv), _struct.F32) if output_final_state else None
    sizes = plan.sizes(batch)
    saved = block(q, sizes.saved) if save else None
    tensors = dict(q=q, k=k, v=v, g=g, beta=beta, state_in=initial_state, out=out, state_out=final)
    # The views keep the memory that the struct points to.
    views = {name: view(x) for name, x in tensors.items() if x is not None}
    args = _struct.GDNArgs(stream=stream_of(q), **{name: x.pointer() for name, x in views.items()})
    if save:
        args.saved, args.saved_bytes = view(saved).data, sizes.saved
    ctx._call("ulysses_gdn_forward", plan.handle, batch.handle, ctypes.byref(args))
    return out, final, DeltaCall(plan, batch, saved, initial_state, ctx.agreed)


@eager
def gated_delta_rule_backward(
    call: DeltaCall, do: Any, dfinal_state: Any = None
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Returns the gradients of the inputs. Collective.

    Args:
        call: the result of `gated_delta_rule_forward`
        do: gradient of o, [B, rows, HV, V], with the dtype of q
        dfinal_state (optional): gradient of the final states, [N, HV, K, V], equal on all ranks.
            Default: None, no gradient

    Returns:
        (dq, dk, dv, dg, dbeta, dinitial_state) with the shapes of the inputs. dq, dk and dv have
        the dtype of q, the others are float32. dinitial_state is complete on every rank; None if
        there was no initial state.

    Raises:
        InvalidArgument: the forward pass had save=False, or a gradient has a wrong shape or dtype
        CommError: the communicator failed
    """
    plan, batch, operation = call.plan, call.batch, "ulysses.gated_delta_rule_backward"
    states = (batch.info.docs, plan.v_heads, plan.qk_dim, plan.v_dim)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if call.saved is None:
            raise InvalidArgument(
                f"{operation}: the forward pass had save=False; call it with save=True"
            )
        for name, x, shape, dtype in (
            ("do", do, (batch.sequences.batch, batch.rows, plan.v_heads, plan.v_dim), plan.dtype),
            ("dfinal_state", dfinal_state, states, None),
        ):
            if (x is not None or name == "do") and (
                tuple(getattr(x, "shape", ())) != shape or (dtype or dtype_of(x)) != dtype_of(x)
            ):
                want = f"shape {shape}" + (f" and dtype {NAMES[dtype]}" if dtype else "")
                raise InvalidArgument(
                    f"{operation}: {name} has shape {tuple(getattr(x, 'shape', ()))} and dtype "
                    f"{getattr(x, 'dtype', type(x).__name__)}; give {want}"
                )
        same = {
            "plan": plan.key,
            "lengths": batch.sequences,
            "device": describe(do)[1],
            "number of the forward pass": call.number,
            "initial_state": call.initial_state is not None,
            "dfinal_state": dfinal_state is not None,
        }
        return same, (), None

    plan.context.agree(operation, prepare)
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


@eager
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
    """Computes the gated delta rule over whole sequences that are sharded over ranks.

    Collective; differentiable in PyTorch. For each value head, the recurrent state S [K, V] of a
    document is updated token by token::

        S = exp(g) S;  u = beta (v - S^T k);  S = S + k u^T;  o = scale S^T q

    The arguments have the names that flash-linear-attention uses (fla.ops.gated_delta_rule).

    Args:
        q, k: [B, rows, H, K], this rank's tokens; float32, or bfloat16 if the device has it
        v: [B, rows, HV, V]; HV must be a multiple of H
        g: [B, rows, HV], natural logarithm of the decay, at most 0. Converted to float32
        beta: [B, rows, HV]. Converted to float32
        scale (float, optional): factor of q. Default: 1/sqrt(K)
        initial_state (optional): [N, HV, K, V], one state for each of the N documents, the same on
            all ranks. Default: None, zeros
        output_final_state (bool): also return the states after the last token of each document.
            Default: False
        use_qk_l2norm_in_kernel (bool): divide q and k by sqrt(sum of squares + 1e-6) of each head.
            Default: False
        cu_seqlens (sequence of int, optional): the start of each document over B*seq tokens of all
            ranks, then B*seq; equal on all ranks. Default: None, each sequence is one document
        seq (int, optional): tokens of each sequence over all ranks. If it is not a multiple of the
            ranks, the first seq mod ranks hold one token more (see `shard_rows`). Default: the
            length that Context.use has set, else the sum of the ranks' rows
        strategy (str): "heads" (all-to-all), "state" (recurrent states are passed between ranks) or
            "auto" (the one that sends fewer bytes). Default: "auto"
        chunk_size (int): tokens of a chunk at most, 16 or more; 0 = the device chooses. Default: 0
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        (o, final_state): o [B, rows, HV, V] with the dtype of q; final_state [N, HV, K, V], float32
        and equal on all ranks, or None.

        Whatever is computed from final_state must be equal on all ranks, because its gradient must
        be. The gradient of initial_state is complete on every rank.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: no kernel of the device has these sizes or options
        CommError: the communicator failed

    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    # The arguments without tensors, which gated_delta_rule_forward checks.
    options: dict[str, Any] = {
        name: value
        for name, value in locals().items()
        if name not in ("q", "k", "v", "g", "beta", "initial_state")
    }
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
