"""Ranks for the tests: threads of this process, which communicate through a table in memory."""

from __future__ import annotations

import threading
from typing import Any, Callable

import ulysses


class Table:
    """One value of each rank, and a barrier. Every rank calls `exchange` in the same order."""

    def __init__(self, size: int):
        self.size, self.barrier, self.values = size, threading.Barrier(size), [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Returns the values of all ranks. A barrier at which a rank is missing for 60 s breaks."""
        self.values[rank] = value
        self.barrier.wait(60)
        values = list(self.values)
        self.barrier.wait(60)
        return values


class Thread:
    """A ulysses.Communicator of one thread."""

    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.size = table, rank, table.size

    def allgather(self, send, receive):
        receive[:] = b"".join(self.table.exchange(self.rank, bytes(send)))

    def alltoallv(self, send, send_bytes, receive, receive_bytes):
        blocks, at = [], 0
        for n in send_bytes:
            blocks.append(bytes(send[at : at + n]))
            at += n
        received = [row[self.rank] for row in self.table.exchange(self.rank, blocks)]
        assert [len(b) for b in received] == list(receive_bytes), "sizes differ between ranks"
        receive[:] = b"".join(received)


def run(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """Runs body(communicator) on each rank, and returns the results in rank order.

    If a rank raises, the barrier breaks, so that the other ranks do not wait, and run raises the
    rank's exception.
    """
    table, results, errors = Table(size), [None] * size, []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = body(Thread(table, rank))
        except BaseException as e:
            errors.append(e)
            table.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(r,)) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    if errors:
        broken = threading.BrokenBarrierError
        causes = [e for e in errors if not isinstance(e, broken)]
        raise next((e for e in causes if not isinstance(e.__cause__, broken)), errors[0])
    return results


def contexts(size: int, body: Callable[[ulysses.Context], Any], **options: Any) -> list[Any]:
    """Runs body(context) on each rank, and returns the results in rank order."""

    def make(comm: Any) -> Any:
        with ulysses.Context(comm, threads=1, **options) as ctx:
            return body(ctx)

    return run(size, make) if size > 1 else [make(None)]


def local(x: Any, ctx: Any, axis: int = 1) -> Any:
    """Returns this rank's shard of x along an axis; None for None."""
    return None if x is None else ulysses.local_tokens(x, axis, context=ctx)


def joined(shards: Any, axis: int = 1, **mesh: Any) -> Any:
    """Returns whole sequences from the shards of all ranks. mesh are arguments of Context."""
    mesh = {name: mesh[name] for name in ("ring", "zigzag") if name in mesh}
    return ulysses.Layout(len(shards), **mesh).join(shards, axis)
