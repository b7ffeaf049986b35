"""Batches for sequence parallelism: each rank holds its shard of the tokens of a batch.

If each rank loads a batch of its own, the P batches of P ranks become P micro-batches (`shard`,
`loader`). In micro-batch j, each rank holds its shard of the batch of rank j. A data loader that
gives different data to each rank, such as one with a DistributedSampler over all ranks, needs no
change. If all ranks load the same batch, `local_batch` takes this rank's shard.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._sharded import Sharded, bytes_of, padded
from .agreement import axis
from .communicator import Communicator, communicator, gather_objects
from .context import Context, current
from .documents import document_starts
from .errors import CommError, InvalidArgument
from .layout import Layout
from .sequences import Sequences
from .tensors import compact, dense, is_torch

IGNORED = -100  # the label of a token without loss
# The value of padding, by key; 0 for other keys.
PADDING = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 1}


class Micro(dict):
    """One micro-batch: a dictionary with this rank's shard of the batch that one rank has loaded.

    Attributes:
        sequences: lengths and documents of the whole batch, for Context.use and `attention`
        owner: the rank that loaded the batch
        ranges: this rank's ranges [lo, hi) of tokens of each sequence: two at most, in a zigzag
        lo, hi: the first of them; (0, 0) if this rank has no tokens
    """

    sequences: Sequences
    owner: int
    ranges: tuple[tuple[int, int], ...]
    lo: int
    hi: int


def shift_labels(labels: Any, starts: Any = None) -> Any:
    """Returns the label of the next token for each token.

    Shift labels before sharding, and only once: the label of a rank's last token is the first label
    of the next rank. Not collective.

    Args:
        labels: [B, S], the label of each token
        starts (optional): [B, S], bool, true where a document starts. Default: None, each sequence
            is one document

    Returns:
        [B, S]. It is -100 for the last token of a sequence, and before the first token of a
        document.
    """
    shifted = labels.clone() if is_torch(labels) else np.array(labels)
    shifted[:, :-1] = labels[:, 1:]
    shifted[:, -1:] = IGNORED
    if starts is not None:
        ends = np.zeros(tuple(labels.shape), bool)
        ends[:, :-1] = np.asarray(starts)[:, 1:]
        shifted[_from_numpy(ends, shifted, getattr(shifted, "device", "cpu"))] = IGNORED
    return shifted


def shard(
    batch: Mapping[str, Any],
    comm: Any,
    *,
    dims: Mapping[str, int | None] | None = None,
    pad: bool = False,
) -> Iterator[Micro]:
    """Shards the batches of P ranks along their sequences, and returns P micro-batches.

    Collective: one all-to-all, before the first micro-batch is returned.

    Args:
        batch: tensors by name (PyTorch or NumPy), and other objects. S is the length of input_ids,
            or of the first tensor [B, S, ..]. Tensors whose second axis has the length S are
            sharded along it; everything else is copied to every rank. Ranks may have different B
            and S. Some keys have a meaning:

            * labels [B, S] are replaced by shift_labels (see `shift_labels`)
            * position_ids [B, S] are made if they are missing. If they are given, a 0 starts a
              document, and zeros at the end of a sequence are padding, which is one document.
              They may be [1, S] for all sequences, or [3, B, S] of a multimodal RoPE, where they
              start no document, or [4, B, S] with positions of the text in front
            * cu_seqlens [documents + 1], the start of each document over B*S tokens, then B*S,
              defines the documents instead of position_ids
        comm: an argument of `communicator`. If it is a Context, Context.use is called with the
            lengths and documents of each micro-batch, and shards are in a zigzag if it has one
        dims (dict, optional): the axis to shard by key; None = copy to every rank. For example
            {"pixel_values": 0, "boxes": 2}. Default: the rule above
        pad (bool): pad S to a multiple of P, so that all ranks hold the same number of tokens.
            Padding is 0, and -100 in labels. False: the first S mod P ranks hold one token more.
            Default: False

    Returns:
        An iterator over `Micro`. Tensors are of the library of the batch, on the CPU.

    Raises:
        InvalidArgument: this rank's batch is wrong
        CommError: another rank failed; the message has its error

    Example, on 2 ranks::

        >>> ids = torch.tensor([[1, 10, 10, 10, 2, 2]])
        >>> micro_batch = next(ulysses.shard({"input_ids": ids, "labels": ids}, ctx))
        >>> micro_batch["input_ids"], micro_batch["shift_labels"]
        # rank 0: [[1, 10, 10]], [[10, 10, 10]]; rank 1: [[10, 2, 2]], [[2, 2, -100]]
    """
    c = communicator(comm)
    own, error = None, None
    try:
        own = _prepare(batch, c.size, dims or {}, pad)
    except Exception as e:
        error = e
    prepared = _gather(c, own, error)
    assert prepared is not None
    return _exchange(comm, c, own, prepared)


def local_batch(
    batch: Mapping[str, Any],
    *,
    dims: Mapping[str, int | None] | None = None,
    pad: bool = False,
    context: Context | None = None,
) -> Micro:
    """Returns this rank's shard of a batch that all ranks have loaded.

    Collective: one allgather of 64 bytes a rank, in which the ranks compare digests of their
    batches. The tensors are not sent.

    Args:
        batch, dims, pad: as in `shard`. If S is less than the number of ranks, the batch is padded,
            because a model needs a token on each rank
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        This rank's shard. Tensors are on the device of the batch. `Context.use` has been called
        with the lengths and documents.

    Raises:
        InvalidArgument: the batch is wrong on a rank, or differs between ranks; the message names
            the key
        CommError: the communicator failed
    """
    ctx, operation = current(context), "ulysses.local_batch"

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], _Prepared]:
        _, lead = _checked_tensors(batch, dims or {})
        own = _prepare(batch, ctx.size, dims or {}, pad or lead.shape[1] < ctx.size)
        assert own.arrays is not None
        return {k: _digest(a) for k, a in own.arrays.items()}, (), own  # all that is sharded

    own, _ = ctx.agree(operation, prepare)
    shards = {
        k: dense(ctx.layout.take(a, own.keys[k].dim, ctx.rank))
        for k, a in (own.arrays or {}).items()
    }
    micro_batch = _micro(own, 0, ctx.layout, ctx.rank, shards)
    for k, x in micro_batch.items():
        micro_batch[k] = _moved_like(x, batch)
    ctx.use(own.sequences)
    return micro_batch


def with_shifted_labels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch of whole sequences with shift_labels, as `shard` makes them. Not collective.

    A batch without labels, or with shift_labels, is returned unchanged.
    """
    labels = batch.get("labels")
    if labels is None or batch.get("shift_labels") is not None:
        return dict(batch)
    starts = document_starts(_on_host_all(batch), {}, *labels.shape[:2])
    return {**batch, "shift_labels": shift_labels(labels, starts)}


