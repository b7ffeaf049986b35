"""Makes calls of the library differentiable in PyTorch.

An operation passes `differentiable` a function that runs its forward pass, and that returns the
function of its backward pass. The module imports PyTorch, so it is imported only for PyTorch
tensors, and it does not depend on any operation.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.autograd.function import once_differentiable

# backward(saved, *grads) returns the gradients of the inputs, from the saved tensors and the
# gradients of the outputs.
Backward = Callable[..., tuple]


def wants_gradient(*tensors: Any) -> bool:
    """Reports whether a tensor needs a gradient. Other arguments may be None, or wrong."""
    return torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in tensors)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
        out, saved, ctx.back = run(*tensors)
        ctx.save_for_backward(*saved)
        if isinstance(out, tuple):  # None, instead of zeros, for an output without a gradient
            ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *ctx.back(ctx.saved_tensors, *grads)


def differentiable(run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
    """Returns the output of run(*tensors), joined to the graph of the tensors.

    Args:
        run: returns (output or tuple of outputs, saved tensors, backward). backward(saved, *grads)
            returns one gradient, or None, for each of the tensors. It must not refer to the saved
            tensors otherwise, because PyTorch's hooks may offload them
        tensors: the inputs; some may be None
    """
    return _Differentiable.apply(run, *tensors)
