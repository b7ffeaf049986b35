"""Resharding of any tensor from tokens to heads and back, and the loss of a sequence group.

The functions have the names and shapes of VeOmni (ByteDance-Seed/VeOmni).
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ._eager import eager
from ._reshards import Reshard, ReshardQKV, Reshards, ceil_div, run_reshard
from .agreement import axis, describe, flag, whole
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .layout import Layout
from .tensors import dtype_of, is_torch, one_library, wants_gradient

MOST = 16  # tensors of one all-to-all


def _several(operation: str, x: Any) -> tuple[Any, ...] | None:
    """Returns the arrays of a list or tuple; None for one array. Raises if they do not fit."""
    if not isinstance(x, (list, tuple)):
        return None
    if not 1 <= len(x) <= MOST:
        raise InvalidArgument(f"{operation}: {len(x)} arrays; give 1 to {MOST}")
    for i, t in enumerate(x):
        if not hasattr(t, "ndim"):
            raise InvalidArgument(
                f"{operation}: x[{i}] is {type(t).__name__}, not an array; give NumPy arrays or "
                "PyTorch tensors"
            )
    one_library(**{f"x[{i}]": t for i, t in enumerate(x)})
    names = [str(t.dtype) for t in x]
    if len(set(names)) > 1:
        raise InvalidArgument(f"{operation}: dtypes {', '.join(names)}; give arrays of one dtype")
    return tuple(x)


def _fit(operation: str, x: tuple[Any, ...], axes: list[tuple[int, int]]) -> None:
    """Raises if several arrays differ in tokens, or in the axes before tokens and heads."""
    counts = [t.shape[seq] for t, (seq, _) in zip(x, axes)]
    leading = [math.prod(t.shape[: min(pair)]) for t, pair in zip(x, axes)]
    if len(set(counts)) > 1:
        raise InvalidArgument(
            f"{operation}: {counts} tokens of the arrays; give arrays of the same tokens"
        )
    if len(set(leading)) > 1:
        raise InvalidArgument(
            f"{operation}: the axes before tokens and heads have {leading} elements; give arrays of "
            "the same sequences"
        )


def _axes(operation: str, x: Any, seq_dim: int, head_dim: int) -> tuple[int, int]:
    """Returns seq_dim and head_dim as numbers from 0. Raises for wrong axes or a wrong x."""
    if not hasattr(x, "ndim"):
        raise InvalidArgument(
            f"{operation}: {type(x).__name__} is not an array; give a NumPy array or a PyTorch "
            "tensor"
        )
    dtype_of(x)
    seq = axis(operation, "seq_dim", seq_dim, x.ndim)
    head = axis(operation, "head_dim", head_dim, x.ndim)
    if seq == head:
        raise InvalidArgument(
            f"{operation}: seq_dim {seq_dim} and head_dim {head_dim} of a tensor of {x.ndim} axes; "
            "give two different axes"
        )
    return seq, head


@eager
def gather_seq_scatter_heads(
    x: Any,
    seq_dim: int,
    head_dim: int,
    unpadded_dim_size: int = 0,
    async_op: bool = False,
    *,
    padded: bool = True,
    context: Context | None = None,
) -> Any:
    """Re-shards a tensor from tokens to heads by one all-to-all.

    Collective; differentiable in PyTorch. The result has all S tokens and this rank's heads. The
    heads of a rank are contiguous; the first H mod ranks hold one head more.

    Args:
        x: [.., rows, .., H, ..], this rank's tokens of all heads; float32, float16, bfloat16,
            int32, int64 or uint8. A list or tuple of up to 16 arrays is sent in one all-to-all.
            They have one dtype, the same tokens, and numbers of heads that are multiples of the
            ranks
        seq_dim (int): the axis of tokens
        head_dim (int): the axis of heads
        unpadded_dim_size (int): S. Padding after the first S tokens is removed from the result.
            0 = there is no padding, S = rows * ranks. Default: 0
        async_op (bool): return a request whose wait() returns the result. All ranks must wait in
            the order in which the requests were started. x must not change before. Default: False
        padded (bool): True: every rank has ceil(S / ranks) rows, and the last ones may be padding,
            as `gather_heads_scatter_seq` makes it. False: there is no padding, the first S mod
            ranks hold one token more, and unpadded_dim_size is S. Default: True
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., S, .., heads of this rank, ..], a tuple of these for several arrays, or a request.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.gather_seq_scatter_heads"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], list[tuple[int, int]]]:
        check_one_group(operation, ctx)
        several = _several(operation, x)
        axes = [_axes(operation, t, seq_dim, head_dim) for t in several or (x,)]
        padding = check_padded(operation, padded, unpadded_dim_size)
        if several:
            _fit(operation, several, axes)
            for t, (_, head) in zip(several, axes):
                if t.shape[head] % ctx.size:
                    raise InvalidArgument(
                        f"{operation}: {t.shape[head]} heads on {ctx.size} ranks; for several "
                        "arrays in one call, give multiples of the ranks, or make one call each"
                    )
        arrays = [describe(t, free=(seq,)) for t, (seq, _) in zip(several or (x,), axes)]
        return (
            {
                "x": arrays if several else arrays[0],
                "seq_dim": [seq for seq, _ in axes],
                "head_dim": [head for _, head in axes],
                "unpadded_dim_size": unpadded_dim_size,
                "padded": padding,
                "async_op": flag(operation, "async_op", async_op),
                "gradients": wants_gradient(*(several or (x,))),
            },
            ((several or (x,))[0].shape[axes[0][0]],),
            axes,
        )

    axes, counts = ctx.agree(operation, prepare)
    seq, unpadded = padded_lengths(
        operation, ctx, [n for (n,) in counts], unpadded_dim_size, padded
    )
    several = _several(operation, x)
    each = tuple(
        Reshard(ctx, True, s, h, t.shape[h], seq, unpadded)
        for t, (s, h) in zip(several or (x,), axes)
    )
    return (
        run_reshard(several, Reshards(each), async_op)
        if several
        else run_reshard(x, each[0], async_op)
    )


