"""Resharding of any tensor from tokens to heads and back, and the loss of a sequence group.

The functions have the names and shapes of VeOmni (ByteDance-Seed/VeOmni).
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from . import _struct
from ._eager import eager
from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .layout import Layout
from .plan import Batch, Plan, Sequences
from .tensors import block, dense, dtype_of, empty, is_torch, one_library, stream_of, view


def _ceil(n: int, size: int) -> int:
    return -(-n // size)


@dataclass(frozen=True)
class Reshard:
    """A reshard of a tensor with tokens and heads on any two axes.

    The library reshards arrays [sequences, rows, heads, features]. `start` reorders the axes of the
    tensor to [leading axes, rows, heads, other axes], and merges the leading and the other axes.

    Attributes:
        to_heads: from tokens to heads, else from heads to tokens
        seq_dim, head_dim: the axes of tokens and of heads
        heads: heads of all ranks
        seq: tokens of all ranks, including padding
        unpadded: tokens of all ranks without padding
        copies: how many consecutive ranks get each head. From heads to tokens, copies are added
    """

    context: Context
    to_heads: bool
    seq_dim: int
    head_dim: int
    heads: int
    seq: int
    unpadded: int
    copies: int = 1

    @property
    def merged(self) -> int:
        """How many heads are passed to the library as one.

        If the number of heads is a multiple of the ranks, the heads of a rank are one, so that
        longer contiguous ranges are copied.
        """
        each, rest = divmod(self.heads * self.copies, self.context.size)
        return each if each and not rest else 1

    def inverse(self) -> Reshard:
        return replace(self, to_heads=not self.to_heads)

    def plan_and_batch(self, x: Any) -> tuple[Plan, Batch, tuple[int, ...], int]:
        """Returns plan, batch, the new order of the axes of x, and the number of leading axes."""
        n = x.ndim
        leading = [i for i in range(n) if i < min(self.seq_dim, self.head_dim)]
        others = [i for i in range(n) if i not in (*leading, self.seq_dim, self.head_dim)]
        sequences = math.prod(x.shape[i] for i in leading)
        if sequences == 0:
            raise InvalidArgument(
                f"ulysses: a tensor of shape {tuple(x.shape)}; the axes before tokens and heads "
                "must not be empty"
            )
        heads = self.heads // self.merged
        plan = self.context._plan(
            heads=heads * self.copies,
            kv_heads=heads,
            head_dim=1,
            # the device must add copies in this type
            dtype=_struct.F32 if self.copies == 1 else dtype_of(x),
        )
        batch = self.context._batch(Sequences(sequences, self.seq))
        return plan, batch, (*leading, self.seq_dim, self.head_dim, *others), len(leading)

    def run(self, x: Any) -> Any:
        """Returns the resharded x. Collective."""
        return self.start(x, blocking=True).wait()

    def start(self, x: Any, blocking: bool = False) -> Request:
        """Starts the reshard of x. Collective. The request's `wait` returns the result."""
        return Request(self.context, self.to_heads, self.parts(x), blocking)

    def parts(self, x: Any) -> Parts:
        """Returns the tensors of the all-to-all."""
        ctx = self.context
        if not self.to_heads:
            x = _pad(x, self.seq_dim, self.seq - x.shape[self.seq_dim])
        plan, batch, axes, lead = self.plan_and_batch(x)
        reordered = _permute(x, axes)
        shape = tuple(reordered.shape)
        rows_in, heads_in = shape[lead], shape[lead + 1]
        sizes = plan.sizes(batch)
        local_heads = (sizes.shared_hi - sizes.shared_lo) * self.merged
        by_tokens, by_heads = (batch.rows, self.heads), (self.seq, local_heads)
        want, (rows_out, heads_out) = (
            (by_tokens, by_heads) if self.to_heads else (by_heads, by_tokens)
        )
        if (rows_in, heads_in) != want:
            raise InvalidArgument(
                f"ulysses: rank {ctx.rank} of {ctx.size} has {rows_in} tokens and {heads_in} "
                f"heads; give its shard of {self.seq} tokens and {self.heads} heads, {want[0]} "
                f"tokens and {want[1]} heads"
            )
        flat = dense(reordered).reshape(
            math.prod(shape[:lead]),
            rows_in,
            heads_in // self.merged,
            self.merged * math.prod(shape[lead + 2 :]),
        )
        out = empty(x, (flat.shape[0], rows_out, heads_out // self.merged, flat.shape[3]))
        result = shape[:lead] + (rows_out, heads_out) + shape[lead + 2 :]
        original = tuple(int(i) for i in np.argsort(axes))

        def finish() -> Any:
            y = _permute(out.reshape(result), original)
            return self.cut(y)

        return Parts(plan, batch, [flat], [out], finish, shared=self.copies > 1)

    def cut(self, y: Any) -> Any:
        """Returns y, resharded to heads, without the padding of its tokens."""
        padded = self.to_heads and self.unpadded < self.seq
        return _narrow(y, self.seq_dim, self.unpadded) if padded else y


@dataclass(frozen=True)
class ReshardQKV(Reshard):
    """A reshard of a tensor whose last axis is [q | k | v], three tensors in one all-to-all.

    The last axis by tokens has the features of q, then of k, then of v, of all heads. By heads it
    has these of the heads of a rank. `heads` is the number of features of q. The tensors that the
    library reads and writes are views, so nothing is copied if tokens are the second axis of three.

    Attributes:
        restore_shape: by heads, the last axis is [q | k | v]; else the last two axes are
            [3, features]
    """

    restore_shape: bool = True

    def parts(self, x: Any) -> Parts:
        """Returns the tensors of the all-to-all."""
        ctx = self.context
        each = self.heads // ctx.size  # features of q on a rank
        if not self.to_heads:
            if not self.restore_shape:
                x = dense(x).reshape(tuple(x.shape[:-2]) + (3 * each,))
            x = _pad(x, self.seq_dim, self.seq - x.shape[self.seq_dim])
        last = x.ndim - 1
        axes = (*(i for i in range(last) if i != self.seq_dim), self.seq_dim, last)
        reordered = _permute(x, axes)
        leading = tuple(reordered.shape[:-2])
        sequences = math.prod(leading)
        if sequences == 0:
            raise InvalidArgument(
                f"ulysses: a tensor of shape {tuple(x.shape)}; only the axis of tokens may be empty"
            )
        plan = ctx._plan(heads=ctx.size, head_dim=1, dtype=_struct.F32)
        batch = ctx._batch(Sequences(sequences, self.seq))
        by_tokens, by_heads = (
            (sequences, batch.rows, 3, ctx.size, each),
            (sequences, self.seq, 3, 1, each),
        )
        shapes = (by_tokens, by_heads) if self.to_heads else (by_heads, by_tokens)
        want = (shapes[0][1], math.prod(shapes[0][2:]))
        if tuple(reordered.shape[-2:]) != want:
            raise InvalidArgument(
                f"ulysses: rank {ctx.rank} of {ctx.size} has {reordered.shape[-2]} tokens of "
                f"{reordered.shape[-1]} features; give {want[0]} tokens of {want[1]} features"
            )
        flat, out = dense(reordered).reshape(shapes[0]), empty(x, shapes[1])
        original = tuple(int(i) for i in np.argsort(axes))

        def finish() -> Any:
            y = out.reshape(leading + (shapes[1][1], math.prod(shapes[1][2:])))
            y = self.cut(_permute(y, original))
            if self.to_heads and not self.restore_shape:
                return y.reshape(tuple(y.shape[:-1]) + (3, each))
            return y

        return Parts(
            plan, batch, [flat[:, :, i] for i in range(3)], [out[:, :, i] for i in range(3)], finish
        )


@dataclass(frozen=True)
class Reshards:
    """Reshards of several tensors, in one direction, in one all-to-all."""

    each: tuple[Reshard, ...]

    @property
    def context(self) -> Context:
        return self.each[0].context

    @property
    def to_heads(self) -> bool:
        return self.each[0].to_heads

    def inverse(self) -> Reshards:
        return Reshards(tuple(r.inverse() for r in self.each))

    def run(self, xs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the resharded tensors. Collective."""
        return self.start(xs, blocking=True).wait()

    def start(self, xs: tuple[Any, ...], blocking: bool = False) -> Request:
        """Starts the reshards. Collective. The request's `wait` returns the results."""
        parts = [r.parts(x) for r, x in zip(self.each, xs)]
        together = Parts(
            parts[0].plan,
            parts[0].batch,
            [x for p in parts for x in p.ins],
            [x for p in parts for x in p.outs],
            lambda: tuple(p.finish() for p in parts),
        )
        return Request(self.context, self.to_heads, together, blocking)


@dataclass(frozen=True)
class Parts:
    """The tensors of one all-to-all, [sequences, rows, heads, features] and back.

    `finish` returns the result, after `outs` was written. Several ranks have each head if `shared`.
    """

    plan: Plan
    batch: Batch
    ins: list[Any]
    outs: list[Any]
    finish: Callable[[], Any]
    shared: bool = False


class Request:
    """A reshard in progress. `wait` returns its result.

    All ranks must wait for the requests of a context in the order in which they were started.
    """

    def __init__(self, context: Context, to_heads: bool, parts: Parts, blocking: bool):
        self._context, self._handle, self._done = context, ctypes.c_void_p(), False
        self._finish: Callable[[], Any] | None = parts.finish
        self._keep: Any = None  # the memory of the call, until `wait`
        self._result: Any = None
        plan, batch, x, n = parts.plan, parts.batch, parts.ins[0], len(parts.ins)
        views = [view(t) for t in parts.ins], [view(t) for t in parts.outs]
        tensors = ctypes.POINTER(_struct.Tensor) * n
        ins, outs = (tensors(*(v.pointer() for v in side)) for side in views)
        args = _struct.ReshardArgs(n=n, stream=stream_of(x))
        setattr(args, "in", ins)
        args.out = outs
        if parts.shared:
            args.shared, args.sum_copies = (ctypes.c_int32 * n)(*[1] * n), int(not to_heads)
        need = ctypes.c_uint64()
        context._call(
            "ulysses_reshard_workspace",
            plan.handle,
            batch.handle,
            ctypes.byref(args),
            int(to_heads),
            ctypes.byref(need),
        )
        workspace = block(x, need.value)
        if need.value:
            args.workspace, args.workspace_bytes = view(workspace).data, need.value
        self._keep = (parts, views, workspace)
        name = "ulysses_seq_to_heads" if to_heads else "ulysses_heads_to_seq"
        if blocking:
            context._call(name, plan.handle, batch.handle, ctypes.byref(args))
            self._done = True
        else:
            context._call(
                name + "_start",
                plan.handle,
                batch.handle,
                ctypes.byref(args),
                ctypes.byref(self._handle),
            )
            # Other ranks write to this memory even if the caller drops the request.
            context._hold(self._keep)

    @eager
    def wait(self) -> Any:
        """Returns the result. The first call is collective; later calls return the same object."""
        if not self._done:
            self._done = True
            try:
                self._context._call("ulysses_request_wait", self._handle)
            finally:
                self._context._release(self._keep)
        if self._finish is not None:
            self._result, self._finish, self._keep = self._finish(), None, None
        return self._result

    __call__ = wait


class Pending:
    """A reshard of a PyTorch tensor in progress. `wait` returns the result, joined to the graph."""

    def __init__(self, x: Any, reshard: Reshard, request: Request):
        self._x, self._reshard, self._request, self._result = x, reshard, request, None

    @eager
    def wait(self) -> Any:
        """Returns the result. The first call is collective; later calls return the same tensor."""
        if self._result is None:
            self._result = _differentiable(self._x, self._reshard, lambda x: self._request.wait())
            self._x = None
        return self._result

    __call__ = wait


def _run(x: Any, reshard: Any, async_op: bool) -> Any:
    """Runs or starts a reshard of x, or the reshards of a tuple of tensors."""
    several = isinstance(x, tuple)
    torch = is_torch(x[0] if several else x)
    if async_op:
        detached = tuple(t.detach() for t in x) if several and torch else x
        request = reshard.start(x.detach() if torch and not several else detached)
        return Pending(x, reshard, request) if torch else request
    return _differentiable(x, reshard, reshard.run) if torch else reshard.run(x)


def _differentiable(x: Any, reshard: Any, forward: Callable[[Any], Any]) -> Any:
    """Returns forward(x), the result of a reshard, joined to the graph of x.

    The backward pass of a reshard is the inverse reshard. All ranks run it for all tensors, so a
    result without a gradient has a gradient of zeros.
    """
    from ._torch import differentiable

    if not isinstance(x, tuple):
        return differentiable(
            lambda x: (forward(x), (), lambda saved, dout: (reshard.inverse().run(dout),)), x
        )

    def run(*xs: Any) -> tuple[Any, tuple, Any]:
        outs = forward(xs)
        shapes = [tuple(y.shape) for y in outs]

        def back(saved: tuple, *douts: Any) -> tuple[Any, ...]:
            like = next(d for d in douts if d is not None)
            return reshard.inverse().run(
                tuple(like.new_zeros(shape) if d is None else d for d, shape in zip(douts, shapes))
            )

        return outs, (), back

    return differentiable(run, *x)


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
    seq, head = (d + x.ndim if d < 0 else d for d in (seq_dim, head_dim))
    if not (0 <= seq < x.ndim and 0 <= head < x.ndim) or seq == head:
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
        check_padded(operation, padded, unpadded_dim_size)
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
                "padded": bool(padded),
                "async_op": bool(async_op),
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
    return _run(several, Reshards(each), async_op) if several else _run(x, each[0], async_op)


def check_one_group(operation: str, ctx: Context) -> None:
    """Raises Unsupported for a ring, where the ranks of a group hold only a part of a sequence."""
    if ctx.ring > 1:
        raise Unsupported(
            f"{operation}: the context has ring {ctx.ring}, where an all-to-all gathers the tokens "
            "of a group and not the sequence; make a context with ring=1 for it"
        )


def check_padded(operation: str, padded: bool, unpadded_dim_size: int) -> None:
    if not padded and not unpadded_dim_size:
        raise InvalidArgument(
            f"{operation}: padded=False without unpadded_dim_size; give the tokens of the "
            "whole sequence as unpadded_dim_size"
        )


def padded_lengths(
    operation: str, ctx: Context, each: list[int], unpadded_dim_size: int, padded: bool
) -> tuple[int, int]:
    """Returns the tokens of all ranks with and without padding, from the tokens of each rank."""
    seq = max(each) * ctx.size if padded else unpadded_dim_size
    unpadded = unpadded_dim_size or seq
    if padded and (len(set(each)) > 1 or _ceil(unpadded, ctx.size) != each[0]):
        raise InvalidArgument(
            f"{operation}: {each} tokens on the ranks with unpadded_dim_size {unpadded}; give "
            f"ceil({unpadded} / {ctx.size}) = {_ceil(unpadded, ctx.size)} tokens on each rank, or "
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
        check_padded(operation, padded, size)
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
                "restore_shape": bool(restore_shape),
                "padded": bool(padded),
                "async_op": bool(async_op),
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
    return _run(x, reshard, async_op)


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
        if several:
            _fit(operation, several, axes)
            if heads:
                raise InvalidArgument(
                    f"{operation}: heads={heads} for several arrays; leave it 0, every rank has the "
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
                "heads": heads,
                "padded": bool(padded),
                "async_op": bool(async_op),
            },
            ((several or (x,))[0].shape[axes[0][1]],),
            axes,
        )

    axes, counts = ctx.agree(operation, prepare)
    several = _several(operation, x)
    each = [count for (count,) in counts]
    n = (several or (x,))[0].shape[axes[0][0]]
    seq = _ceil(n, ctx.size) * ctx.size if padded else n
    if several:
        reshards = tuple(
            Reshard(ctx, False, s, h, t.shape[h] * ctx.size, seq, n)
            for t, (s, h) in zip(several, axes)
        )
        return _run(several, Reshards(reshards), async_op)
    total = heads or sum(each)
    Layout(ctx.size).check(operation, "heads", each, total, "shard heads with ulysses.shard_rows")
    seq_axis, head_axis = axes[0]
    return _run(x, Reshard(ctx, False, seq_axis, head_axis, total, seq, n), async_op)


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
            whole = float(num_valid_tokens).is_integer()
        except (TypeError, ValueError, RuntimeError, OverflowError) as e:
            raise InvalidArgument(
                f"{operation}: loss {loss!r}, num_valid_tokens {num_valid_tokens!r}; give one "
                "number for each"
            ) from e
        if not whole:
            raise InvalidArgument(
                f"{operation}: num_valid_tokens {num_valid_tokens!r}; give a whole number"
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
            return loss.new_tensor(mean), (), lambda saved, grad: (grad * scale,)

        return differentiable(run, loss)
    return _reduce_loss(float(loss), count, ctx)[0]


def _permute(x: Any, axes: tuple[int, ...]) -> Any:
    return x.permute(axes) if is_torch(x) else x.transpose(axes)


def _narrow(x: Any, dim: int, n: int) -> Any:
    return x.narrow(dim, 0, n) if is_torch(x) else x[(slice(None),) * dim + (slice(0, n),)]


def _pad(x: Any, dim: int, more: int) -> Any:
    """Returns x with `more` zeros appended along axis dim."""
    if more == 0:
        return x
    shape = list(x.shape)
    shape[dim] += more
    y = empty(x, shape)
    head = (slice(None),) * dim
    y[head + (slice(0, x.shape[dim]),)] = x
    y[head + (slice(x.shape[dim], None),)] = 0
    return y
