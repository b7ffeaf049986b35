"""Finds the token mixers of a transformers model, and refuses those that need whole sequences.

Attention layers that use transformers' interface (ALL_ATTENTION_FUNCTIONS) call this package. The
gated delta rule layers of Qwen3.5 and Qwen3-Next are replaced by `gated_delta_net`. Every other
layer that mixes tokens would compute on the tokens of its rank only, so `prepare` refuses the model
and names the layer.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from .delta_layer import gated_delta_layer
from .errors import Unsupported
from .model_call import Forward, cache_of, call_of

# A layer that takes an argument with one of these names mixes tokens.
_MIXER_ARGUMENTS = {
    "attention_mask",
    "past_key_values",
    "past_key_value",
    "layer_past",
    "cache_params",
    "cache",
    "state",
    "position_embeddings",
    "cu_seqlens",
    "seq_idx",
    "position_bias",
}
_LAYER_TYPES = {"full_attention", "sliding_attention", "linear_attention", "sparse", "dense"}
_DELTA_NETS = {"Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "Qwen3NextGatedDeltaNet"}
_DELTA_NET_ATTRIBUTES = (
    "conv1d",
    "A_log",
    "dt_bias",
    "norm",
    "out_proj",
    "key_dim",
    "value_dim",
    "head_k_dim",
    "head_v_dim",
    "activation",
)
# For each model, the reason why it cannot run on several ranks, or "", the reason why it cannot
# keep documents apart, or "", and the name of its first gated delta rule layer, or "".
_found: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def prepare(model: Any, ranks: int, zigzag: bool = False) -> None:
    """Replaces the gated delta rule layers of a model, and checks its other layers. Not collective.

    Raises:
        Unsupported: ranks > 1, and the model has a layer that works on one rank only, or one that
            needs tokens in order in a zigzag
    """
    if model not in _found:
        nets = [(name, type(m)) for name, m in model.named_modules() if _is_delta_net(m)]
        for _, cls in nets:
            _replace(cls)
        obstacles = list(_obstacles(model))
        _found[model] = (
            next((reason for reason, _ in obstacles), ""),
            next((reason for reason, mixes in obstacles if mixes), ""),
            nets[0][0] if nets else "",
        )
    reason, _, net = _found[model]
    if zigzag and net:
        raise Unsupported(
            f"ulysses: {type(model).__name__}: {net} passes states from token to token, so it "
            "needs tokens in order; make the context without zigzag=True"
        )
    if ranks > 1 and reason:
        raise Unsupported(
            f"ulysses: {type(model).__name__} on {ranks} ranks: {reason}, so it would compute on "
            "the tokens of its rank only; run the model on one rank"
        )


def check_documents(model: Any) -> None:
    """Raises Unsupported for a prepared model with a layer that would mix documents, or padding
    with tokens, on one rank. Not collective."""
    if _found[model][1]:
        raise Unsupported(
            f"ulysses: {type(model).__name__}: {_found[model][1]}, so it would mix documents, and "
            "padding with tokens; pass one document in each sequence, without attention_mask, or "
            "load the model with attn_implementation='sdpa'"
        )


def _is_delta_net(m: Any) -> bool:
    """Reports whether m is a gated delta rule layer that `gated_delta_net` can compute."""
    projections = (
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if hasattr(m, "in_proj_qkv")
        else ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
    )
    return (
        type(m).__name__ in _DELTA_NETS
        and all(hasattr(m, name) for name in (*_DELTA_NET_ATTRIBUTES, *projections))
        and m.conv1d.bias is None
    )


def _obstacles(model: Any) -> Iterator[tuple[str, bool]]:
    """Returns the reasons why a model cannot run on several ranks, and whether this is a layer that
    mixes tokens of text."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "its forward takes no position_ids", False
    config = model.config.get_text_config()
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            yield f"layer {i} is of type {kind!r}", True
    import torch

    convolutions = (
        torch.nn.Conv1d,
        torch.nn.Conv2d,
        torch.nn.Conv3d,
        torch.nn.RNNBase,
        torch.nn.ZeroPad2d,
    )
    replaced: list[str] = []
    for name, m in model.named_modules():
        if any(name.startswith(prefix + ".") for prefix in replaced):
            continue
        cls: Any = type(m)
        image = "vis" in name
        if _is_delta_net(m):
            replaced.append(name)
        elif isinstance(m, convolutions):
            hint = " (for text, load the text model: AutoModelForCausalLM)" if image else ""
            yield f"{name} is a {type(m).__name__} of {_owner(model, name)}{hint}", not image
        elif (
            _mixes(m)
            and not any(_mixes(child) for child in m.modules() if child is not m)
            and not _uses_interface(cls)
        ):
            yield (
                f"{name} is a {type(m).__name__}, which mixes tokens without the attention "
                "interface",
                not image and not isinstance(m, torch.nn.Embedding),
            )


