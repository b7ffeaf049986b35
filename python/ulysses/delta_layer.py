"""The linear attention layer of Qwen3.5 and Qwen3-Next between its projections."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import _struct
from ._eager import eager
from .agreement import describe, flag, in_order, number, number32, whole
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .plan import Batch, DeltaPlan, Lengths
from .tensors import (
    block,
    compute_dtype_of,
    dense,
    empty,
    is_torch,
    one_library,
    stream_of,
    view,
    wants_gradient,
    without_zero_strides,
)

ACTIVATIONS = ("qkv", "a", "b", "z")
# the weights by their names in the library
WEIGHTS = {"conv_weight": "conv", "A_log": "a_log", "dt_bias": "dt_bias", "norm_weight": "norm"}


@eager
def gated_delta_layer(
    qkv: Any,
    a: Any,
    b: Any,
    conv_weight: Any,
    A_log: Any,
    dt_bias: Any,
    *,
    key_heads: int,
    key_dim: int,
    activation: str = "silu",
    z: Any = None,
    norm_weight: Any = None,
    eps: float = 1e-6,
    scale: float | None = None,
    l2norm: bool = True,
    cu_seqlens: Sequence[int] | None = None,
    seq: int | None = None,
    strategy: str = "auto",
    chunk_size: int = 0,
    context: Context | None = None,
) -> Any:
    """Computes a gated delta rule layer from its projected inputs to the input of out_proj.

    Collective; differentiable in PyTorch. The caller computes the projections, which are local to
    a token. The steps, of value head h::

        q, k, v = silu(causal convolution of qkv over the documents)
        g = -exp(A_log[h]) softplus(a[h] + dt_bias[h]);  beta = sigmoid(b[h])
        o = gated delta rule of q, k, v, g, beta
        out = norm_weight * o / sqrt(mean of squares of o + eps) * silu(z)    # if z is given

    Args:
        qkv: [B, rows, 2*H*K + HV*V], this rank's tokens: q|k|v before the convolution, of H =
            key_heads heads of K = key_dim features for q and k; float32, or bfloat16 if the device
            has it
        a, b: [B, rows, HV]. HV must be a multiple of H. Gates are computed in float32
        conv_weight: [2*H*K + HV*V, W], as in `causal_conv1d`, with W at most 256
        A_log, dt_bias: [HV]. Converted to float32, all other tensors to the dtype of qkv
        key_heads (int), key_dim (int): heads of q and k, and their features
        activation (str): "silu" or "swish", which is the same. Default: "silu"
        z (optional): [B, rows, HV, V], the gate of the norm. Default: None, no norm
        norm_weight (optional): [V], with z. Default: None, ones
        eps (float): of the norm; 0 = 1e-6. Default: 1e-6
        scale (float, optional): factor of q. Default: 1/sqrt(K)
        l2norm (bool): divide q and k by sqrt(sum of squares + 1e-6) of each head. Default: True
        cu_seqlens, seq, strategy, chunk_size, context: as in `chunk_gated_delta_rule`

    Returns:
        out [B, rows, HV, V], with the dtype of qkv.

        The gradients of weights are this rank's share: their sum over the ranks is the gradient.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: another activation, or no kernel of the device has these sizes or options
        CommError: the communicator failed

    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    ctx, operation = current(context), "ulysses.gated_delta_layer"
    weights = dict(conv_weight=conv_weight, A_log=A_log, dt_bias=dt_bias, norm_weight=norm_weight)
    given = dict(qkv=qkv, a=a, b=b, z=z, **weights)

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        v_dim = _check(operation, qkv, a, b, z, weights, key_heads, key_dim)
        if activation not in ("silu", "swish"):
            raise Unsupported(
                f"{operation}: activation {activation!r}; give 'silu', or call causal_conv1d and "
                "chunk_gated_delta_rule"
            )
        lengths = Lengths.of(
            ctx, qkv.shape[0], qkv.shape[1], seq=seq, cu_seqlens=cu_seqlens, ignore_cross=True
        )
        planned = dict(
            qk_heads=key_heads,
            v_heads=a.shape[2],
            qk_dim=key_dim,
            v_dim=v_dim,
            dtype=compute_dtype_of(operation, qkv),
            strategy=strategy,
            scale=None if scale is None else number(operation, "scale", scale),
            l2norm=flag(operation, "l2norm", l2norm),
            chunk=whole(operation, "chunk_size", chunk_size, 0, 1 << 16),
            conv_width=conv_weight.shape[1],
            gated_norm=z is not None,
        )
        same = {
            **planned,
            **lengths.same(),
            **{n: describe(x, free=(1,) * (n in ACTIVATIONS)) for n, x in given.items()},
            "activation": activation,
            "eps": number32(operation, "eps", eps, "1e-6"),
            "gradients": wants_gradient(*given.values()),
        }
        return same, lengths.counts(), (planned, lengths)

    (planned, lengths), counts = ctx.agree(operation, prepare)
    sequences = lengths.sequences(operation, counts)
    plan = ctx._delta_plan(**planned, tokens=sequences.batch * sequences.seq)
    layer = _Layer(plan, ctx._batch(sequences), float(eps) if z is not None else 0.0)
    if z is not None and norm_weight is None:
        given["norm_weight"] = empty(qkv, (plan.v_dim,))
        given["norm_weight"][...] = 1
    tensors = {name: x for name, x in given.items() if x is not None}
    if is_torch(qkv):
        from ._torch import differentiable

        names = list(tensors)
        again = [name for name in names if name in WEIGHTS or name == "z"]  # backward reads them

        def run(*tensors: Any) -> tuple[Any, tuple, Any]:
            inputs = _convert(dict(zip(names, tensors)))
            like = {name: (tuple(x.shape), x.dtype) for name, x in zip(names, tensors)}
            call = ctx.agreed
            out, saved = layer.forward(inputs, save=True)

            def back(saved: tuple, dout: Any) -> tuple:
                shapes = {name: shape for name, (shape, _) in like.items()}
                grads = layer.backward(dict(zip(again, saved[1:])), saved[0], dout, shapes)
                return tuple(grads[name].to(dtype) for name, (_, dtype) in like.items())

            back = in_order(ctx, f"{operation} backward", call, back)
            return out, (saved, *(inputs[name] for name in again)), back

        if wants_gradient(*tensors.values()):
            return differentiable(run, *tensors.values())
    return layer.forward(_convert(tensors), save=False)[0]


