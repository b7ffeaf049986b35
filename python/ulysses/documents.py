"""Finds where the documents of a batch of whole sequences start, from cu_seqlens or positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import InvalidArgument
from .sequences import starts_of


def document_starts(
    batch: Mapping[str, Any], dims: Mapping[str, int | None], b: int, s: int
) -> np.ndarray:
    """Returns [B, S], true where a document of a batch starts. Not collective.

    Args:
        batch: as in `shard`, on the host
        dims: as in `shard`
        b, s: sequences of the batch, and their tokens

    Raises:
        InvalidArgument: cu_seqlens or the shape of position_ids is wrong
    """
    starts = np.zeros((b, s), bool)
    starts[:, 0] = True
    positions = _text_positions(batch, dims, b, s)
    if batch.get("cu_seqlens") is not None:
        cu = np.asarray(starts_of("cu_seqlens", np.asarray(batch["cu_seqlens"]).reshape(-1)))
        if (
            len(cu) < 2
            or cu[0] != 0
            or cu[-1] != b * s
            or (np.diff(cu) <= 0).any()
            or not np.isin(np.arange(b) * s, cu).all()
        ):
            raise InvalidArgument(
                f"ulysses.shard: cu_seqlens {cu.tolist()[:8]} for {b} sequences of {s} tokens; "
                f"give rising numbers from 0 to {b * s} that include the end of each sequence"
            )
        starts.reshape(-1)[cu[:-1]] = True
    elif positions is not None:
        zero = positions == 0
        # Zeros from here to the end of the sequence, after another zero: inside the padding.
        padding = np.logical_and.accumulate(zero[:, ::-1], axis=1)[:, ::-1]
        padding[:, 1:] &= zero[:, :-1]
        padding[:, 0] = False
        starts |= zero & ~padding
    return starts


def _text_positions(
    batch: Mapping[str, Any], dims: Mapping[str, int | None], b: int, s: int
) -> np.ndarray | None:
    """Returns the positions of the text, [B, S]; None if the batch has none."""
    positions = batch.get("position_ids")
    shape = () if positions is None else tuple(positions.shape)
    if shape in ((b, s), (1, s)) and dims.get("position_ids", 1) == 1:
        return np.broadcast_to(np.asarray(positions), (b, s))
    if shape == (4, b, s) and dims.get("position_ids", 2) == 2:
        return np.asarray(positions)[0]
    if positions is not None and shape != (3, b, s) and "position_ids" not in dims:
        raise InvalidArgument(
            f"ulysses.shard: position_ids has shape {shape}; give [{b}, {s}], or [3, {b}, {s}] or "
            f"[4, {b}, {s}] of a multimodal RoPE"
        )
    return None
