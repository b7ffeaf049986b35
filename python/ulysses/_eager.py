"""Keeps torch.compile out of this package's functions."""

from __future__ import annotations

import functools
from typing import Any, Callable, TypeVar

from .tensors import torch_or_none

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Returns the function, which a graph of torch.compile calls and does not trace.

    Calls of the library need the addresses of tensors, and a compiler has none. It therefore ends
    its graph before the call, and begins another one after it. With fullgraph=True it raises.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        compiler = getattr(torch_or_none(), "compiler", None)
        if compiler is None or not compiler.is_compiling():
            return function(*args, **options)
        if not disabled:  # made here, because it imports the compiler
            disabled.append(compiler.disable(function))
        return disabled[0](*args, **options)

    return run  # type: ignore[return-value]
