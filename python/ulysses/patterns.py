"""Masks of block-sparse attention, for `attention(..., block_mask=mask, block=block)`.

The parameters are the ones of DeepSpeed's SparsityConfig classes; numbers are in blocks. A mask is
made for the heads of all ranks, so a head has the same mask on every number of ranks. A
unidirectional mask has no block above the diagonal. Random columns are a function of seed, layer,
head and row.

    mask = ulysses.patterns.fixed(heads=8, blocks=4096 // 64, attention="unidirectional")
    out = ulysses.attention(q, k, v, causal=True, block_mask=mask, block=64)

Each function returns an array [heads, blocks, blocks] of uint8: 1 where a block of queries (row)
sees a block of keys (column). Not collective.

Sources: Child et al. 2019, arXiv:1904.10509; Zaheer et al. 2020, arXiv:2007.14062; Beltagy et al.
2020, arXiv:2004.05150.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _library, _struct
from .errors import InvalidArgument

_ATTENTION = {"unidirectional": 1, "bidirectional": 2}


def _count(n: int) -> int:
    """Returns a number as the library takes it, where 0 means the default and -1 none."""
    return -1 if n == 0 else n


def _list(values: Sequence[int] | None) -> Any:
    if values is None:
        return None
    array = (ctypes.c_int64 * len(values))(*values)
    return ctypes.cast(array, ctypes.POINTER(ctypes.c_int64))


def _mask(
    heads: int, blocks: int, pattern: int, attention: str, per_head: bool, **more: Any
) -> Any:
    if attention not in _ATTENTION:
        raise InvalidArgument(
            f"ulysses.patterns: attention {attention!r}; give one of {', '.join(_ATTENTION)}"
        )
    if heads < 1 or blocks < 1:
        raise InvalidArgument(
            f"ulysses.patterns: {heads} heads and {blocks} blocks; give 1 or more of each"
        )
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
    return _mask(
        heads,
        blocks,
        _struct.PATTERN_FIXED,
        attention,
        different_layout_per_head,
        local=_count(num_local_blocks),
        horizontal=int(horizontal_global_attention),
        global_patterns=_count(num_different_global_patterns),
        **{"global": num_global_blocks or -1},
    )


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
    return _mask(
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
