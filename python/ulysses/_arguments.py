"""Checks of the arguments of Context and of its methods. None of them communicates."""

from __future__ import annotations

from typing import Any

from . import _library, _struct
from .agreement import whole
from .errors import InvalidArgument
from .plan import Sequences
from .tensors import current_gpu

DEVICES = {"cpu": _struct.CPU, "cuda": _struct.CUDA, None: 0}
TRANSPORTS = {
    "auto": _struct.COMM_AUTO,
    "host": _struct.COMM_HOST,
    "nccl": _struct.COMM_NCCL,
    "ipc": _struct.COMM_IPC,
}


def context_options(
    device: Any, ordinal: Any, way: Any, threads: Any, log: Any, **mesh: Any
) -> _struct.Options:
    """Returns the options of a context as the library takes them.

    mesh: ulysses, ring and timeout.
    """
    operation = "ulysses.Context"
    if device not in tuple(DEVICES):  # a tuple, because a list has no hash
        raise InvalidArgument(f"{operation}: device {device!r}; give 'cpu' or 'cuda'")
    if way not in tuple(TRANSPORTS):
        raise InvalidArgument(f"{operation}: way {way!r}; give one of {', '.join(TRANSPORTS)}")
    if log is not None and not callable(log):
        raise InvalidArgument(
            f"{operation}: log is {type(log).__name__}; give a function of (level, line), or None"
        )
    gpu = ordinal if ordinal is not None else current_gpu() if device == "cuda" else 0
    numbers = {
        name: whole(operation, name, n, 0, (1 << 31) - 1)
        for name, n in {"ordinal": gpu, "threads": threads, **mesh}.items()
    }
    _library.library()
    return _struct.Options(device=DEVICES[device], comm=TRANSPORTS[way], **numbers)


def plan_options(operation: str, options: dict[str, Any], numbers: tuple[str, ...]) -> dict:
    """Returns the options of a plan. Raises InvalidArgument for wrong numbers, window or block."""
    for name in numbers:
        whole(operation, name, options.get(name, 0), 0)
    for name in ("window", "block"):
        pair = options.get(name)
        if pair is None:
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgument(f"{operation}: {name} {pair!r}; give two whole numbers")
        for n in pair:
            whole(operation, name, n, -1)
    return options


def sequences_of(operation: str, sequences: Any) -> Sequences:
    """Returns the lengths and documents of a batch. Raises InvalidArgument if they are none."""
    if not isinstance(sequences, Sequences):
        raise InvalidArgument(
            f"{operation}: sequences is {type(sequences).__name__}; give ulysses.Sequences(batch, "
            "seq)"
        )
    return sequences
