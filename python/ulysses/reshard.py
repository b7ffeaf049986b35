"""Sequence to heads and back on any tensor, and the loss of a sequence group. Names and shapes are VeOmni's (ByteDance-Seed/VeOmni)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from typing import Any, Callable

import numpy as np

from . import _struct
from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument
from .plan import Batch, Plan, Sequences, shard_rows
from .tensors import block, dtype_of, empty, is_torch, stream_of, view


def _ceil(n: int, size: int) -> int:
    return -(-n // size)


@dataclass(frozen=True)
class Move:
    """A reshard of a tensor whose axes lie anywhere: its axes are reordered to [others before, rows, heads, others behind]."""

    context: Context
    to_heads: bool
    seq_dim: int
    head_dim: int
    heads: int  # of the whole group
    seq: int  # rows of the whole group, with padding
    unpadded: int  # rows without

    @property
    def chunk(self) -> int:
        """Heads that always travel together: they are handed over as one, so that longer runs are copied."""
        return (
            self.heads // self.context.size
            if self.heads % self.context.size == 0 and self.heads
            else 1
        )

    def back(self) -> Move:
        return replace(self, to_heads=not self.to_heads)

    def settle(self, x: Any) -> tuple[Plan, Batch, tuple[int, ...], int]:
        """Plan, batch, the axes of x as [before, rows, heads, behind], and how many are before."""
        n = x.ndim
        before = [i for i in range(n) if i < min(self.seq_dim, self.head_dim)]
        behind = [i for i in range(n) if i not in before and i not in (self.seq_dim, self.head_dim)]
        lead = math.prod(x.shape[i] for i in before)
        if lead == 0:
            raise InvalidArgument(
                f"ulysses: a tensor of shape {tuple(x.shape)}: its leading axes must not be empty"
            )
        plan = self.context._plan(heads=self.heads // self.chunk, head_dim=1, dtype=_struct.F32)
        batch = self.context._batch(Sequences(lead, self.seq))
        return plan, batch, (*before, self.seq_dim, self.head_dim, *behind), len(before)

    def run(self, x: Any) -> Any:
        return self.start(x, blocking=True).wait()

    def start(self, x: Any, blocking: bool = False) -> Request:
        ctx = self.context
        if not self.to_heads:
            x = _pad(x, self.seq_dim, self.seq - x.shape[self.seq_dim])
        plan, batch, axes, lead = self.settle(x)
        moved = _permute(x, axes)
        shape = tuple(moved.shape)
        rows_in, heads_in = shape[lead], shape[lead + 1]
        sizes = plan.sizes(batch)
        mine = (sizes.head_hi - sizes.head_lo) * self.chunk
        want = (batch.rows, self.heads) if self.to_heads else (self.seq, mine)
        if (rows_in, heads_in) != want:
            raise InvalidArgument(
                f"ulysses: rank {ctx.rank} of {ctx.size} brings {rows_in} rows of {heads_in} heads: of {self.seq} rows and {self.heads} heads "
                f"{'before' if self.to_heads else 'after'} the exchange it holds {want[0]} rows of {want[1]} heads"
            )
        rows_out, heads_out = (self.seq, mine) if self.to_heads else (batch.rows, self.heads)
        flat = _dense(moved).reshape(
            math.prod(shape[:lead]),
            rows_in,
            heads_in // self.chunk,
            self.chunk * math.prod(shape[lead + 2 :]),
        )
        out = empty(x, (flat.shape[0], rows_out, heads_out // self.chunk, flat.shape[3]))
        result = shape[:lead] + (rows_out, heads_out) + shape[lead + 2 :]
        back = tuple(int(i) for i in np.argsort(axes))
        trim = self.unpadded if self.to_heads else None

        def finish() -> Any:
            y = _permute(out.reshape(result), back)
            return _narrow(y, self.seq_dim, trim) if trim is not None and trim < self.seq else y

        return Request(ctx, plan, batch, self.to_heads, flat, out, finish, blocking)


class Request:
    """An exchange under way. `wait()` gives its result; requests of a context are waited for in the order of their start, on every rank."""

    def __init__(
        self,
        context: Context,
        plan: Plan,
        batch: Batch,
        to_heads: bool,
        x: Any,
        out: Any,
        finish: Callable[[], Any],
        blocking: bool,
    ):
        self._context, self._handle, self._done = context, ctypes.c_void_p(), False
        self._finish: Callable[[], Any] | None = finish
        self._keep: Any = None  # memory of the call, until the wait
        self._result: Any = None
        views = view(x), view(out)
        tensor_p = ctypes.POINTER(_struct.Tensor)
        ins, outs = (tensor_p * 1)(views[0].pointer()), (tensor_p * 1)(views[1].pointer())
        args = _struct.ReshardArgs(n=1, stream=stream_of(x))
        setattr(args, "in", ins)
        args.out = outs
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
        self._keep = (x, out, views, workspace, plan, batch)
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
            context._pending[id(self._keep)] = (
                self._keep
            )  # a request that is dropped still receives into this memory

    def wait(self) -> Any:
        """The result, at the first call and every later one. Collective."""
        if not self._done:
            self._done = True
            self._context._pending.pop(id(self._keep), None)
            self._context._call("ulysses_request_wait", self._handle)
        if self._finish is not None:
            self._result, self._finish, self._keep = self._finish(), None, None
        return self._result

    __call__ = wait


class Pending:
    """A started reshard of a PyTorch tensor: `wait()` joins the result to the graph."""

    def __init__(self, x: Any, move: Move, request: Request):
        self._x, self._move, self._request, self._result = x, move, request, None

    def wait(self) -> Any:
        if self._result is None:
            self._result = _joined(self._x, self._move, lambda x: self._request.wait())
            self._x = None
        return self._result

    __call__ = wait


def _go(x: Any, move: Move, async_op: bool) -> Any:
    if async_op:
        request = move.start(x.detach() if is_torch(x) else x)
        return Pending(x, move, request) if is_torch(x) else request
    return _joined(x, move, move.run) if is_torch(x) else move.run(x)


def _joined(x: Any, move: Move, forward: Callable[[Any], Any]) -> Any:
    """forward(x), the result of a move, joined to the graph of x: the reverse move is its backward."""
    from ._torch import differentiable

    return differentiable(
        lambda x: (forward(x), (), lambda saved, dout: (move.back().run(dout),)), x
    )


def _axes(x: Any, seq_dim: int, head_dim: int) -> tuple[int, int]:
    if not hasattr(x, "ndim"):
        raise InvalidArgument(
            f"ulysses: {type(x).__name__} is no array: give a NumPy array or a PyTorch tensor"
        )
    dtype_of(x)
    seq, head = (d + x.ndim if d < 0 else d for d in (seq_dim, head_dim))
    if not (0 <= seq < x.ndim and 0 <= head < x.ndim) or seq == head:
        raise InvalidArgument(
            f"ulysses: seq_dim {seq_dim} and head_dim {head_dim} of a tensor of {x.ndim} axes: give two different ones"
        )
    return seq, head


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
    """[.., rows, .., H, ..] to [.., S, .., this rank's heads, ..]. Collective; differentiable for PyTorch.

    x          this rank's rows along seq_dim, all heads along head_dim; any of the library's types
    unpadded_dim_size  S without the padding at its end, which is cut off; 0 = no padding, S = rows * ranks
    padded     True: every rank has ceil(S / ranks) rows, the last ones padding (as gather_heads_scatter_seq makes them).
               False: no padding; the first S mod ranks have one row more, and unpadded_dim_size says S
    async_op   return an object whose wait() gives the result; waits in the order of starting. x may not change before

    The heads of a rank are contiguous; the first H mod ranks have one head more. Errors: InvalidArgument, CommError.
    """
    ctx, operation = current(context), "ulysses.gather_seq_scatter_heads"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[int, int]]:
        seq, head = _axes(x, seq_dim, head_dim)
        if not padded and not unpadded_dim_size:
            raise InvalidArgument(
                f"{operation}: padded=False: say the length of the whole sequence by unpadded_dim_size"
            )
        return (
            {
                "x": describe(x, free=(seq,)),
                "seq_dim": seq,
                "head_dim": head,
                "unpadded_dim_size": unpadded_dim_size,
                "padded": bool(padded),
                "async_op": bool(async_op),
            },
            (x.shape[seq],),
            (seq, head),
        )

    (seq_dim, head_dim), counts = ctx.agree(operation, prepare)
    each = [rows for (rows,) in counts]
    seq = max(each) * ctx.size if padded else unpadded_dim_size
    unpadded = unpadded_dim_size or seq
    if padded and (len(set(each)) > 1 or _ceil(unpadded, ctx.size) != each[0]):
        raise InvalidArgument(
            f"{operation}: {each} rows on the ranks for unpadded_dim_size {unpadded}: each must have ceil({unpadded} / {ctx.size}) = "
            f"{_ceil(unpadded, ctx.size)} rows, or padded=False where nothing is padded"
        )
    want = [hi - lo for lo, hi in (shard_rows(seq, ctx.size, rank) for rank in range(ctx.size))]
    if each != want:
        raise InvalidArgument(
            f"{operation}: {each} rows on the ranks: of {seq} they hold {want}: cut by ulysses.shard_rows"
        )
    return _go(x, Move(ctx, True, seq_dim, head_dim, x.shape[head_dim], seq, unpadded), async_op)


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
    """[.., S, .., this rank's heads, ..] to [.., rows, .., H, ..]: the inverse, and the backward, of gather_seq_scatter_heads. Collective.

    x        all rows along seq_dim, this rank's heads along head_dim
    heads    H; 0 = the sum of the ranks' heads
    padded   True: zeros are put behind S until ranks divide it. False: nothing is padded, the first S mod ranks get one row more
    """
    ctx, operation = current(context), "ulysses.gather_heads_scatter_seq"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[int, int]]:
        seq, head = _axes(x, seq_dim, head_dim)
        return (
            {
                "x": describe(x, free=(head,)),
                "seq_dim": seq,
                "head_dim": head,
                "heads": heads,
                "padded": bool(padded),
                "async_op": bool(async_op),
            },
            (x.shape[head],),
            (seq, head),
        )

    (seq_dim, head_dim), counts = ctx.agree(operation, prepare)
    each = [own for (own,) in counts]
    total = heads or sum(each)
    want = [hi - lo for lo, hi in (shard_rows(total, ctx.size, rank) for rank in range(ctx.size))]
    if each != want:
        raise InvalidArgument(
            f"{operation}: {each} heads on the ranks: of {total} they hold {want}: the first {total} mod {ctx.size} ranks hold one more than the others"
        )
    n = x.shape[seq_dim]
    seq = _ceil(n, ctx.size) * ctx.size if padded else n
    return _go(x, Move(ctx, False, seq_dim, head_dim, total, seq, n), async_op)


def reduce_loss(mean: float, count: int, context: Context | None) -> tuple[float, int, int]:
    """(mean over the group's valid tokens, this rank's count, the group's count). The sum and the count travel. Collective."""
    ctx = current(context)
    own = count
    total, n, out = (
        ctypes.c_double(mean * count if count else 0.0),
        ctypes.c_int64(count),
        ctypes.c_double(),
    )
    ctx._call(
        "ulysses_loss_reduce", ctx.handle, ctypes.byref(total), ctypes.byref(n), ctypes.byref(out)
    )
    return out.value, own, n.value


def reduce_sequence_parallel_loss(
    loss: Any, num_valid_tokens: Any, *, gradients: str = "averaged", context: Context | None = None
) -> Any:
    """The mean loss over the valid tokens of all ranks, the same number on each. Collective; differentiable for PyTorch.

    loss              this rank's mean over its valid tokens; whatever it is (NaN too) where it has none
    num_valid_tokens  how many those are
    gradients         how the caller then combines the weights' gradients over the group: "averaged" (DDP, FSDP and ZeRO take the mean), and
                      the gradient of `loss` is ranks * n / N; or "summed", and it is n / N. n is this rank's count, N the group's

    0 where no rank has a valid token. Semantics: VeOmni's function of this name.
    """
    ctx = current(context)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if gradients not in ("averaged", "summed"):
            raise InvalidArgument(
                f"ulysses.reduce_sequence_parallel_loss: gradients {gradients!r}: 'averaged' or 'summed'"
            )
        try:
            float(loss.detach() if is_torch(loss) else loss), int(num_valid_tokens)
        except (TypeError, ValueError, RuntimeError) as e:
            raise InvalidArgument(
                f"ulysses.reduce_sequence_parallel_loss: loss {loss!r} and num_valid_tokens {num_valid_tokens!r}: give one number each"
            ) from e
        return {"gradients": gradients}, (), None

    ctx.agree("ulysses.reduce_sequence_parallel_loss", prepare)
    if is_torch(loss):
        from ._torch import differentiable

        factor = float(ctx.size if gradients == "averaged" else 1)

        def run(loss: Any) -> tuple[Any, tuple, Any]:
            mean, own, total = reduce_loss(float(loss.detach()), int(num_valid_tokens), ctx)
            scale = factor * own / max(total, 1)
            return loss.new_tensor(mean), (), lambda saved, grad: (grad * scale,)

        return differentiable(run, loss)
    return reduce_loss(float(loss), int(num_valid_tokens), ctx)[0]


def _permute(x: Any, axes: tuple[int, ...]) -> Any:
    return x.permute(axes) if is_torch(x) else x.transpose(axes)


def _dense(x: Any) -> Any:
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def _narrow(x: Any, dim: int, n: int) -> Any:
    return x.narrow(dim, 0, n) if is_torch(x) else x[(slice(None),) * dim + (slice(0, n),)]


def _pad(x: Any, dim: int, more: int) -> Any:
    """x with `more` zero rows behind dim."""
    if more == 0:
        return x
    shape = list(x.shape)
    shape[dim] += more
    y = empty(x, shape)
    head = (slice(None),) * dim
    y[head + (slice(0, x.shape[dim]),)] = x
    y[head + (slice(x.shape[dim], None),)] = 0
    return y
