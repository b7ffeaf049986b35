"""Masks of block-sparse attention, for `attention(..., block_mask=mask, block=block)`.

The parameters are the ones of DeepSpeed's SparsityConfig classes; numbers are in blocks. A mask is
made for the heads of all ranks, so a head has the same mask on every number of ranks. Random
columns are a function of seed, layer, head and row.

A unidirectional mask has no block above the diagonal. DeepSpeed's classes keep such blocks where a
range of several global blocks begins; a warning, once for each mask, tells how many were dropped.

    mask = ulysses.patterns.fixed(heads=8, blocks=4096 // 64, attention="unidirectional")
    out = ulysses.attention(q, k, v, causal=True, block_mask=mask, block=64)

Each function returns an array [heads, blocks, blocks] of uint8: 1 where a block of queries (row)
sees a block of keys (column). Not collective.

Sources: Child et al. 2019, arXiv:1904.10509; Zaheer et al. 2020, arXiv:2007.14062; Beltagy et al.
2020, arXiv:2004.05150.
"""

from __future__ import annotations

import ctypes
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from . import _library, _struct
from .agreement import whole
from .errors import InvalidArgument

_ATTENTION = {"unidirectional": 1, "bidirectional": 2}
_reported: set[str] = set()  # warnings that were given
_INT32 = (1 << 31) - 1


def _report(kind: str, heads: int, blocks: int, dropped: int) -> None:
    """Warns once that blocks above the diagonal were dropped."""
    text = (
        f"ulysses.patterns.{kind}: {dropped} blocks above the diagonal were dropped from the "
        f"unidirectional mask of {heads} heads and {blocks} blocks, because they are in the future"
    )
    if dropped and text not in _reported:
        _reported.add(text)
        warnings.warn(text, stacklevel=3)


def _above(blocks: int, spans: Iterable[tuple[int, int]]) -> int:
    """Returns how many blocks above the diagonal DeepSpeed's global columns have in one head.

    spans are the ranges [start, end) of global columns, which the rows from start on see.
    """
    upstream = np.zeros((blocks, blocks), bool)
    for start, end in spans:
        upstream[start:, start:end] = True
    return int(np.triu(upstream, 1).sum())


def _count(n: Any) -> int:
    """Returns a number as the library takes it, where 0 means the default and -1 none."""
    return whole("ulysses.patterns", "a number of blocks", n, 0, _INT32) or -1


def _list(values: Sequence[int] | None) -> Any:
    if values is None:
        return None
    numbers = [whole("ulysses.patterns", "the index or size of blocks", n, 0) for n in values]
    array = (ctypes.c_int64 * len(numbers))(*numbers)
    return ctypes.cast(array, ctypes.POINTER(ctypes.c_int64))


