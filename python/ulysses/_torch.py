"""PyTorch's autograd around the calls. Imported where tensors are PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .attention import Call, attention_backward, attention_forward
from .gdn import DeltaCall, gated_delta_rule_backward, gated_delta_rule_forward
from .reshard import reduce_loss


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, options: dict) -> Any:
        out, _, call = attention_forward(q, k, v, save=True, **options)
        ctx.save_for_backward(call.saved)  # so that hooks may offload it
        call.saved = None
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any) -> Any:
        call = ctx.call
        dq, dk, dv = attention_backward(Call(call.plan, call.batch, call.layout, ctx.saved_tensors[0], call.shapes), dout)
        return dq, dk, dv, None


def attention(q: Any, k: Any, v: Any, options: dict) -> Any:
    # Nothing is saved where nobody will go backward.
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _Attention.apply(q, k, v, options)
    return attention_forward(q, k, v, save=False, **options)[0]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, options: dict) -> Any:
        out, final, call = gated_delta_rule_forward(q, k, v, g, beta, initial_state=initial_state, save=True, **options)
        ctx.save_for_backward(call.saved, call.initial_state)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.batch, ctx.shape, ctx.like = call.plan, call.batch, out.shape, out.new_empty(0)
        ctx.dtypes = [None if x is None else x.dtype for x in (g, beta, initial_state)]
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dfinal: Any) -> Any:
        saved, initial = ctx.saved_tensors
        do = ctx.like.new_zeros(ctx.shape) if do is None else do
        dq, dk, dv, *rest = gated_delta_rule_backward(DeltaCall(ctx.plan, ctx.batch, saved, initial), do, dfinal)
        return dq, dk, dv, *(x if x is None else x.to(t) for x, t in zip(rest, ctx.dtypes)), None


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, options: dict) -> Any:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state)):
        return _DeltaRule.apply(q, k, v, g, beta, initial_state, options)
    return gated_delta_rule_forward(q, k, v, g, beta, initial_state=initial_state, save=False, **options)[:2]


class _Reshard(torch.autograd.Function):
    """Sequence to heads or heads to sequence: each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Any, move: Any) -> Any:
        ctx.move = move
        return move.run(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any) -> Any:
        return ctx.move.back().run(dout), None


class _Finish(torch.autograd.Function):
    """The wait of a reshard that was started: joins its result to the graph of its input."""

    @staticmethod
    def forward(ctx: Any, x: Any, move: Any, request: Any) -> Any:
        ctx.move = move
        return request.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any) -> Any:
        return ctx.move.back().run(dout), None, None


def reshard(x: Any, move: Any) -> Any:
    return _Reshard.apply(x, move)


def finish(x: Any, move: Any, request: Any) -> Any:
    return _Finish.apply(x, move, request)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Any, count: Any, context: Any, factor: float) -> Any:
        mean, own, total = reduce_loss(float(loss.detach()), int(count), context)
        ctx.scale = factor * own / max(total, 1)
        return loss.new_tensor(mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.scale, None, None, None


def loss(value: Any, count: Any, context: Any, factor: float) -> Any:
    return _Loss.apply(value, count, context, factor)