def to_owners(shards: Sequence[Any], counts: Sequence[int], context: Context) -> Any:
    """Sends the shards of P micro-batches to the ranks that own them. Collective.

    This inverts what `shard` does to a tensor [B, S, ..]: one all-to-all through host memory.

    Args:
        shards: for micro-batch j of P, this rank's [B, rows, ..]; equal dtypes, and equal axes
            after the second
        counts: the tokens of each sequence of micro-batch j
        context: the ranks

    Returns:
        [B, S, ..], the whole sequences of this rank's own micro-batch, on the device of the shards.
    """
    c, layout, own = context.communicator, context.layout, shards[context.rank]
    blocks = [bytes_of(_on_host(x)) for x in shards]
    whole = Sharded.like(own, (own.shape[0], counts[c.rank], *own.shape[2:]), 1)
    extents = [whole.extent(layout, rank) for rank in range(c.size)]
    receive = bytearray(sum(n for _, n in extents))
    c.alltoallv(
        memoryview(bytearray(b"".join(blocks))),
        [len(b) for b in blocks],
        memoryview(receive),
        [n for _, n in extents],
    )
    received, at = [], 0
    for shape, n in extents:
        received.append(whole.array(shape, receive[at : at + n]))
        at += n
    joined = layout.join(received, 1)
    return joined.to(own.device) if is_torch(own) else joined


