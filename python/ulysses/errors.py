"""Statuses of the library as exceptions.

Every exception carries `status`, the number that the C call returned, and the library's sentence: operation, values, remedy.
Each also derives from Python's own class of that meaning, so `except ValueError` catches a wrong argument.
"""

from __future__ import annotations

import enum


class Status(enum.IntEnum):
    """Outcomes of a call: the same numbers in C, and as exit codes of the program."""

    OK = 0
    INVALID_ARGUMENT = 1
    INVALID_CONFIG = 2
    UNSUPPORTED = 3
    OUT_OF_MEMORY = 4
    COMM = 5
    DEVICE = 6
    IO = 7
    NUMERIC = 8
    INTERNAL = 10
    PREEMPTED = 75


class UlyssesError(Exception):
    """Any failure of the library. `status` is its number."""

    status: int = Status.INTERNAL

    def __init__(self, text: str, status: int | None = None):
        super().__init__(text)
        if status is not None:
            self.status = status


class InvalidArgument(UlyssesError, ValueError):
    """A call that cannot be right: a shape, a type, a handle."""

    status = Status.INVALID_ARGUMENT


class InvalidConfig(UlyssesError, ValueError):
    """A configuration or data that cannot be right."""

    status = Status.INVALID_CONFIG


class Unsupported(UlyssesError, NotImplementedError):
    """Right, but not built; refused by name."""

    status = Status.UNSUPPORTED


class OutOfMemory(UlyssesError, MemoryError):
    """Does not fit."""

    status = Status.OUT_OF_MEMORY


class CommError(UlyssesError, ConnectionError):
    """A peer is late, dead or disagrees."""

    status = Status.COMM


class DeviceError(UlyssesError, RuntimeError):
    """A device or its library failed, or no library was found."""

    status = Status.DEVICE


class InputOutputError(UlyssesError, OSError):
    """A file could not be read or written."""

    status = Status.IO

    def __str__(self) -> str:  # OSError would print its own number
        return str(self.args[0])


class NumericError(UlyssesError, ArithmeticError):
    """NaN or infinity where a number is needed."""

    status = Status.NUMERIC


class InternalError(UlyssesError, RuntimeError):
    """A fault of the library itself."""

    status = Status.INTERNAL


class Preempted(UlyssesError, RuntimeError):
    """Stopped in time."""

    status = Status.PREEMPTED


_CLASSES: dict[int, type[UlyssesError]] = {
    int(c.status): c
    for c in (
        InvalidArgument,
        InvalidConfig,
        Unsupported,
        OutOfMemory,
        CommError,
        DeviceError,
        InputOutputError,
        NumericError,
        InternalError,
        Preempted,
    )
}


def error_of(status: int, text: str) -> UlyssesError:
    """The exception for a status, with the library's sentence."""
    cls = _CLASSES.get(status)
    return cls(text) if cls else UlyssesError(text, status)