def check_one_group(operation: str, ctx: Context) -> None:
    """Raises Unsupported for a ring, where the ranks of a group hold only a part of a sequence."""
    if ctx.ring > 1:
        raise Unsupported(
            f"{operation}: the context has ring {ctx.ring}, where an all-to-all gathers the tokens "
            "of a group and not the sequence; make a context with ring=1 for it"
        )


def check_padded(operation: str, padded: bool, unpadded_dim_size: int) -> bool:
    """Returns padded as a bool. Raises InvalidArgument for a wrong unpadded_dim_size; 0 = there is
    no padding."""
    whole(operation, "unpadded_dim_size", unpadded_dim_size or 0, 0)
    padding = flag(operation, "padded", padded)
    if not padding and not unpadded_dim_size:
        raise InvalidArgument(
            f"{operation}: padded=False without unpadded_dim_size; give the tokens of the "
            "whole sequence as unpadded_dim_size"
        )
    return padding


def padded_lengths(
    operation: str, ctx: Context, each: list[int], unpadded_dim_size: int, padded: bool
) -> tuple[int, int]:
    """Returns the tokens of all ranks with and without padding, from the tokens of each rank."""
    seq = max(each) * ctx.size if padded else unpadded_dim_size
    unpadded = unpadded_dim_size or seq
    if padded and (len(set(each)) > 1 or ceil_div(unpadded, ctx.size) != each[0]):
        raise InvalidArgument(
            f"{operation}: {each} tokens on the ranks with unpadded_dim_size {unpadded}; give "
            f"ceil({unpadded} / {ctx.size}) = {ceil_div(unpadded, ctx.size)} tokens on each rank, or "
            "padded=False without padding"
        )
    Layout(ctx.size).check(operation, "tokens", each, seq, "shard tokens with ulysses.shard_rows")
    return seq, unpadded


