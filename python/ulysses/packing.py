"""Finds the documents of a model's call from the position ids and padding masks of all ranks.

A document starts where a position is not the previous position plus 1. This is the rule of
transformers (find_packed_sequence_indices). Padding is a separate document. For each range of its
tokens, a rank sends the first and the last position and the document starts, not all ids: a few
numbers for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidArgument, Unsupported
from .layout import Layout
from .sequences import Sequences


@dataclass
class RangePositions:
    """Positions and padding of the tokens [B, n] of one range of a rank's tokens.

    Attributes:
        first, last: [B], the positions of the first and of the last token; None without ids or
            tokens
        starts: [n, 2], sequence and token index of tokens, except the first, that start a document
        visible: [B], whether the mask shows the first token; None without a mask
        changes: [n, 2], sequence and token index of tokens, except the first, where the mask
            changes
    """

    first: np.ndarray | None
    last: np.ndarray | None
    starts: np.ndarray
    visible: np.ndarray | None
    changes: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray | None, visible: np.ndarray | None) -> RangePositions:
        """Reads positions and mask, [B, n] or None."""
        none = np.zeros((0, 2), np.int64)
        return cls(
            None if ids is None else ids[:, 0].copy(),
            None if ids is None else ids[:, -1].copy(),
            none if ids is None else _indices(np.diff(ids, axis=1) != 1),
            None if visible is None else visible[:, 0].copy(),
            none if visible is None else _indices(visible[:, 1:] != visible[:, :-1]),
        )


@dataclass
class ShardPositions:
    """Positions and padding of the tokens [B, rows] of one rank, as sent to the other ranks.

    Attributes:
        ranges: the positions of each range of the rank's tokens
        from_zero: the positions of every sequence are 0, 1, .. rows-1, as a model makes them if it
            is given no ids
    """

    ranges: list[RangePositions]
    from_zero: bool

    @classmethod
    def of(cls, position_ids: Any, mask: Any, batch: int, lengths: Sequence[int]) -> ShardPositions:
        """Reads position_ids and mask, [B, rows] or [1, rows] or None. Not collective.

        `lengths` are the tokens of each range of the rank.
        """
        ids, visible = _numpy(position_ids, np.int64, batch), _numpy(mask, np.bool_, batch)
        ends = np.cumsum(lengths)
        ranges = [
            RangePositions.of(*(None if x is None else x[:, hi - n : hi] for x in (ids, visible)))
            for n, hi in zip(lengths, ends)
        ]
        from_zero = ids is not None and ids.shape[1] and (ids == np.arange(ids.shape[1])).all()
        return cls(ranges, bool(from_zero))


def _numpy(x: Any, dtype: Any, batch: int) -> np.ndarray | None:
    """Returns x as [batch, rows] of the dtype."""
    if x is None:
        return None
    a = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    a = (a != 0) if dtype is np.bool_ else a.astype(dtype)
    return np.broadcast_to(a, (batch, a.shape[1]))


def _indices(changes: np.ndarray) -> np.ndarray:
    """Returns [n, 2], sequence and index of the token after each true element of [B, rows-1]."""
    found = np.argwhere(changes)
    found[:, 1] += 1
    return found.astype(np.int64)


def check_tokens(layout: Layout, counts: Sequence[int]) -> None:
    """Raises InvalidArgument on all ranks if the ranks do not hold their shards of sequences."""
    seq = sum(counts)
    layout.check("ulysses", "tokens of each sequence", counts, seq, "shard with ulysses.shard")
    if min(counts) < 1:
        raise InvalidArgument(
            f"ulysses: sequences of {seq} tokens on {layout.size} ranks, but a model needs a token "
            "on each rank; use fewer ranks, or longer sequences"
        )


def sequences_of(
    batch: int, seq: int, layout: Layout, each: Sequence[ShardPositions], known: Sequences | None
) -> Sequences:
    """Returns lengths and documents of the whole sequences, from the positions of all ranks.

    Not collective. The result, or the exception, is the same on all ranks.

    Args:
        batch: number of sequences
        seq: tokens of each sequence
        layout: which of them each rank holds
        each: the positions of each rank
        known: the lengths that Context.use has set, or None. If they fit, their documents are added
    """
    known = (
        known
        if known is not None and (known.batch, known.seq) == (batch, seq) and known.kv_seq is None
        else None
    )
    begins = np.zeros((batch, seq), bool)
    begins[:, 0] = True
    if known is not None and known.cu_seqlens is not None:
        begins.reshape(-1)[list(known.cu_seqlens[:-1])] = True
    _check_from_zero(layout, seq, each, begins)
    visible = np.ones((batch, seq), bool)
    before = None
    ranges = [iter(shard.ranges) for shard in each]
    for rank, lo, hi in layout.all_ranges(seq):
        held = next(ranges[rank])
        begins[held.starts[:, 0], lo + held.starts[:, 1]] = True
        if held.first is not None and before is not None:
            begins[:, lo] |= before + 1 != held.first
        before = held.last
        if held.visible is not None:
            changes = np.zeros((batch, hi - lo), np.int64)
            changes[held.changes[:, 0], held.changes[:, 1]] = 1
            visible[:, lo:hi] = held.visible[:, None] ^ (np.cumsum(changes, 1) % 2 == 1)
    if not visible.all():
        _check_padding(begins, visible)
        begins[:, 1:] |= visible[:, 1:] != visible[:, :-1]
    starts = np.flatnonzero(begins)
    return Sequences(
        batch, seq, None, (*map(int, starts), batch * seq) if len(starts) > batch else None
    )


def _check_from_zero(
    layout: Layout, seq: int, each: Sequence[ShardPositions], begins: np.ndarray
) -> None:
    """Raises InvalidArgument if the positions of every rank start at 0.

    Such positions mean one document on each rank, or a caller who forgot the rank's offset. The
    call is valid only if Context.use has set documents that start at the ranks' first tokens.
    """
    borders = [layout.ranges(seq, rank)[0][0] for rank in range(1, layout.size)]
    if borders and all(shard.from_zero for shard in each) and not begins[:, borders].all():
        raise InvalidArgument(
            f"ulysses: position_ids start at 0 on rank 1 of {layout.size}, whose first token has "
            f"index {borders[0]}; give each rank its positions in the whole sequence, as ulysses.shard "
            "does, or None; if each rank holds one document, call Context.use(Sequences(.., "
            "cu_seqlens=..))"
        )


def _check_padding(begins: np.ndarray, visible: np.ndarray) -> None:
    """Raises Unsupported if a document has hidden tokens between visible ones.

    Attention cannot skip tokens.
    """
    document = np.cumsum(begins.reshape(-1)) - 1
    flat = visible.reshape(-1)
    opens = flat & np.concatenate([[True], ~flat[:-1] | begins.reshape(-1)[1:]])
    runs = np.bincount(document[opens], minlength=document[-1] + 1)
    if (runs > 1).any():
        token = int(np.flatnonzero(opens & (runs[document] > 1))[1])
        b, t = divmod(token, visible.shape[1])
        raise Unsupported(
            f"ulysses: attention_mask hides tokens in the middle of sequence {b}, before token "
            f"{t}; move the padding to the start or to the end, or remove the hidden tokens"
        )
