"""Finds the documents of a model's call from the position ids and padding masks of all ranks.

A document starts where a position is not its predecessor plus 1. This is the rule of transformers
(find_packed_sequence_indices). Padding is a document of its own. A rank sends its first and last
position and the document starts inside its rows, not all ids: a few numbers for each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .errors import InvalidArgument, Unsupported
from .plan import Sequences, shard_rows


@dataclass
class Rows:
    """Positions and padding of one rank's rows [B, rows], as sent to the other ranks."""

    first: np.ndarray | None  # [B] position of the first row; None = no ids, or no rows
    last: np.ndarray | None
    starts: np.ndarray  # [n, 2] sequence and row, from 1, of rows whose position does not follow
    counts_from_zero: (
        bool  # every sequence is 0, 1, .. rows-1: what a model makes when it is given no ids
    )
    shown: np.ndarray | None  # [B] whether the first row is shown; None = no mask
    turns: np.ndarray  # [n, 2] sequence and row, from 1, where shown turns to hidden or back

    @classmethod
    def of(cls, position_ids: Any, mask: Any, batch: int) -> Rows:
        ids, shown = _numpy(position_ids, np.int64, batch), _numpy(mask, np.bool_, batch)
        none = np.zeros((0, 2), np.int64)
        if ids is not None and not ids.shape[1]:
            ids = None
        return cls(
            None if ids is None else ids[:, 0].copy(),
            None if ids is None else ids[:, -1].copy(),
            none if ids is None else _places(np.diff(ids, axis=1) != 1),
            ids is not None and bool((ids == np.arange(ids.shape[1])).all()),
            None if shown is None or not shown.shape[1] else shown[:, 0].copy(),
            none if shown is None else _places(shown[:, 1:] != shown[:, :-1]),
        )


def _numpy(x: Any, dtype: Any, batch: int) -> np.ndarray | None:
    if x is None:
        return None
    a = np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
    a = (a != 0) if dtype is np.bool_ else a.astype(dtype)
    return np.broadcast_to(a, (batch, a.shape[1]))


def _places(where: np.ndarray) -> np.ndarray:
    at = np.argwhere(where)
    at[:, 1] += 1
    return at.astype(np.int64)


def sequences_of(
    batch: int, counts: Sequence[int], each: Sequence[Rows], known: Sequences | None
) -> Sequences:
    """Lengths and documents of the whole sequences, from all ranks' rows.

    `known` is what Context.use has set; its documents are added if its lengths are the same. The
    result, or the exception, is the same on all ranks."""
    size, seq = len(counts), sum(counts)
    for rank, n in enumerate(counts):
        lo, hi = shard_rows(seq, size, rank)
        if n != hi - lo:
            raise InvalidArgument(
                f"ulysses: rank {rank} of {size} brings {n} tokens a sequence: of {seq} it holds {hi - lo}: cut the batch by ulysses.shard"
            )
        if n == 0:
            raise InvalidArgument(
                f"ulysses: sequences of {seq} tokens on {size} ranks: a model needs a token on each: use fewer ranks, or longer sequences"
            )
    known = (
        known
        if known is not None and (known.batch, known.seq) == (batch, seq) and known.kv_seq is None
        else None
    )
    begins = np.zeros((batch, seq), bool)
    begins[:, 0] = True
    if known is not None and known.cu_seqlens is not None:
        begins.reshape(-1)[list(known.cu_seqlens[:-1])] = True
    _check_counted(size, each, known, begins, counts)
    shown = np.ones((batch, seq), bool)
    at = 0
    for rank, (n, r) in enumerate(zip(counts, each)):
        begins[r.starts[:, 0], at + r.starts[:, 1]] = True
        before = each[rank - 1].last if rank else None
        if r.first is not None and before is not None:
            begins[:, at] |= before + 1 != r.first
        if r.shown is not None:
            turns = np.zeros((batch, n), np.int64)
            turns[r.turns[:, 0], r.turns[:, 1]] = 1
            shown[:, at : at + n] = r.shown[:, None] ^ (np.cumsum(turns, 1) % 2 == 1)
        at += n
    if not shown.all():
        _check_padding(begins, shown)
        begins[:, 1:] |= shown[:, 1:] != shown[:, :-1]
    starts = np.flatnonzero(begins)
    return Sequences(
        batch, seq, None, (*map(int, starts), batch * seq) if len(starts) > batch else None
    )


def _check_counted(
    size: int,
    each: Sequence[Rows],
    known: Sequences | None,
    begins: np.ndarray,
    counts: Sequence[int],
) -> None:
    """Raises if every rank counts its positions from 0.

    Such positions may mean one document on each rank, or a caller who forgot the rank's offset. Only
    Context.use can tell."""
    borders = np.cumsum(counts)[:-1]
    if size > 1 and all(r.counts_from_zero for r in each) and not begins[:, borders].all():
        raise InvalidArgument(
            f"ulysses: position_ids start at 0 on rank 1 of {size}, the rank's rows at {borders[0]}: give each rank its positions in the whole sequence, "
            "as ulysses.shard brings them, or none; where each rank holds one document, say so by Context.use(Sequences(.., cu_seqlens=..))"
        )


def _check_padding(begins: np.ndarray, shown: np.ndarray) -> None:
    """Raises if a document has hidden tokens between visible ones: attention cannot skip tokens."""
    document = np.cumsum(begins.reshape(-1)) - 1
    flat = shown.reshape(-1)
    opens = flat & np.concatenate([[True], ~flat[:-1] | begins.reshape(-1)[1:]])
    runs = np.bincount(document[opens], minlength=document[-1] + 1)
    if (runs > 1).any():
        token = int(np.flatnonzero(opens & (runs[document] > 1))[1])
        b, t = divmod(token, shown.shape[1])
        raise Unsupported(
            f"ulysses: attention_mask hides tokens in the middle of sequence {b}, before token {t}: padding is possible at the start and at the end: move it "
            "there, or take the hidden tokens out"
        )
