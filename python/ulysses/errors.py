"""Exceptions for the library's statuses.

Each exception has `status`, the number that the C call returned, and the library's message: the
function, what is wrong with its values, and what to do. Each class also derives from the matching
built-in class, so `except ValueError` catches an invalid argument.
"""

from __future__ import annotations

from typing import Any

from ._struct import Status

_classes: dict[int, type[UlyssesError]] = {}


class UlyssesError(Exception):
    """The base class of the exceptions.

    Attributes:
        status: the `Status` that the C call returned
    """

    status: int = Status.INTERNAL

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        if status is not None:
            self.status = status

    def __init_subclass__(cls, status: Status | None = None, **options: Any):
        super().__init_subclass__(**options)
        if status is not None:
            cls.status = status
            _classes[int(status)] = cls


class InvalidArgument(UlyssesError, ValueError, status=Status.INVALID_ARGUMENT):
    """A shape, type, value or handle is wrong."""


class InvalidConfig(UlyssesError, ValueError, status=Status.INVALID_CONFIG):
    """A configuration or data is wrong."""


class Unsupported(UlyssesError, NotImplementedError, status=Status.UNSUPPORTED):
    """An option or a combination is valid, but not implemented. The message names it."""


class OutOfMemory(UlyssesError, MemoryError, status=Status.OUT_OF_MEMORY):
    """An allocation failed."""


class CommError(UlyssesError, ConnectionError, status=Status.COMM):
    """The communicator failed, a peer is late or has failed, or the ranks disagree."""


class DeviceError(UlyssesError, RuntimeError, status=Status.DEVICE):
    """A device or its driver failed, or libulysses.so was not found."""


class InputOutputError(UlyssesError, OSError, status=Status.IO):
    """A file could not be read or written."""

    def __str__(self) -> str:  # OSError would print its own number
        return str(self.args[0])


class NumericError(UlyssesError, ArithmeticError, status=Status.NUMERIC):
    """NaN or Inf where a finite number is required."""


class InternalError(UlyssesError, RuntimeError, status=Status.INTERNAL):
    """A bug of the library."""


class Preempted(UlyssesError, RuntimeError, status=Status.PREEMPTED):
    """The scheduler stopped the program before it was finished."""


def error_of(status: int, text: str) -> UlyssesError:
    """Returns the exception for a status, with the library's message."""
    cls = _classes.get(status)
    return cls(text) if cls else UlyssesError(text, status)