def _mask(
    heads: int, blocks: int, pattern: int, attention: str, per_head: bool, **more: Any
) -> Any:
    if attention not in _ATTENTION:
        raise InvalidArgument(
            f"ulysses.patterns: attention {attention!r}; give one of {', '.join(_ATTENTION)}"
        )
    for name, n in (("heads", heads), ("blocks", blocks)):
        whole("ulysses.patterns", name, n, 1)
    for name in more.keys() & {"seed", "layer"}:
        more[name] = whole("ulysses.patterns", name, more[name], -(1 << 63))
    described = _struct.BlockPattern(
        pattern=pattern, attention=_ATTENTION[attention], per_head=int(per_head), **more
    )
    mask = np.empty((heads, blocks, blocks), np.uint8)
    pointer = ctypes.cast(mask.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    _library.call("ulysses_block_mask", ctypes.byref(described), heads, blocks, pointer)
    return mask


def dense(heads: int, blocks: int) -> Any:
    """Returns a mask with all blocks."""
    return _mask(heads, blocks, _struct.PATTERN_DENSE, "bidirectional", False)


def fixed(
    heads: int,
    blocks: int,
    *,
    num_local_blocks: int = 4,
    num_global_blocks: int = 1,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    num_different_global_patterns: int = 1,
    different_layout_per_head: bool = False,
) -> Any:
    """Returns a mask of groups whose blocks see each other, with global columns of each group."""
    mask = _mask(
        heads,
        blocks,
        _struct.PATTERN_FIXED,
        attention,
        different_layout_per_head,
        local=_count(num_local_blocks),
        horizontal=int(horizontal_global_attention),
        global_patterns=_count(num_different_global_patterns),
        **{"global": _count(num_global_blocks)},
    )
    if attention == "unidirectional":
        n, g = num_local_blocks, num_global_blocks
        dropped = 0
        for h in range(heads):
            first = n - (1 + h % num_different_global_patterns) * g
            # The last group may be shorter, and then its global columns end with it.
            ends = (min(at + first + g, blocks) for at in range(0, blocks, n))
            dropped += _above(blocks, ((end - g, end) for end in ends))
        _report("fixed", heads, blocks, dropped)
    return mask


def variable(
    heads: int,
    blocks: int,
    *,
    num_random_blocks: int = 0,
    local_window_blocks: Sequence[int] = (4,),
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = "bidirectional",
    horizontal_global_attention: bool = False,
    different_layout_per_head: bool = False,
    seed: int = 0,
    layer: int = 0,
) -> Any:
    """Returns a mask of local windows of the listed sizes, global and random columns."""
    mask = _mask(
        heads,
        blocks,
        _struct.PATTERN_VARIABLE,
        attention,
        different_layout_per_head,
        random=_count(num_random_blocks),
        horizontal=int(horizontal_global_attention),
        seed=seed,
        layer=layer,
        n_windows=len(local_window_blocks),
        windows=_list(local_window_blocks),
        **_globals(global_block_indices, global_block_end_indices),
    )
    if attention == "unidirectional" and global_block_end_indices is not None:
        spans = zip(global_block_indices, global_block_end_indices)
        _report("variable", heads, blocks, heads * _above(blocks, spans))
    return mask


def _globals(starts: Sequence[int], ends: Sequence[int] | None) -> dict[str, Any]:
    if len(starts) < 1 or ends is not None and len(ends) != len(starts):
        raise InvalidArgument(
            f"ulysses.patterns: global blocks {starts!r} to {ends!r}; give one or more, with an "
            "end for each start, or no ends"
        )
    return {"n_globals": len(starts), "globals": _list(starts), "global_ends": _list(ends)}


def bigbird(
    heads: int,
    blocks: int,
    *,
    num_random_blocks: int = 1,
    num_sliding_window_blocks: int = 3,
    num_global_blocks: int = 1,
    attention: str = "bidirectional",
    different_layout_per_head: bool = False,
    seed: int = 0,
    layer: int = 0,
) -> Any:
    """Returns a mask of a sliding window, the first rows and columns, and random columns."""
    return _mask(
        heads,
        blocks,
        _struct.PATTERN_BIGBIRD,
        attention,
        different_layout_per_head,
        random=_count(num_random_blocks),
        window=_count(num_sliding_window_blocks),
        seed=seed,
        layer=layer,
        **{"global": _count(num_global_blocks)},
    )


def bslongformer(
    heads: int,
    blocks: int,
    *,
    num_sliding_window_blocks: int = 3,
    global_block_indices: Sequence[int] = (0,),
    global_block_end_indices: Sequence[int] | None = None,
    attention: str = "bidirectional",
) -> Any:
    """Returns a mask of a sliding window, and of global rows and columns."""
    return _mask(
        heads,
        blocks,
        _struct.PATTERN_BSLONGFORMER,
        attention,
        False,
        window=_count(num_sliding_window_blocks),
        **_globals(global_block_indices, global_block_end_indices),
    )


def local_sliding_window(
    heads: int,
    blocks: int,
    *,
    num_sliding_window_blocks: int = 3,
    attention: str = "unidirectional",
) -> Any:
    """Returns a mask of a sliding window."""
    return _mask(
        heads,
        blocks,
        _struct.PATTERN_LOCAL_SLIDING_WINDOW,
        attention,
        False,
        window=_count(num_sliding_window_blocks),
    )


def from_layout(layout: Any, heads: int | None = None, *, attention: str = "bidirectional") -> Any:
    """Returns the mask of an explicit layout, such as DeepSpeed's make_layout(seq_len) returns.

    Args:
        layout: [heads or 1, blocks, blocks] or [blocks, blocks] of 0 and 1: an array, a PyTorch
            tensor or nested lists
        heads (int, optional): heads of the mask, if the layout has one. Default: as in the layout
        attention (str): "unidirectional" drops blocks above the diagonal. Default: "bidirectional"

    Raises:
        InvalidArgument: the layout has another shape or other values
    """
    array = np.asarray(layout.detach().cpu() if hasattr(layout, "detach") else layout)
    if array.ndim == 2:
        array = array[None]
    if attention not in _ATTENTION:
        raise InvalidArgument(
            f"ulysses.patterns.from_layout: attention {attention!r}; give one of "
            f"{', '.join(_ATTENTION)}"
        )
    fits = array.ndim == 3 and array.shape[1] == array.shape[2] and array.size
    if (
        not fits
        or not np.isin(array, (0, 1)).all()
        or heads not in (None, array.shape[0])
        and (array.shape[0] != 1)
    ):
        raise InvalidArgument(
            f"ulysses.patterns.from_layout: a layout of shape {array.shape} for {heads} heads; "
            "give 0 and 1 in [heads or 1, blocks, blocks]"
        )
    mask = np.repeat(array.astype(np.uint8), (heads or 1) if array.shape[0] == 1 else 1, 0)
    if attention == "unidirectional":
        dropped = int(np.triu(mask, 1).sum())
        _report("from_layout", mask.shape[0], mask.shape[1], dropped)
        mask = np.tril(mask)
    return mask


# By mode of a configuration, the function, and its defaults that differ from the function's.
_MODES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": (dense, {}),
    "fixed": (fixed, {}),
    "variable": (variable, {}),
    "bigbird": (bigbird, {"num_random_blocks": 0}),
    "bslongformer": (bslongformer, {}),
    "local_sliding_window": (local_sliding_window, {}),
}


