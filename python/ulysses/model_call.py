"""The call of a transformers model that is running in a thread. Its layers read it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ._eager import eager
from .context import Context
from .errors import Unsupported
from .sequences import Sequences

KEY = "ulysses_forward"  # keyword under which layers receive the Forward of their model's call
# The argument of a model or layer that has its cache, in the versions of transformers.
_CACHES = ("past_key_values", "cache", "cache_params")
# The attributes in which layers of transformers and PyTorch's CheckpointWrapper have the function
# that checkpoints them.
_CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
_in_call: weakref.WeakSet = weakref.WeakSet()  # layers whose last forward pass was in a call
_thread = threading.local()


@dataclass
class Forward:
    """One call of a model, after the ranks have agreed on its arguments.

    Attributes:
        context: the ranks
        sequences: lengths and documents
        rows: tokens of each sequence on this rank
        past: tokens in the key-value cache; 0 on several ranks
        model: the model; None = the call of every layer
        windows: the windows of the masks that the model has asked for; None = of one without
        mixed: a layer has called this package
    """

    context: Context
    sequences: Sequences
    rows: int
    past: int = 0
    model: Any = None
    windows: set[int | None] = field(default_factory=set)
    mixed: bool = False

    def runs(self, model: Any) -> bool:
        """Reports whether the call runs a model, as itself or as one of its modules."""
        return self.model is None or any(m is model for m in self.model.modules())

    def check_masks(self) -> None:
        """Raises Unsupported if the model has asked for a mask, and no layer has called this
        package, which makes masks itself: then layers have computed without the mask."""
        if self.windows and not self.mixed:
            raise Unsupported(
                f"ulysses: {type(self.model).__name__}: its layers do not call the attention "
                "function of transformers, so they have no mask; load the model with "
                "attn_implementation='eager'"
            )


def inside() -> Forward | None:
    """Returns the model's call that is running in this thread, or None."""
    return getattr(_thread, "forward", None)


@contextlib.contextmanager
def entered(forward: Forward | None) -> Iterator[None]:
    """Sets the model's call of this thread, or that there is none, inside a with statement."""
    before = inside()
    _thread.forward = forward
    try:
        yield
    finally:
        _thread.forward = before


@eager
def call_of(layer: Any, options: dict[str, Any]) -> Forward | None:
    """Returns the call of the model in which a layer runs, or None. It removes KEY from options.

    Raises:
        Unsupported: the layer runs again in backward, and its call is not known
    """
    import torch

    call = options.pop(KEY, None) or inside()
    if call is not None:
        call.mixed = True
    if torch._C._current_graph_task_id() == -1:  # not in backward
        (_in_call.discard if call is None else _in_call.add)(layer)
    elif call is None and layer in _in_call:
        name = type(layer).__name__
        raise Unsupported(
            f"ulysses: {name} runs again in backward without the documents of its model's call, "
            "because this version of the model does not pass keyword arguments to its layers; call "
            "model.gradient_checkpointing_enable() instead of torch.utils.checkpoint"
        )
    return call


def cache_of(given: Mapping[str, Any]) -> Any:
    """Returns the cache among the arguments of a model or a layer, or None.

    An argument with the method of transformers' caches is one under every name.
    """
    for name, x in given.items():
        if x is not None and (name in _CACHES or hasattr(x, "get_seq_length")):
            return x
    return None


@contextlib.contextmanager
def running_again(model: Any, forward: Forward) -> Iterator[None]:
    """Layers that gradient checkpointing runs again in backward have the call of their model.

    Not all versions of transformers pass a model's keyword arguments to all of its layers, and
    in backward no call of the model is running. Inside the with statement, the functions that
    checkpoint layers therefore note the call.
    """
    kept = [
        (m, name, vars(m)[name])
        for m in model.modules()
        for name in _CHECKPOINTS
        if name in vars(m)
    ]
    for m, name, function in kept:
        setattr(m, name, _with_call(function, forward))
    try:
        yield
    finally:
        for m, name, function in kept:
            setattr(m, name, function)


def _with_call(checkpoint: Callable[..., Any], forward: Forward) -> Callable[..., Any]:
    """Returns a function that checkpoints a layer and runs it in a call of its model."""

    def run(layer: Callable[..., Any], *args: Any, **options: Any) -> Any:
        def in_call(*args: Any, **options: Any) -> Any:
            with entered(forward):
                return layer(*args, **options)

        return checkpoint(in_call, *args, **options)

    return run
