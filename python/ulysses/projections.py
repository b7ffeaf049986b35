"""Projections before and after attention, which run while their all-to-alls run.

The functions have the names, arguments and order of VeOmni (ByteDance-Seed/VeOmni,
arXiv:2508.02317), which calls this asynchronous Ulysses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

from ._eager import eager
from ._reshards import Reshard
from .agreement import describe, flag, in_order, number
from .context import Context, current
from .errors import InvalidArgument
from .reshard import check_one_group, check_padded, padded_lengths
from .tensors import is_torch

NORMS = ("rmsnorm", "layernorm")


@dataclass(frozen=True)
class Norm:
    """The norm of the heads of q or k, computed in float32 or wider.

    Attributes:
        kind: one of NORMS; None = no norm
        eps: added to the mean square, or to the variance
    """

    kind: str | None
    eps: float

    def forward(self, x: Any, weight: Any, bias: Any) -> Any:
        """Returns the normalized x [.., D]. weight and bias are [D]; the bias may be None."""
        import torch

        if self.kind is None:
            return x
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if self.kind == "layernorm":
            y = torch.nn.functional.layer_norm(wide, (x.shape[-1],), weight, bias, self.eps)
        else:
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * weight
        return y.to(x.dtype)

    def backward(self, dy: Any, x: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
        """Returns the gradients of x, weight and bias. It computes the norm of x again."""
        import torch

        if self.kind is None:
            return dy, None, None
        with torch.enable_grad():
            given = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
            y = self.forward(*given, *[None] * (3 - len(given)))
        dx, dweight, *dbias = torch.autograd.grad(y, given, dy)
        return dx, dweight, dbias[0] if dbias else None


@dataclass(frozen=True)
class Projection:
    """q, k and v of one layer: their reshards from tokens to heads, and the norm of q and k.

    Attributes:
        q, k, v: the reshards; their heads are features
        head_dim: features of a head
        norm: the norm of q and k
        wanted: which of the inputs of `forward` need a gradient
    """

    q: Reshard
    k: Reshard
    v: Reshard
    head_dim: int
    norm: Norm
    wanted: tuple[bool, ...]

    def forward(self, x: Any, *parameters: Any) -> tuple[Any, tuple, Any]:
        """Returns ((q, k, v), saved tensors, backward).

        Args:
            parameters: weight and bias of q, of k and of v, then weight and bias of the norm of q
                and of k
        """
        from torch.nn.functional import linear

        wq, bq, wk, bk, wv, bv, *norms = parameters
        sent_q = self.q.start(linear(x, wq, bq))
        sent_k = self.k.start(linear(x, wk, bk))
        sent_v = self.v.start(linear(x, wv, bv))
        raw_q = self.by_head(sent_q.wait())
        raw_k = self.by_head(sent_k.wait())
        q = self.norm.forward(raw_q, *norms[:2])
        k = self.norm.forward(raw_k, *norms[2:])
        v = self.by_head(sent_v.wait())
        shapes = tuple(t.shape for t in (q, k, v))
        raw = (raw_q, raw_k) if self.norm.kind else (None, None)

        def back(saved: tuple, *grads: Any) -> tuple:
            like = next(g for g in grads if g is not None)
            given = (like.new_zeros(s) if g is None else g for g, s in zip(grads, shapes))
            return self.backward(saved, *given)

        return (q, k, v), (x, wq, wk, wv, *raw, *norms), back

    def backward(self, saved: tuple, dq: Any, dk: Any, dv: Any) -> tuple:
        """Returns the gradients of the inputs of `forward`."""
        x, wq, wk, wv, raw_q, raw_k, *norms = saved
        sent_v = self.v.inverse().start(dv.flatten(-2))
        dk, *dnorm_k = self.norm.backward(dk, raw_k, *norms[2:])
        dq, *dnorm_q = self.norm.backward(dq, raw_q, *norms[:2])
        dv = sent_v.wait()
        sent_k = self.k.inverse().start(dk.flatten(-2))
        dx, *dv_parameters = linear_backward(dv, x, wv, (self.wanted[0], *self.wanted[5:7]))
        dk = sent_k.wait()
        sent_q = self.q.inverse().start(dq.flatten(-2))
        more, *dk_parameters = linear_backward(dk, x, wk, (self.wanted[0], *self.wanted[3:5]))
        dx = dx if more is None else dx.add_(more)
        dq = sent_q.wait()
        more, *dq_parameters = linear_backward(dq, x, wq, self.wanted[:3])
        dx = dx if more is None else dx.add_(more)
        return (dx, *dq_parameters, *dk_parameters, *dv_parameters, *dnorm_q, *dnorm_k)

    def by_head(self, x: Any) -> Any:
        """Returns [.., features] as [.., heads, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim))


