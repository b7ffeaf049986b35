"""This rank's tokens of whole sequences, and whole sequences from the tokens of all ranks."""

from __future__ import annotations

from typing import Any

from ._eager import eager
from .agreement import axis, describe
from .communicator import gather_objects
from .context import Context, current
from .errors import InvalidArgument
from .tensors import compact, is_torch


def local_tokens(x: Any, dim: int = 1, *, context: Context | None = None) -> Any:
    """Returns this rank's tokens of whole sequences, in the order of the context. Not collective.

    Args:
        x: [.., seq, ..], the same on all ranks
        dim (int): the axis of tokens. Default: 1
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., rows, ..], with the tokens `Context.layout.ranges(seq, rank)`: a view of x, or a copy
        if the rank has two ranges, in a zigzag.

    Raises:
        InvalidArgument: x is no array, or it has no axis dim

    Example::

        >>> q, k, v = (ulysses.local_tokens(x, context=ctx) for x in (q, k, v))
    """
    ctx, operation = current(context), "ulysses.local_tokens"
    return ctx.layout.take(x, _axis_of(operation, x, dim), ctx.rank)


def _axis_of(operation: str, x: Any, dim: Any) -> int:
    """Returns dim as a number from 0. Raises InvalidArgument unless x has this axis."""
    if not hasattr(x, "ndim"):
        raise InvalidArgument(
            f"{operation}: x is {type(x).__name__}, not an array; give a NumPy array or a PyTorch "
            "tensor"
        )
    return axis(operation, "dim", dim, x.ndim)


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

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], int]:
        dim_of_x = _axis_of(operation, x, dim)
        same = {"x": describe(x, free=(dim_of_x,)), "dim": dim_of_x}
        return same, (x.shape[dim_of_x],), dim_of_x

    dim, counts = ctx.agree(operation, prepare)
    rows = [n for (n,) in counts]
    fix = "shard sequences with ulysses.local_tokens"
    ctx.layout.check(operation, "tokens", rows, sum(rows), fix)
    torch = is_torch(x)
    mine = compact(x.detach().cpu()) if torch else x
    whole = ctx.layout.join(gather_objects(ctx.communicator, mine), dim)
    return whole.to(x.device) if torch else whole