def from_config(
    config: Mapping[str, Any], heads: int, seq: int, *, seed: int = 0, layer: int = 0
) -> tuple[Any, int]:
    """Returns the mask and the block of the key "sparse_attention" of a DeepSpeed configuration.

    Args:
        config: the value of the key: "mode" ("fixed" if it is missing; "local_sliding_window" is an
            addition), "block" (16), and the parameters of the mode's function. As in DeepSpeed,
            num_random_blocks of "bigbird" is 0 if it is missing
        heads (int), seq (int): heads and tokens of a sequence, over all ranks
        seed (int), layer (int): of random columns, in the modes that have them. Default: 0

    Returns:
        (mask, block) for `attention(.., block_mask=mask, block=block)`.

    Raises:
        InvalidArgument: the mode or a parameter is unknown or wrong

    Example::

        >>> mask, block = ulysses.patterns.from_config({"mode": "bigbird"}, heads=8, seq=4096)
    """
    given = dict(config)
    mode, block = given.pop("mode", "fixed"), given.pop("block", 16)
    if mode not in _MODES:
        raise InvalidArgument(
            f"ulysses.patterns.from_config: mode {mode!r}; give one of {', '.join(_MODES)}"
        )
    if not isinstance(block, int) or block < 1:
        raise InvalidArgument(
            f"ulysses.patterns.from_config: block {block!r}; give the tokens of a block, 1 or more"
        )
    make, defaults = _MODES[mode]
    known = inspect.signature(make).parameters
    if "different_layout_per_head" not in known and not given.get("different_layout_per_head"):
        given.pop("different_layout_per_head", None)  # all heads of these modes are alike
    unknown = sorted(name for name in given if name not in known or name in ("heads", "blocks"))
    if unknown:
        names = [name for name in known if name not in ("heads", "blocks", "seed", "layer")]
        raise InvalidArgument(
            f"ulysses.patterns.from_config: mode {mode!r} has no {', '.join(unknown)}; its "
            f"parameters are block{''.join(', ' + name for name in names)}"
        )
    more = {"seed": seed, "layer": layer} if "seed" in known else {}
    return make(heads, -(-seq // block), **{**defaults, **more, **given}), block