class loader:
    """Shards the batches of a data loader. Iterates over `Micro`.

    Collective: all ranks iterate. The iteration ends on all ranks when one rank has no further
    batch. If the data loader of a rank raises, all ranks raise. len() is P times the length of
    `batches`.

    Args:
        batches: an iterable over batches, for example a DataLoader
        comm, dims, pad: as in `shard`

    Raises:
        InvalidArgument: this rank's batch is wrong
        CommError: another rank failed; the message has its error

    Example::

        >>> for x in ulysses.loader(batches, ctx):
        ...     logits = model(x["input_ids"], position_ids=x["position_ids"]).logits
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        comm: Any,
        *,
        dims: Mapping[str, int | None] | None = None,
        pad: bool = False,
    ):
        self.batches, self.comm, self.dims, self.pad = batches, comm, dims or {}, pad

    def __len__(self) -> int:
        return len(self.batches) * communicator(self.comm).size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Micro]:
        c = communicator(self.comm)
        source: Iterator[Any] | None = None
        while True:
            own, error = None, None
            try:
                source = iter(self.batches) if source is None else source
                batch = next(source, None)
                own = None if batch is None else _prepare(batch, c.size, self.dims, self.pad)
            except Exception as e:
                error = e
            prepared = _gather(c, own, error)
            if prepared is None:
                return
            yield from _exchange(self.comm, c, own, prepared)


@dataclass
class _Prepared:
    """The batch of one rank, its owner. The owner sends all except `arrays` to the other ranks.

    Attributes:
        keys: the tensors that are sharded, by key
        whole: values that are copied to every rank, by key
        sequences: lengths and documents
        arrays: the tensors of keys; None on the other ranks
    """

    keys: dict[str, Sharded]
    whole: dict[str, Any]
    sequences: Sequences
    arrays: dict[str, Any] | None


def _prepare(
    batch: Mapping[str, Any], size: int, dims: Mapping[str, int | None], pad: bool
) -> _Prepared:
    """Adds positions and shifted labels to a batch, pads it, and finds its documents."""
    batch = _on_host_all(batch)
    tensors, lead = _checked_tensors(batch, dims)
    dims = _checked_dims(tensors, dims)
    b, s = lead.shape[:2]
    starts = document_starts(batch, dims, b, s)
    if "position_ids" not in tensors:
        positions = np.arange(s) - np.maximum.accumulate(np.where(starts, np.arange(s), 0), axis=1)
        tensors["position_ids"] = _from_numpy(positions.astype(np.int64), lead)
    if "labels" in tensors and "shift_labels" not in tensors:
        tensors["shift_labels"] = shift_labels(tensors["labels"], starts)
    tensors.pop("labels", None)
    more = -s % size if pad else 0
    if more:
        starts = np.concatenate([starts, np.eye(1, more, dtype=bool).repeat(b, 0)], 1)
    axes: dict[str, Any] = {k: dims[k] if k in dims else _axis(k, v, s) for k, v in tensors.items()}
    arrays = {
        k: padded(v, dim, -v.shape[dim] % size if pad else 0, PADDING.get(k, 0))
        for k, v in tensors.items()
        if (dim := axes[k]) is not None
    }
    keys = {k: Sharded.like(a, tuple(a.shape), axes[k]) for k, a in arrays.items()}
    whole = {
        k: tensors.get(k, v)
        for k, v in batch.items()
        if k not in arrays and k not in ("labels", "cu_seqlens")
    }
    whole.update({k: v for k, v in tensors.items() if axes[k] is None})
    n = s + more
    cu = [int(i) for i in np.flatnonzero(starts)] + [b * n]
    return _Prepared(
        keys, whole, Sequences(b, n, None, tuple(cu) if len(cu) > b + 1 else None), arrays
    )


def _checked_tensors(
    batch: Mapping[str, Any], dims: Mapping[str, int | None]
) -> tuple[dict[str, Any], Any]:
    """Returns the tensors of a batch by key, without cu_seqlens, and the one that has B and S.

    Raises InvalidArgument if B, S, dims or the shape of labels is wrong.
    """
    tensors = {
        k: v
        for k, v in batch.items()
        if (is_torch(v) or isinstance(v, np.ndarray)) and k != "cu_seqlens"
    }
    lead = tensors.get("input_ids", next((v for v in tensors.values() if v.ndim >= 2), None))
    if lead is None or lead.ndim < 2:
        raise InvalidArgument(
            f"ulysses.shard: the batch has the keys {sorted(batch)}; give a tensor [B, S, ..]"
        )
    b, s = lead.shape[:2]
    if b < 1 or s < 1:
        raise InvalidArgument(
            f"ulysses.shard: a batch of {b} sequences of {s} tokens; give 1 or more of each"
        )
    missing = sorted(set(dims) - set(batch))
    if missing:
        raise InvalidArgument(
            f"ulysses.shard: dims has the keys {missing}, which are not in the batch; give some of "
            f"{sorted(batch)}"
        )
    for k in ("labels", "shift_labels"):
        if k in tensors and tuple(tensors[k].shape) != (b, s):
            raise InvalidArgument(
                f"ulysses.shard: {k} has shape {tuple(tensors[k].shape)}; give [{b}, {s}], a label "
                "for each token"
            )
    return tensors, lead


def _checked_dims(
    tensors: Mapping[str, Any], dims: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Returns dims with axes that are counted from 0.

    Raises InvalidArgument for an axis that a tensor does not have, and for a value that is no
    tensor, which cannot be sharded.
    """
    checked: dict[str, int | None] = {}
    for k, dim in dims.items():
        if dim is not None and k not in tensors:
            raise InvalidArgument(
                f"ulysses.shard: dims has axis {dim} of {k!r}, which is not sharded; give tensors "
                "[B, S, ..], or None to copy a value to every rank"
            )
        name = f"the axis of {k!r} in dims"
        checked[k] = None if dim is None else axis("ulysses.shard", name, dim, tensors[k].ndim)
    return checked


