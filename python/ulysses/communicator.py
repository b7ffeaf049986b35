"""Communicators: the ranks of a group, and how bytes move between them.

A communicator has `rank`, `size` and two collectives over bytes in host memory. Blocks are dense
and in rank order:

    allgather(send, receive)
        receive is the concatenation of all ranks' send buffers, which have the same size
    alltoallv(send, send_bytes, receive, receive_bytes)
        block j of send goes to rank j; both lists hold the size of each block in bytes

A context whose MPI library cannot be used directly makes all its communication from these two, and
so does `ulysses.shard`.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any, Callable, Protocol, runtime_checkable

from .errors import InvalidArgument
from .tensors import torch_or_none


@runtime_checkable
class Communicator(Protocol):
    """The interface that a communicator of the caller must have.

    Failures are exceptions. The receive buffers are allocated by the caller of the methods.

    Attributes:
        rank: index of this process, from 0
        size: number of ranks
    """

    rank: int
    size: int

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        """Gathers the send buffers of all ranks into receive, in rank order. Collective.

        Args:
            send: n bytes, the same n on all ranks
            receive: size * n bytes
        """

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        """Sends block j of send to rank j, and receives one block from each rank. Collective.

        Args:
            send: the blocks for all ranks, dense and in rank order
            send_bytes: the size of each block of send
            receive: memory for the blocks from all ranks, dense and in rank order
            receive_bytes: the size of each block of receive
        """


class Alone(Communicator):
    """The communicator of one rank."""

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
    """A communicator that calls two functions of the caller.

    Args:
        rank: index of this process, from 0
        size: number of ranks
        allgather: a function with the arguments of `Communicator.allgather`
        alltoallv: a function with the arguments of `Communicator.alltoallv`

    Raises:
        InvalidArgument: rank is not in [0, size)
    """

    def __init__(
        self, rank: int, size: int, allgather: Callable[..., None], alltoallv: Callable[..., None]
    ):
        if not 0 <= rank < size:
            raise InvalidArgument(
                f"ulysses.Callbacks: rank {rank} of {size}; give 0 <= rank < size"
            )
        self.rank, self.size, self.allgather, self.alltoallv = rank, size, allgather, alltoallv


class MPI(Communicator):
    """An mpi4py communicator.

    MPI's counts have 32 bits here, so one rank can send at most 2 GiB - 1 bytes to another in one
    call.

    Args:
        comm: an mpi4py.MPI.Comm
    """

    def __init__(self, comm: Any):
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()

    def duplicate(self) -> MPI:
        """Returns a communicator over a duplicate of `comm`, for `free` to free. Collective."""
        return MPI(self.comm.Dup())

    def free(self) -> None:
        """Frees `comm`, unless MPI has ended. Collective."""
        from mpi4py import MPI as mpi

        if not mpi.Is_finalized():
            self.comm.Free()

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        self.comm.Allgather(_mpi_buffer(send), _mpi_buffer(receive))

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        from mpi4py import MPI as mpi

        self.comm.Alltoallv(
            [_mpi_buffer(send), (send_bytes, _offsets(send_bytes)), mpi.BYTE],
            [_mpi_buffer(receive), (receive_bytes, _offsets(receive_bytes)), mpi.BYTE],
        )


class TorchGroup(Communicator):
    """A torch.distributed process group whose backend communicates host memory (gloo or MPI).

    Args:
        group: a torch.distributed.ProcessGroup. Default: None, the default group

    Raises:
        InvalidArgument: the backend cannot communicate host memory, or this process is not a member
    """

    def __init__(self, group: Any = None):
        import torch.distributed as dist

        backend = dist.get_backend(group)
        if "gloo" not in backend and "mpi" not in backend:
            raise InvalidArgument(
                f"ulysses.TorchGroup: a process group with backend {backend} cannot communicate "
                "host memory; give torch.distributed.new_group(ranks, backend='gloo')"
            )
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InvalidArgument(
                "ulysses.TorchGroup: this process is not a member of the process group; call it "
                "only on members"
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


def _mpi_buffer(m: memoryview) -> Any:
    """Returns m, or an empty bytearray: mpi4py refuses an empty memoryview without an address."""
    return m if len(m) else bytearray(0)


def _offsets(sizes: Sequence[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))[:-1]


def communicator(comm: Any) -> Communicator:
    """Returns the communicator for an object of mpi4py, torch.distributed or this package.

    Args:
        comm: None (one rank), a Context, an mpi4py communicator, a torch.distributed process group,
            or a Communicator

    Raises:
        InvalidArgument: comm is none of these
    """
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
        f"ulysses.communicator: {type(comm).__name__} is not a communicator; give an mpi4py "
        "communicator, a torch.distributed process group, or an object with rank, size, allgather "
        "and alltoallv"
    )


def gather_objects(comm: Communicator, value: Any) -> list[Any]:
    """Returns the values of all ranks in rank order. Collective.

    The values are pickled, so the ranks must trust each other.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    sizes = bytearray(8 * comm.size)
    comm.allgather(memoryview(bytearray(len(data).to_bytes(8, "little"))), memoryview(sizes))
    each = [int.from_bytes(sizes[8 * i : 8 * i + 8], "little") for i in range(comm.size)]
    most = max(each)
    pickled = bytearray(most * comm.size)
    comm.allgather(memoryview(bytearray(data.ljust(most, b"\0"))), memoryview(pickled))
    return [pickle.loads(pickled[i * most : i * most + each[i]]) for i in range(comm.size)]
