"""Collective calls agree on their arguments before they communicate.

Each rank first checks its own arguments without communicating. One allgather of 64 bytes a rank
follows. It carries whether the check failed, a digest of the arguments that must be equal, and the
rank's numbers of tokens. If a check fails on one rank, or the arguments differ, the call raises on
every rank. Without this, the other ranks would wait in the collective for a rank that has already
raised.
"""

from __future__ import annotations

import ctypes
import hashlib
import operator
import struct
from collections.abc import Mapping
from typing import Any, Callable, TypeVar

import numpy as np

from . import errors
from .communicator import Communicator, gather_objects
from .errors import CommError, InvalidArgument, UlyssesError
from .tensors import check_layout

_MESSAGE = struct.Struct("<q16s5q")  # 1 if the check failed, digest of the arguments, counts
_COUNTS = 5  # counts in a message
T = TypeVar("T")


def agree(
    comm: Communicator,
    operation: str,
    prepare: Callable[[], tuple[Mapping[str, Any], tuple[int, ...], T]],
) -> tuple[T, list[tuple[int, ...]]]:
    """Runs `prepare` on each rank and compares the results. Collective: one allgather.

    Args:
        comm: the ranks
        operation: the name of the call, for messages
        prepare: checks this rank's arguments without communicating. It returns the arguments by
            name that must be equal on all ranks, up to 5 counts that may differ, and any result

    Returns:
        The result of prepare, and the counts of all ranks in rank order.

    Raises:
        UlyssesError: prepare raised on a rank. That rank raises the same exception; the other ranks
            raise one of the same class, which names the rank: InvalidArgument for a TypeError or
            a ValueError of Python, and CommError for other exceptions
        InvalidArgument: arguments differ. The message names the first one and two ranks
        CommError: the communicator failed
    """
    error: BaseException | None = None
    same: Mapping[str, Any] = {}
    counts: tuple[int, ...] = ()
    result: Any = None
    try:
        same, counts, result = prepare()
        same = {name: plain(value) for name, value in same.items()}
    except Exception as e:
        if comm.size == 1:
            raise
        error = e
    if comm.size == 1:
        return result, [tuple(counts)]
    text = repr((operation, sorted(same.items())))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    send = _MESSAGE.pack(error is not None, digest, *counts, *(0,) * (_COUNTS - len(counts)))
    receive = bytearray(len(send) * comm.size)
    try:
        comm.allgather(memoryview(bytearray(send)), memoryview(receive))
    except UlyssesError:
        raise
    except Exception as e:
        raise CommError(f"{operation}: allgather failed: {type(e).__name__}: {e}") from e
    each = [_MESSAGE.unpack_from(receive, rank * len(send)) for rank in range(comm.size)]
    if any(fault for fault, *_ in each) or len({other for _, other, *_ in each}) > 1:
        _refuse(comm, operation, same, error)
    return result, [message[2 : 2 + len(counts)] for message in each]


def in_order(ctx: Any, operation: str, number: int, back: Callable[..., tuple]) -> Any:
    """Returns a backward pass that first compares the numbers of the ranks' forward passes.

    It raises on every rank if the numbers differ: gradients of one call would otherwise be added to
    the gradients of another one of the same shape.

    Args:
        ctx: the context
        operation: the name of the backward pass, for messages
        number: ctx.agreed after the forward pass
        back: the backward pass, which is collective
    """

    def run(*args: Any) -> tuple:
        ctx.agree(operation, lambda: ({"number of the forward pass": number}, (), None))
        return back(*args)

    return run


def _refuse(
    comm: Communicator, operation: str, same: Mapping[str, Any], error: BaseException | None
) -> None:
    """Raises the failure of a rank, or the difference of arguments, on every rank. Collective."""
    failure = None if error is None else (_class_for_peers(error).__name__, str(error))
    arguments = {name: repr(value) for name, value in same.items()}
    each = gather_objects(comm, (failure, operation, arguments))
    if error is not None:
        raise error
    for rank, (failure, *_) in enumerate(each):
        if failure is not None:
            cls = getattr(errors, failure[0], CommError)  # not found: a class of the program
            raise cls(f"{operation}: rank {rank} of {comm.size} refused the call: {failure[1]}")
    _, first_operation, first = each[0]
    for rank, (_, other_operation, other) in enumerate(each):
        if other_operation != first_operation:
            raise InvalidArgument(
                f"{operation}: rank 0 calls {first_operation}, rank {rank} calls "
                f"{other_operation}; make the same calls in the same order on all ranks"
            )
        for name in [*first, *other]:
            a, b = first.get(name, "not given"), other.get(name, "not given")
            if a != b:
                raise InvalidArgument(
                    f"{operation}: {name} is {_short(a)} on rank 0 and {_short(b)} on rank {rank}; "
                    "give the same on all ranks"
                )
    raise InvalidArgument(f"{operation}: the ranks' arguments differ; give the same on all ranks")


