"""Batches for sequence parallelism: each rank brings its own, and all of them are trained on together, one after the other.

With P ranks, P micro-steps follow: in step j all ranks hold their rows of rank j's batch. A loader that gives each rank other data
needs no change (a DistributedSampler over all ranks is right).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .communicator import Communicator, communicator, gather_objects
from .context import Context
from .errors import CommError, InvalidArgument
from .plan import Sequences, shard_rows
from .tensors import is_torch

IGNORED = -100  # label of a token without loss
PAD = {"labels": IGNORED, "shift_labels": IGNORED, "attention_mask": 1}  # of other keys: 0


class Micro(dict):
    """One micro-step: this rank's rows [lo, hi) of a batch.

    sequences  lengths and documents of the whole batch, for Context.use and attention
    owner      the rank that brought it
    """

    sequences: Sequences
    owner: int
    lo: int
    hi: int


def shift_labels(labels: Any, starts: Any = None) -> Any:
    """[B, S] labels of each token to the label of the next one, -100 at a row's end and where the next token starts a document.

    starts [B, S] true where a document starts; None = at row starts alone. Shift once, before cutting: a rank's last label is its
    neighbour's first.
    """
    shifted = labels.clone() if is_torch(labels) else np.array(labels)
    shifted[:, :-1] = labels[:, 1:]
    shifted[:, -1:] = IGNORED
    if starts is not None:
        ends = np.zeros(tuple(labels.shape), bool)
        ends[:, :-1] = np.asarray(starts)[:, 1:]
        shifted[_mask(ends, shifted)] = IGNORED
    return shifted


def shard(
    batch: Mapping[str, Any],
    comm: Any,
    *,
    dims: Mapping[str, int | None] | None = None,
    pad: bool = False,
) -> Iterator[Micro]:
    """Cuts the ranks' batches along their sequences: P micro-steps, in each of which the ranks hold the rows of one rank's batch. Collective.

    batch  tensors by name (PyTorch on the CPU, NumPy), and anything else. S is the length of input_ids, or else of the first tensor [B, S, ..].
           Every tensor with S as its second axis is cut there; all else goes to every rank whole. `labels` become `shift_labels`, shifted
           before cutting. position_ids are made (0 .. S-1) where there are none; where given, a 0 starts a document, and a run of zeros at a
           row's end is padding, one document. cu_seqlens [docs+1] over B*S says the documents instead. Ranks may bring different B and S
    comm   what ulysses.communicator takes; a Context is also told the lengths and documents of each step (Context.use)
    dims   the axis to cut by name, None = whole: {"pixel_values": 0, "position_ids": 2}
    pad    make S a multiple of P, so that all ranks hold as many rows: 0, labels -100. False: the first S mod P ranks hold one row more

    Example, 2 ranks: input_ids [1 10 10 10 2 2] = labels give rank 0 [1 10 10], shift_labels [10 10 10], rank 1 [10 2 2], [2 2 -100].
    Errors: InvalidArgument; on all ranks alike.
    """
    c = communicator(comm)
    own, error = None, None
    try:
        own = _prepare(batch, c.size, dims or {}, pad)
    except Exception as e:
        error = e
    prepared = _agree(c, own, error)
    assert prepared is not None
    return _serve(comm, c, own, prepared)


class loader:
    """A loader of batches, sharded: iterates over Micro. See `shard` for the options.

    Ends on all ranks together, as soon as one rank has no further batch; a rank whose loader fails ends all of them with an error that names
    it. len() is P times that of `batches` on this rank.
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
            prepared = _agree(c, own, error)
            if prepared is None:
                return
            yield from _serve(self.comm, c, own, prepared)


@dataclass
class _Key:
    torch: bool
    dtype: str
    shape: tuple[int, ...]
    dim: int


@dataclass
class _Prepared:
    """A batch as its owner describes it to the others; `arrays` stay with the owner."""

    keys: dict[str, _Key]
    whole: dict[str, Any]
    sequences: Sequences
    arrays: dict[str, Any] | None


