"""Tiled compute: a function of rows, run tile by tile, so that what it keeps inside is that of one tile (Bekman et al. 2025, arXiv:2506.13996).

The forward pass keeps no inner activations; the backward pass runs each tile again and goes back through it at once. Gradients of
parameters are added up over the tiles and handed to autograd once, after the last tile: hooks that wait for a parameter's gradient
(DDP, FSDP, ZeRO) fire once, and never early.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable

from .errors import InvalidArgument

REDUCTIONS = ("concatenate", "sum", "mean")


def tiles(rows: int, tile_rows: int, max_rows: int = 0) -> list[tuple[int, int]]:
    """The tiles [lo, hi) of `rows` rows: max(1, ceil(max_rows / tile_rows)) of ceil(rows / that), the last ones shorter or empty.

    max_rows is the largest number of rows of any rank (0 = rows): with it, all ranks have equally many tiles, so that a tile may take part
    in collectives. tile_rows 0 = one tile. The arithmetic of the library's tiled_compute.
    """
    if rows < 0 or tile_rows < 0 or max_rows < 0 or 0 < max_rows < rows:
        raise InvalidArgument(
            f"ulysses.tiles: {rows} rows in tiles of {tile_rows}, at most {max_rows} on a rank: none may be negative, and no rank "
            "has more than the most (0 = rows)"
        )
    most = max_rows or rows
    count = max(1, -(-most // tile_rows)) if tile_rows else 1
    step = -(-rows // count)
    return [(min(i * step, rows), min((i + 1) * step, rows)) for i in range(count)]


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
    """fn over tiles of the rows of its inputs. PyTorch.

    fn         called with a tile of each tensor of `inputs` that is cut, everything else as it is. Also with tiles of 0 rows (a rank may hold
               fewer rows than its peers): it must take them
    inputs     tensors with `dim` as the axis of rows, all of as many rows; wrap a tensor in `Whole` to pass it uncut. None, numbers and other objects
               pass as they are. Tensors that need a gradient get one
    tile_rows  rows of a tile; 0 = one tile
    out_dim    the axis along which results are joined, any shape otherwise; None = dim
    reduction  "concatenate": fn returns a tensor; "sum": a scalar, added up; "mean": a pair (sum, count), the sums' total by the counts'
               total: exact for unequal tiles and masked rows, 0 where no row counts
    max_rows   the most rows of any rank, so that all have equally many tiles (ulysses.tiles); 0 = these rows
    params     parameters that fn uses; None = found by running fn on its first row. A tensor that needs a gradient and is neither an input nor among them is
               an error in backward, not a lost gradient. It must be a leaf: pass others as inputs
    preserve_rng  the second run draws the same random numbers as the first

    As a decorator:

        @ulysses.tiled_compute(tile_rows=4096)
        def mlp(x): return down(silu(gate(x)) * up(x))

    Returns what fn returns for one tile of all rows. Errors: InvalidArgument.
    """
    options: dict[str, Any] = dict(
        tile_rows=tile_rows,
        dim=dim,
        out_dim=out_dim,
        reduction=reduction,
        max_rows=max_rows,
        params=params,
        preserve_rng=preserve_rng,
    )
    if fn is None or not inputs:
        if inputs:
            raise InvalidArgument("ulysses.tiled_compute: inputs without a function")

        def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(f)
            def run(*args: Any, **given: Any) -> Any:
                return _run(f, args, **{**options, **given})

            return run

        return decorate if fn is None else decorate(fn)
    return _run(fn, inputs, **options)


class Whole:
    """Marks a tensor that every tile gets uncut."""

    def __init__(self, tensor: Any):
        self.tensor = tensor


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

    from ._tiled import TiledCompute, Walk, captured

    if reduction not in REDUCTIONS:
        raise InvalidArgument(
            f"ulysses.tiled_compute: reduction {reduction!r}: one of {', '.join(REDUCTIONS)}"
        )
    cut, values = [], []
    for x in inputs:
        whole = isinstance(x, Whole)
        values.append(x.tensor if whole else x)
        cut.append(isinstance(x, torch.Tensor) and not whole)
    rows = {
        values[i].shape[dim]
        for i in range(len(values))
        if cut[i] and values[i].ndim > (dim if dim >= 0 else -dim - 1)
    }
    flat = [
        tuple(values[i].shape)
        for i in range(len(values))
        if cut[i] and not -values[i].ndim <= dim < values[i].ndim
    ]
    if len(rows) != 1 or flat:
        raise InvalidArgument(
            f"ulysses.tiled_compute: inputs of {sorted(rows)} rows along dim {dim}{f', and of shapes {flat} without it' if flat else ''}: "
            "all that are cut need as many; wrap the others in Whole"
        )
    walk = Walk(
        fn,
        tuple(cut),
        tiles(rows.pop(), tile_rows, max_rows),
        dim,
        dim if out_dim is None else out_dim,
        reduction,
        preserve_rng,
    )
    if not torch.is_grad_enabled():
        return walk.forward(values)[0]
    found = list(params) if params is not None else captured(walk, values)
    return TiledCompute.apply(walk, len(values), *values, *found)