@eager
def gather_seq_scatter_heads_qkv(
    x: Any,
    seq_dim: int,
    unpadded_dim_size: int | None = None,
    restore_shape: bool = True,
    async_op: bool = False,
    *,
    padded: bool = True,
    context: Context | None = None,
) -> Any:
    """Re-shards the result of a fused projection from tokens to heads by one all-to-all.

    Collective; differentiable in PyTorch. It has the semantics of VeOmni's function with this name.

    Args:
        x: [.., rows, .., 3 C], this rank's tokens. The last axis is [q | k | v] with C features
            each, of all heads, so query and key heads have one number
        seq_dim (int): the axis of tokens, not the last one
        unpadded_dim_size (int, optional): S. Padding after the first S tokens is removed from the
            result. None or 0 = there is no padding, S = rows * ranks. Default: None
        restore_shape (bool): True: the last axis of the result is [q | k | v] of this rank's heads.
            False: it is split into two axes [3, C / ranks]. Default: True
        async_op (bool), padded (bool): as in `gather_seq_scatter_heads`. Default: False, True
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., S, .., 3 C / ranks] or [.., S, .., 3, C / ranks], or a request.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong (C must be a multiple of the ranks), or
            arguments differ between ranks
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.gather_seq_scatter_heads_qkv"
    size = unpadded_dim_size or 0

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], int]:
        check_one_group(operation, ctx)
        seq, last = _axes(operation, x, seq_dim, -1)
        padding = check_padded(operation, padded, size)
        features = x.shape[last]
        if features == 0 or features % (3 * ctx.size):
            raise InvalidArgument(
                f"{operation}: {features} features in the last axis on {ctx.size} ranks; give "
                f"[q | k | v] of one width each, a multiple of {ctx.size}"
            )
        return (
            {
                "x": describe(x, free=(seq,)),
                "seq_dim": seq,
                "unpadded_dim_size": size,
                "restore_shape": flag(operation, "restore_shape", restore_shape),
                "padded": padding,
                "async_op": flag(operation, "async_op", async_op),
                "gradients": wants_gradient(x),
            },
            (x.shape[seq],),
            seq,
        )

    seq_dim, counts = ctx.agree(operation, prepare)
    seq, unpadded = padded_lengths(operation, ctx, [n for (n,) in counts], size, padded)
    reshard = ReshardQKV(
        ctx,
        True,
        seq_dim,
        x.ndim - 1,
        x.shape[-1] // 3,
        seq,
        unpadded,
        restore_shape=bool(restore_shape),
    )
    return run_reshard(x, reshard, async_op)


@eager
def gather_heads_scatter_seq(
    x: Any,
    head_dim: int,
    seq_dim: int,
    async_op: bool = False,
    *,
    heads: int = 0,
    padded: bool = True,
    context: Context | None = None,
) -> Any:
    """Re-shards a tensor from heads to tokens by one all-to-all.

    Collective; differentiable in PyTorch. It is the inverse, and the backward pass, of
    `gather_seq_scatter_heads`.

    Args:
        x: [.., S, .., heads of this rank, ..], all tokens of this rank's heads. A list or tuple of
            up to 16 arrays is sent in one all-to-all; they have one dtype, the same tokens, and the
            same numbers of heads on all ranks
        head_dim (int): the axis of heads
        seq_dim (int): the axis of tokens
        async_op (bool): return a request, as in `gather_seq_scatter_heads`. Default: False
        heads (int): H; 0 = the sum of the ranks' heads. Default: 0
        padded (bool): True: zeros are appended to S up to a multiple of the ranks. False: there is
            no padding, and the first S mod ranks receive one token more. Default: True
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., rows, .., H, ..], a tuple of these for several arrays, or a request.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.gather_heads_scatter_seq"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], list[tuple[int, int]]]:
        check_one_group(operation, ctx)
        several = _several(operation, x)
        axes = [_axes(operation, t, seq_dim, head_dim) for t in several or (x,)]
        total = whole(operation, "heads", heads or 0, 0)
        if several:
            _fit(operation, several, axes)
            if total:
                raise InvalidArgument(
                    f"{operation}: heads={total} for several arrays; leave it 0, every rank has the "
                    "same heads"
                )
        arrays = [
            describe(t, free=() if several else (head,))
            for t, (_, head) in zip(several or (x,), axes)
        ]
        return (
            {
                "x": arrays if several else arrays[0],
                "seq_dim": [seq for seq, _ in axes],
                "head_dim": [head for _, head in axes],
                "heads": total,
                "padded": flag(operation, "padded", padded),
                "async_op": flag(operation, "async_op", async_op),
                "gradients": wants_gradient(*(several or (x,))),
            },
            ((several or (x,))[0].shape[axes[0][1]],),
            axes,
        )

    axes, counts = ctx.agree(operation, prepare)
    several = _several(operation, x)
    each = [count for (count,) in counts]
    n = (several or (x,))[0].shape[axes[0][0]]
    seq = ceil_div(n, ctx.size) * ctx.size if padded else n
    if several:
        reshards = tuple(
            Reshard(ctx, False, s, h, t.shape[h] * ctx.size, seq, n)
            for t, (s, h) in zip(several, axes)
        )
        return run_reshard(several, Reshards(reshards), async_op)
    total = heads or sum(each)
    Layout(ctx.size).check(operation, "heads", each, total, "shard heads with ulysses.shard_rows")
    seq_axis, head_axis = axes[0]
    return run_reshard(x, Reshard(ctx, False, seq_axis, head_axis, total, seq, n), async_op)


