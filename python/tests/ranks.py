"""Ranks for the tests: threads of this process, whose collectives are a barrier and a table."""

from __future__ import annotations

import importlib.util
import os
import threading
import unittest
from typing import Any, Callable

import ulysses

# Tests that need PyTorch and transformers. Nothing is skipped in CI.
TORCH = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))
without_torch = unittest.skipIf(
    not TORCH and not os.environ.get("CI"),
    "no torch and transformers: make test-python TORCH=1, or PYTHON=... that has them",
)


class Table:
    def __init__(self, size: int):
        self.size, self.barrier, self.slots = size, threading.Barrier(size), [None] * size

    def swap(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait(60)
        all_ = list(self.slots)
        self.barrier.wait(60)
        return all_


class Thread:
    """A ulysses.Communicator."""

    def __init__(self, table: Table, rank: int):
        self.table, self.rank, self.size = table, rank, table.size

    def allgather(self, send, receive):
        receive[:] = b"".join(self.table.swap(self.rank, bytes(send)))

    def alltoallv(self, send, send_bytes, receive, receive_bytes):
        blocks, at = [], 0
        for n in send_bytes:
            blocks.append(bytes(send[at : at + n]))
            at += n
        mine = [row[self.rank] for row in self.table.swap(self.rank, blocks)]
        assert [len(b) for b in mine] == list(receive_bytes), "the ranks disagree about sizes"
        receive[:] = b"".join(mine)


def run(size: int, body: Callable[[Any], Any]) -> list[Any]:
    """body(communicator) on each rank; their results. A rank's failure is the test's, and releases its peers."""
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
        raise next(
            (
                e
                for e in errors
                if not isinstance(e, threading.BrokenBarrierError)
                and not isinstance(e.__cause__, threading.BrokenBarrierError)
            ),
            errors[0],
        )
    return results


def contexts(size: int, body: Callable[[ulysses.Context], Any], **options: Any) -> list[Any]:
    """body(context) on each rank."""

    def make(comm: Any) -> Any:
        with ulysses.Context(comm, threads=1, **options) as ctx:
            return body(ctx)

    return run(size, make) if size > 1 else [make(None)]