def _axis(key: str, x: Any, s: int) -> int | None:
    """Returns the axis of x with S tokens; None if x is copied to every rank."""
    if key == "position_ids":
        return x.ndim - 1
    return 1 if x.ndim >= 2 and x.shape[1] == s else None


def _gather(
    c: Communicator, own: _Prepared | None, error: BaseException | None
) -> list[_Prepared] | None:
    """Returns the batches of all ranks without arrays; None if a rank has no further batch.

    Collective. If there is an error on one rank, every rank raises.
    """
    pickled = None
    if own is not None:
        try:  # the other ranks would wait for a rank that cannot send its batch
            whole = {k: compact(v) for k, v in own.whole.items()}
            pickled = pickle.dumps(_Prepared(own.keys, whole, own.sequences, None))
        except Exception as e:
            error = InvalidArgument(
                f"ulysses.shard: the values {sorted(own.whole)} of the batch, which are copied to "
                f"every rank, cannot be pickled: {type(e).__name__}: {e}"
            )
            error.__cause__ = e
    each = gather_objects(c, pickled if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, m in enumerate(each):
        if isinstance(m, str):
            raise CommError(f"ulysses.shard: rank {rank} of {c.size} failed: {m}")
    return None if any(m is None for m in each) else [pickle.loads(m) for m in each]


def _exchange(
    comm: Any, c: Communicator, own: _Prepared | None, each: list[_Prepared]
) -> Iterator[Micro]:
    """Sends each rank its shards by one all-to-all, and returns the micro-batches.

    Collective. This is no generator: the all-to-all runs now, not when the first micro-batch is
    taken.
    """
    assert own is not None and own.arrays is not None
    layout = _layout(comm, c)
    blocks = [
        b"".join(bytes_of(layout.take(a, own.keys[k].dim, rank)) for k, a in own.arrays.items())
        for rank in range(c.size)
    ]
    send = bytearray(b"".join(blocks))
    receive_bytes = [sum(key.extent(layout, c.rank)[1] for key in p.keys.values()) for p in each]
    receive = bytearray(sum(receive_bytes))
    c.alltoallv(memoryview(send), [len(b) for b in blocks], memoryview(receive), receive_bytes)
    return _micro_batches(comm, c, each, receive)


def _layout(comm: Any, c: Communicator) -> Layout:
    """Returns the order of tokens on the ranks."""
    return comm.layout if isinstance(comm, Context) else Layout(c.size)


def _micro_batches(
    comm: Any, c: Communicator, each: list[_Prepared], receive: bytearray
) -> Iterator[Micro]:
    at, layout = 0, _layout(comm, c)
    for owner, p in enumerate(each):
        shards = {}
        for name, key in p.keys.items():
            shape, n = key.extent(layout, c.rank)
            shards[name] = key.array(shape, receive[at : at + n])
            at += n
        micro_batch = _micro(p, owner, layout, c.rank, shards)
        if isinstance(comm, Context):
            comm.use(p.sequences)
        yield micro_batch


def _micro(p: _Prepared, owner: int, layout: Layout, rank: int, shards: Mapping[str, Any]) -> Micro:
    """Returns a micro-batch of the shards of a rank."""
    micro_batch = Micro({**p.whole, **shards})
    micro_batch.sequences, micro_batch.owner = p.sequences, owner
    micro_batch.ranges = layout.ranges(p.sequences.seq, rank)
    micro_batch.lo, micro_batch.hi = micro_batch.ranges[0] if micro_batch.ranges else (0, 0)
    return micro_batch


def _on_host(a: Any) -> Any:
    return a.detach().cpu() if is_torch(a) else a


def _on_host_all(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _on_host(v) for k, v in batch.items()}


def _moved_like(a: Any, batch: Mapping[str, Any]) -> Any:
    """Returns a on the device of the tensors of a batch."""
    devices = [v.device for v in batch.values() if is_torch(v)]
    return a.to(devices[0]) if devices and is_torch(a) else a


def _digest(a: Any) -> str:
    """Returns a text that is equal for arrays of equal dtype, shape and elements."""
    return f"{a.dtype} {tuple(a.shape)} {hashlib.blake2b(bytes_of(a), digest_size=8).hexdigest()}"


def _from_numpy(a: np.ndarray, like: Any, device: Any = "cpu") -> Any:
    """Returns a as an array of the library of `like`."""
    if is_torch(like):
        import torch

        return torch.from_numpy(a).to(device)
    return a
