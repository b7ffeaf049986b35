"""Examines which layers of a transformers model work when ranks hold shards of a sequence.

Attention layers that use transformers' interface (ALL_ATTENTION_FUNCTIONS) call this library. The
gated delta rule layers of Qwen3.5 and Qwen3-Next are replaced by `gated_delta_net`. Every other layer
that mixes tokens would see the tokens of its rank only, so `prepare` refuses it by name.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from .errors import Unsupported
from .gdn import chunk_gated_delta_rule
from .halo import causal_conv1d
from .model_call import KEY, Forward, inside

# Only layers that read other tokens take an argument with one of these names.
_MIXING = {
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
_NEEDS = (
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
_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # model: reason of refusal, or ""


def prepare(model: Any, ranks: int) -> None:
    """Replaces the gated delta rule layers of a model. Not collective.

    Raises Unsupported if there are several ranks and the model has a layer that needs one rank."""
    found = _known.get(model)
    if found is None:
        for m in model.modules():
            if type(m).__name__ in _DELTA_NETS and not _missing(m):
                _replace(type(m))
        found = _known[model] = next(_refused(model), "")
    if ranks > 1 and found:
        raise Unsupported(
            f"ulysses: {type(model).__name__} on {ranks} ranks: {found}: it would see the tokens of its rank only: run the model on one rank"
        )


def _missing(m: Any) -> list[str]:
    projections = (
        ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if hasattr(m, "in_proj_qkv")
        else ("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering")
    )
    return [name for name in (*_NEEDS, *projections) if not hasattr(m, name)]


def _refused(model: Any) -> Iterator[str]:
    """The reasons why a model cannot run on several ranks."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "its forward takes no position_ids"
    config = model.config.get_text_config()
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _LAYER_TYPES:
            yield f"layer {i} is of type {kind!r}"
    import torch

    convolutions = (
        torch.nn.Conv1d,
        torch.nn.Conv2d,
        torch.nn.Conv3d,
        torch.nn.RNNBase,
        torch.nn.ZeroPad2d,
    )
    ours: list[str] = []
    for name, m in model.named_modules():
        if any(name.startswith(prefix + ".") for prefix in ours):
            continue
        cls: Any = type(m)
        if type(m).__name__ in _DELTA_NETS and not _missing(m):
            ours.append(name)
        elif isinstance(m, convolutions):
            tower = (
                "; for text alone, load the text model (AutoModelForCausalLM)"
                if "vis" in name
                else ""
            )
            yield f"{name} is a {type(m).__name__}, of {_owner(model, name)}{tower}"
        elif (
            _mixes(m)
            and not any(_mixes(child) for child in m.modules() if child is not m)
            and not _asks_the_interface(cls)
        ):
            yield f"{name} is a {type(m).__name__}, which mixes tokens without the attention interface"


def _owner(model: Any, name: str) -> str:
    parent = name.rpartition(".")[0]
    return type(model.get_submodule(parent)).__name__ if parent else type(model).__name__


def _mixes(m: Any) -> bool:
    try:
        return bool(_MIXING & set(inspect.signature(type(m).forward).parameters)) and not type(
            m
        ).__module__.startswith("torch.nn")
    except (TypeError, ValueError):
        return False


@functools.cache
def _asks_the_interface(cls: Any) -> bool:
    """Whether a method of the class takes its attention function from transformers' interface."""
    for owner in cls.__mro__:
        for f in vars(owner).values():
            while callable(f) and f is not None:
                code = getattr(f, "__code__", None)
                if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
                    return True
                f = getattr(f, "__wrapped__", None)
    return False


def _replace(cls: type) -> None:
    original: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]
    if getattr(original, "ulysses", False):
        return

    @functools.wraps(original)
    def forward(
        self: Any,
        hidden_states: Any,
        cache_params: Any = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        call = kwargs.pop(KEY, None) or inside()
        if call is None or cache_params is not None:  # only a call on one rank has a cache
            return original(
                self,
                hidden_states,
                cache_params=cache_params,
                attention_mask=attention_mask,
                **kwargs,
            )
        return gated_delta_net(self, hidden_states, call)

    forward.ulysses = True  # type: ignore[attr-defined]
    cls.forward = forward  # type: ignore[attr-defined]


def gated_delta_net(layer: Any, x: Any, call: Forward) -> Any:
    """The linear attention layer of Qwen3.5 and Qwen3-Next on this rank's rows. Collective.

    x [B, rows, hidden] to [B, rows, hidden]. Projections, gates and the gated norm are local to a
    token. The causal convolution and the gated delta rule run over the documents of all ranks.
    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464."""
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
    where: dict[str, Any] = dict(
        seq=call.sequences.seq, cu_seqlens=call.sequences.cu_seqlens, context=call.context
    )
    mixed = causal_conv1d(
        mixed, layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.activation, **where
    )
    q, k, v = (
        y.reshape(b, rows, -1, d)
        for y, d in zip(
            mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1),
            (layer.head_k_dim, layer.head_k_dim, layer.head_v_dim),
        )
    )
    g = -layer.A_log.float().exp() * torch.nn.functional.softplus(a.float() + layer.dt_bias)
    out, _ = chunk_gated_delta_rule(
        q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True, **where
    )
    out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    return layer.out_proj(out.reshape(b, rows, -1))
