"""Plans, a kind of layer settled for the ranks of a context, and batches, lengths and documents settled for them."""

from __future__ import annotations

import ctypes
import hashlib
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _library, _struct
from .errors import InvalidArgument


@dataclass(frozen=True)
class Sequences:
    """Lengths and documents of a batch, the same on all ranks.

    batch       sequences
    seq         tokens of each, over all ranks
    kv_seq      keys of each, for cross-attention; None = seq
    cu_seqlens  document starts over batch*seq tokens, then batch*seq; None = one document a sequence
    kv_cu_seqlens  the same over the keys
    """

    batch: int
    seq: int
    kv_seq: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    kv_cu_seqlens: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        """Lengths and documents in a line: of many documents the first 8, the number and a digest."""

        def short(cu: tuple[int, ...] | None) -> str:
            if cu is None or len(cu) <= 9:
                return repr(cu)
            return f"({', '.join(map(str, cu[:8]))}, ... {len(cu)} in all, {hashlib.blake2b(repr(cu).encode(), digest_size=8).hexdigest()})"

        if "_text" not in self.__dict__:
            text = (
                f"{self.batch} sequences of {self.seq} tokens"
                + (f" and {self.kv_seq} keys" if self.kv_seq else "")
                + (f", cu_seqlens {short(self.cu_seqlens)}" if self.cu_seqlens else "")
                + (f", kv_cu_seqlens {short(self.kv_cu_seqlens)}" if self.kv_cu_seqlens else "")
            )
            object.__setattr__(self, "_text", text)
        return self.__dict__["_text"]


class _Made:
    """A plan or a batch on a Context: destroyed, which is local, when nobody holds it."""

    _destroy = ""

    def __init__(self, context: Any):
        self.context, self._handle = context, ctypes.c_void_p()
        context._made.add(self)

    @property
    def handle(self) -> ctypes.c_void_p:
        if not self._handle:
            raise InvalidArgument(
                f"ulysses: the {type(self).__name__.lower()} is closed with its context: make another"
            )
        return self._handle

    def close(self) -> None:
        if self._handle and _library.usable():
            getattr(_library.library(), self._destroy)(self._handle)
        self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        try:
            with self.context._lock:
                self.close()
        except Exception:  # the interpreter is going
            pass


class _Planned(_Made):
    _destroy = "ulysses_plan_destroy"
    key: tuple  # the options that it was made from

    def sizes(self, batch: Batch | None = None) -> _struct.Sizes:
        """Bytes of saved and workspace memory, and the heads [head_lo, head_hi) and key heads [shared_lo, shared_hi) of this rank."""
        sizes = _struct.Sizes()
        self.context._call(
            "ulysses_plan_sizes", self.handle, batch.handle if batch else None, ctypes.byref(sizes)
        )
        return sizes

    def describe(self) -> dict:
        """How the plan works: strategy, head split, kernels, bytes sent, and why."""
        return json.loads(_library.library().ulysses_plan_json(self.handle) or b"{}")


class Plan(_Planned):
    """A kind of attention layer on the ranks of a context. Made by Context.plan."""

    def __init__(
        self,
        context: Any,
        heads: int,
        head_dim: int,
        kv_heads: int,
        v_dim: int,
        dtype: int,
        causal: bool,
        window: tuple[int, int] | None,
        scale: float | None,
        cross: bool,
        softcap: float,
        deterministic: bool,
    ):
        super().__init__(context)
        self.heads, self.head_dim, self.kv_heads, self.v_dim, self.dtype, self.cross = (
            heads,
            head_dim,
            kv_heads,
            v_dim,
            dtype,
            cross,
        )
        flags = (
            _struct.CAUSAL * bool(causal)
            | _struct.WINDOW * (window is not None)
            | _struct.CROSS * bool(cross)
            | _struct.DETERMINISTIC * bool(deterministic)
        )
        left, right = window if window is not None else (0, 0)
        if scale is not None and scale == 0:
            raise InvalidArgument(
                "ulysses: scale 0: give another number, or None for 1/sqrt(head_dim)"
            )
        desc = _struct.AttentionDesc(
            dtype=dtype,
            flags=flags,
            scale=scale or 0.0,
            softcap=softcap,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_dim=v_dim,
            window_left=left,
            window_right=right,
        )
        context._call(
            "ulysses_attention_plan", context.handle, ctypes.byref(desc), ctypes.byref(self._handle)
        )


