"""The lock of a context's calls, and the handles that are dropped during a call."""

from __future__ import annotations

import collections
import threading
from typing import Any

from . import _library


class Calls:
    """Allows one call of a context at a time, in a with statement.

    The garbage collector may delete a plan or a batch in any thread, also in a callback of a call.
    The library does not destroy a handle during a call, and a thread that waited for the end of the
    call could be one that the call waits for. Such handles are destroyed after the call.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0  # of with statements of the thread that has the lock
        self._dropped: collections.deque[tuple[str, Any]] = collections.deque()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *exc: Any) -> None:
        try:
            if self._depth == 1:
                self._destroy()
        finally:
            self._depth -= 1
            self._lock.release()

    def drop(self, function: str, handle: Any) -> None:
        """Destroys a handle by a function of the library: now, or after the call that runs."""
        self._dropped.append((function, handle))
        if self._lock.acquire(blocking=False):
            try:
                if self._depth == 0:
                    self._destroy()
            finally:
                self._lock.release()

    def _destroy(self) -> None:
        while self._dropped and _library.usable():
            function, handle = self._dropped.popleft()
            getattr(_library.library(), function)(handle)
