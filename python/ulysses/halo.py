"""Halos, the tokens of neighbouring ranks, and the causal convolution over documents."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _struct
from ._eager import eager
from .agreement import describe, in_order, whole
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
    wants_gradient,
)

ACTIVATIONS = (None, "silu", "swish")
_MOST = (1 << 40) - 1  # tokens of a halo; the library refuses more


def _copy_halo(context: Context, batch: Batch, x: Any, halo: Any, n: int, forward: bool) -> None:
    """Copies tokens between x [B, rows, ...] and a halo [B, |n|, ...], both row-major. Collective.

    Forward writes the halo from the x of other ranks. Backward adds the halo to the x of the ranks
    that the tokens came from.
    """
    views = view(x), view(halo)
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


def _agreed_batch(
    operation: str,
    x: Any,
    n: int,
    seq: int | None,
    cu_seqlens: Sequence[int] | None,
    context: Context | None,
    others: dict[str, Any] | None = None,
    check: Any = None,
) -> tuple[Context, Batch]:
    """Checks the arguments of a call, and returns its context and batch. Collective.

    `others` are arrays by name with the same shape on all ranks. `check` raises if an argument is
    wrong on this rank.
    """
    ctx = current(context)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], Lengths]:
        if not hasattr(x, "shape") or len(x.shape) < 2:
            raise InvalidArgument(
                f"{operation}: x is {type(x).__name__} of shape {tuple(getattr(x, 'shape', ()))}; "
                "give an array [B, rows, ...]"
            )
        if not whole(operation, "n", n, -_MOST, _MOST):
            raise InvalidArgument(
                f"{operation}: n 0; give n > 0 for the tokens before this rank's, or n < 0 for "
                "those after them"
            )
        one_library(x=x, **(others or {}))
        if check is not None:
            check()
        lengths = Lengths.of(ctx, x.shape[0], x.shape[1], seq=seq, cu_seqlens=cu_seqlens)
        dtype_of(x)
        return (
            {
                "x": describe(x, free=(1,)),
                "n": n,
                "gradient of x": wants_gradient(x),
                **lengths.same(),
                **{name: describe(t) for name, t in (others or {}).items()},
            },
            lengths.counts(),
            lengths,
        )

    lengths, counts = ctx.agree(operation, prepare)
    return ctx, ctx._batch(lengths.sequences(operation, counts))


@eager
def halo(
    x: Any,
    n: int,
    *,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    context: Context | None = None,
) -> Any:
    """Returns the tokens of neighbouring ranks: the last n before this rank's tokens, or the first
    -n after them.

    Collective; differentiable in PyTorch.

    Args:
        x: [B, rows, ...], this rank's tokens; float32, or bfloat16 if the device has it
        n (int): n > 0: the n tokens of each sequence before this rank's. n < 0: the -n tokens after
            them. |n| may exceed the rows of a neighbour
        seq, cu_seqlens, context: as in `attention`

    Returns:
        [B, |n|, ...], with the dtype of x. A token is zero if it lies outside the sequence, or in
        another document than the nearest token of this rank.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the dtype is not implemented on the device
        CommError: the communicator failed

    .. note::
        If each sequence is one document, a causal convolution of width W is the local convolution
        of concatenate([halo(x, W - 1), x], 1). If a sequence has several documents, that
        convolution mixes the end of a document into the start of the next one on the same rank. Use
        `causal_conv1d`, which keeps documents apart.
    """
    ctx, batch = _agreed_batch("ulysses.halo", x, n, seq, cu_seqlens, context)
    return _halo(x, n, ctx, batch)


def _halo(x: Any, n: int, ctx: Context, batch: Batch) -> Any:
    """`halo` after the ranks have agreed on the batch. Collective."""

    number = ctx.agreed

    def run(x: Any) -> tuple[Any, tuple, Any]:
        shape = x.shape
        out = empty(x, (shape[0], abs(n), *shape[2:]))
        _copy_halo(ctx, batch, dense(x), out, n, True)

        def back(saved: tuple, dhalo: Any) -> tuple:
            dx = dhalo.new_zeros(shape)
            _copy_halo(ctx, batch, dx, dense(dhalo), n, False)
            return (dx,)

        return out, (), in_order(ctx, "ulysses.halo backward", number, back)

    if is_torch(x):
        from ._torch import differentiable

        return differentiable(run, x)
    return run(x)[0]


@eager
def halo_backward(
    dhalo: Any,
    n: int,
    dx: Any,
    *,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    context: Context | None = None,
) -> None:
    """Adds the gradient of a halo to the gradients of the tokens that it was copied from.

    Collective. Each rank receives the gradients of its tokens from the other ranks' dhalo.

    Args:
        dhalo: [B, |n|, ...], gradient of the result of `halo`
        n, seq, cu_seqlens, context: as in the call of `halo`
        dx: [B, rows, ...], row-major; the gradients are added to it

    Raises:
        InvalidArgument: a shape or dtype is wrong, dx is not row-major, or arguments differ between
            ranks
        CommError: the communicator failed
    """

    def check() -> None:
        want = (dx.shape[0], abs(n), *dx.shape[2:])
        if tuple(getattr(dhalo, "shape", ())) != want or dtype_of(dhalo) != dtype_of(dx):
            raise InvalidArgument(
                f"ulysses.halo_backward: dhalo {tuple(getattr(dhalo, 'shape', ()))} "
                f"{getattr(dhalo, 'dtype', type(dhalo).__name__)} with dx "
                f"{tuple(dx.shape)} {dx.dtype} and n {n}; give shape {tuple(want)} and the dtype "
                "of dx"
            )
        found = view(dx)
        if found.strides != tuple(dense_strides(found.shape)):
            raise InvalidArgument(
                f"ulysses.halo_backward: dx has strides {found.strides}; give a contiguous array, "
                "to which the gradients are added"
            )

    ctx, batch = _agreed_batch(
        "ulysses.halo_backward", dx, n, seq, cu_seqlens, context, {"dhalo": dhalo}, check
    )
    _copy_halo(ctx, batch, dx, dense(dhalo), n, False)


@eager
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
    """Computes a causal depthwise convolution over documents that are sharded over ranks.

    Collective; differentiable in PyTorch. For token t and channel c::

        y[t, c] = activation(bias[c] + sum over j < W of weight[c, W-1-j] * x[t-j, c])

    The sum is over the tokens t-j in the document of t. A document may have fewer than W tokens and
    may lie on several ranks.

    Args:
        x: [B, rows, C], this rank's tokens; float32, or bfloat16 if the device has it
        weight: [C, W]; the last column multiplies the token itself, as in torch.nn.Conv1d
        bias (optional): [C]. Default: None
        activation (str, optional): "silu" or "swish", which is the same. Default: None
        seq, cu_seqlens, context: as in `attention`

    Returns:
        y [B, rows, C], with the dtype of x.

        The gradients of weight and bias are this rank's share: their sum over the ranks is the
        gradient. Forward receives W - 1 tokens from the previous ranks, backward returns their
        gradients.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the dtype is not implemented on the device
        CommError: the communicator failed
    """

    def check() -> None:
        if (
            len(x.shape) != 3
            or len(getattr(weight, "shape", ())) != 2
            or weight.shape[0] != x.shape[2]
            or weight.shape[1] < 1
        ):
            raise InvalidArgument(
                f"ulysses.causal_conv1d: x {tuple(x.shape)}, weight "
                f"{tuple(getattr(weight, 'shape', ()))}; give x [B, rows, C] and weight [C, W]"
            )
        if bias is not None and tuple(bias.shape) != (x.shape[2],):
            raise InvalidArgument(
                f"ulysses.causal_conv1d: bias {tuple(bias.shape)} for {x.shape[2]} channels; give "
                f"[{x.shape[2]}], or None"
            )
        if activation not in ACTIVATIONS:
            raise InvalidArgument(
                f"ulysses.causal_conv1d: activation {activation!r}; give one of "
                f"{', '.join(map(repr, ACTIVATIONS))}"
            )

    operation = f"ulysses.causal_conv1d with activation {activation!r}"
    ctx, batch = _agreed_batch(
        operation, x, 1, seq, cu_seqlens, context, {"weight": weight, "bias": bias}, check
    )
    width = weight.shape[1]
    if is_torch(x):
        return _convolve_torch(x, weight, bias, activation, ctx, batch)
    x = dense(x)
    before = _halo(x, width - 1, ctx, batch) if width > 1 else x[:, :0]
    extended, rows = np.concatenate([before, x], 1), x.shape[1]
    # Positions in the documents: token t - j is in the document of t if the position is at least j.
    position = np.asarray(batch.positions(), np.int64).reshape(x.shape[0], rows, 1)
    y = np.zeros_like(x)
    for j in range(width):
        shifted = extended[:, width - 1 - j : width - 1 - j + rows]
        y += np.where(position >= j, shifted, 0) * weight[:, width - 1 - j]
    if bias is not None:
        y += bias
    if activation is None:
        return y
    with np.errstate(over="ignore"):  # exp may be Inf; the result is then 0
        return y / (1 + np.exp(-y))


def _convolve_torch(
    x: Any, weight: Any, bias: Any, activation: str | None, ctx: Context, batch: Batch
) -> Any:
    """`causal_conv1d` of PyTorch tensors, after the ranks have agreed on the batch. Collective."""
    import torch

    width, rows = weight.shape[1], x.shape[1]
    extended = torch.cat([_halo(x, width - 1, ctx, batch), x], 1) if width > 1 else x
    position = torch.tensor(batch.positions(), dtype=torch.int64).reshape(x.shape[0], rows)
    # Of the two computations below, autocast would convert the first one only. Ranks choose by
    # their documents, so their results would have different dtypes.
    with torch.autocast(x.device.type, enabled=False):
        y = _convolved(extended, x, weight, position)
    y = y if bias is None else y + bias.to(x.dtype)
    return y if activation is None else torch.nn.functional.silu(y)


def _convolved(extended: Any, x: Any, weight: Any, position: Any) -> Any:
    """Returns the convolution of x [B, rows, C], before which `extended` has the halo.

    position is [B, rows], the positions of the tokens in their documents, on the CPU.
    """
    import torch

    width, rows = weight.shape[1], x.shape[1]
    # The halo is already zero outside the document of this rank's first token. A mask is necessary
    # only if a document starts at a later token. A rank without tokens reads its halo as well: the
    # other ranks wait for it in the backward pass. PyTorch's convolution refuses 0 channels.
    if extended.numel() and rows and bool((position[:, 1:] >= 1).all()):
        return torch.nn.functional.conv1d(
            extended.transpose(1, 2), weight[:, None].to(x.dtype), groups=x.shape[2]
        ).transpose(1, 2)
    position = position.to(x.device)[:, :, None]
    return sum(
        torch.where(position >= j, extended[:, width - 1 - j : width - 1 - j + rows], 0)
        * weight[:, width - 1 - j].to(x.dtype)
        for j in range(width)
    )
