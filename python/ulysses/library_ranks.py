"""The communicator of Context.world(), for which there is no mpi4py: the library communicates."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _struct
from .communicator import Communicator
from .errors import Unsupported
from .sequences import Sequences
from .tensors import view


class LibraryRanks(Communicator):
    """A Communicator over the ranks of a context, made of two functions of the library.

    On the CPU, both collectives are reshards. A context on a GPU reshards only GPU memory: there,
    allgather is a series of sums, and alltoallv raises Unsupported.
    """

    def __init__(self, context: Any):
        self._context, self.rank, self.size = context, context.rank, context.size

    def _alltoall(self, blocks: np.ndarray) -> np.ndarray:
        """Sends row j of blocks [P, n] to rank j, and returns the received rows [P, n]. Collective.

        n is the same on all ranks. The call is a reshard of a sequence of P tokens, one on each
        rank, and P heads of n bytes.
        """
        ctx, (size, n) = self._context, blocks.shape
        if ctx.device != "cpu":
            raise Unsupported(
                "ulysses.Context.world: a context on a GPU has no communicator for host memory; "
                "make the context from an mpi4py communicator"
            )
        plan = ctx._plan(heads=size, head_dim=1, dtype=_struct.F32)
        batch = ctx._batch(Sequences(1, size))
        x = np.ascontiguousarray(blocks).reshape(1, 1, size, n)
        out = np.empty((1, size, 1, n), np.uint8)
        views, pointers = (view(x), view(out)), ctypes.POINTER(_struct.Tensor) * 1
        args = _struct.ReshardArgs(n=1)
        ins, args.out = pointers(views[0].pointer()), pointers(views[1].pointer())
        setattr(args, "in", ins)
        ctx._call("ulysses_seq_to_heads", plan.handle, batch.handle, ctypes.byref(args))
        return out.reshape(size, n)

    def _allgather_by_sums(self, send: bytes) -> bytes:
        """Gathers the bytes of all ranks with ulysses_loss_reduce. Collective; for short messages.

        Each call carries 12 bytes of one rank, to which the other ranks add 0: the sum and the
        count of the call hold whole numbers below 2^48 exactly.
        """
        out = []
        for rank in range(self.size):
            for at in range(0, len(send), 12):
                word = send[at : at + 12].ljust(12, b"\0") if rank == self.rank else bytes(12)
                low, high = int.from_bytes(word[:6], "little"), int.from_bytes(word[6:], "little")
                total, count, mean = ctypes.c_double(low), ctypes.c_int64(high), ctypes.c_double()
                self._context._call(
                    "ulysses_loss_reduce",
                    self._context.handle,
                    ctypes.byref(total),
                    ctypes.byref(count),
                    ctypes.byref(mean),
                )
                word = int(total.value).to_bytes(6, "little") + count.value.to_bytes(6, "little")
                out.append(word[: len(send) - at])
        return b"".join(out)

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        if len(send) and self._context.device != "cpu":
            receive[:] = self._allgather_by_sums(bytes(send))
        elif len(send):
            receive[:] = self._alltoall(
                np.broadcast_to(np.frombuffer(send, np.uint8), (self.size, len(send)))
            ).tobytes()

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        # The blocks of an alltoall have one size: that of the largest block of any rank.
        largest = bytearray(8 * self.size)
        self.allgather(
            memoryview(bytearray(max(send_bytes).to_bytes(8, "little"))), memoryview(largest)
        )
        blocks = np.zeros((self.size, int(np.frombuffer(largest, np.int64).max())), np.uint8)
        at = 0
        for rank, n in enumerate(send_bytes):
            blocks[rank, :n] = np.frombuffer(send[at : at + n], np.uint8)
            at += n
        if blocks.shape[1]:
            receive[:] = b"".join(
                row[:n].tobytes() for row, n in zip(self._alltoall(blocks), receive_bytes)
            )