def _prepare(
    batch: Mapping[str, Any], size: int, dims: Mapping[str, int | None], pad: bool
) -> _Prepared:
    tensors = {
        k: v
        for k, v in batch.items()
        if (is_torch(v) or isinstance(v, np.ndarray)) and k != "cu_seqlens"
    }
    lead = tensors.get("input_ids", next((v for v in tensors.values() if v.ndim >= 2), None))
    if lead is None or lead.ndim < 2:
        raise InvalidArgument(
            f"ulysses.shard: keys {sorted(batch)}: one must be a tensor [B, S, ..]"
        )
    b, s = lead.shape[:2]
    if b < 1 or s < 1:
        raise InvalidArgument(
            f"ulysses.shard: a batch of {b} sequences of {s} tokens: each must be 1 or more"
        )
    missing = sorted(set(dims) - set(batch))
    if missing:
        raise InvalidArgument(f"ulysses.shard: dims names {missing}, the batch has {sorted(batch)}")
    starts = _starts(batch, dims, b, s)
    if "position_ids" not in tensors:
        at = np.arange(s) - np.maximum.accumulate(np.where(starts, np.arange(s), 0), axis=1)
        tensors["position_ids"] = _like(lead, at.astype(np.int64))
    if "labels" in tensors and "shift_labels" not in tensors:
        tensors["shift_labels"] = shift_labels(tensors["labels"], starts)
    tensors.pop("labels", None)
    more = -s % size if pad else 0
    if more:
        starts = np.concatenate([starts, np.eye(1, more, dtype=bool).repeat(b, 0)], 1)
    cut: dict[str, Any] = {
        k: dims[k] if k in dims else (1 if v.ndim >= 2 and v.shape[1] == s else None)
        for k, v in tensors.items()
    }
    arrays = {
        k: _bytes_ready(_padded(v, dim, -v.shape[dim] % size if pad else 0, PAD.get(k, 0)))
        for k, v in tensors.items()
        if (dim := cut[k]) is not None
    }
    keys = {
        k: _Key(is_torch(a), str(a.dtype).removeprefix("torch."), tuple(a.shape), cut[k] % a.ndim)
        for k, a in arrays.items()
    }
    whole = {
        k: tensors.get(k, v)
        for k, v in batch.items()
        if k not in arrays and k not in ("labels", "cu_seqlens")
    }
    whole.update({k: v for k, v in tensors.items() if cut[k] is None})
    n = s + more
    cu = [int(i) for i in np.flatnonzero(starts)] + [b * n]
    return _Prepared(
        keys, whole, Sequences(b, n, None, tuple(cu) if len(cu) > b + 1 else None), arrays
    )


def _starts(batch: Mapping[str, Any], dims: Mapping[str, int | None], b: int, s: int) -> np.ndarray:
    """[B, S] true where a document starts."""
    starts = np.zeros((b, s), bool)
    starts[:, 0] = True
    positions = batch.get("position_ids")
    if batch.get("cu_seqlens") is not None:
        cu = np.asarray(batch["cu_seqlens"], np.int64).reshape(-1)
        if (
            len(cu) < 2
            or cu[0] != 0
            or cu[-1] != b * s
            or (np.diff(cu) <= 0).any()
            or not np.isin(np.arange(b) * s, cu).all()
        ):
            raise InvalidArgument(
                f"ulysses.shard: cu_seqlens {cu.tolist()[:8]} for {b} sequences of {s}: it must rise from 0 to {b * s} through every "
                "sequence's end"
            )
        starts.reshape(-1)[cu[:-1]] = True
    elif (
        positions is not None
        and tuple(positions.shape) == (b, s)
        and dims.get("position_ids", 1) == 1
    ):
        zero = np.asarray(positions) == 0
        tail = np.logical_and.accumulate(zero[:, ::-1], axis=1)[
            :, ::-1
        ]  # zero from here to the end
        tail[:, 1:] &= zero[:, :-1]  # behind another zero: inside padding
        tail[:, 0] = False
        starts |= zero & ~tail
    return starts


