"""A drop-in attention function for Hugging Face transformers (its AttentionInterface).

    ulysses.use(ulysses.Context(comm))
    ulysses.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ulysses")
    for micro in ulysses.loader(batches, context):
        logits = model(input_ids=micro["input_ids"], position_ids=micro["position_ids"]).logits

Each rank calls the model with its rows of the batch. position_ids count tokens of the whole sequence
(`ulysses.shard` makes them). If they are left out, this package makes them. A document starts where
a position is not its predecessor plus 1.
"""

from __future__ import annotations

from typing import Any

from . import forwards
from .attention import attention
from .context import Context, current
from .errors import Unsupported
from .model_call import KEY, inside
from .plan import Sequences

# Masks made of these functions need no array: the library computes causality and windows, and the
# model's call has found documents and padding.
_MASKS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
    "padding_mask_function",
    "add_offsets_to_mask_function",
    "and_masks",
)


def register_transformers(name: str = "ulysses", context: Context | None = None) -> None:
    """Makes this library the attention of models with `attn_implementation=name`.

    context  None = what ulysses.use has set when the model is called

    Calls of such a model are collective. Before the first layer, the ranks find the documents from
    their position_ids and padding. The GatedDeltaNet layers of Qwen3.5 and Qwen3-Next are replaced by
    this library's. On several ranks, a model with any other layer that mixes tokens is refused
    (Unsupported, which names the layer). attention_mask [B, rows] may hide padding at the start or at
    the end of a sequence. A key-value cache, and so model.generate, works on one rank only.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> tuple[Any, None]:
        return transformers_attention(
            module, query, key, value, attention_mask, context=context, **options
        )

    forwards.contexts[name] = context
    forwards.install()
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _mask)


def _mask(*args: Any, attention_mask: Any = None, mask_function: Any = None, **options: Any) -> Any:
    """Returns the padding mask [B, rows] or None; the library computes everything else itself.

    Inside a call of a model there is no padding mask: `forwards.begin` has made documents of it."""
    for name in _made_of(mask_function):
        if name not in _MASKS:
            raise Unsupported(
                f"ulysses: a mask made by {name} of the model: causality, windows, documents and padding are built: load the model with attn_implementation='sdpa'"
            )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f"ulysses: an attention_mask of {attention_mask.ndim} axes: only causality, a window, documents and padding are built"
        )
    return attention_mask


def _made_of(function: Any) -> set[str]:
    """The names of the functions that a mask function is composed of."""
    if not callable(function) or not hasattr(function, "__code__"):
        return set()
    names = {function.__qualname__.split(".<locals>")[0]}
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        for f in inner if isinstance(inner, (tuple, list)) else (inner,):
            names |= _made_of(f)
    return names


def transformers_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_ids: Any = None,
    context: Context | None = None,
    **others: Any,
) -> tuple[Any, None]:
    """query [B, H, rows, D], key, value [B, Hkv, rows, D] to ([B, rows, H, D], None). Collective.

    Inside a call of a model, the call's documents are used. Otherwise they are found here, from
    position_ids [B, rows] and attention_mask [B, rows] of all ranks. Options that are not built raise
    Unsupported, which names the option."""
    call = others.pop(KEY, None) or inside()
    ctx = call.context if call is not None else current(context)
    refused = {
        "dropout": dropout or None,
        "softcap": softcap,
        "s_aux": others.get("s_aux"),
        "head_mask": others.get("head_mask"),
        "position_bias": others.get("position_bias"),
        "output_attentions": others.get("output_attentions") or None,
    }
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]

    def check() -> None:
        for name, value_ in refused.items():
            if value_ is not None:
                raise Unsupported(
                    f"ulysses: {name} of the attention interface: not built; set it to none"
                )
        if call is not None and attention_mask is not None:
            raise Unsupported(
                "ulysses: an attention_mask that a layer made: only causality, a window, documents and padding are built"
            )
        if call is None and rows != keys:
            raise Unsupported(
                f"ulysses: {rows} queries and {keys} keys: a key-value cache works only in a call of the whole model: call with use_cache=False"
            )
        if (
            call is not None
            and ctx.size > 1
            and (rows != call.rows or batch != call.sequences.batch or keys != rows)
        ):
            raise Unsupported(
                f"ulysses: {type(module).__name__} with {batch} sequences of {rows} queries and {keys} keys in a call of {call.sequences.batch} of {call.rows} tokens: "
                "only the layers of the text are built on several ranks"
            )
        types = getattr(getattr(module, "config", None), "layer_types", None) or ()
        if call is None and ctx.size > 1 and "linear_attention" in types:
            raise Unsupported(
                "ulysses: model.forward was called on a model with linear attention, whose layers are replaced by calls of the model only: call model(...)"
            )

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (sliding_window - 1, 0 if causal else sliding_window - 1) if sliding_window else None
    options: dict[str, Any] = dict(
        causal=bool(causal), window=window, scale=scaling, layout="BHSD", context=ctx
    )
    sequences: Sequences | None
    if call is None and (position_ids is not None or attention_mask is not None or ctx.size > 1):
        sequences = forwards.settle(
            ctx,
            "ulysses.transformers_attention",
            batch,
            rows,
            forwards.text_positions(position_ids),
            attention_mask,
            {},
            check,
        )
    else:
        check()
        own = call is not None and (rows, batch) == (call.rows, call.sequences.batch)
        sequences = call.sequences if call is not None and own else None
    if sequences is not None and keys == rows:
        options.update(seq=sequences.seq, cu_seqlens=sequences.cu_seqlens)
    elif keys != rows or call is not None:
        # One rank: a cache, whose last key belongs to the last query, or a tower beside the text.
        options.update(seq=rows, kv_seq=None if keys == rows else keys)
    return attention(query, key, value, **options).transpose(1, 2), None
