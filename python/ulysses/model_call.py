"""The call of a transformers model that a thread is in, as its layers see it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from .context import Context
from .plan import Sequences

KEY = "ulysses_forward"  # keyword under which layers receive the Forward of their model's call
_thread = threading.local()


@dataclass
class Forward:
    """One call of a model, as the ranks have agreed on it."""

    context: Context
    sequences: Sequences
    rows: int  # tokens of each sequence on this rank
    past: int = 0  # tokens in a key-value cache, on one rank


def inside() -> Forward | None:
    """The model's call that this thread is in, or None."""
    return getattr(_thread, "forward", None)


@contextlib.contextmanager
def entered(forward: Forward) -> Iterator[None]:
    """Makes `forward` this thread's call of a model."""
    _thread.forward = forward
    try:
        yield
    finally:
        _thread.forward = None
