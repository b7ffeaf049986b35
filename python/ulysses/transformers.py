"""A drop-in attention function for Hugging Face transformers (its AttentionInterface).

    ulysses.use(ulysses.Context(comm))
    ulysses.register_transformers()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ulysses")
    for micro in ulysses.loader(batches, context):
        loss = model(**micro)...

Each rank calls the model with its rows; position_ids must be theirs in the whole sequence (`ulysses.shard` brings them).
"""

from __future__ import annotations

from typing import Any

from .attention import attention
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .plan import shard_rows


def register_transformers(name: str = "ulysses", context: Context | None = None) -> None:
    """Makes `attn_implementation=name` this library's attention. context None = what ulysses.use has set by the time of a call."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def forward(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any) -> tuple[Any, None]:
        return transformers_attention(module, query, key, value, attention_mask, context=context, **options)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, _mask)


def _mask(*args: Any, attention_mask: Any = None, **options: Any) -> None:
    """No mask is made: causality, windows and documents are the library's. Padding has to be a document or masked labels."""
    if attention_mask is not None and attention_mask.ndim == 2 and not bool(attention_mask.all()):
        raise Unsupported("ulysses: an attention_mask that hides tokens: leave it out, pad at the end and mask the labels, or pack with cu_seqlens")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise Unsupported(f"ulysses: an attention_mask of {attention_mask.ndim} axes: only causality, a window and documents are built")
    return None


def transformers_attention(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *, scaling: float | None = None,
                           dropout: float = 0.0, sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
                           position_ids: Any = None, context: Context | None = None, **others: Any) -> tuple[Any, None]:
    """query [B, H, rows, D], key, value [B, Hkv, rows, D] to ([B, rows, H, D], None). What is not built is refused by name."""
    refused = {"dropout": dropout or None, "softcap": softcap, "s_aux": others.get("s_aux"), "head_mask": others.get("head_mask"),
               "attention_mask": attention_mask, "output_attentions": others.get("output_attentions") or None}
    for name, value_ in refused.items():
        if value_ is not None:
            raise Unsupported(f"ulysses: {name} of the attention interface: not built; set it to none")
    ctx = current(context)
    if query.shape[2] != key.shape[2]:
        raise Unsupported(f"ulysses: {query.shape[2]} queries and {key.shape[2]} keys: a key cache is not built; call with use_cache=False")
    if position_ids is not None:
        _check_positions(ctx, position_ids, query.shape[2])
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    window = (sliding_window - 1, 0 if causal else sliding_window - 1) if sliding_window else None
    out = attention(query, key, value, causal=bool(causal), window=window, scale=scaling, layout="BHSD", context=ctx)
    return out.transpose(1, 2), None


def _check_positions(ctx: Context, position_ids: Any, rows: int) -> None:
    """Positions that start anew on each rank (what a model makes by itself when given none) are wrong on all ranks but the first."""
    if ctx.size == 1 or position_ids.ndim != 2 or rows == 0 or position_ids.is_cuda:
        return
    sequences = ctx.sequences
    if sequences is not None and sequences.cu_seqlens is not None:
        want = ctx.batch(sequences).positions()[0]
    else:
        want = shard_rows(sequences.seq if sequences else rows * ctx.size, ctx.size, ctx.rank)[0]
    found = int(position_ids[0, 0])
    if found != want:
        raise InvalidArgument(f"ulysses: position_ids start at {found} on rank {ctx.rank} of {ctx.size}, the rank's rows at {want}: call the model with the "
                              "rank's own position_ids, as ulysses.shard brings them")