def _reduce_loss(mean: float, count: int, ctx: Context) -> tuple[float, int]:
    """Returns the mean over the valid tokens of all ranks, and their number. Collective."""
    total = ctypes.c_double(mean * count if count else 0.0)
    n, out = ctypes.c_int64(count), ctypes.c_double()
    ctx._call(
        "ulysses_loss_reduce", ctx.handle, ctypes.byref(total), ctypes.byref(n), ctypes.byref(out)
    )
    return out.value, n.value


@eager
def reduce_sequence_parallel_loss(
    loss: Any, num_valid_tokens: Any, *, gradients: str = "averaged", context: Context | None = None
) -> Any:
    """Returns the mean loss over the valid tokens of all ranks.

    Collective; differentiable in PyTorch. It has the semantics of VeOmni's function with this
    name.

    Args:
        loss: the mean loss over this rank's valid tokens. Without valid tokens, its value does not
            matter, and may be NaN
        num_valid_tokens: the number n of this rank's valid tokens
        gradients (str): how the caller combines the gradients of weights over the ranks. "averaged"
            (as DDP, FSDP and ZeRO do): the gradient of loss is ranks * n / N. "summed": it is
            n / N. N is the sum of n over the ranks. Default: "averaged"
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        The mean, equal on all ranks: a tensor if loss is a tensor, else a float. It is 0 if no rank
        has a valid token.

    Raises:
        InvalidArgument: a value is wrong, or arguments differ between ranks
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.reduce_sequence_parallel_loss"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if gradients not in ("averaged", "summed"):
            raise InvalidArgument(
                f"{operation}: gradients {gradients!r}; give 'averaged' or 'summed'"
            )
        try:
            float(loss.detach() if is_torch(loss) else loss)
            fits = float(num_valid_tokens).is_integer() and 0 <= int(num_valid_tokens) <= 1 << 52
        except (TypeError, ValueError, RuntimeError, OverflowError) as e:
            raise InvalidArgument(
                f"{operation}: loss {loss!r}, num_valid_tokens {num_valid_tokens!r}; give one "
                "number for each"
            ) from e
        if not fits:
            raise InvalidArgument(
                f"{operation}: num_valid_tokens {num_valid_tokens!r}; give a whole number from 0 "
                "to 2^52"
            )
        return {"gradients": gradients}, (), None

    ctx.agree(operation, prepare)
    count = int(num_valid_tokens)
    if is_torch(loss):
        from ._torch import differentiable

        factor = float(ctx.size if gradients == "averaged" else 1)

        def run(loss: Any) -> tuple[Any, tuple, Any]:
            mean, total = _reduce_loss(float(loss.detach()), count, ctx)
            scale = factor * count / max(total, 1)
            shape = loss.shape  # of one element, with any axes
            return loss.new_tensor(mean), (), lambda saved, grad: (grad.reshape(shape) * scale,)

        return differentiable(run, loss)
    return _reduce_loss(float(loss), count, ctx)[0]
