"""A communicator for Context.world(), where Python has none: the library moves the bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _struct
from .errors import Unsupported
from .plan import Sequences
from .tensors import view


class LibraryRanks:
    """A Communicator over the ranks of a context.

    A context on a GPU reshards GPU memory only. There, allgather adds up numbers instead, and
    alltoallv is refused."""

    def __init__(self, context: Any):
        self._context, self.rank, self.size = context, context.rank, context.size

    def _swap(self, blocks: np.ndarray) -> np.ndarray:
        """Sends block j of [P, n] to rank j; returns the blocks that arrive, [P, n].

        n is the same on all ranks. The call is a reshard of P rows, one a rank, and P heads."""
        ctx, (size, n) = self._context, blocks.shape
        if ctx.device != "cpu":
            raise Unsupported(
                "ulysses: Context.world() on a GPU gives Python no communicator: make the context from an mpi4py communicator"
            )
        plan, batch = (
            ctx._plan(heads=size, head_dim=1, dtype=_struct.F32),
            ctx._batch(Sequences(1, size)),
        )
        x, out = (
            np.ascontiguousarray(blocks).reshape(1, 1, size, n),
            np.empty((1, size, 1, n), np.uint8),
        )
        views, pointers = (view(x), view(out)), ctypes.POINTER(_struct.Tensor) * 1
        args = _struct.ReshardArgs(n=1)
        ins, args.out = pointers(views[0].pointer()), pointers(views[1].pointer())
        setattr(args, "in", ins)
        ctx._call("ulysses_seq_to_heads", plan.handle, batch.handle, ctypes.byref(args))
        return out.reshape(size, n)

    def _sums(self, send: bytes) -> bytes:
        """An allgather of short messages by loss_reduce, to which all ranks but one add 0.

        A call carries 12 bytes of one rank: whole numbers below 2^48 are exact in its sum and count."""
        out = []
        for rank in range(self.size):
            for at in range(0, len(send), 12):
                own = send[at : at + 12].ljust(12, b"\0") if rank == self.rank else bytes(12)
                low, high = int.from_bytes(own[:6], "little"), int.from_bytes(own[6:], "little")
                total, count, mean = ctypes.c_double(low), ctypes.c_int64(high), ctypes.c_double()
                self._context._call(
                    "ulysses_loss_reduce",
                    self._context.handle,
                    ctypes.byref(total),
                    ctypes.byref(count),
                    ctypes.byref(mean),
                )
                out.append(
                    (int(total.value).to_bytes(6, "little") + count.value.to_bytes(6, "little"))[
                        : len(send) - at
                    ]
                )
        return b"".join(out)

    def allgather(self, send: memoryview, receive: memoryview) -> None:
        if len(send) and self._context.device != "cpu":
            receive[:] = self._sums(bytes(send))
        elif len(send):
            receive[:] = self._swap(
                np.broadcast_to(np.frombuffer(send, np.uint8), (self.size, len(send)))
            ).tobytes()

    def alltoallv(
        self,
        send: memoryview,
        send_bytes: Sequence[int],
        receive: memoryview,
        receive_bytes: Sequence[int],
    ) -> None:
        most = bytearray(8 * self.size)
        self.allgather(
            memoryview(bytearray(max(send_bytes).to_bytes(8, "little"))), memoryview(most)
        )
        blocks = np.zeros((self.size, int(np.frombuffer(most, np.int64).max())), np.uint8)
        at = 0
        for rank, n in enumerate(send_bytes):
            blocks[rank, :n] = np.frombuffer(send[at : at + n], np.uint8)
            at += n
        if blocks.shape[1]:
            receive[:] = b"".join(
                row[:n].tobytes() for row, n in zip(self._swap(blocks), receive_bytes)
            )
