"""Rows of the neighbours: what a convolution or a token shift sees beyond this rank's own."""

from __future__ import annotations

import ctypes
from typing import Any, Sequence

import numpy as np

from . import _struct
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, batch_of
from .tensors import block, empty, is_torch, stream_of, view


def _dense(x: Any) -> Any:
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def exchange(context: Context, batch: Batch, x: Any, rows: Any, n: int, forward: bool) -> None:
    """One exchange between x [B, rows, ...] and halo [B, |n|, ...], both dense: forward writes `rows`, backward adds it to x where it came from."""
    views = view(x), view(rows)
    args = _struct.HaloArgs(n=n, x=views[0].pointer(), halo=views[1].pointer(), stream=stream_of(x))
    need = ctypes.c_uint64()
    context._call("ulysses_halo_workspace", context.handle, batch.handle, ctypes.byref(args), ctypes.byref(need))
    workspace = view(block(x, need.value))
    if need.value:
        args.workspace, args.workspace_bytes = workspace.data, need.value
    context._call("ulysses_halo_forward" if forward else "ulysses_halo_backward", context.handle, batch.handle, ctypes.byref(args))


def settle(x: Any, n: int, seq: int | None, cu_seqlens: Sequence[int] | None, context: Context | None) -> tuple[Context, Batch]:
    ctx = current(context)
    if not hasattr(x, "shape") or len(x.shape) < 2 or not n:
        raise InvalidArgument(f"ulysses.halo: x {tuple(getattr(x, 'shape', ()))}, n {n}: give an array [B, rows, ...], and n > 0 for rows before or n < 0 for rows after")
    return ctx, batch_of(ctx, x.shape[0], x.shape[1], seq, cu_seqlens)


def halo(x: Any, n: int, *, seq: int | None = None, cu_seqlens: Sequence[int] | None = None, context: Context | None = None) -> Any:
    """The n rows before this rank's (n > 0), or the -n rows after them (n < 0), in each sequence. Collective; differentiable for PyTorch.

    x          [B, rows, ...], this rank's rows: F32, or BF16 where the device computes in it
    seq, cu_seqlens  lengths and documents, as for `attention`

    Returns [B, |n|, ...], zero where a row belongs to another document than this rank's nearest row, or to none. n may exceed a neighbour's rows: a causal
    convolution of width W over the whole sequence is that of concatenate([halo(x, W - 1), x], 1). Errors: InvalidArgument, Unsupported, CommError.
    """
    if is_torch(x):
        from ._torch import halo as differentiable

        return differentiable(x, n, *settle(x, n, seq, cu_seqlens, context))
    ctx, batch = settle(x, n, seq, cu_seqlens, context)
    x = _dense(x)
    out = empty(x, (x.shape[0], abs(n), *x.shape[2:]))
    exchange(ctx, batch, x, out, n, True)
    return out


def halo_backward(dhalo: Any, n: int, dx: Any, *, seq: int | None = None, cu_seqlens: Sequence[int] | None = None, context: Context | None = None) -> None:
    """Adds the gradient of a halo to dx [B, rows, ...], dense, on the ranks where the rows came from. Collective."""
    ctx, batch = settle(dx, n, seq, cu_seqlens, context)
    exchange(ctx, batch, dx, _dense(dhalo), n, False)
