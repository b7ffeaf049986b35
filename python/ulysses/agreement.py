"""Collective calls agree on their arguments before they communicate.

Each rank first checks its own arguments without communicating. One allgather of 64 bytes follows: it
carries whether the check failed, a digest of the arguments that must be equal, and the rank's number
of rows. If a check fails on one rank, or the arguments differ, the call raises on every rank. Without
this, the other ranks would wait in the collective for a rank that has already raised.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Callable, TypeVar

from . import errors
from .communicator import Communicator, gather_objects
from .errors import CommError, InvalidArgument, UlyssesError

_MESSAGE = struct.Struct("<q16s5q")  # 1 = a fault, digest, counts
_MOST = 5  # counts of a message
T = TypeVar("T")


def agree(
    comm: Communicator,
    operation: str,
    prepare: Callable[[], tuple[Mapping[str, Any], tuple[int, ...], T]],
) -> tuple[T, list[tuple[int, ...]]]:
    """Runs `prepare` on each rank and compares the results. Collective: one allgather.

    prepare returns (arguments by name that must be equal on all ranks, up to 5 counts that may
    differ, any result). It must not communicate. agree returns that result and the counts of all
    ranks in rank order. If prepare raises on a rank, this rank raises the same exception; the other
    ranks raise an exception of the same class that names the rank. If arguments differ, every rank
    raises InvalidArgument, which names the first one that differs.
    """
    error: BaseException | None = None
    same: Mapping[str, Any] = {}
    counts: tuple[int, ...] = ()
    result: Any = None
    try:
        same, counts, result = prepare()
    except Exception as e:
        if comm.size == 1:
            raise
        error = e
    if comm.size == 1:
        return result, [tuple(counts)]
    text = repr((operation, sorted(same.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    send = _MESSAGE.pack(error is not None, digest, *counts, *(0,) * (_MOST - len(counts)))
    receive = bytearray(len(send) * comm.size)
    try:
        comm.allgather(memoryview(bytearray(send)), memoryview(receive))
    except UlyssesError:
        raise
    except Exception as e:
        raise CommError(f"{operation}: the communicator failed: {type(e).__name__}: {e}") from e
    each = [_MESSAGE.unpack_from(receive, rank * len(send)) for rank in range(comm.size)]
    if any(fault for fault, *_ in each) or len({other for _, other, *_ in each}) > 1:
        _refuse(comm, operation, same, error)
    return result, [row[2 : 2 + len(counts)] for row in each]


def _refuse(
    comm: Communicator, operation: str, same: Mapping[str, Any], error: BaseException | None
) -> None:
    """Raises on every rank. Collective."""
    mine = None if error is None else (type(error).__name__, str(error))
    all_ = gather_objects(
        comm, (mine, operation, {name: repr(value) for name, value in same.items()})
    )
    if error is not None:
        raise error
    for rank, (fault, *_) in enumerate(all_):
        if fault is not None:
            cls = getattr(errors, fault[0], CommError)
            cls = cls if isinstance(cls, type) and issubclass(cls, UlyssesError) else CommError
            raise cls(f"{operation}: rank {rank} of {comm.size} refused the call: {fault[1]}")
    first = all_[0]
    for rank, (_, other, theirs) in enumerate(all_):
        if other != first[1]:
            raise InvalidArgument(
                f"{operation}: rank 0 calls {first[1]}, rank {rank} {other}: make the same calls in the same order on all ranks"
            )
        for name in [*first[2], *theirs]:
            a, b = first[2].get(name, "not given"), theirs.get(name, "not given")
            if a != b:
                raise InvalidArgument(
                    f"{operation}: {name} is {_short(a)} on rank 0 and {_short(b)} on rank {rank}: give the same on all ranks"
                )
    raise InvalidArgument(f"{operation}: the ranks' arguments differ: give the same on all ranks")


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


def describe(x: Any, *, free: tuple[int, ...] = ()) -> Any:
    """Type, device and shape of an array, without the extents of the axes in `free`; None for None.

    Ranks compare these."""
    if x is None:
        return None
    shape = tuple(getattr(x, "shape", ()))
    free = tuple(i % len(shape) for i in free) if shape else ()
    device = getattr(getattr(x, "device", None), "type", "cpu")
    return (
        str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch."),
        device,
        tuple("rows" if i in free else int(n) for i, n in enumerate(shape)),
    )