def linear_backward(dy: Any, x: Any, weight: Any, wanted: tuple[bool, ...]) -> tuple[Any, Any, Any]:
    """Returns the gradients of x, weight and bias of y = x weight^T + bias; None = not wanted.

    The gradients of weight and bias are sums over all axes but the last one.
    """
    rows = dy.reshape(-1, dy.shape[-1])
    return (
        dy @ weight if wanted[0] else None,
        rows.t() @ x.reshape(-1, x.shape[-1]) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _wanted(*tensors: Any) -> tuple[bool, ...]:
    """Reports for each tensor whether it needs a gradient. Tensors may be None."""
    return tuple(x is not None and x.requires_grad for x in tensors)


def _autocast(tensors: dict[str, Any]) -> dict[str, Any]:
    """Returns the tensors in the dtype of autocast, if it is enabled.

    Parameters of norms and float64 keep their dtype.
    """
    from ._torch import autocasted

    return {
        name: autocasted(t) if is_torch(t) and not name.startswith("norm") else t
        for name, t in tensors.items()
    }


def _differentiable(
    ctx: Context,
    operation: str,
    run: Callable[..., tuple[Any, tuple, Any]],
    tensors: dict[str, Any],
) -> Any:
    """`differentiable` without autocast, which `_autocast` has already applied.

    The ranks have just agreed on the call.
    """
    import torch

    from ._torch import differentiable

    device, number = tensors["hidden_states"].device.type, ctx.agreed

    def without(*given: Any) -> tuple[Any, tuple, Any]:
        with torch.autocast(device, enabled=False):
            out, saved, back = run(*given)

        def back_without(saved: tuple, *grads: Any) -> tuple:
            with torch.autocast(device, enabled=False):
                return back(saved, *grads)

        return out, saved, in_order(ctx, f"{operation} backward", number, back_without)

    return differentiable(without, *tensors.values())


def _check_tensors(operation: str, tensors: dict[str, Any], *optional: str) -> None:
    """Raises if a tensor is missing, is not of PyTorch, or has another dtype than the first.

    Tensors of norms may have another dtype.
    """
    first, like = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x is None and name in optional:
            continue
        if not is_torch(x):
            raise InvalidArgument(
                f"{operation}: {name} is {type(x).__name__}; give a PyTorch tensor"
            )
        dtype = x.dtype if name.startswith("norm") else like.dtype
        if (x.dtype, x.device) != (dtype, like.device):
            raise InvalidArgument(
                f"{operation}: {name} is {x.dtype} on {x.device}, {first} is {like.dtype} on "
                f"{like.device}; give tensors of one dtype on one device"
            )


def _check_shape(operation: str, name: str, x: Any, *shape: int) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise InvalidArgument(f"{operation}: {name} has shape {list(x.shape)}; give {list(shape)}")


def _check_heads(operation: str, ranks: int, head_dim: int, heads: int, kv_heads: int) -> None:
    """Raises if a rank would have a part of a head, or key heads of other ranks' query heads."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise InvalidArgument(
            f"{operation}: q_weight has {heads} heads and k_weight {kv_heads} of head_dim "
            f"{head_dim}; give a multiple of the key heads"
        )
    if heads % ranks or kv_heads % ranks and ranks % kv_heads:
        raise InvalidArgument(
            f"{operation}: {heads} heads and {kv_heads} key heads on {ranks} ranks; give heads "
            "that are a multiple of the ranks, and key heads that are a multiple or a divisor"
        )


def _check_qkv(operation: str, ranks: int, head_dim: int, t: dict[str, Any]) -> None:
    """Raises if a weight, bias or norm does not have the shape of its heads."""
    hidden = t["hidden_states"].shape[-1]
    for x in "qkv":
        weight, bias = t[f"{x}_weight"], t[f"{x}_bias"]
        features = weight.shape[0] if weight.ndim else 0
        if head_dim < 1 or features % head_dim:
            raise InvalidArgument(
                f"{operation}: {x}_weight has {features} rows with head_dim {head_dim}; give a "
                "multiple of head_dim, which is 1 or more"
            )
        _check_shape(operation, f"{x}_weight", weight, features, hidden)
        _check_shape(operation, f"{x}_bias", bias, features)
    _check_shape(operation, "v_weight", t["v_weight"], *t["k_weight"].shape)
    for name in ("norm_q_weight", "norm_q_bias", "norm_k_weight", "norm_k_bias"):
        _check_shape(operation, name, t[name], head_dim)
    heads, kv_heads = (t[f"{x}_weight"].shape[0] // head_dim for x in "qk")
    _check_heads(operation, ranks, head_dim, heads, kv_heads)


def _check_norms(operation: str, norm_type: Any, shape: Any, head_dim: int, t: dict) -> None:
    """Raises for a norm that is not one of heads, and for parameters that it does not have."""
    names = ["norm_q_weight", "norm_k_weight", "norm_q_bias", "norm_k_bias"]
    given = [n for n in names if t[n] is not None]
    if norm_type is not None and norm_type not in NORMS:
        raise InvalidArgument(
            f"{operation}: norm_type {norm_type!r}; give None or one of {', '.join(NORMS)}"
        )
    if norm_type is not None and not {*names[:2]} <= {*given}:
        raise InvalidArgument(
            f"{operation}: norm_type {norm_type!r} without norm_q_weight or norm_k_weight; give "
            "both"
        )
    if norm_type != "layernorm" and {*names[2:]} & {*given} or norm_type is None and given:
        raise InvalidArgument(
            f"{operation}: {', '.join(given)} with norm_type {norm_type!r}, which does not have "
            "all of them; leave them out, or give another norm_type"
        )
    if shape is not None and list(shape if hasattr(shape, "__len__") else (shape,)) != [head_dim]:
        raise InvalidArgument(
            f"{operation}: normalized_shape {shape}; the norms are of single heads, give None or "
            f"{head_dim}"
        )


def _check_axes(operation: str, seq_dim: int, head_dim: int, last: int) -> None:
    if not 0 <= seq_dim < last or head_dim != last:
        raise InvalidArgument(
            f"{operation}: seq_dimension {seq_dim} and head_dimension {head_dim}; give {last} as "
            f"the axis of heads, and an axis from 0 to {last - 1} as the one of tokens"
        )


@eager
def async_ulysses_qkv_projection(
    hidden_states: Any,
    seq_dimension: int,
    head_dimension: int,
    q_weight: Any,
    q_bias: Any,
    k_weight: Any,
    k_bias: Any,
    v_weight: Any,
    v_bias: Any,
    norm_type: str | None = None,
    norm_q_weight: Any = None,
    norm_q_bias: Any = None,
    norm_k_weight: Any = None,
    norm_k_bias: Any = None,
    normalized_shape: Any = None,
    eps: float = 1e-5,
    unpadded_dim_size: int | None = None,
    head_dim: int = 0,
    *,
    padded: bool = True,
    context: Context | None = None,
) -> tuple[Any, Any, Any]:
    """Projects q, k and v, and re-shards them from tokens to heads, for a caller's own attention.

    Collective; differentiable in PyTorch. Each of q, k and v is sent while the next one is
    projected, and their gradients while gradients of weights are computed. How much is hidden
    depends on the transport: the collectives of a `Communicator` are complete when they return.

    Args:
        hidden_states: [.., rows, .., hidden], this rank's tokens, a PyTorch tensor
        seq_dimension (int): the axis of tokens
        head_dimension (int): the last axis of hidden_states, which is the axis of heads of the
            results
        q_weight, k_weight, v_weight: [H*D, hidden], [Hkv*D, hidden] and [Hkv*D, hidden], as in
            torch.nn.Linear. H is a multiple of Hkv and of the ranks; Hkv is a multiple or a
            divisor of the ranks
        q_bias, k_bias, v_bias: [H*D], [Hkv*D] and [Hkv*D], or None
        norm_type (str, optional): "rmsnorm" or "layernorm" of each head of q and k, after the
            all-to-all. Default: None
        norm_q_weight, norm_k_weight: [D], with a norm; any floating-point dtype
        norm_q_bias, norm_k_bias (optional): [D], with "layernorm". Default: None
        normalized_shape (optional): D. Norms over several heads are not possible. Default: None
        eps (float): constant of the norms. Default: 1e-5
        unpadded_dim_size (int, optional): S, as in `gather_seq_scatter_heads`. None or 0 = there
            is no padding. Default: None
        head_dim (int): D
        padded (bool): as in `gather_seq_scatter_heads`. Default: True
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        (q, k, v): q [.., S, .., H / ranks, D], k and v [.., S, .., max(1, Hkv / ranks), D], not
        rotated. With fewer key heads than ranks, ranks / Hkv consecutive ranks have each key head.

        The gradients of weights, biases and norms are this rank's share, from its tokens or its
        heads: their sum over the ranks is the gradient.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the context has a ring, or its device does not add key heads of this dtype
        CommError: the communicator failed
    """
    from ._torch import wants_gradient

    ctx, operation = current(context), "ulysses.async_ulysses_qkv_projection"
    size = unpadded_dim_size or 0
    given = dict(
        hidden_states=hidden_states,
        q_weight=q_weight,
        q_bias=q_bias,
        k_weight=k_weight,
        k_bias=k_bias,
        v_weight=v_weight,
        v_bias=v_bias,
        norm_q_weight=norm_q_weight,
        norm_q_bias=norm_q_bias,
        norm_k_weight=norm_k_weight,
        norm_k_bias=norm_k_bias,
    )
    tensors = _autocast(given)
    x = tensors["hidden_states"]

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        check_one_group(operation, ctx)
        padding = check_padded(operation, padded, size)
        _check_tensors(operation, tensors, *(n for n in tensors if "bias" in n or "norm" in n))
        _check_axes(operation, seq_dimension, head_dimension, x.ndim - 1)
        _check_qkv(operation, ctx.size, head_dim, tensors)
        _check_norms(operation, norm_type, normalized_shape, head_dim, tensors)
        free = {"hidden_states": (seq_dimension,)}
        return (
            {
                **{name: describe(t, free=free.get(name, ())) for name, t in tensors.items()},
                "seq_dimension": seq_dimension,
                "norm_type": norm_type,
                "eps": number(operation, "eps", eps),
                "unpadded_dim_size": size,
                "head_dim": head_dim,
                "padded": padding,
                "gradients": wants_gradient(*tensors.values()),
            },
            (x.shape[seq_dimension],),
            None,
        )

    _, counts = ctx.agree(operation, prepare)
    seq, unpadded = padded_lengths(operation, ctx, [n for (n,) in counts], size, padded)
    q = Reshard(ctx, True, seq_dimension, x.ndim - 1, q_weight.shape[0], seq, unpadded)
    copies = max(1, ctx.size * head_dim // k_weight.shape[0])
    k = replace(q, heads=k_weight.shape[0], copies=copies)
    norm, wanted = Norm(norm_type, float(eps)), _wanted(*tensors.values())
    projection = Projection(q, k, k, head_dim, norm, wanted)
    return _differentiable(ctx, operation, projection.forward, tensors)


@eager
def async_ulysses_output_projection(
    hidden_states: Any,
    seq_dimension: int,
    head_dimension: int,
    proj_weight: Any,
    proj_bias: Any = None,
    unpadded_dim_size: int | None = None,
    *,
    padded: bool = True,
    context: Context | None = None,
) -> Any:
    """Re-shards the output of attention from heads to tokens, and projects it.

    Collective; differentiable in PyTorch. In the backward pass, the gradient of hidden_states is
    sent while the gradients of weight and bias are computed. It is the inverse of
    `async_ulysses_qkv_projection` around attention.

    Args:
        hidden_states: [.., S, .., H / ranks, D] or [.., S, .., H / ranks * D], all tokens of this
            rank's heads, a PyTorch tensor
        seq_dimension (int): the axis of tokens
        head_dimension (int): the axis of heads, or of their features
        proj_weight: [hidden, H*D], as in torch.nn.Linear
        proj_bias (optional): [hidden]. Default: None
        unpadded_dim_size (int, optional): S, for a check. None or 0 = not checked. Default: None
        padded (bool): as in `gather_heads_scatter_seq`. Default: True
        context (Context, optional): Default: the context that ulysses.use has set

    Returns:
        [.., rows, .., hidden], this rank's tokens.

        The gradients of weight and bias are this rank's share: their sum over the ranks is the
        gradient.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: the context has a ring
        CommError: the communicator failed
    """
    from ._torch import wants_gradient

    ctx, operation = current(context), "ulysses.async_ulysses_output_projection"
    size = unpadded_dim_size or 0
    tensors = _autocast(
        dict(hidden_states=hidden_states, proj_weight=proj_weight, proj_bias=proj_bias)
    )
    x = tensors["hidden_states"]

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], Any]:
        check_one_group(operation, ctx)
        _check_tensors(operation, tensors, "proj_bias")
        last = x.ndim - 1
        split = head_dimension == last - 1  # heads and features are two axes
        _check_axes(operation, seq_dimension, head_dimension, last - split)
        features = x.shape[last] * (x.shape[last - 1] if split else 1)
        hidden = proj_weight.shape[0] if proj_weight.ndim else 0
        _check_shape(operation, "proj_weight", proj_weight, hidden, ctx.size * features)
        _check_shape(operation, "proj_bias", proj_bias, hidden)
        if size not in (0, x.shape[seq_dimension]):
            raise InvalidArgument(
                f"{operation}: {x.shape[seq_dimension]} tokens with unpadded_dim_size {size}; give "
                "all tokens without padding"
            )
        return (
            {
                **{name: describe(t) for name, t in tensors.items()},
                "seq_dimension": seq_dimension,
                "head_dimension": head_dimension,
                "padded": flag(operation, "padded", padded),
                "gradients": wants_gradient(*tensors.values()),
            },
            (),
            split,
        )

    split, _ = ctx.agree(operation, prepare)
    seq = x.shape[seq_dimension]
    padding = -seq % ctx.size if padded else 0
    reshard = Reshard(
        ctx, False, seq_dimension, head_dimension, proj_weight.shape[1], seq + padding, seq
    )
    wanted = _wanted(x, proj_weight, proj_bias)

    def run(x: Any, weight: Any, bias: Any) -> tuple[Any, tuple, Any]:
        from torch.nn.functional import linear

        mixed = reshard.run(x.flatten(-2) if split else x)
        shape = x.shape

        def back(saved: tuple, dy: Any) -> tuple:
            mixed, weight = saved
            sent = reshard.inverse().start(dy @ weight)
            _, dweight, dbias = linear_backward(dy, mixed, weight, (False, *wanted[1:]))
            return sent.wait().reshape(shape), dweight, dbias

        return linear(mixed, weight, bias), (mixed, weight), back

    return _differentiable(ctx, operation, run, tensors)
