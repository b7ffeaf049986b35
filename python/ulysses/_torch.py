"""Makes calls of the library differentiable in PyTorch.

An operation passes `differentiable` a function that runs its forward pass, and that returns the
function of its backward pass. The module imports PyTorch, so it is imported only for PyTorch
tensors, and it does not depend on any operation.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.autograd import forward_ad

from .errors import Unsupported

if not hasattr(torch, "get_autocast_dtype"):
    raise Unsupported(
        f"ulysses: PyTorch {torch.__version__} is too old; install torch 2.4 or newer"
    )

# backward(saved, *grads) returns the gradients of the inputs, from the saved tensors and the
# gradients of the outputs.
Backward = Callable[..., tuple]


def autocasted(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype of autocast, if it is enabled. float64 stays float64."""
    device = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return x
    return x.to(torch.get_autocast_dtype(device))


def wants_gradient(*tensors: Any) -> bool:
    """Reports whether a tensor needs a gradient. Other arguments may be None, or wrong.

    A tensor with a tangent of forward-mode differentiation also counts: autograd then refuses the
    call. Otherwise the result would have no tangent.
    """
    given = [x for x in tensors if isinstance(x, torch.Tensor)]
    return (torch.is_grad_enabled() and any(x.requires_grad for x in given)) or any(
        forward_ad.unpack_dual(x).tangent is not None for x in given
    )


class _Once(torch.autograd.Function):
    """Returns gradients whose own backward pass raises Unsupported."""

    @staticmethod
    def forward(ctx: Any, *grads: Any) -> Any:
        return tuple(g.detach() for g in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise Unsupported(
            "ulysses: second derivatives are not implemented; call backward without "
            "create_graph=True, or compute this part of the model with PyTorch's functions"
        )


def once(grads: tuple) -> tuple:
    """Returns the gradients of a backward pass that cannot be differentiated again.

    With create_graph=True, they would be constants to autograd if the gradient of the output is a
    constant, as of a sum. Second derivatives would then be 0 without an error.
    """
    if not torch.is_grad_enabled():
        return grads
    given = [g.detach().requires_grad_() for g in grads if g is not None]
    marked = iter(_Once.apply(*given) if given else ())
    return tuple(None if g is None else next(marked) for g in grads)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
        out, saved, ctx.back = run(*tensors)
        ctx.save_for_backward(*saved)
        if isinstance(out, tuple):  # None, instead of zeros, for an output without a gradient
            ctx.set_materialize_grads(False)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        with torch.no_grad():
            result = None, *ctx.back(saved, *grads)
        # Without saved tensors, the gradients depend on nothing but `grads`.
        depends = saved or any(g is not None and g.requires_grad for g in grads)
        return once(result) if depends else result


def differentiable(run: Callable[..., tuple[Any, tuple, Backward]], *tensors: Any) -> Any:
    """Returns the output of run(*tensors), joined to the graph of the tensors.

    Args:
        run: returns (output or tuple of outputs, saved tensors, backward). backward(saved, *grads)
            returns one gradient, or None, for each of the tensors. It must not refer to the saved
            tensors otherwise, because PyTorch's hooks may offload them
        tensors: the inputs; some may be None
    """
    return _Differentiable.apply(run, *tensors)
