"""PyTorch's autograd around the calls. Imported where tensors are PyTorch's."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ._tiled import leaves
from .attention import Call, attention_backward, attention_forward
from .errors import InvalidArgument
from .gdn import DeltaCall, gated_delta_rule_backward, gated_delta_rule_forward
from .halo import exchange
from .layer import (
    WEIGHTS,
    LayerCall,
    LocalCall,
    LocalTensors,
    attention_layer_backward,
    attention_layer_forward,
    local_attention_backward,
    local_attention_forward,
)
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
        dq, dk, dv = attention_backward(
            Call(call.plan, call.batch, call.layout, ctx.saved_tensors[0], call.shapes), dout
        )
        return dq, dk, dv, None


def attention(q: Any, k: Any, v: Any, options: dict) -> Any:
    # Nothing is saved where nobody will go backward.
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _Attention.apply(q, k, v, options)
    return attention_forward(q, k, v, save=False, **options)[0]


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, options: dict
    ) -> Any:
        out, final, call = gated_delta_rule_forward(
            q, k, v, g, beta, initial_state=initial_state, save=True, **options
        )
        ctx.save_for_backward(call.saved, call.initial_state)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.batch, ctx.shape, ctx.like = (
            call.plan,
            call.batch,
            out.shape,
            out.new_empty(0),
        )
        ctx.dtypes = [None if x is None else x.dtype for x in (g, beta, initial_state)]
        return out, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Any, dfinal: Any) -> Any:
        saved, initial = ctx.saved_tensors
        do = ctx.like.new_zeros(ctx.shape) if do is None else do
        dq, dk, dv, *rest = gated_delta_rule_backward(
            DeltaCall(ctx.plan, ctx.batch, saved, initial), do, dfinal
        )
        return dq, dk, dv, *(x if x is None else x.to(t) for x, t in zip(rest, ctx.dtypes)), None


def delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, options: dict) -> Any:
    if torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in (q, k, v, g, beta, initial_state)
    ):
        return _DeltaRule.apply(q, k, v, g, beta, initial_state, options)
    return gated_delta_rule_forward(
        q, k, v, g, beta, initial_state=initial_state, save=False, **options
    )[:2]


class _Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, n: int, context: Any, batch: Any) -> Any:
        ctx.n, ctx.context, ctx.batch, ctx.shape = n, context, batch, x.shape
        out = x.new_empty((x.shape[0], abs(n), *x.shape[2:]))
        exchange(context, batch, x.contiguous(), out, n, True)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhalo: Any) -> Any:
        dx = dhalo.new_zeros(ctx.shape)
        exchange(ctx.context, ctx.batch, dx, dhalo.contiguous(), ctx.n, False)
        return dx, None, None, None


def halo(x: Any, n: int, context: Any, batch: Any) -> Any:
    return _Halo.apply(x, n, context, batch)


def causal_conv1d(
    x: Any, weight: Any, bias: Any, activation: str | None, context: Any, batch: Any
) -> Any:
    """halo.causal_conv1d on a batch that the ranks have agreed on."""
    width, rows = weight.shape[1], x.shape[1]
    longer = torch.cat([halo(x, width - 1, context, batch), x], 1) if width > 1 else x
    at = torch.tensor(batch.positions(), dtype=torch.int64).reshape(
        x.shape[0], rows
    )  # inside its document
    # The halo is already zero before the document of the first row. Only documents that start at a
    # later row need a mask.
    if rows == 0:
        y = x * 1
    elif bool((at[:, 1:] >= 1).all()):
        y = torch.nn.functional.conv1d(
            longer.transpose(1, 2), weight[:, None].to(x.dtype), groups=x.shape[2]
        ).transpose(1, 2)
    else:
        at = at.to(x.device)[:, :, None]
        y = sum(
            torch.where(at >= j, longer[:, width - 1 - j : width - 1 - j + rows], 0)
            * weight[:, width - 1 - j].to(x.dtype)
            for j in range(width)
        )
    y = y if bias is None else y + bias.to(x.dtype)
    return y if activation is None else torch.nn.functional.silu(y)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: dict, names: tuple, *tensors: Any) -> Any:
        y, call = attention_layer_forward(**dict(zip(names, tensors)), **options)
        ctx.save_for_backward(call.saved, *(call.inputs[name] for name in names))
        ctx.plan, ctx.batch, ctx.names, ctx.eps = call.plan, call.batch, names, call.eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> Any:
        saved, *tensors = ctx.saved_tensors
        inputs = {**dict.fromkeys(("x", *WEIGHTS, "cos", "sin")), **dict(zip(ctx.names, tensors))}
        grads = attention_layer_backward(LayerCall(ctx.plan, ctx.batch, saved, inputs, ctx.eps), dy)
        return (
            None,
            None,
            *(grads[name].to(inputs[name].dtype) if name in grads else None for name in ctx.names),
        )


def attention_layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, options: dict) -> Any:
    tensors = {
        "x": x,
        "wq": wq,
        "wk": wk,
        "wv": wv,
        "wo": wo,
        **{n: options[n] for n in (*WEIGHTS[4:], "cos", "sin") if options.get(n) is not None},
    }
    rest = {n: v for n, v in options.items() if n not in tensors}
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors.values()):
        return _Layer.apply(rest, tuple(tensors), *tensors.values())
    return attention_layer_forward(**tensors, save=False, **rest)[0]


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, function: Any, options: dict) -> Any:
        out, call = local_attention_forward(q, k, v, lambda t: _write(t, function), **options)
        ctx.save_for_backward(call.saved)
        call.saved = None
        ctx.call, ctx.function = call, function
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any) -> Any:
        def back(t: LocalTensors) -> None:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (t.q, t.k, t.v)]
                out = ctx.function(*inputs)
                lost = [
                    tuple(x.shape) for x in leaves(out, 0) if all(x is not own for own in inputs)
                ]
                if lost:
                    raise InvalidArgument(
                        f"ulysses.local_attention: the function uses tensors of shapes {lost} that need a gradient, and q, k and v alone get one: detach them"
                    )
                grads = torch.autograd.grad(out, inputs, t.dout, allow_unused=True)
            for to, grad in zip((t.dq, t.dk, t.dv), grads):
                to.zero_() if grad is None else to.copy_(grad)

        c = ctx.call
        return (
            *local_attention_backward(
                LocalCall(c.plan, c.batch, c.layout, ctx.saved_tensors[0], c.shapes), dout, back
            ),
            None,
            None,
        )


def _write(t: LocalTensors, function: Any) -> None:
    with torch.no_grad():
        t.out.copy_(function(t.q, t.k, t.v))


def local_attention(q: Any, k: Any, v: Any, function: Any, options: dict) -> Any:
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        return _Local.apply(q, k, v, function, options)
    return local_attention_forward(q, k, v, lambda t: _write(t, function), save=False, **options)[0]


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
