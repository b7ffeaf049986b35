"""Checks of the arguments of Context and of its methods. None of them communicates."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from . import _library, _struct
from .agreement import flag, whole
from .errors import InvalidArgument
from .plan import AttentionOptions, DeltaOptions
from .sequences import Sequences
from .tensors import current_gpu

DEVICES = {"cpu": _struct.CPU, "cuda": _struct.CUDA, None: 0}
TRANSPORTS = {
    "auto": _struct.COMM_AUTO,
    "host": _struct.COMM_HOST,
    "nccl": _struct.COMM_NCCL,
    "ipc": _struct.COMM_IPC,
}
_FLAGS = {
    field.name
    for kind in (AttentionOptions, DeltaOptions)
    for field in fields(kind)
    if field.type == "bool"
}  # options of plans


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
    """Returns the options of a plan. Raises InvalidArgument if a value is of a wrong type."""
    checked = dict(options)
    for name in options.keys() & set(numbers):
        checked[name] = whole(operation, name, options[name], 0)
    for name in options.keys() & _FLAGS:
        checked[name] = flag(operation, name, options[name])
    for name in ("window", "block"):
        pair = options.get(name)
        if pair is None:
            continue
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidArgument(f"{operation}: {name} {pair!r}; give two whole numbers")
        checked[name] = tuple(whole(operation, name, n, -1) for n in pair)
    return checked


def sequences_of(operation: str, sequences: Any) -> Sequences:
    """Returns the lengths and documents of a batch. Raises InvalidArgument if they are none."""
    if not isinstance(sequences, Sequences):
        raise InvalidArgument(
            f"{operation}: sequences is {type(sequences).__name__}; give ulysses.Sequences(batch, "
            "seq)"
        )
    return sequences