STRATEGIES = {"auto": _struct.GDN_AUTO, "heads": _struct.GDN_HEADS, "state": _struct.GDN_STATE}


class DeltaPlan(_Planned):
    """A kind of layer of the gated delta rule on the ranks of a context. Made by Context.delta_plan."""

    def __init__(
        self,
        context: Any,
        qk_heads: int,
        v_heads: int,
        qk_dim: int,
        v_dim: int,
        dtype: int,
        strategy: str,
        tokens: int,
        scale: float | None,
        l2norm: bool,
        chunk: int,
        states: bool,
    ):
        super().__init__(context)
        self.key: tuple = ()  # the arguments, set by the context
        self.qk_heads, self.v_heads, self.qk_dim, self.v_dim, self.dtype = (
            qk_heads,
            v_heads,
            qk_dim,
            v_dim,
            dtype,
        )
        if strategy not in STRATEGIES:
            raise InvalidArgument(
                f"ulysses: strategy {strategy!r}: give one of {', '.join(STRATEGIES)}"
            )
        if scale is not None and scale == 0:
            raise InvalidArgument(
                "ulysses: scale 0: give another number, or None for 1/sqrt(features of a key)"
            )
        desc = _struct.GDNDesc(
            dtype=dtype,
            flags=_struct.QK_L2NORM * bool(l2norm) | _struct.STATES * bool(states),
            strategy=STRATEGIES[strategy],
            chunk=chunk,
            scale=scale or 0.0,
            qk_heads=qk_heads,
            v_heads=v_heads,
            qk_dim=qk_dim,
            v_dim=v_dim,
            max_tokens=tokens,
        )
        context._call(
            "ulysses_gdn_plan", context.handle, ctypes.byref(desc), ctypes.byref(self._handle)
        )


class Batch(_Made):
    """Lengths and documents settled for the ranks of a context. Made by Context.batch."""

    _destroy = "ulysses_batch_destroy"

    def __init__(self, context: Any, sequences: Sequences):
        super().__init__(context)
        s, self.sequences = sequences, sequences
        cu, kv_cu = _int64s(s.cu_seqlens), _int64s(s.kv_cu_seqlens)
        if s.seq < 1:  # 0 would mean "add up the ranks' rows" to the library
            raise InvalidArgument(
                f"ulysses: a batch of {s.batch} sequences of {s.seq} tokens: each must be 1 or more"
            )
        desc = _struct.BatchDesc(
            batch=s.batch,
            seq=s.seq,
            kv_seq=s.kv_seq or 0,
            docs=len(s.cu_seqlens) - 1 if s.cu_seqlens else 0,
            cu_seqlens=cu,
            kv_cu_seqlens=kv_cu,
        )
        context._call(
            "ulysses_batch_create", context.handle, ctypes.byref(desc), ctypes.byref(self._handle)
        )
        self.info = _struct.BatchInfo()
        context._call("ulysses_batch_query", self._handle, ctypes.byref(self.info))
        self.rows, self.lo, self.hi = self.info.rows, self.info.lo[0], self.info.hi[0]
        self.kv_rows = self.info.kv_rows if s.kv_seq else self.info.rows

    def positions(self) -> list[int]:
        """[batch * rows] positions of this rank's tokens inside their documents, for rotary embeddings."""
        out = (ctypes.c_int64 * (self.sequences.batch * self.rows))()
        self.context._call("ulysses_batch_positions", self.handle, out)
        return list(out)


