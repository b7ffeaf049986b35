"""Tiled compute: a function runs on one tile of its rows at a time, to save memory.

The forward pass saves no activations of the function. The backward pass runs each tile again, and
then computes the gradients of this tile, so activations need the memory of one tile. The gradients
of parameters are summed over the tiles, in float32 or wider, and passed to autograd once, after the
last tile. The hooks of DDP, FSDP and ZeRO therefore run once, with the complete gradient.

Source: Arctic Long Sequence Training, Bekman et al. 2025, arXiv:2506.13996.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Callable

from ._eager import eager
from .agreement import whole
from .errors import InvalidArgument

REDUCTIONS = ("concatenate", "sum", "mean")
_MOST_AXES = 64  # of a tensor in PyTorch


def tiles(rows: int, tile_rows: int, max_rows: int = 0) -> list[tuple[int, int]]:
    """Returns the ranges [lo, hi) of the tiles of `rows` rows.

    There are n = max(1, ceil(max_rows / tile_rows)) tiles of ceil(rows / n) rows. The last ones may
    be shorter or empty. The C library's tiled_compute uses the same tiles. Not collective.

    Args:
        rows (int): rows of this rank
        tile_rows (int): rows of a tile; 0 = one tile
        max_rows (int): the largest number of rows of any rank; 0 = rows. If all ranks give it, they
            have the same number of tiles, so the function may call collectives. Default: 0

    Raises:
        InvalidArgument: a number is negative or no whole number, or max_rows is less than rows

    Example::

        >>> ulysses.tiles(5, 2, 8)
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    numbers = {"rows": rows, "tile_rows": tile_rows, "max_rows": max_rows}
    rows, tile_rows, max_rows = (whole("ulysses.tiles", name, n, 0) for name, n in numbers.items())
    if 0 < max_rows < rows:
        raise InvalidArgument(
            f"ulysses.tiles: max_rows {max_rows} with {rows} rows; give 0, or at least the rows"
        )
    most = max_rows or rows
    count = max(1, -(-most // tile_rows)) if tile_rows else 1
    step = -(-rows // count)
    return [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(count)]


@eager
def tiled_compute(
    fn: Callable[..., Any] | None = None,
    *inputs: Any,
    tile_rows: int = 0,
    dim: int = 1,
    out_dim: int | None = None,
    reduction: str = "concatenate",
    max_rows: int = 0,
    params: Sequence[Any] | None = None,
    preserve_rng: bool = True,
) -> Any:
    """Runs a PyTorch function on tiles of its inputs, and joins the results.

    Differentiable. Not collective, except for collectives that fn calls. The backward pass calls fn
    again on each tile.

    Args:
        fn: a function, called with the same tile of each tensor in inputs, which it must not change
            in place. It runs several times on each row, so a result must depend on its row alone,
            and a call must leave no trace: BatchNorm and InstanceNorm, which compute statistics
            over the rows in training, are refused. It must accept tiles of 0 rows if max_rows is
            given. If it is None, the result is a decorator
        inputs: tensors [.., rows, ..] that have the same number of rows on axis dim. Tensors
            wrapped in `Whole`, and objects that are not tensors, are passed to every tile unchanged
        tile_rows (int): rows of a tile; 0 = one tile. Default: 0
        dim (int): the axis of rows. Default: 1
        out_dim (int, optional): the axis along which results are concatenated. Default: dim
        reduction (str): "concatenate": fn returns a tensor; "sum": fn returns a scalar tensor, and
            the result is the sum over the tiles; "mean": fn returns (sum, count), and the result is
            the total of sums divided by the total of counts, or 0 if no row counts. It is exact for
            tiles of unequal size and for masked rows; counts are whole numbers. Sums of float16
            and bfloat16 over the tiles are computed in float32. Default: "concatenate"
        max_rows (int): the largest number of rows of any rank, which gives all ranks the same
            number of tiles; 0 = the rows of inputs (see `tiles`). Default: 0
        params (sequence of Tensor, optional): the parameters that fn uses, which must be leaves of
            autograd's graph. Default: None, found by running fn on the first row
        preserve_rng (bool): the second run of a tile uses the same random numbers as the first.
            Default: True

    Returns:
        The result of fn for one tile with all rows.

    Raises:
        InvalidArgument: an argument or a result of fn is wrong; fn uses a tensor that needs a
            gradient and is neither in inputs nor in params (raised in backward); fn changed an
            input in place; fn has a BatchNorm or InstanceNorm in training; or a parameter was
            changed in place between forward and backward

    Source: Bekman et al. 2025, arXiv:2506.13996.

    Example::

        >>> y = ulysses.tiled_compute(mlp, x, tile_rows=4096)  # x [B, rows, hidden]

        >>> @ulysses.tiled_compute(tile_rows=4096)
        ... def mlp(x):
        ...     return down(silu(gate(x)) * up(x))
    """
    options: dict[str, Any] = {  # all keyword arguments
        name: value for name, value in locals().items() if name not in ("fn", "inputs")
    }
    if fn is None or not inputs:
        if inputs:
            raise InvalidArgument("ulysses.tiled_compute: inputs without a function; give fn")

        def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(f)
            def run(*args: Any, **given: Any) -> Any:
                return _run(f, args, **{**options, **given})

            return run

        return decorate if fn is None else decorate(fn)
    return _run(fn, inputs, **options)


class Whole:
    """Marks an input of `tiled_compute` that is passed to every tile unchanged.

    Args:
        tensor: a tensor. It receives its gradient like the other inputs
    """

    def __init__(self, tensor: Any):
        self.tensor = tensor


def _given(params: Any) -> list[Any]:
    """Returns params as a list. Raises InvalidArgument unless it has tensors only."""
    import torch

    if not isinstance(params, Iterable):
        raise InvalidArgument(
            f"ulysses.tiled_compute: params is {type(params).__name__}; give a list of tensors"
        )
    found = list(params)
    for i, p in enumerate(found):
        if not isinstance(p, torch.Tensor):
            raise InvalidArgument(
                f"ulysses.tiled_compute: params[{i}] is {type(p).__name__}; give tensors"
            )
    return found


@eager
def _run(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    tile_rows: int,
    dim: int,
    out_dim: int | None,
    reduction: str,
    max_rows: int,
    params: Sequence[Any] | None,
    preserve_rng: bool,
) -> Any:
    import torch

    from ._tiled import (
        TiledCompute,
        TiledFunction,
        check_modules,
        check_unchanged,
        parameters_of,
        versions,
    )

    operation = "ulysses.tiled_compute"
    if not callable(fn):
        raise InvalidArgument(
            f"{operation}: fn is {type(fn).__name__}; give a function of the tiles"
        )
    if reduction not in REDUCTIONS:
        raise InvalidArgument(
            f"{operation}: reduction {reduction!r}; give one of {', '.join(REDUCTIONS)}"
        )
    values = [x.tensor if isinstance(x, Whole) else x for x in inputs]
    tiled = [isinstance(x, torch.Tensor) for x in inputs]
    shapes = [tuple(x.shape) for x, t in zip(values, tiled) if t]
    dim = whole(operation, "dim", dim, -_MOST_AXES, _MOST_AXES - 1)
    if out_dim is not None:  # whether results have this axis is known when fn has returned one
        out_dim = whole(operation, "out_dim", out_dim, -_MOST_AXES, _MOST_AXES - 1)
    rows = {shape[dim] for shape in shapes if -len(shape) <= dim < len(shape)}
    without = [shape for shape in shapes if not -len(shape) <= dim < len(shape)]
    if len(rows) != 1 or without:
        also = f", and shapes {without} without this axis" if without else ""
        raise InvalidArgument(
            f"{operation}: inputs with {sorted(rows)} rows on axis {dim}{also}; give the "
            "same number of rows, and wrap other tensors in Whole"
        )
    check_modules((fn, getattr(fn, "__self__", None), *values))
    function = TiledFunction(
        fn,
        tuple(tiled),
        tiles(rows.pop(), tile_rows, max_rows),
        dim,
        dim if out_dim is None else out_dim,
        reduction,
        preserve_rng,
    )
    if not torch.is_grad_enabled():
        return function.forward(values)[0]
    before = versions(values)
    found = _given(params) if params is not None else parameters_of(function, values)
    out = TiledCompute.apply(function, len(values), *values, *found)
    check_unchanged(values, before)
    return out
