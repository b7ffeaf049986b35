"""Plans and batches of a context, and the checks of a call's lengths and documents.

A plan is what is fixed for a kind of layer: heads, sizes, type and mask. A batch is what is fixed
for the lengths and documents of sequences. A call needs one of each. The context makes and keeps
both.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _library, _struct
from .agreement import whole
from .errors import InvalidArgument
from .layout import Layout
from .sequences import Sequences, starts_of


class _Owned:
    """A plan or a batch of a Context: one handle of the library.

    The handle is destroyed when the object is deleted or the context is closed. Destroying is not
    collective.
    """

    _destroy = ""  # the library's function

    def __init__(self, context: Any):
        self.context, self._handle = context, ctypes.c_void_p()
        context._owned.add(self)

    @property
    def handle(self) -> ctypes.c_void_p:
        """The library's handle. Raises InvalidArgument if the context is closed."""
        if not self._handle:
            kind = type(self).__name__
            raise InvalidArgument(
                f"ulysses.{kind}: the context of this {kind} is closed; make another context"
            )
        return self._handle

    def close(self) -> None:
        """Destroys the handle. Not collective."""
        if self._handle and _library.usable():
            getattr(_library.library(), self._destroy)(self._handle)
        self._handle = ctypes.c_void_p()

    def __del__(self) -> None:
        try:
            if self._handle:
                self.context._lock.drop(self._destroy, self._handle)
        except Exception:  # the interpreter is shutting down
            pass


@dataclass(frozen=True)
class AttentionOptions:
    """The options of a Plan. Equal options give the same plan.

    Attributes:
        heads, kv_heads: query heads and key heads; kv_heads 0 = heads
        head_dim, v_dim: features of a key and of a value; v_dim 0 = head_dim
        dtype: a type number of _struct
        causal, window, scale, deterministic: as in `attention`
        cross: queries and keys have different lengths
        softcap, dropout: as in `attention`
        sinks, alibi: calls have sinks, slopes
        block: queries and keys of a block of the mask of each call; None = calls have no mask
        gather_keys: all keys move between the groups of a ring at the start
        overlap: layers send each of q, k and v while the next one is projected
    """

    heads: int
    head_dim: int
    kv_heads: int = 0
    v_dim: int = 0
    dtype: int = _struct.F32
    causal: bool = False
    window: tuple[int, int] | None = None
    scale: float | None = None
    cross: bool = False
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: bool = False
    alibi: bool = False
    block: tuple[int, int] | None = None
    deterministic: bool = False
    gather_keys: bool = False
    overlap: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "v_dim", self.v_dim or self.head_dim)


@dataclass(frozen=True)
class DeltaOptions:
    """The options of a DeltaPlan. Equal options give the same plan.

    Attributes:
        qk_heads, v_heads: key heads and value heads
        qk_dim, v_dim: features of a key and of a value
        dtype: a type number of _struct
        strategy, scale: as in `chunk_gated_delta_rule`
        tokens: tokens of a batch over all ranks; "auto" compares the strategies for this number
        l2norm: normalize q and k
        chunk: tokens of a chunk at most; 0 = the device chooses
        states: calls may have initial states and return final states
        conv_width, gated_norm: of `gated_delta_layer`; conv_width 0 = calls of the rule only
    """

    qk_heads: int
    v_heads: int
    qk_dim: int
    v_dim: int
    dtype: int = _struct.F32
    strategy: str = "auto"
    tokens: int = 0
    scale: float | None = None
    l2norm: bool = False
    chunk: int = 0
    states: bool = False
    conv_width: int = 0
    gated_norm: bool = False


class _AnyPlan(_Owned):
    _destroy = "ulysses_plan_destroy"
    key: Any  # the options that the plan was made from

    def sizes(self, batch: Batch | None = None) -> _struct.Sizes:
        """Returns the memory that a call needs, and the heads of this rank. Not collective.

        Args:
            batch: the lengths of the call. Default: None, one sequence of the `tokens` of a
                DeltaPlan. A Plan needs a batch

        Returns:
            A struct with `saved` and `workspace` in bytes, the query heads [head_lo, head_hi) and
            the key heads [shared_lo, shared_hi).
        """
        sizes = _struct.Sizes()
        self.context._call(
            "ulysses_plan_sizes", self.handle, batch.handle if batch else None, ctypes.byref(sizes)
        )
        return sizes

    def describe(self) -> dict:
        """Returns a dictionary with the strategy, the head split, the kernels and the bytes sent,
        and the reasons for these choices. Not collective."""
        return json.loads(_library.library().ulysses_plan_json(self.handle) or b"{}")


