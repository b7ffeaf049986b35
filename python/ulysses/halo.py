"""Rows of neighbour ranks, and the causal convolution over documents."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _struct
from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, Lengths
from .tensors import (
    block,
    dense,
    dense_strides,
    dtype_of,
    empty,
    is_torch,
    one_library,
    stream_of,
    view,
)

ACTIVATIONS = (None, "silu", "swish")


def exchange(context: Context, batch: Batch, x: Any, rows: Any, n: int, forward: bool) -> None:
    """Moves rows between x [B, rows, ...] and a halo [B, |n|, ...], both dense. Collective.

    forward writes the halo; backward adds the halo to x on the ranks where the rows came from."""
    views = view(x), view(rows)
    args = _struct.HaloArgs(n=n, x=views[0].pointer(), halo=views[1].pointer(), stream=stream_of(x))
    need = ctypes.c_uint64()
    context._call(
        "ulysses_halo_workspace",
        context.handle,
        batch.handle,
        ctypes.byref(args),
        ctypes.byref(need),
    )
    workspace = view(block(x, need.value))
    if need.value:
        args.workspace, args.workspace_bytes = workspace.data, need.value
    context._call(
        "ulysses_halo_forward" if forward else "ulysses_halo_backward",
        context.handle,
        batch.handle,
        ctypes.byref(args),
    )


def settle(
    operation: str,
    x: Any,
    n: int,
    seq: int | None,
    cu_seqlens: Sequence[int] | None,
    context: Context | None,
    beside: dict[str, Any] | None = None,
    check: Any = None,
) -> tuple[Context, Batch]:
    """The batch of a call. Collective.

    `beside` are arrays with the same shape on all ranks; `check` raises if another argument is wrong."""
    ctx = current(context)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], Lengths]:
        if not hasattr(x, "shape") or len(x.shape) < 2 or not n:
            raise InvalidArgument(
                f"{operation}: x {tuple(getattr(x, 'shape', ()))}, n {n}: give an array [B, rows, ...], and n > 0 for rows before or n < 0 for rows after"
            )
        one_library(x=x, **(beside or {}))
        if check is not None:
            check()
        lengths = Lengths.of(ctx, x.shape[0], x.shape[1], None, seq, None, cu_seqlens)
        dtype_of(x)
        return (
            {
                "x": describe(x, free=(1,)),
                "n": n,
                **lengths.same(),
                **{name: describe(t) for name, t in (beside or {}).items()},
            },
            lengths.counts(),
            lengths,
        )

    lengths, counts = ctx.agree(operation, prepare)
    return ctx, ctx._batch(lengths.settle(counts))


def halo(
    x: Any,
    n: int,
    *,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    context: Context | None = None,
) -> Any:
    """The n rows before this rank's (n > 0), or the -n rows after them (n < 0), in each sequence. Collective; differentiable for PyTorch.

    x          [B, rows, ...], this rank's rows: F32, or BF16 where the device computes in it
    seq, cu_seqlens  lengths and documents, as for `attention`

    Returns [B, |n|, ...]. A row is zero if it lies outside the sequence or in another document than
    this rank's nearest row. n may exceed a neighbour's rows.

    If each sequence is one document, a causal convolution of width W over the sequence is the local
    convolution of concatenate([halo(x, W - 1), x], 1). If a sequence has several documents, it is
    not: that convolution mixes the end of a document into the start of the next one on the same rank.
    Use `causal_conv1d`, which keeps documents apart. Errors: InvalidArgument, Unsupported, CommError.
    """
    ctx, batch = settle("ulysses.halo", x, n, seq, cu_seqlens, context)
    return _settled_halo(x, n, ctx, batch)


def _settled_halo(x: Any, n: int, ctx: Context, batch: Batch) -> Any:
    """`halo` on a batch that the ranks have agreed on."""

    def run(x: Any) -> tuple[Any, tuple, Any]:
        shape = x.shape
        out = empty(x, (shape[0], abs(n), *shape[2:]))
        exchange(ctx, batch, dense(x), out, n, True)

        def back(saved: tuple, dhalo: Any) -> tuple:
            dx = dhalo.new_zeros(shape)
            exchange(ctx, batch, dx, dense(dhalo), n, False)
            return (dx,)

        return out, (), back

    if is_torch(x):
        from ._torch import differentiable

        return differentiable(run, x)
    return run(x)[0]


def halo_backward(
    dhalo: Any,
    n: int,
    dx: Any,
    *,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    context: Context | None = None,
) -> None:
    """Adds the gradient of a halo to dx [B, rows, ...], dense, on the ranks where the rows came from. Collective."""

    def check() -> None:
        want = (dx.shape[0], abs(n), *dx.shape[2:])
        if tuple(dhalo.shape) != tuple(want) or dtype_of(dhalo) != dtype_of(dx):
            raise InvalidArgument(
                f"ulysses.halo_backward: dhalo {tuple(dhalo.shape)} {dhalo.dtype} for dx {tuple(dx.shape)} {dx.dtype} and n {n}: give {tuple(want)} of dx's type"
            )
        strides = view(dx)
        if strides.strides != tuple(dense_strides(strides.shape)):
            raise InvalidArgument(
                "ulysses.halo_backward: dx is not dense: give a contiguous array, which the gradient is added to"
            )

    ctx, batch = settle(
        "ulysses.halo_backward", dx, n, seq, cu_seqlens, context, {"dhalo": dhalo}, check
    )
    exchange(ctx, batch, dx, dense(dhalo), n, False)


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    *,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    context: Context | None = None,
) -> Any:
    """A causal depthwise convolution over documents. Collective; differentiable for PyTorch.

    y[t, c] = activation(bias[c] + sum over j < W of weight[c, W-1-j] * x[t-j, c]), over the tokens
    t-j of the document of t.

    x          [B, rows, C], this rank's rows: F32, or BF16 where the device computes in it
    weight     [C, W]; the last column multiplies the token itself, as in torch.nn.Conv1d
    bias       [C], or None
    activation None, "silu" or "swish" (the same)
    seq, cu_seqlens  lengths and documents, as for `attention`

    Returns y [B, rows, C]. Forward receives W - 1 rows from the ranks before, backward returns their
    gradients. Documents may be shorter than W - 1 tokens and may lie on any ranks. Gradients of weight
    and bias are this rank's share: sum them over the ranks. Errors: InvalidArgument, Unsupported,
    CommError.
    """

    def check() -> None:
        if (
            len(x.shape) != 3
            or len(getattr(weight, "shape", ())) != 2
            or weight.shape[0] != x.shape[2]
            or weight.shape[1] < 1
        ):
            raise InvalidArgument(
                f"ulysses.causal_conv1d: x {tuple(x.shape)}, weight {tuple(getattr(weight, 'shape', ()))}: give x [B, rows, C] and weight [C, W]"
            )
        if bias is not None and tuple(bias.shape) != (x.shape[2],):
            raise InvalidArgument(
                f"ulysses.causal_conv1d: bias {tuple(bias.shape)} for {x.shape[2]} channels: give [C], or None"
            )
        if activation not in ACTIVATIONS:
            raise InvalidArgument(
                f"ulysses.causal_conv1d: activation {activation!r}: give one of {', '.join(map(repr, ACTIVATIONS))}"
            )

    operation = f"ulysses.causal_conv1d with activation {activation!r}"
    ctx, batch = settle(
        operation, x, 1, seq, cu_seqlens, context, {"weight": weight, "bias": bias}, check
    )
    width = weight.shape[1]
    if is_torch(x):
        return _convolve_torch(x, weight, bias, activation, ctx, batch)
    x = dense(x)
    before = _settled_halo(x, width - 1, ctx, batch) if width > 1 else x[:, :0]
    longer, rows = np.concatenate([before, x], 1), x.shape[1]
    at = np.asarray(batch.positions(), np.int64).reshape(x.shape[0], rows, 1)  # inside its document
    y = np.zeros_like(x)
    for j in range(width):
        y += (
            np.where(at >= j, longer[:, width - 1 - j : width - 1 - j + rows], 0)
            * weight[:, width - 1 - j]
        )
    y = y if bias is None else y + bias
    return y if activation is None else y / (1 + np.exp(-y))


def _convolve_torch(
    x: Any, weight: Any, bias: Any, activation: str | None, ctx: Context, batch: Batch
) -> Any:
    """causal_conv1d of PyTorch tensors on a batch that the ranks have agreed on."""
    import torch

    width, rows = weight.shape[1], x.shape[1]
    longer = torch.cat([_settled_halo(x, width - 1, ctx, batch), x], 1) if width > 1 else x
    at = torch.tensor(batch.positions(), dtype=torch.int64).reshape(
        x.shape[0], rows
    )  # inside its document
    # The halo is already zero before the document of the first row. Only documents that start at a
    # later row need a mask.
    if rows == 0:
        y = x * 1
    elif bool((at[:, 1:] >= 1).all()):
        y = torch.nn.functional.conv1d(
            longer.transpose(1, 2), weight[:, None].to(x.dtype), groups=x.shape[2]
        ).transpose(1, 2)
    else:
        at = at.to(x.device)[:, :, None]
        y = sum(
            torch.where(at >= j, longer[:, width - 1 - j : width - 1 - j + rows], 0)
            * weight[:, width - 1 - j].to(x.dtype)
            for j in range(width)
        )
    y = y if bias is None else y + bias.to(x.dtype)
    return y if activation is None else torch.nn.functional.silu(y)
