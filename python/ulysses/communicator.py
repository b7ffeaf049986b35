"""Who the ranks are, and how bytes travel between them: mpi4py, torch.distributed, a host's own functions, or one rank alone.

A communicator has `rank`, `size`, and two collectives over bytes in host memory, blocks dense in rank order:

    allgather(send, receive)                               receive = every rank's send, one after the other
    alltoallv(send, send_bytes, receive, receive_bytes)    block j of send goes to rank j; lists of sizes in bytes

The library makes all its exchanges from these two where it has no MPI of its own to use, and `ulysses.shard` makes its own from them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Callable, Protocol, runtime_checkable

from .errors import CommError, InvalidArgument
from .tensors import torch_or_none


@runtime_checkable
class Communicator(Protocol):
    """What a host's own launcher brings. Failures are exceptions."""

    rank: int
    size: int

    def allgather(self, send: memoryview, receive: memoryview) -> None: ...

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None: ...


class Alone:
    """One rank."""

    rank, size = 0, 1

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        receive[:] = send

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        receive[:] = send


class Callbacks:
    """A host's own two functions, with the signatures of Communicator's."""

    def __init__(
        self, rank: int, size: int, allgather: Callable[..., None], alltoallv: Callable[..., None]
    ):
        if not 0 <= rank < size:
            raise InvalidArgument(f"ulysses: rank {rank} of {size}: ranks count from 0")
        self.rank, self.size, self.allgather, self.alltoallv = rank, size, allgather, alltoallv


class MPI:
    """An mpi4py communicator. Counts are MPI's 32-bit ones: at most 2 GiB - 1 from one rank to one other here."""

    def __init__(self, comm: Any):
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        self.comm.Allgather(_bytes(send), _bytes(receive))

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        from mpi4py import MPI as mpi

        self.comm.Alltoallv(
            [_bytes(send), (send_bytes, _starts(send_bytes)), mpi.BYTE],
            [_bytes(receive), (receive_bytes, _starts(receive_bytes)), mpi.BYTE],
        )


class TorchGroup:
    """A torch.distributed process group that carries host memory (gloo); None = the default group."""

    def __init__(self, group: Any = None):
        import torch.distributed as dist

        backend = dist.get_backend(group)
        if "gloo" not in backend and "mpi" not in backend:
            raise InvalidArgument(
                f"ulysses: a process group of {backend} carries no host memory: give torch.distributed.new_group(ranks, backend='gloo')"
            )
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgument(
                "ulysses: this process is not in the process group: call on its members alone"
            )

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        import torch.distributed as dist

        n = len(send)
        if n:
            dist.all_gather(
                [_tensor(receive[i * n : (i + 1) * n]) for i in range(self.size)],
                _tensor(send),
                group=self.group,
            )

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        import torch.distributed as dist

        dist.all_to_all_single(
            _tensor(receive), _tensor(send), list(receive_bytes), list(send_bytes), group=self.group
        )


def _tensor(m: memoryview) -> Any:
    import torch

    return torch.frombuffer(m, dtype=torch.uint8) if len(m) else torch.empty(0, dtype=torch.uint8)


def _bytes(m: memoryview) -> Any:
    """mpi4py refuses an empty memoryview over no memory."""
    return m if len(m) else bytearray(0)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts, at = [], 0
    for n in sizes:
        starts.append(at)
        at += n
    return starts


def communicator(comm: Any) -> Communicator:
    """What `comm` is: None (alone), a Context, an mpi4py communicator, a torch.distributed process group, or a Communicator."""
    if comm is None:
        return Alone()
    if isinstance(getattr(comm, "communicator", None), Communicator):  # a Context
        return comm.communicator
    if hasattr(comm, "py2f"):
        return MPI(comm)
    torch = torch_or_none()
    if (
        torch is not None
        and torch.distributed.is_available()
        and isinstance(comm, torch.distributed.ProcessGroup)
    ):
        return TorchGroup(comm)
    if isinstance(comm, Communicator):
        return comm
    raise InvalidArgument(
        f"ulysses: {type(comm).__name__} is no communicator: give an mpi4py communicator, a torch.distributed process group, or "
        "an object with rank, size, allgather and alltoallv"
    )


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Every rank's value, in rank order, pickled. Collective. Ranks of one job trust each other."""
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    sizes = bytearray(8 * comm.size)
    comm.allgather(memoryview(bytearray(len(data).to_bytes(8, "little"))), memoryview(sizes))
    each = [int.from_bytes(sizes[8 * i : 8 * i + 8], "little") for i in range(comm.size)]
    most = max(each)
    all_ = bytearray(most * comm.size)
    comm.allgather(memoryview(bytearray(data.ljust(most, b"\0"))), memoryview(all_))
    return [pickle.loads(all_[i * most : i * most + each[i]]) for i in range(comm.size)]


def raise_together(comm: Communicator, what: str, error: BaseException | None) -> None:
    """One rank's failure is every rank's: raises it where it happened, and CommError that names it elsewhere. Collective."""
    texts = gather_objects(comm, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise CommError(f"{what}: rank {rank} failed: {text}")
