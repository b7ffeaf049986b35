"""Lengths and documents of the sequences of a batch."""

from __future__ import annotations

import hashlib
import operator
import reprlib
from dataclasses import dataclass
from typing import Any

from .errors import InvalidArgument


@dataclass(frozen=True)
class Sequences:
    """Lengths and documents of the sequences of a batch, equal on all ranks.

    Attributes:
        batch: number of sequences
        seq: tokens of each sequence, over all ranks
        kv_seq: keys of each sequence, for cross-attention; None = seq
        cu_seqlens: the start of each document over batch*seq tokens, then batch*seq, in a list,
            array or tensor; None = each sequence is one document
        kv_cu_seqlens: the same for the keys

    Raises:
        InvalidArgument: starts of documents are not a list of whole numbers
    """

    batch: int
    seq: int
    kv_seq: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    kv_cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("cu_seqlens", "kv_cu_seqlens"):  # as tuples, because contexts compare hashes
            if (cu := getattr(self, name)) is not None:
                object.__setattr__(self, name, starts_of(name, cu))

    def __repr__(self) -> str:
        """Describes lengths and documents in one line.

        Of many documents it has the first 8 starts, their number and a digest, so that ranks can
        compare the texts.
        """

        def short(cu: tuple[int, ...] | None) -> str:
            if cu is None or len(cu) <= 9:
                return repr(cu)
            digest = hashlib.blake2b(repr(cu).encode(), digest_size=8).hexdigest()
            return f"({', '.join(map(str, cu[:8]))}, ... {len(cu)} in all, {digest})"

        if "_text" not in self.__dict__:
            text = (
                f"{self.batch} sequences of {self.seq} tokens"
                + (f" and {self.kv_seq} keys" if self.kv_seq is not None else "")
                + (f", cu_seqlens {short(self.cu_seqlens)}" if self.cu_seqlens else "")
                + (f", kv_cu_seqlens {short(self.kv_cu_seqlens)}" if self.kv_cu_seqlens else "")
            )
            object.__setattr__(self, "_text", text)
        return self.__dict__["_text"]


def starts_of(name: str, cu: Any) -> tuple[int, ...]:
    """Returns the starts of documents as numbers of Python.

    Arrays of NumPy and tensors of PyTorch have tolist. Raises InvalidArgument unless cu has whole
    numbers along one axis: a fraction would be rounded to the start of another document.
    """
    try:
        return tuple(map(operator.index, cu.tolist() if hasattr(cu, "tolist") else cu))
    except TypeError:
        raise InvalidArgument(
            f"ulysses: {name} {reprlib.repr(cu)}; give whole numbers along one axis"
        ) from None
