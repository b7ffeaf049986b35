"""Whole attention layers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from . import _struct
from ._eager import eager
from .agreement import describe, flag, number32
from .attention import check_gradient
from .context import Context, current
from .errors import InvalidArgument
from .options import OptionTensors, draw_seed, plan_options, same_options
from .plan import Batch, Lengths, Plan
from .tensors import (
    block as memory,
)
from .tensors import (
    dense,
    empty,
    is_torch,
    one_library,
    stream_of,
    view,
)

WEIGHTS = ("wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo", "q_norm", "k_norm")
PARAMETERS = (*WEIGHTS, "sinks", "alibi")  # what has a gradient besides x
INPUTS = ("x", *PARAMETERS, "cos", "sin", "block_mask")


@dataclass
class LayerCall:
    """The result of a layer's forward pass that its backward pass needs.

    Attributes:
        plan, batch: the plan and the batch of the call
        saved: saved activations as plain bytes; None if the forward pass had save=False
        inputs: x, the parameters, cos, sin and the block mask by name
        eps: the constant of the RMS norms
        seed: of dropout, equal on all ranks
        number: of the forward pass among the calls of the context, equal on all ranks
    """

    plan: Plan
    batch: Batch
    saved: Any
    inputs: dict[str, Any]
    eps: float
    seed: int = 0
    number: int = 0


def _args(call: LayerCall) -> tuple[_struct.AttentionLayerArgs, _struct.Sizes, list[Any]]:
    """Returns the arguments of a call, the sizes of its memory, and the views to keep alive."""
    inputs = call.inputs
    views = {name: view(x) for name, x in inputs.items() if x is not None}
    args = _struct.AttentionLayerArgs(
        hidden=inputs["x"].shape[2],
        eps=call.eps,
        stream=stream_of(inputs["x"]),
        dropout_seed=call.seed,
        **{name: v.pointer() for name, v in views.items()},
    )
    sizes = _struct.Sizes()
    call.plan.context._call(
        "ulysses_attention_layer_sizes",
        call.plan.handle,
        call.batch.handle,
        ctypes.byref(args),
        ctypes.byref(sizes),
    )
    return args, sizes, list(views.values())


@eager
def attention_layer_forward(
    x: Any,
    wq: Any,
    wk: Any,
    wv: Any,
    wo: Any,
    *,
    heads: int,
    kv_heads: int = 0,
    bq: Any = None,
    bk: Any = None,
    bv: Any = None,
    bo: Any = None,
    q_norm: Any = None,
    k_norm: Any = None,
    cos: Any = None,
    sin: Any = None,
    eps: float = 0.0,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    seq: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    deterministic: bool = False,
    overlap: bool = False,
    softcap: float = 0.0,
    sinks: Any = None,
    alibi: Any = None,
    block_mask: Any = None,
    block: int | tuple[int, int] | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    save: bool = True,
    context: Context | None = None,
) -> tuple[Any, LayerCall]:
    """Computes an attention layer, and returns what the backward pass needs. Collective.

    Args:
        save (bool): save the activations that `attention_layer_backward` needs. Default: True

    `attention_layer` describes the other arguments.

    Returns:
        (y, call): y [B, rows, hidden], and the `LayerCall` for `attention_layer_backward`.

    Raises:
        InvalidArgument, Unsupported, CommError: as in `attention_layer`
    """
    o = SimpleNamespace(**locals())
    ctx, operation = current(context), "ulysses.attention_layer"
    given = {name: getattr(o, name) for name in INPUTS}

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], tuple[dict[str, Any], Lengths]]:
        for name in ("x", *WEIGHTS[:4]):
            if not hasattr(given[name], "shape"):
                raise InvalidArgument(
                    f"{operation}: {name} is {type(given[name]).__name__}, not an array; give "
                    "NumPy arrays or PyTorch tensors"
                )
        one_library(**given)
        if len(x.shape) != 3 or heads < 1 or len(wq.shape) != 2 or len(wv.shape) != 2:
            raise InvalidArgument(
                f"{operation}: x {tuple(x.shape)}, wq {tuple(wq.shape)}, wv {tuple(wv.shape)}, "
                f"{heads} heads; give x [B, rows, hidden] and weights [heads * features, hidden]"
            )
        kv = kv_heads or heads
        if wq.shape[0] % heads or wv.shape[0] % kv:
            raise InvalidArgument(
                f"{operation}: wq has {wq.shape[0]} rows for {heads} heads, wv has {wv.shape[0]} "
                f"rows for {kv} key heads; give a multiple of the heads"
            )
        tokens = x.shape[0] * x.shape[1]
        for name in ("cos", "sin"):
            if given[name] is not None and (
                len(given[name].shape) != 2 or given[name].shape[0] != tokens
            ):
                raise InvalidArgument(
                    f"{operation}: {name} has shape {tuple(given[name].shape)}; give "
                    f"[{tokens}, rotary/2], a row for each token of this rank"
                )
        lengths = Lengths.of(
            ctx, x.shape[0], x.shape[1], seq=seq, cu_seqlens=cu_seqlens, ignore_cross=True
        )
        planned = dict(
            heads=heads,
            kv_heads=kv,
            head_dim=wq.shape[0] // heads,
            v_dim=wv.shape[0] // kv,
            overlap=flag(operation, "overlap", overlap),
            **plan_options(operation, o, heads, x),
        )
        free = {"x": (1,), "cos": (0,), "sin": (0,)}
        same = {
            **planned,
            **lengths.same(),
            **{name: describe(t, free=free.get(name, ())) for name, t in given.items()},
            **same_options(operation, o),
            "eps": number32(operation, "eps", eps, "1e-6"),
            "save": flag(operation, "save", save),
        }
        return same, (*lengths.counts(), draw_seed(o, x)), (planned, lengths)

    (planned, lengths), counts = ctx.agree(operation, prepare)
    plan, batch = ctx._plan(**planned), ctx._batch(lengths.sequences(operation, counts))
    options = OptionTensors.of(o, counts[0][2])
    inputs = {name: None if t is None else dense(t) for name, t in given.items()}
    inputs["block_mask"] = options.block_mask
    call = LayerCall(plan, batch, None, inputs, eps, options.seed, ctx.agreed)
    y = empty(x, x.shape)
    args, sizes, keep = _args(call)
    out = view(y)
    args.y = out.pointer()
    saved, workspace = memory(x, max(sizes.saved, 64)) if save else None, memory(x, sizes.workspace)
    args.workspace, args.workspace_bytes = view(workspace).data, sizes.workspace
    if save:
        args.saved, args.saved_bytes = view(saved).data, max(sizes.saved, 64)
    ctx._call("ulysses_attention_layer_forward", plan.handle, batch.handle, ctypes.byref(args))
    return y, replace(call, saved=saved)


@eager
def attention_layer_backward(call: LayerCall, dy: Any) -> dict[str, Any]:
    """Returns the gradients of the inputs by name. Collective.

    Args:
        call: the result of `attention_layer_forward`
        dy: gradient of y, [B, rows, hidden], with the dtype of x

    Returns:
        A dictionary: "x" [B, rows, hidden] with the dtype of x, and a float32 gradient for each
        weight, bias, norm, sinks and alibi that was given. The latter are this rank's share: their
        sum over the ranks is the gradient.

    Raises:
        InvalidArgument: the forward pass had save=False, or dy has another shape or dtype than y
        CommError: the communicator failed
    """
    check_gradient("ulysses.attention_layer_backward", call, dy, tuple(call.inputs["x"].shape))
    plan, batch, ctx = call.plan, call.batch, call.plan.context
    dy = dense(dy)
    grads = {"x": empty(dy, call.inputs["x"].shape)}
    for name in PARAMETERS:
        if call.inputs[name] is not None:
            grads[name] = empty(dy, call.inputs[name].shape, _struct.F32)
            grads[name][...] = 0
    args, sizes, keep = _args(call)
    workspace = memory(dy, sizes.workspace)
    args.workspace, args.workspace_bytes = view(workspace).data, sizes.workspace
    args.saved, args.saved_bytes = view(call.saved).data, call.saved.shape[0]
    views = {name: view(t) for name, t in grads.items()}
    g = _struct.AttentionLayerGrads(
        dy=view(dy).pointer(), **{"d" + name: v.pointer() for name, v in views.items()}
    )
    ctx._call(
        "ulysses_attention_layer_backward",
        plan.handle,
        batch.handle,
        ctypes.byref(args),
        ctypes.byref(g),
    )
    return grads


def _refuse_rotation(context: Context | None) -> None:
    """Raises for cos or sin that need a gradient, on all ranks. Collective.

    The layer computes none, and without an error the rotation would not be trained.
    """

    def prepare() -> Any:
        raise InvalidArgument(
            "ulysses.attention_layer: cos or sin needs a gradient, which the layer does not "
            "compute; give cos.detach() and sin.detach(), or rotate q and k yourself and call "
            "ulysses.attention"
        )

    current(context).agree("ulysses.attention_layer", prepare)


@eager
def attention_layer(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, **options: Any) -> Any:
    """Computes a whole attention layer over sequences that are sharded over ranks.

    Collective; differentiable in PyTorch. The layer has projections, optional biases, optional RMS
    norms of heads, optional rotary embeddings, and attention::

        q = rope(norm(x wq^T + bq)); k = rope(norm(x wk^T + bk)); v = x wv^T + bv
        y = attention(q, k, v) wo^T + bo

    Args:
        x: [B, rows, hidden], this rank's tokens; float32, or bfloat16 if the device has it
        wq, wk, wv, wo: [H*D, hidden], [Hkv*D, hidden], [Hkv*Dv, hidden] and [hidden, H*Dv], as in
            torch.nn.Linear, with the dtype of x
        heads (int): H
        kv_heads (int): Hkv; H must be a multiple of it; 0 = H. Default: 0
        bq, bk, bv, bo (optional): [H*D], [Hkv*D], [Hkv*Dv] and [hidden]. Default: None
        q_norm, k_norm (optional): [D], weights of the RMS norms; both or neither. Default: None
        cos, sin (optional): [B*rows, rotary/2], float32, for the positions of this rank's tokens;
            feature i is rotated with feature i + rotary/2; both or neither. They must not need a
            gradient. Default: None
        eps (float): constant of the RMS norms; 0 = 1e-6. Default: 0
        sinks, alibi (optional): [H], float32 or the dtype of x, as in `attention`. Default: None
        block_mask, block (optional): as in `attention`. Default: None
        overlap (bool): send each of q, k and v while the next one is projected, and their gradients
            while gradients of weights are computed. Results are bitwise equal. How much is hidden
            depends on the transport: the collectives of a `Communicator` are complete when they
            return. Default: False
        causal, window, scale, softcap, dropout, seed, seq, cu_seqlens, deterministic, context: as
            in `attention`

    Returns:
        y [B, rows, hidden], with the dtype of x.

        The gradients of weights, biases, norms, sinks and slopes are this rank's share: their sum
        over the ranks is the gradient.

    Raises:
        InvalidArgument: a shape, dtype or value is wrong, or arguments differ between ranks
        Unsupported: no kernel of the device has these sizes or options
        CommError: the communicator failed
    """
    names = [n for n in INPUTS[5:] if options.get(n) is not None]
    tensors = dict(zip(INPUTS, (x, wq, wk, wv, wo))) | {n: options.pop(n) for n in names}
    if is_torch(x):
        from ._torch import differentiable, wants_gradient

        def run(*given: Any) -> tuple[Any, tuple, Any]:
            y, call = attention_layer_forward(**dict(zip(tensors, given)), **options)
            saved = (call.saved, *(call.inputs[name] for name in names))
            kept = replace(call, saved=None, inputs={})

            def back(saved: tuple, dy: Any) -> tuple:
                inputs = {**dict.fromkeys(INPUTS), **dict(zip(names, saved[1:]))}
                grads = attention_layer_backward(replace(kept, saved=saved[0], inputs=inputs), dy)
                return tuple(
                    grads[name].to(inputs[name].dtype) if name in grads else None for name in names
                )

            return y, saved, back

        if any(wants_gradient(tensors.get(name)) for name in ("cos", "sin")):
            _refuse_rotation(options.get("context"))
        names = list(tensors)
        if wants_gradient(*tensors.values()):
            return differentiable(run, *tensors.values())
    return attention_layer_forward(**tensors, save=False, **options)[0]
