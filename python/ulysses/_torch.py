"""Makes the library's calls differentiable for PyTorch's autograd.

This module knows no operation. An operation gives `differentiable` a function that runs its forward
pass and returns how to go backward. Import it only if the host uses PyTorch.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.autograd.function import once_differentiable

# Runs backward: from the saved tensors and the gradients of the outputs to the gradients of the
# inputs.
Backward = Callable[..., tuple]


def wants_gradient(*tensors: Any) -> bool:
    """Whether a backward pass may follow a call with these tensors, of which some may be None."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
        out, saved, ctx.back = run(*tensors)
        ctx.save_for_backward(*saved)
        if isinstance(out, tuple):  # an output without a gradient gets None instead of zeros
            ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.back(ctx.saved_tensors, *grads)


def differentiable(run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
    """Calls run(*tensors) and joins its result to the graph of the tensors.

    run returns (output or tuple of outputs, saved tensors, backward), where backward(saved, *grads)
    returns one gradient or None for each of the tensors. PyTorch's hooks may offload the saved
    tensors, so backward itself must not refer to them.
    """
    return _Differentiable.apply(run, *tensors)
