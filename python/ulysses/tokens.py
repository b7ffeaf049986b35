"""This rank's tokens of whole sequences, and whole sequences from the tokens of all ranks."""

from __future__ import annotations

from typing import Any

from ._eager import eager
from .agreement import describe
from .communicator import gather_objects
from .context import Context, current
from .errors import InvalidArgument
from .tensors import is_torch


def local_tokens(x: Any, dim: int = 1, *, context: Context | None = None) -> Any:
    """Returns this rank's tokens of whole sequences, in the order of the context. Not collective.

    Args:
        x: [.., seq, ..], the same on all ranks
        dim (int): the axis of tokens. Default: 1
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., rows, ..], with the tokens `Context.layout.ranges(seq, rank)`: a view of x, or a copy
        if the rank has two ranges, in a zigzag.

    Example::

        >>> q, k, v = (ulysses.local_tokens(x, context=ctx) for x in (q, k, v))
    """
    ctx = current(context)
    return ctx.layout.take(x, dim, ctx.rank)


@eager
def gather_tokens(x: Any, dim: int = 1, *, context: Context | None = None) -> Any:
    """Returns whole sequences, in order, from the tokens of all ranks. Inverts `local_tokens`.

    Collective, not differentiable. The data moves through host memory and is pickled, so the ranks
    must trust each other. It is meant for results, such as logits, not for the layers of a model.

    Args:
        x: [.., rows, ..], this rank's tokens
        dim (int): the axis of tokens. Default: 1
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., seq, ..] on every rank, on the device of x.

    Raises:
        InvalidArgument: a shape or dtype is wrong, or arguments differ between ranks
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.gather_tokens"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if not hasattr(x, "ndim") or not -x.ndim <= dim < x.ndim:
            raise InvalidArgument(
                f"{operation}: dim {dim} of a {type(x).__name__} of shape "
                f"{tuple(getattr(x, 'shape', ()))}; give an array and one of its axes"
            )
        return {"x": describe(x, free=(dim,)), "dim": dim}, (x.shape[dim],), None

    _, counts = ctx.agree(operation, prepare)
    rows = [n for (n,) in counts]
    fix = "shard sequences with ulysses.local_tokens"
    ctx.layout.check(operation, "tokens", rows, sum(rows), fix)
    torch = is_torch(x)
    whole = ctx.layout.join(gather_objects(ctx.communicator, x.detach().cpu() if torch else x), dim)
    return whole.to(x.device) if torch else whole
