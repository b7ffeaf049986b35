"""Options of attention that `attention` and `attention_layer` have in common.

They are sinks, slopes, block masks, soft caps, dropout and the mask of positions. The functions
take an object whose attributes are the keyword arguments of `attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _struct
from .agreement import describe, flag, number, number32, whole
from .errors import InvalidArgument
from .tensors import (
    View,
    compute_dtype_of,
    dense,
    dtype_of,
    is_torch,
    one_library,
    torch_or_none,
    view,
)

_INT32 = (1 << 31) - 1


def plan_options(operation: str, o: Any, heads: int, like: Any) -> dict[str, Any]:
    """Checks the options of a call, and returns the options of its plan. Not collective.

    Args:
        operation: the name of the call, for messages
        o: the options
        heads: query heads
        like: q or x; sinks and slopes may have its dtype
    """
    dtype = compute_dtype_of(operation, like)
    softcap = number32(operation, "softcap", o.softcap or 0, "none")
    for name in ("sinks", "alibi"):
        _check_vector(operation, name, getattr(o, name), heads, like)
    one_library(input=like, sinks=o.sinks, alibi=o.alibi, block_mask=o.block_mask)
    if (o.block_mask is None) != (o.block is None):
        raise InvalidArgument(
            f"{operation}: one of block_mask and block is None; give a mask and (queries, keys) "
            "of a block, or neither"
        )
    return dict(
        dtype=dtype,
        causal=flag(operation, "causal", o.causal),
        window=_window(operation, o.window),
        scale=None if o.scale is None else number(operation, "scale", o.scale),
        deterministic=flag(operation, "deterministic", o.deterministic),
        softcap=softcap,
        dropout=number(operation, "dropout", o.dropout or 0),
        sinks=o.sinks is not None,
        alibi=o.alibi is not None,
        block=_pair(operation, o.block),
    )


def alibi_slopes(heads: int) -> Any:
    """Returns the slopes of ALiBi for a number of heads (Press et al. 2022, arXiv:2108.12409).

    Not collective. With c the largest power of 2 up to `heads`, they are 2^(-8k/c) for k = 1 to c,
    and then 2^(-4k/c) for k = 1, 3, 5 and so on, as in BLOOM and MPT.

    Args:
        heads (int): query heads, over all ranks

    Returns:
        An array [heads] of float32, for the argument `alibi` of `attention`.

    Raises:
        InvalidArgument: heads is not a whole number above 0

    Example::

        >>> ulysses.alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]
    """
    n = whole("ulysses.alibi_slopes", "heads", heads, 1, _INT32)
    c = 1 << (n.bit_length() - 1)
    powers = [-8 * k / c for k in range(1, c + 1)] + [-4 * k / c for k in range(1, 2 * (n - c), 2)]
    return np.exp2(np.array(powers)).astype(np.float32)


def _window(operation: str, window: Any) -> tuple[int, int] | None:
    """Returns the keys that a query sees before and after its own position; None = all."""
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise InvalidArgument(
            f"{operation}: window {window!r}; give (left, right) in keys, -1 = unbounded"
        )
    left, right = (whole(operation, "window", n, -1) for n in window)
    return left, right


def _check_vector(operation: str, name: str, x: Any, heads: int, like: Any) -> None:
    """Raises InvalidArgument unless x is None or [heads] of float32 or the dtype of `like`."""
    if x is None:
        return
    shape = tuple(getattr(x, "shape", ()))
    if shape != (heads,) or dtype_of(x) not in (_struct.F32, dtype_of(like)):
        types = "float32" if dtype_of(like) == _struct.F32 else f"float32 or {like.dtype}"
        raise InvalidArgument(
            f"{operation}: {name} has shape {shape} and dtype "
            f"{getattr(x, 'dtype', type(x).__name__)}; give [{heads}] of {types}"
        )


def _pair(operation: str, block: Any) -> tuple[int, int] | None:
    """Returns the queries and keys of a block. A whole number stands for both."""
    if block is None:
        return None
    both = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
    if len(both) != 2:
        raise InvalidArgument(
            f"{operation}: block {block!r}; give (queries, keys) of a block, 1 or more"
        )
    queries, keys = (whole(operation, "block", n, 1, _INT32) for n in both)
    return queries, keys


def same_options(operation: str, o: Any) -> dict[str, Any]:
    """Returns the options by name that must be equal on all ranks and are not in the plan."""
    arrays = {name: describe(getattr(o, name)) for name in ("sinks", "alibi", "block_mask")}
    return {**arrays, "seed": None if o.seed is None else whole(operation, "seed", o.seed, 0)}


def draw_seed(o: Any, like: Any) -> int:
    """Returns the seed of a call, or draws it. Only rank 0's is used.

    Gradient checkpointing restores PyTorch's generator, and so the seed.
    """
    if o.seed is not None or not o.dropout:
        return int(o.seed or 0)
    if is_torch(like):
        return int(torch_or_none().randint(1 << 48, (1,)))
    return int(np.random.randint(1 << 48, dtype=np.int64))


@dataclass(frozen=True)
class OptionTensors:
    """Sinks, slopes, block mask and seed of a call, as the library takes them.

    Attributes:
        sinks, alibi: [H], or None
        block_mask: uint8 [H or 1, blocks of queries, blocks of keys], or None
        seed: of dropout, equal on all ranks
    """

    sinks: Any = None
    alibi: Any = None
    block_mask: Any = None
    seed: int = 0

    @classmethod
    def of(cls, o: Any, seed: int) -> OptionTensors:
        """Returns dense tensors of the options of a call."""
        sinks, alibi = (None if x is None else dense(x) for x in (o.sinks, o.alibi))
        return cls(sinks, alibi, _bytes(o.block_mask), seed)

    def set(self, args: Any) -> list[View]:
        """Sets the fields of a C struct, and returns the views that must stay alive."""
        views = []
        for name in ("sinks", "alibi", "block_mask"):
            x = getattr(self, name)
            if x is not None:
                views.append(view(x))
                setattr(args, name, views[-1].pointer())
        args.dropout_seed = self.seed
        return views


def _bytes(mask: Any) -> Any:
    """Returns a dense mask of uint8 for one of uint8 or bool."""
    if mask is None:
        return None
    mask = dense(mask)
    if str(mask.dtype).removeprefix("torch.") == "bool":
        mask = mask.view(torch_or_none().uint8 if is_torch(mask) else np.uint8)
    return mask
