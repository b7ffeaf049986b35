"""Which tokens of a sequence each rank holds, and moving tensors to this order and back.

In order, a rank holds one range of tokens. In a zigzag over a ring of R groups, a sequence is
divided into 2 R chunks. Group r holds chunks r and 2 R - 1 - r, of which each of its ranks holds an
equal share. Under a causal mask, the groups then have the same work (see docs/attention.md).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidArgument
from .tensors import is_torch


def shard_rows(n: int, size: int, rank: int) -> tuple[int, int]:
    """Returns the range [lo, hi) of n tokens (or heads) that a rank holds in order.

    The first n mod size ranks hold one more than the others. Not collective.

    Args:
        n: tokens over all ranks
        size: number of ranks
        rank: index of the rank, from 0

    Raises:
        InvalidArgument: n is negative, there is no such rank, or an argument is no whole number

    Example::

        >>> [ulysses.shard_rows(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    try:
        n, size, rank = operator.index(n), operator.index(size), operator.index(rank)
        wrong = n < 0 or not 0 <= rank < size
    except TypeError:
        wrong = True
    if wrong:
        raise InvalidArgument(
            f"ulysses.shard_rows: {n!r} tokens, {size!r} ranks, rank {rank!r}; give whole numbers: "
            "0 tokens or more, and a rank from 0 to size - 1"
        )
    rows, more = divmod(n, size)
    lo = rank * rows + min(rank, more)
    return lo, lo + rows + (rank < more)


@dataclass(frozen=True)
class Layout:
    """The order of tokens on the ranks of a context. Equal on all ranks. Not collective.

    Attributes:
        size: number of ranks
        ring: groups of the ring; rank = group * (size / ring) + rank in the group
        zigzag: the tokens are in a zigzag; False if ring is 1, where a zigzag is in order

    Example::

        >>> [ulysses.Layout(2, ring=2, zigzag=True).ranges(8, rank) for rank in range(2)]
        [((0, 2), (6, 8)), ((2, 6),)]
    """

    size: int
    ring: int = 1
    zigzag: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "zigzag", bool(self.zigzag) and self.ring > 1)

    def ranges(self, n: int, rank: int) -> tuple[tuple[int, int], ...]:
        """Returns the ranges [lo, hi) of n tokens that a rank holds: ascending, none is empty."""
        if not self.zigzag:
            return _without_empty([shard_rows(n, self.size, rank)])
        group, index = divmod(rank, self.size // self.ring)
        chunks = [shard_rows(n, 2 * self.ring, c) for c in (group, 2 * self.ring - 1 - group)]
        lo, hi = shard_rows(sum(b - a for a, b in chunks), self.size // self.ring, index)
        found, at = [], 0
        for a, b in chunks:  # [lo, hi) counts the tokens of the two chunks, one after the other
            found.append((a + max(lo - at, 0), a + min(hi - at, b - a)))
            at += b - a
        return _without_empty(found)

    def rows(self, n: int, rank: int) -> int:
        """Returns how many of n tokens a rank holds."""
        return sum(hi - lo for lo, hi in self.ranges(n, rank))

    def index(self, n: int, rank: int) -> np.ndarray:
        """Returns the tokens of a rank as indices in the sequence, int64 [rows]."""
        ranges = [np.arange(lo, hi) for lo, hi in self.ranges(n, rank)]
        return np.concatenate([np.empty(0, np.int64), *ranges])

    def take(self, x: Any, dim: int, rank: int) -> Any:
        """Returns the tokens of a rank of whole sequences x, whose axis `dim` has all tokens.

        The result is a view of x, or a copy if the rank has several ranges.
        """
        head = (slice(None),) * (dim % x.ndim)
        ranges = self.ranges(x.shape[dim], rank) or ((0, 0),)
        found = [x[head + (slice(lo, hi),)] for lo, hi in ranges]
        return found[0] if len(found) == 1 else _concatenate(found, dim)

    def join(self, shards: Sequence[Any], dim: int) -> Any:
        """Returns whole sequences from the shards of all ranks in rank order. Inverts `take`."""
        n = sum(x.shape[dim] for x in shards)
        head = (slice(None),) * (dim % shards[0].ndim)
        found = []
        for rank, x in enumerate(shards):
            at = 0
            for lo, hi in self.ranges(n, rank):
                found.append((lo, x[head + (slice(at, at + hi - lo),)]))
                at += hi - lo
        found.sort(key=lambda pair: pair[0])
        return _concatenate([x for _, x in found] or [shards[0]], dim)

    def all_ranges(self, n: int) -> Iterator[tuple[int, int, int]]:
        """Returns (rank, lo, hi) of the ranges of all ranks, in the order of the tokens."""
        found = [(lo, hi, r) for r in range(self.size) for lo, hi in self.ranges(n, r)]
        return ((rank, lo, hi) for lo, hi, rank in sorted(found))

    def check(self, operation: str, what: str, each: Sequence[int], n: int, fix: str) -> None:
        """Raises InvalidArgument if the ranks do not hold their shards of n elements.

        Args:
            operation, what: names of the call and of the elements, for the message
            each: how many elements each rank holds
            n: how many there are
            fix: what the caller should do
        """
        for rank, rows in enumerate(each):
            if rows != self.rows(n, rank):
                order = " in a zigzag" if self.zigzag else ""
                raise InvalidArgument(
                    f"{operation}: rank {rank} of {self.size} has {rows} {what}, its shard of {n}"
                    f"{order} has {self.rows(n, rank)}; {fix}"
                )


def _without_empty(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the ranges that are not empty, joined where one continues another."""
    found: list[tuple[int, int]] = []
    for lo, hi in ranges:
        if lo < hi and found and found[-1][1] == lo:
            found[-1] = (found[-1][0], hi)
        elif lo < hi:
            found.append((lo, hi))
    return tuple(found)


def _concatenate(arrays: Sequence[Any], dim: int) -> Any:
    if is_torch(arrays[0]):
        import torch

        return torch.cat(list(arrays), dim)
    return np.concatenate(list(arrays), dim)