def _class_for_peers(error: BaseException) -> type[UlyssesError]:
    """Returns the class of the exception that a rank's exception raises on the other ranks."""
    if isinstance(error, UlyssesError):
        return type(error)
    return InvalidArgument if isinstance(error, (TypeError, ValueError)) else CommError


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


def plain(x: Any) -> Any:
    """Returns numbers of NumPy as numbers of Python, also in tuples, lists and dictionaries.

    Equal numbers then have equal texts."""
    if isinstance(x, np.generic):
        return x.item()
    if type(x) in (tuple, list):
        return type(x)(plain(value) for value in x)
    if type(x) is dict:
        return {plain(name): plain(value) for name, value in x.items()}
    return x


def whole(operation: str, name: str, x: Any, least: int, most: int = (1 << 63) - 1) -> int:
    """Returns an argument as an int, so that equal numbers of NumPy and Python compare equal.

    Raises InvalidArgument unless it is a whole number from least to most. ctypes would cut a larger
    number to the bits of its field.
    """
    try:
        n = operator.index(x)
    except TypeError:
        n = least - 1
    if not least <= n <= most:
        limit = most if most < 1 << 31 else f"2^{most.bit_length()}-1"
        raise InvalidArgument(
            f"{operation}: {name} {_short(repr(x))}; give a whole number from {least} to {limit}"
        )
    return n


def axis(operation: str, name: str, dim: Any, axes: int) -> int:
    """Returns the number of an axis of an array, which callers may count from the end, from 0.

    Raises InvalidArgument unless it is one of the array's axes.
    """
    try:
        n = operator.index(dim)
    except TypeError:
        n = axes
    if not -axes <= n < axes:
        numbers = f"a whole number from {-axes} to {axes - 1}" if axes else "an array with axes"
        raise InvalidArgument(
            f"{operation}: {name} {_short(repr(dim))} of {axes} axes; give {numbers}"
        )
    return n % axes


def number(operation: str, name: str, x: Any) -> float:
    """Returns an argument as a float.

    Raises InvalidArgument unless it is one number, and for a tensor that needs a gradient, which it
    would not get.
    """
    if getattr(x, "requires_grad", False):
        raise InvalidArgument(
            f"{operation}: {name} is a tensor that needs a gradient, which it would not get; give "
            f"{name}.item(), or compute with it outside of the call"
        )
    try:
        return float(x)
    except (TypeError, ValueError, RuntimeError, OverflowError) as e:
        raise InvalidArgument(f"{operation}: {name} {_short(repr(x))}; give a number") from e


def number32(operation: str, name: str, x: Any, zero: str) -> float:
    """Returns an argument that the library takes as a float32, in which 0 means `zero`.

    Raises InvalidArgument unless it is one number, or if only its float32 is 0.
    """
    value = number(operation, name, x)
    if value and ctypes.c_float(value).value == 0:
        raise InvalidArgument(
            f"{operation}: {name} {value} is 0 in float32; give a larger number, or 0 for {zero}"
        )
    return value


def flag(operation: str, name: str, x: Any) -> bool:
    """Returns an argument as a bool. None is False.

    Raises InvalidArgument unless it is true or false: a text such as "no" would count as true.
    """
    try:
        value = bool(x)
        known = x is None or bool(x == value)
    except (TypeError, ValueError, RuntimeError):  # an array of several elements
        known = False
    if not known:
        raise InvalidArgument(f"{operation}: {name} {_short(repr(x))}; give True or False")
    return value


def describe(x: Any, *, free: tuple[int, ...] = ()) -> Any:
    """Returns the dtype, device and shape of an array, which ranks compare; None for None.

    The extents of the axes in `free` may differ between ranks, so "rows" replaces them. It raises
    for an array whose memory the library cannot read, such as a sparse tensor.
    """
    if x is None:
        return None
    check_layout(x)
    shape = tuple(getattr(x, "shape", ()))
    free = tuple(i % len(shape) for i in free) if shape else ()
    device = getattr(getattr(x, "device", None), "type", "cpu")
    return (
        str(getattr(x, "dtype", type(x).__name__)).removeprefix("torch."),
        device,
        tuple("rows" if i in free else int(n) for i, n in enumerate(shape)),
    )