def _agree(
    c: Communicator, own: _Prepared | None, error: BaseException | None
) -> list[_Prepared] | None:
    """All ranks' descriptions; None where one has no further batch. A failure of one is an error on all."""
    message: Any = f"{type(error).__name__}: {error}" if error is not None else None
    if own is not None:
        message = _Prepared(own.keys, own.whole, own.sequences, None)
    all_ = gather_objects(c, message)
    if error is not None:
        raise error
    for rank, m in enumerate(all_):
        if isinstance(m, str):
            raise CommError(f"ulysses.shard: rank {rank} of {c.size} failed: {m}")
    return None if any(m is None for m in all_) else all_


def _serve(
    comm: Any, c: Communicator, own: _Prepared | None, all_: list[_Prepared]
) -> Iterator[Micro]:
    """The exchange, and the micro-steps one by one. The exchange is made at once, not at the first step."""
    assert own is not None and own.arrays is not None
    pieces = [
        [
            _rows(a, own.keys[k].dim, *shard_rows(own.keys[k].shape[own.keys[k].dim], c.size, j))
            for k, a in own.arrays.items()
        ]
        for j in range(c.size)
    ]
    send = bytearray(b"".join(p for piece in pieces for p in piece))
    sizes = [sum(map(len, piece)) for piece in pieces]
    back = [sum(_extent(key, c)[1] for key in p.keys.values()) for p in all_]
    receive = bytearray(sum(back))
    c.alltoallv(memoryview(send), sizes, memoryview(receive), back)
    return _steps(comm, c, all_, receive)


def _steps(
    comm: Any, c: Communicator, all_: list[_Prepared], receive: bytearray
) -> Iterator[Micro]:
    at = 0
    for owner, p in enumerate(all_):
        micro = Micro(p.whole)
        for name, key in p.keys.items():
            shape, n = _extent(key, c)
            micro[name] = _array(key, shape, receive[at : at + n])
            at += n
        micro.sequences, micro.owner = p.sequences, owner
        micro.lo, micro.hi = shard_rows(p.sequences.seq, c.size, c.rank)
        if isinstance(comm, Context):
            comm.use(p.sequences)
        yield micro


def _extent(key: _Key, c: Communicator) -> tuple[tuple[int, ...], int]:
    """This rank's shape of a key, and its bytes."""
    lo, hi = shard_rows(key.shape[key.dim], c.size, c.rank)
    shape = key.shape[: key.dim] + (hi - lo,) + key.shape[key.dim + 1 :]
    return shape, int(np.prod(shape, dtype=np.int64)) * _itemsize(key)


def _itemsize(key: _Key) -> int:
    if key.torch:
        import torch

        return getattr(torch, key.dtype).itemsize
    return np.dtype(key.dtype).itemsize


def _array(key: _Key, shape: tuple[int, ...], data: bytearray) -> Any:
    if key.torch:
        import torch

        dtype = getattr(torch, key.dtype)
        return (
            torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        ).reshape(shape)
    return np.frombuffer(data, key.dtype).reshape(shape)


def _rows(a: Any, dim: int, lo: int, hi: int) -> bytes:
    piece = a[(slice(None),) * dim + (slice(lo, hi),)]
    if is_torch(piece):
        import torch

        return (
            piece.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            if piece.numel()
            else b""
        )
    return np.ascontiguousarray(piece).tobytes()


def _bytes_ready(a: Any) -> Any:
    return a.detach().cpu() if is_torch(a) else a


def _padded(a: Any, dim: int, more: int, value: int) -> Any:
    if not more:
        return a
    shape = list(a.shape)
    shape[dim] = more
    if is_torch(a):
        import torch

        return torch.cat([a, a.new_full(shape, value)], dim)
    return np.concatenate([a, np.full(shape, value, a.dtype)], dim)


def _like(lead: Any, a: np.ndarray) -> Any:
    if is_torch(lead):
        import torch

        return torch.from_numpy(a)
    return a


def _mask(mask: np.ndarray, like: Any) -> Any:
    if is_torch(like):
        import torch

        return torch.from_numpy(mask).to(like.device)
    return mask