def _owner(model: Any, name: str) -> str:
    """Returns the class of the module that contains the module `name`."""
    parent = name.rpartition(".")[0]
    return type(model.get_submodule(parent)).__name__ if parent else type(model).__name__


def _mixes(m: Any) -> bool:
    """Reports whether a module of transformers takes an argument that only token mixers take."""
    try:
        return bool(
            _MIXER_ARGUMENTS & set(inspect.signature(type(m).forward).parameters)
        ) and not type(m).__module__.startswith("torch.nn")
    except (TypeError, ValueError):
        return False


@functools.cache
def _uses_interface(cls: Any) -> bool:
    """Reports whether a method of the class calls transformers' attention interface."""
    for owner in cls.__mro__:
        for f in vars(owner).values():
            while callable(f) and f is not None:
                code = getattr(f, "__code__", None)
                if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                    return True
                f = getattr(f, "__wrapped__", None)
    return False


def _replace(cls: type) -> None:
    """Replaces the forward of a gated delta rule layer in calls of a model on its ranks."""
    original: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]
    if getattr(original, "ulysses", False):
        return

    names = list(inspect.signature(original).parameters)[2:]  # without self and hidden_states

    @functools.wraps(original)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        call = call_of(self, kwargs)
        # Only a call on one rank has a cache.
        if call is None or cache_of({**dict(zip(names, args)), **kwargs}) is not None:
            return original(self, hidden_states, *args, **kwargs)
        return gated_delta_net(self, hidden_states, call)

    forward.ulysses = True  # type: ignore[attr-defined]
    cls.forward = forward  # type: ignore[attr-defined]


def gated_delta_net(layer: Any, x: Any, call: Forward) -> Any:
    """Computes the linear attention layer of Qwen3.5 and Qwen3-Next on this rank's tokens.

    Collective. Projections, gates and the gated norm are local to a token. The causal convolution
    and the gated delta rule run over the documents on all ranks.

    Args:
        layer: the GatedDeltaNet module
        x: [B, rows, hidden]
        call: the call of the model

    Returns:
        [B, rows, hidden].

    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    import torch

    b, rows, _ = x.shape
    if hasattr(layer, "in_proj_qkv"):
        mixed, z, beta, a = (
            layer.in_proj_qkv(x),
            layer.in_proj_z(x),
            layer.in_proj_b(x),
            layer.in_proj_a(x),
        )
    else:
        q, k, v, z, beta, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(x), layer.in_proj_ba(x)
        )
        mixed = torch.cat([y.reshape(b, rows, -1) for y in (q, k, v)], -1)
    out = gated_delta_layer(
        mixed,
        a,
        beta,
        layer.conv1d.weight.squeeze(1),
        layer.A_log,
        layer.dt_bias,
        key_heads=layer.key_dim // layer.head_k_dim,
        key_dim=layer.head_k_dim,
        activation=layer.activation,
        seq=call.sequences.seq,
        cu_seqlens=call.sequences.cu_seqlens,
        context=call.context,
    )
    out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.reshape(b, rows, -1))