class Plan(_AnyPlan):
    """The plan for one kind of attention layer. Made by Context.plan, which is collective.

    Attributes:
        heads, kv_heads: query heads and key heads, over all ranks
        head_dim, v_dim: features of a key and of a value
        dtype: a type number of ulysses._struct
        cross: queries and keys have different lengths
    """

    def __init__(self, context: Any, options: AttentionOptions):
        super().__init__(context)
        self.key = o = options
        self.heads, self.kv_heads, self.head_dim, self.v_dim = (
            o.heads,
            o.kv_heads,
            o.head_dim,
            o.v_dim,
        )
        self.dtype, self.cross = o.dtype, o.cross
        left, right = o.window or (0, 0)
        # The library refuses (0, 0), which may be fields that were not set. With a causal mask,
        # (0, -1) is the same window: the query's own key.
        own_key = o.window == (0, 0)
        desc = _struct.AttentionDesc(
            dtype=o.dtype,
            flags=_struct.CAUSAL * (bool(o.causal) or own_key)
            | _struct.WINDOW * (o.window is not None)
            | _struct.CROSS * bool(o.cross)
            | _struct.SINKS * bool(o.sinks)
            | _struct.ALIBI * bool(o.alibi)
            | _struct.BLOCK_MASK * (o.block is not None)
            | _struct.DETERMINISTIC * bool(o.deterministic)
            | _struct.GATHER_KEYS * bool(o.gather_keys)
            | _struct.OVERLAP * bool(o.overlap),
            scale=_scale(o.scale, "head_dim"),
            softcap=o.softcap,
            dropout=o.dropout,
            block_q=o.block[0] if o.block else 0,
            block_k=o.block[1] if o.block else 0,
            heads=o.heads,
            kv_heads=o.kv_heads,
            head_dim=o.head_dim,
            v_dim=o.v_dim,
            window_left=left,
            window_right=-1 if own_key else right,
        )
        context._call(
            "ulysses_attention_plan", context.handle, ctypes.byref(desc), ctypes.byref(self._handle)
        )


STRATEGIES = {"auto": _struct.GDN_AUTO, "heads": _struct.GDN_HEADS, "state": _struct.GDN_STATE}


class DeltaPlan(_AnyPlan):
    """The plan for one kind of gated delta rule layer. Made by Context.delta_plan, which is
    collective.

    Attributes:
        qk_heads, v_heads: key heads and value heads, over all ranks
        qk_dim, v_dim: features of a key and of a value
        dtype: a type number of ulysses._struct
    """

    def __init__(self, context: Any, options: DeltaOptions):
        super().__init__(context)
        self.key = o = options
        self.qk_heads, self.v_heads, self.qk_dim, self.v_dim = (
            o.qk_heads,
            o.v_heads,
            o.qk_dim,
            o.v_dim,
        )
        self.dtype = o.dtype
        if o.strategy not in STRATEGIES:
            raise InvalidArgument(
                f"ulysses.DeltaPlan: strategy {o.strategy!r}; give one of {', '.join(STRATEGIES)}"
            )
        desc = _struct.GDNDesc(
            dtype=o.dtype,
            flags=_struct.QK_L2NORM * bool(o.l2norm)
            | _struct.STATES * bool(o.states)
            | _struct.GATED_NORM * bool(o.gated_norm),
            strategy=STRATEGIES[o.strategy],
            chunk=o.chunk,
            scale=_scale(o.scale, "qk_dim"),
            qk_heads=o.qk_heads,
            v_heads=o.v_heads,
            qk_dim=o.qk_dim,
            v_dim=o.v_dim,
            max_tokens=o.tokens,
            conv_width=o.conv_width,
        )
        context._call(
            "ulysses_gdn_plan", context.handle, ctypes.byref(desc), ctypes.byref(self._handle)
        )

    def layer_sizes(self, batch: Batch) -> _struct.Sizes:
        """As `sizes`, for the calls of a plan with conv_width in `gated_delta_layer`."""
        sizes = _struct.Sizes()
        self.context._call(
            "ulysses_gdn_layer_sizes", self.handle, batch.handle, ctypes.byref(sizes)
        )
        return sizes


def _scale(scale: float | None, dim: str) -> float:
    """Returns the scale as the library takes it, where 0 means the default."""
    if scale is not None and ctypes.c_float(scale).value == 0:
        raise InvalidArgument(
            f"ulysses: scale {scale} is 0 in float32; give another number, or None for 1/sqrt({dim})"
        )
    return scale or 0.0


