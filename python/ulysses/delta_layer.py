"""The linear attention layer of Qwen3.5 and Qwen3-Next between its projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .agreement import describe
from .context import Context, current
from .errors import InvalidArgument
from .gdn import chunk_gated_delta_rule
from .halo import ACTIVATIONS, causal_conv1d
from .plan import Lengths
from .tensors import is_torch, one_library


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
    conv_bias: Any = None,
    activation: str | None = "silu",
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

        q, k, v = activation(causal convolution of qkv over the documents)
        g = -exp(A_log[h]) softplus(a[h] + dt_bias[h]);  beta = sigmoid(b[h])
        o = gated delta rule of q, k, v, g, beta
        out = norm_weight * o / sqrt(mean of squares of o + eps) * silu(z)    # if z is given

    Args:
        qkv: [B, rows, 2*H*K + HV*V], this rank's tokens: q|k|v before the convolution, of H =
            key_heads heads of K = key_dim features for q and k; float32, or bfloat16 if the device
            has it
        a, b: [B, rows, HV]. HV must be a multiple of H. Gates are computed in float32
        conv_weight: [2*H*K + HV*V, W], as in `causal_conv1d`
        A_log, dt_bias: [HV]
        key_heads (int), key_dim (int): heads of q and k, and their features
        conv_bias (optional): [2*H*K + HV*V]. Default: None
        activation (str, optional): as in `causal_conv1d`. Default: "silu"
        z (optional): [B, rows, HV, V], the gate of the norm. Default: None, no norm
        norm_weight (optional): [V], with z. Default: None, ones
        eps (float): of the norm. Default: 1e-6
        scale (float, optional): factor of q. Default: 1/sqrt(K)
        l2norm (bool): divide q and k by sqrt(sum of squares + 1e-6) of each head. Default: True
        cu_seqlens, seq, strategy, chunk_size, context: as in `chunk_gated_delta_rule`

    Returns:
        out [B, rows, HV, V], with the dtype of qkv. The gradients of weights come from
        this rank's tokens: sum them over the ranks.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: no kernel of the device has these sizes or options
        CommError: the communicator failed

    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    ctx, operation = current(context), "ulysses.gated_delta_layer"
    weights = dict(
        conv_weight=conv_weight,
        A_log=A_log,
        dt_bias=dt_bias,
        conv_bias=conv_bias,
        norm_weight=norm_weight,
    )

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], int]:
        v_dim = _check(operation, qkv, a, b, z, weights, key_heads, key_dim)
        if activation not in ACTIVATIONS:
            raise InvalidArgument(
                f"{operation}: activation {activation!r}; give one of "
                f"{', '.join(map(repr, ACTIVATIONS))}"
            )
        lengths = Lengths.of(ctx, qkv.shape[0], qkv.shape[1], seq=seq, cu_seqlens=cu_seqlens)
        same = {
            **lengths.same(),
            **{name: describe(x) for name, x in weights.items()},
            **{n: describe(x, free=(1,)) for n, x in (("qkv", qkv), ("a", a), ("b", b), ("z", z))},
            "key_heads": key_heads,
            "key_dim": key_dim,
            "activation": activation,
            "eps": float(eps),
        }
        return same, lengths.counts(), v_dim

    v_dim, _ = ctx.agree(operation, prepare)
    documents: dict[str, Any] = dict(seq=seq, cu_seqlens=cu_seqlens, context=ctx)
    mixed = causal_conv1d(qkv, conv_weight, conv_bias, activation, **documents)
    keys = key_heads * key_dim
    head = tuple(qkv.shape[:2])
    q, k, v = (
        mixed[..., lo:hi].reshape(*head, -1, d)
        for lo, hi, d in (
            (0, keys, key_dim),
            (keys, 2 * keys, key_dim),
            (2 * keys, mixed.shape[-1], v_dim),
        )
    )
    g, beta = _gates(a, b, A_log, dt_bias)
    out, _ = chunk_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        use_qk_l2norm_in_kernel=l2norm,
        strategy=strategy,
        chunk_size=chunk_size,
        **documents,
    )
    return out if z is None else _gated_norm(out, z, norm_weight, eps)


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
        "conv_bias": (channels,),
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


def _gates(a: Any, b: Any, A_log: Any, dt_bias: Any) -> tuple[Any, Any]:
    """Returns (g, beta) [B, rows, HV]: the logarithm of the decay, and the factor of the update."""
    if is_torch(a):
        import torch

        g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
        return g, b.sigmoid()
    a, A_log, dt_bias = (np.asarray(x, np.float32) for x in (a, A_log, dt_bias))
    g = -np.exp(A_log) * np.logaddexp(a + dt_bias, np.float32(0))
    return g, 1 / (1 + np.exp(-np.asarray(b, np.float32)))


def _gated_norm(x: Any, z: Any, weight: Any, eps: float) -> Any:
    """Returns weight * x / sqrt(mean of squares + eps) * silu(z) over the last axis, in float32."""
    if is_torch(x):
        import torch

        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
        y = y if weight is None else weight * y.to(x.dtype)
        return (y * torch.nn.functional.silu(z.float())).to(x.dtype)
    y, gate = np.asarray(x, np.float32), np.asarray(z, np.float32)
    y = y / np.sqrt(np.square(y).mean(-1, keepdims=True) + np.float32(eps))
    y = y if weight is None else y * weight
    return (y * gate / (1 + np.exp(-gate))).astype(x.dtype)
