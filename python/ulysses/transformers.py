"""A drop-in attention function for Hugging Face transformers (its AttentionInterface).

    ulysses.use(ulysses.Context(comm))
    ulysses.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ulysses")
    for x in ulysses.loader(batches, context):
        logits = model(input_ids=x["input_ids"], position_ids=x["position_ids"]).logits

Each rank calls the model with its tokens of the batch. position_ids are positions in the whole
sequence, which `ulysses.shard` makes. If position_ids are omitted, this package makes them. A
document starts where a position is not the previous position plus 1.
"""

from __future__ import annotations

from typing import Any

from . import forwards
from .attention import attention
from .context import Context, current
from .errors import Unsupported
from .model_call import KEY, inside
from .plan import Sequences

# A mask composed of these functions needs no array: the library computes causality and windows, and
# `forwards.begin` has found documents and padding.
_MASK_FUNCTIONS = (
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
    """Registers this package as an attention implementation of transformers. Not collective.

    Calls of models with `attn_implementation=name` are then collective. Before the first layer, the
    ranks find the documents from position_ids and padding. The GatedDeltaNet layers of Qwen3.5 and
    Qwen3-Next are replaced by this package's. attention_mask [B, rows] may hide padding at the
    start or at the end of a sequence. A key-value cache, and therefore model.generate, works on one
    rank only.

    On several ranks, a call of a model with another layer that mixes tokens raises Unsupported,
    which names the layer.

    Args:
        name (str): the name for attn_implementation. Default: "ulysses"
        context (Context, optional): Default: the context that ulysses.use has set when the model is
            called

    Example::

        >>> ulysses.use(ulysses.Context.torch())
        >>> ulysses.register_transformers()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ulysses")
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
    """Returns the padding mask [B, rows] or None.

    Inside a call of a model it is None, because `forwards.begin` has converted padding to
    documents.
    """
    for name in _functions_in(mask_function):
        if name not in _MASK_FUNCTIONS:
            raise Unsupported(
                f"ulysses: the model's mask function {name} is not implemented (causality, "
                "windows, documents and padding are); load the model with "
                "attn_implementation='sdpa'"
            )
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(
            f"ulysses: attention_mask has {attention_mask.ndim} axes; give a padding mask "
            "[B, tokens] or None (causality, windows and documents need no mask)"
        )
    return attention_mask


def _functions_in(function: Any) -> set[str]:
    """Returns the names of the functions that a mask function is composed of."""
    if not callable(function) or not hasattr(function, "__code__"):
        return set()
    names = {function.__qualname__.split(".<locals>")[0]}
    for cell in function.__closure__ or ():
        inner = cell.cell_contents
        for f in inner if isinstance(inner, (tuple, list)) else (inner,):
            names |= _functions_in(f)
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
    """Computes attention for a layer of a transformers model. Collective.

    This is the function that `register_transformers` registers. Inside a call of a model, it uses
    the documents of the call. Otherwise it finds them from position_ids and attention_mask of all
    ranks.

    Args:
        module: the attention layer
        query: [B, H, rows, D], this rank's tokens
        key, value: [B, Hkv, rows, D]
        attention_mask (optional): [B, rows], 0 for padding. Default: None
        scaling (float, optional): Default: 1/sqrt(D)
        sliding_window (int, optional): keys that a query sees, including its own. Default: None
        is_causal (bool, optional): Default: module.is_causal
        position_ids (optional): [B, rows], positions in the whole sequence. Default: None
        context (Context, optional): Default: the context of the model's call, or the one that
            ulysses.use has set
        dropout, softcap: as in `attention`. Default: 0
        others: `s_aux` are the sinks of the layer, [H] over all ranks; head_mask, position_bias and
            output_attentions are not implemented and must be None

    Returns:
        ([B, rows, H, D], None): the output, and no attention weights.

    Raises:
        InvalidArgument: a shape or value is wrong, or arguments differ between ranks
        Unsupported: an option is not implemented; the message names it
        CommError: the communicator failed
    """
    operation = "ulysses.transformers_attention"
    call = others.pop(KEY, None) or inside()
    ctx = call.context if call is not None else current(context)
    refused = {
        "head_mask": others.get("head_mask"),
        "position_bias": others.get("position_bias"),
        "output_attentions": others.get("output_attentions") or None,
    }
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]

    def check() -> None:
        for name, value_ in refused.items():
            if value_ is not None:
                raise Unsupported(
                    f"{operation}: {name} is not implemented; set it to 0 or None in the model's "
                    "config"
                )
        if call is not None and attention_mask is not None:
            raise Unsupported(
                f"{operation}: {type(module).__name__} made an attention_mask, which is not "
                "implemented (causality, windows, documents and padding are); load the model with "
                "attn_implementation='sdpa'"
            )
        if call is None and rows != keys:
            raise Unsupported(
                f"{operation}: {rows} queries and {keys} keys: a key-value cache works only in a "
                "call of the whole model; set use_cache=False"
            )
        if (
            call is not None
            and ctx.size > 1
            and (rows != call.rows or batch != call.sequences.batch or keys != rows)
        ):
            raise Unsupported(
                f"{operation}: {type(module).__name__} has {batch} sequences of {rows} queries and "
                f"{keys} keys, the model's call has {call.sequences.batch} sequences of "
                f"{call.rows} tokens: on several ranks, only layers on text tokens are "
                "implemented; run the model on one rank"
            )
        types = getattr(getattr(module, "config", None), "layer_types", None) or ()
        if call is None and ctx.size > 1 and "linear_attention" in types:
            raise Unsupported(
                f"{operation}: model.forward of a model with linear attention, whose layers are "
                "replaced only in calls of the model; call model(...)"
            )

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (sliding_window - 1, 0 if causal else sliding_window - 1) if sliding_window else None
    options: dict[str, Any] = dict(
        causal=bool(causal),
        window=window,
        scale=scaling,
        layout="BHSD",
        context=ctx,
        softcap=softcap or 0.0,
        sinks=others.get("s_aux"),
        dropout=dropout or 0.0,
    )
    sequences: Sequences | None
    if call is None and (position_ids is not None or attention_mask is not None or ctx.size > 1):
        sequences = forwards.agreed_sequences(
            ctx,
            operation,
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
        # On one rank: a key-value cache, whose last key belongs to the last query, or the layers of
        # an image encoder.
        options.update(seq=rows, kv_seq=None if keys == rows else keys)
    return attention(query, key, value, **options).transpose(1, 2), None
