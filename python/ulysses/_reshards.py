"""Reshards of arrays: views, padding and temporary arrays around the library's reshard.

reshard.py has the functions for callers.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from . import _struct
from ._eager import eager
from .agreement import in_order
from .context import Context
from .errors import InvalidArgument
from .plan import Batch, Plan
from .sequences import Sequences
from .tensors import block, dense, dtype_of, empty, is_torch, stream_of, view


def ceil_div(n: int, size: int) -> int:
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
        """Returns the result. The first call is collective; later calls return the same object.

        If it raises, later calls raise as well, unless the ranks have refused the call: the ranks
        may then wait again.
        """
        if not self._done:
            # After an error other ranks may still write to the memory, so the context keeps it.
            self._context._call("ulysses_request_wait", self._handle)
            self._done = True
            self._context._release(self._keep)
        if self._finish is not None:
            self._result, self._finish, self._keep = self._finish(), None, None
        return self._result

    __call__ = wait


class Pending:
    """A reshard of a PyTorch tensor in progress. `wait` returns the result, joined to the graph."""

    def __init__(self, x: Any, reshard: Reshard, request: Request):
        self._x, self._reshard, self._request, self._result = x, reshard, request, None
        self._number = reshard.context.agreed

    @eager
    def wait(self) -> Any:
        """Returns the result. The first call is collective; later calls return the same tensor."""
        if self._result is None:
            self._result = _differentiable(
                self._x, self._reshard, lambda x: self._request.wait(), self._number
            )
            self._x = None
        return self._result

    __call__ = wait


def run_reshard(x: Any, reshard: Any, async_op: bool) -> Any:
    """Runs or starts a reshard of x, or the reshards of a tuple of tensors."""
    several = isinstance(x, tuple)
    torch = is_torch(x[0] if several else x)
    if async_op:
        detached = tuple(t.detach() for t in x) if several and torch else x
        request = reshard.start(x.detach() if torch and not several else detached)
        return Pending(x, reshard, request) if torch else request
    if not torch:
        return reshard.run(x)
    return _differentiable(x, reshard, reshard.run, reshard.context.agreed)


def _differentiable(x: Any, reshard: Any, forward: Callable[[Any], Any], number: int) -> Any:
    """Returns forward(x), the result of a reshard, joined to the graph of x.

    The backward pass of a reshard is the inverse reshard. All ranks run it for all tensors, so a
    result without a gradient has a gradient of zeros. number is that of the call, see
    `in_order`.
    """
    from ._torch import differentiable

    def ordered(back: Callable[..., tuple]) -> Any:
        return in_order(reshard.context, "ulysses: backward of a reshard", number, back)

    if not isinstance(x, tuple):

        def one(saved: tuple, dout: Any) -> tuple:
            return (reshard.inverse().run(dout),)

        return differentiable(lambda x: (forward(x), (), ordered(one)), x)

    def run(*xs: Any) -> tuple[Any, tuple, Any]:
        outs = forward(xs)
        shapes = [tuple(y.shape) for y in outs]

        def back(saved: tuple, *douts: Any) -> tuple[Any, ...]:
            like = next(d for d in douts if d is not None)
            return reshard.inverse().run(
                tuple(like.new_zeros(shape) if d is None else d for d, shape in zip(douts, shapes))
            )

        return outs, (), ordered(back)

    return differentiable(run, *x)


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