def _convert(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors of a layer as the library takes them."""
    qkv, converted = tensors["qkv"], {}
    for name, x in tensors.items():
        gates = name in ("A_log", "dt_bias")
        if is_torch(x):
            x = x.float() if gates else x.to(qkv.dtype)
        else:
            x = np.asarray(x, np.float32 if gates else qkv.dtype)
        converted[name] = dense(x) if name in WEIGHTS else without_zero_strides(x)
    return converted


@dataclass
class _Layer:
    """The calls of the library with a plan and a batch. eps is 0 without a norm."""

    plan: DeltaPlan
    batch: Batch
    eps: float

    def forward(self, inputs: dict[str, Any], save: bool) -> tuple[Any, Any]:
        """Returns the output, and the saved activations or None. Collective."""
        plan, batch, qkv = self.plan, self.batch, inputs["qkv"]
        out = empty(qkv, (*qkv.shape[:2], plan.v_heads, plan.v_dim))
        saved = block(qkv, plan.layer_sizes(batch).saved) if save else None
        self._call("forward", {**inputs, "out": out}, saved)
        return out, saved

    def backward(
        self, inputs: dict[str, Any], saved: Any, dout: Any, shapes: dict[str, tuple]
    ) -> dict[str, Any]:
        """Returns the gradients of these shapes by name, of weights in float32. Collective.

        inputs are the weights, and z if there is a norm.
        """
        grads = {}
        for name, shape in shapes.items():
            grads[name] = empty(dout, shape, _struct.F32 if name in WEIGHTS else None)
            if name in WEIGHTS:
                grads[name][...] = 0  # the library adds to it
        dout = without_zero_strides(dout)
        views = {"dout": view(dout)}
        views.update({"d" + WEIGHTS.get(name, name): view(x) for name, x in grads.items()})
        g = _struct.GDNLayerGrads(**{name: v.pointer() for name, v in views.items()})
        self._call("backward", inputs, saved, ctypes.byref(g))
        return grads

    def _call(self, kind: str, tensors: dict[str, Any], saved: Any, *grads: Any) -> None:
        views = {WEIGHTS.get(name, name): view(x) for name, x in tensors.items()}
        args = _struct.GDNLayerArgs(
            eps=self.eps,
            stream=stream_of(tensors["conv_weight"]),
            **{name: v.pointer() for name, v in views.items()},
        )
        if saved is not None:
            args.saved, args.saved_bytes = view(saved).data, saved.shape[0]
        self.plan.context._call(
            f"ulysses_gdn_layer_{kind}",
            self.plan.handle,
            self.batch.handle,
            ctypes.byref(args),
            *grads,
        )


def _check(
    operation: str,
    qkv: Any,
    a: Any,
    b: Any,
    z: Any,
    weights: dict[str, Any],
    key_heads: int,
    key_dim: int,
) -> int:
    """Raises InvalidArgument for a wrong shape. Returns the features of a value head."""
    one_library(qkv=qkv, a=a, b=b, z=z, **weights)
    shapes = {
        name: tuple(getattr(x, "shape", ()))
        for name, x in (("qkv", qkv), ("a", a), ("b", b), ("z", z), *weights.items())
        if x is not None
    }
    if len(shapes["qkv"]) != 3 or len(shapes["a"]) != 3:
        raise InvalidArgument(
            f"{operation}: qkv has shape {shapes['qkv']} and a {shapes['a']}; give [B, rows, "
            "channels of q|k|v] and [B, rows, value heads]"
        )
    (batch, rows, channels), heads = shapes["qkv"], shapes["a"][2]
    values = channels - 2 * key_heads * key_dim
    if min(key_heads, key_dim, heads, values) < 1 or heads % key_heads or values % heads:
        raise InvalidArgument(
            f"{operation}: qkv has {channels} channels, key_heads is {key_heads}, key_dim "
            f"{key_dim}, and a has {heads} heads; give 2*key_heads*key_dim + heads*features "
            "channels, with heads a multiple of key_heads"
        )
    v_dim = values // heads
    width = shapes["conv_weight"][1] if len(shapes["conv_weight"]) == 2 else 0
    want = {
        "a": (batch, rows, heads),
        "b": (batch, rows, heads),
        "z": (batch, rows, heads, v_dim),
        "conv_weight": (channels, max(width, 1)),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm_weight": (v_dim,),
    }
    for name, shape in shapes.items():
        if shape != want.get(name, shape):
            raise InvalidArgument(
                f"{operation}: {name} has shape {shape}; give {want[name]} for qkv {shapes['qkv']} "
                f"and {heads} value heads"
            )
    if z is None and weights["norm_weight"] is not None:
        raise InvalidArgument(
            f"{operation}: norm_weight is given and z is None; give z, the gate of the norm"
        )
    return v_dim