class Batch(_Owned):
    """Lengths and documents on the ranks of a context. Made by Context.batch, which is collective.

    Attributes:
        sequences: the lengths and documents
        rows: tokens of each sequence on this rank
        kv_rows: keys of each sequence on this rank
        ranges: this rank's ranges [lo, hi) of tokens of each sequence: two at most, in a zigzag
        lo, hi: the first of them; (0, 0) if this rank has no tokens
    """

    _destroy = "ulysses_batch_destroy"

    def __init__(self, context: Any, sequences: Sequences):
        super().__init__(context)
        s, self.sequences = sequences, sequences
        keys = s.seq if s.kv_seq is None else s.kv_seq
        for name, n in (("batch", s.batch), ("seq", s.seq), ("kv_seq", keys)):
            whole("ulysses.Batch", name, n, 0)
        if min(s.seq, keys) < 1:  # 0 means to the library: add up the rows of the ranks
            raise InvalidArgument(
                f"ulysses.Batch: {s.batch} sequences of {s.seq} tokens and {keys} keys; give 1 or "
                "more of each"
            )
        cu, kv_cu = (
            _int64s(_cu_seqlens(name, getattr(s, name), s.batch))
            for name in ("cu_seqlens", "kv_cu_seqlens")
        )
        desc = _struct.BatchDesc(
            flags=_struct.ZIGZAG * context.layout.zigzag,
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
        i = self.info
        ranges = ((i.lo[k], i.hi[k]) for k in range(i.ranges))
        self.ranges = tuple((lo, hi) for lo, hi in ranges if lo < hi)
        self.rows, self.lo, self.hi = i.rows, i.lo[0], i.hi[0]
        self.kv_rows = i.rows if s.kv_seq is None else i.kv_rows

    def positions(self) -> list[int]:
        """Returns the position of each token of this rank in its document.

        The list has batch * rows elements, for rotary embeddings. Not collective.
        """
        out = (ctypes.c_int64 * (self.sequences.batch * self.rows))()
        self.context._call("ulysses_batch_positions", self.handle, out)
        return list(out)


def _cu_seqlens(name: str, given: Sequence[int] | None, batch: int) -> tuple[int, ...] | None:
    """Returns document starts as a tuple.

    Raises InvalidArgument unless they are whole numbers, and for a length that is not a multiple of
    batch.
    """
    if given is None:
        return None
    cu = starts_of(name, given)
    if len(cu) < 2 or cu[-1] % max(1, batch) or not 0 <= min(cu) <= max(cu) <= cu[-1] < 1 << 63:
        raise InvalidArgument(
            f"ulysses: {name} {given!r} of {batch} sequences; give whole numbers from 0 to the "
            "tokens of all sequences, which have equal lengths"
        )
    return cu


@dataclass(frozen=True)
class Lengths:
    """This rank's rows, and the lengths and documents that a call gives.

    A length that the call does not give is the sum of the ranks' rows.
    """

    batch: int
    rows: int
    kv_rows: int
    seq: int | None
    kv_seq: int | None
    cu_seqlens: tuple[int, ...] | None
    kv_cu_seqlens: tuple[int, ...] | None
    default: Sequences | None  # set by Context.use, if the call gives no lengths
    layout: Layout

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
        *,
        ignore_cross: bool = False,
    ) -> Lengths:
        """Checks the lengths of a call without communicating.

        kv_rows None = rows. ignore_cross: if Context.use has set lengths for cross-attention, they
        do not apply to this call.
        """
        default = context.sequences
        given = any(x is not None for x in (seq, kv_seq, cu_seqlens, kv_cu_seqlens))
        if given or default is None or default.batch != batch:
            default = None
        elif ignore_cross and default.kv_seq is not None:
            default = None
        return cls(
            batch,
            rows,
            rows if kv_rows is None else kv_rows,
            None if seq is None else whole("ulysses", "seq", seq, 1),
            None if kv_seq is None else whole("ulysses", "kv_seq", kv_seq, 1),
            _cu_seqlens("cu_seqlens", cu_seqlens, batch),
            _cu_seqlens("kv_cu_seqlens", kv_cu_seqlens, batch),
            default,
            context.layout,
        )

    def same(self) -> dict[str, Any]:
        """Returns the arguments, by name, that must be equal on all ranks."""
        return {
            "batch": self.batch,
            "seq": self.seq,
            "kv_seq": self.kv_seq,
            "cu_seqlens": self.cu_seqlens,
            "kv_cu_seqlens": self.kv_cu_seqlens,
            "Context.use": self.default,
        }

    def counts(self) -> tuple[int, int]:
        """Returns the arguments that may differ between ranks."""
        return self.rows, self.kv_rows

    def sequences(self, operation: str, counts: Sequence[tuple[int, ...]]) -> Sequences:
        """Returns the lengths of the whole sequences, from the counts of all ranks.

        The result is the same on all ranks. So is the InvalidArgument that it raises if a rank has
        other rows than its shard.
        """
        rows, kv_rows = [c[0] for c in counts], [c[1] for c in counts]
        found = self.default
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
        fix = "shard sequences with ulysses.local_tokens, and give another total length as seq="
        self.layout.check(operation, "rows", rows, found.seq, fix)
        keys = found.seq if found.kv_seq is None else found.kv_seq
        self.layout.check(operation, "rows of keys", kv_rows, keys, fix)
        return found


def _int64s(values: Sequence[int] | None) -> Any:
    return (
        None
        if values is None
        else ctypes.cast((ctypes.c_int64 * len(values))(*values), ctypes.POINTER(ctypes.c_int64))
    )