def documents(name: str, starts: Sequence[int] | None, batch: int) -> tuple[int, ...] | None:
    """Document starts over `batch` sequences, then the end of all, as whole numbers: what has a fraction would be another document's start."""
    if starts is None:
        return None
    try:
        cu = tuple(operator.index(x) for x in starts)
    except TypeError:
        cu = ()
    if len(cu) < 2 or cu[-1] % max(1, batch):
        raise InvalidArgument(
            f"ulysses: {name} {starts!r} of {batch} sequences: give whole numbers, from 0 to the tokens of all sequences, which are equally long"
        )
    return cu


@dataclass(frozen=True)
class Lengths:
    """This rank's rows, and what a call says about the whole sequences.

    A length that the call leaves out is the sum of the ranks' rows."""

    batch: int
    rows: int
    kv_rows: int
    seq: int | None
    kv_seq: int | None
    cu_seqlens: tuple[int, ...] | None
    kv_cu_seqlens: tuple[int, ...] | None
    given: Sequences | None  # of Context.use, where the call names no lengths

    @classmethod
    def of(
        cls,
        context: Any,
        batch: int,
        rows: int,
        kv_rows: int | None = None,
        seq: int | None = None,
        kv_seq: int | None = None,
        cu_seqlens: Sequence[int] | None = None,
        kv_cu_seqlens: Sequence[int] | None = None,
    ) -> Lengths:
        given = context.sequences
        if (
            seq is not None
            or cu_seqlens is not None
            or kv_seq is not None
            or kv_cu_seqlens is not None
            or given is None
            or given.batch != batch
        ):
            given = None
        return cls(
            batch,
            rows,
            rows if kv_rows is None else kv_rows,
            seq,
            kv_seq,
            documents("cu_seqlens", cu_seqlens, batch),
            documents("kv_cu_seqlens", kv_cu_seqlens, batch),
            given,
        )

    def same(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {
            "batch": self.batch,
            "seq": self.seq,
            "kv_seq": self.kv_seq,
            "cu_seqlens": self.cu_seqlens,
            "kv_cu_seqlens": self.kv_cu_seqlens,
            "Context.use": self.given,
        }

    def counts(self) -> tuple[int, int]:
        return self.rows, self.kv_rows

    def settle(self, counts: Sequence[tuple[int, ...]]) -> Sequences:
        """The lengths of the whole sequences, from all ranks' counts.

        The result, or the exception for rows that are sharded otherwise, is the same on all ranks."""
        rows, kv_rows = [c[0] for c in counts], [c[1] for c in counts]
        found = self.given
        if found is None:
            ends, kv_ends = (
                cu[-1] // max(1, self.batch) if cu else None
                for cu in (self.cu_seqlens, self.kv_cu_seqlens)
            )
            seq = self.seq if self.seq is not None else ends if ends is not None else sum(rows)
            kv_seq = self.kv_seq if self.kv_seq is not None else kv_ends
            if kv_seq is None and kv_rows != rows:
                kv_seq = sum(kv_rows)
            found = Sequences(self.batch, seq, kv_seq, self.cu_seqlens, self.kv_cu_seqlens)
        size = len(counts)
        for what, total, each in (
            ("rows", found.seq, rows),
            ("rows of keys", found.kv_seq or found.seq, kv_rows),
        ):
            for rank, n in enumerate(each):
                lo, hi = shard_rows(total, size, rank)
                if n != hi - lo:
                    raise InvalidArgument(
                        f"ulysses: rank {rank} of {size} brings {n} {what}: of {total} it holds {hi - lo}: the first {total} mod {size} ranks hold "
                        "one more than the others; cut by ulysses.shard_rows, and name another length by seq="
                    )
        return found


def _int64s(values: Sequence[int] | None) -> Any:
    return (
        None
        if values is None
        else ctypes.cast((ctypes.c_int64 * len(values))(*values), ctypes.POINTER(ctypes.c_int64))
    )


def shard_rows(n: int, size: int, rank: int) -> tuple[int, int]:
    """The rows [lo, hi) of n that a rank holds: the first n mod size ranks hold one more."""
    rows, more = divmod(n, size)
    lo = rank * rows + min(rank, more)
    return lo, lo + rows + (rank < more)
