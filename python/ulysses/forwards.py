"""Prepares calls of transformers models whose attention is this library's.

`install` wraps PreTrainedModel.__call__. When a model with a registered attn_implementation is
called, `begin` runs before its first layer: the ranks compare their arguments, find the documents
from their position ids and padding, and make positions if none are given. Models that cannot run on several
ranks are refused on every rank. Layers receive the result, a Forward, as a keyword argument; gradient
checkpointing keeps it, so that a layer that runs again in backward sees the documents of its call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from . import mixers
from .agreement import describe
from .communicator import gather_objects
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .model_call import KEY, Forward, entered, inside
from .packing import Rows, sequences_of
from .plan import Sequences, shard_rows

contexts: dict[str, Context | None] = {}  # by attn_implementation


def install() -> None:
    """Wraps PreTrainedModel.__call__, once."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.__call__
    if getattr(original, "ulysses", False):
        return

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.config, "_attn_implementation", None)
        if name not in contexts or KEY in kwargs or inside() is not None:
            return original(self, *args, **kwargs)
        args, kwargs, forward = begin(self, current(contexts[name]), args, kwargs)
        with entered(forward):
            return original(self, *args, **kwargs)

    __call__.ulysses = True  # type: ignore[attr-defined]
    PreTrainedModel.__call__ = __call__


def text_positions(ids: Any) -> Any:
    """The position ids [B, rows] that count tokens of text, or None.

    Models with images take [4, B, rows], whose first entry counts text, or [3, B, rows], where none
    does."""
    if ids is None or ids.ndim == 2:
        return ids
    return ids[0] if ids.ndim == 3 and ids.shape[0] == 4 else None


def settle(
    ctx: Context,
    operation: str,
    batch: int,
    rows: int,
    position_ids: Any,
    mask: Any,
    same: Mapping[str, Any],
    check: Any = None,
) -> Sequences:
    """Lengths and documents of the whole sequences. Collective."""

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if check is not None:
            check()
        for name, x in (("position_ids", position_ids), ("attention_mask", mask)):
            if x is not None and (
                x.ndim != 2 or x.shape[1] != rows or x.shape[0] not in (1, batch)
            ):
                raise InvalidArgument(
                    f"{operation}: {name} of shape {tuple(x.shape)} for {batch} sequences of {rows} tokens on this rank: give [{batch}, {rows}]"
                )
        return (
            {
                "sequences": batch,
                "position_ids": position_ids is not None,
                "Context.use": ctx.sequences,
                **same,
            },
            (rows,),
            None,
        )

    _, counts = ctx.agree(operation, prepare)
    each = gather_objects(ctx.communicator, Rows.of(position_ids, mask, batch))
    return sequences_of(batch, [n for (n,) in counts], each, ctx.sequences)


def begin(
    model: Any, ctx: Context, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any], Forward]:
    """Agrees on a model's call. Collective.

    Returns the call's arguments, with positions and without a mask, and the Forward."""
    operation = f"ulysses: {type(model).__name__}"
    signature = inspect.signature(model.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    try:
        bound: Any = signature.bind_partial(*args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if name != rest}
        given.update(bound.arguments.get(rest, {}) if rest else {})
    except TypeError as e:  # the model would refuse this call on this rank only
        bound, given, wrong = None, {}, e
    tokens = (
        given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    )
    batch, rows = tuple(tokens.shape[:2]) if tokens is not None and tokens.ndim >= 2 else (0, 0)
    cache: Any = given.get("past_key_values")
    ids, mask = given.get("position_ids"), given.get("attention_mask")
    past = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
    if (
        past
        and mask is not None
        and getattr(mask, "ndim", 0) == 2
        and mask.shape[1] == past + rows
        and bool(mask.all())
    ):
        mask = None

    def check() -> None:
        if bound is None:
            raise InvalidArgument(f"{operation}: {wrong}") from wrong
        if batch < 1 or rows < 1:
            raise InvalidArgument(
                f"{operation}: {'no input_ids and no inputs_embeds' if tokens is None else f'input of shape {tuple(tokens.shape)}'}: give input_ids "
                "[B, tokens of this rank], one token or more"
            )
        mixers.prepare(model, ctx.size)
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise Unsupported(
                f"{operation}: an attention_mask of {getattr(mask, 'ndim', type(mask).__name__)} axes: causality, windows, documents and padding are built: "
                "give [B, tokens], or none"
            )
        if cache is not None or (given.get("use_cache") and ctx.size > 1):
            _check_cache(operation, ctx, cache, past, mask, text_positions(ids))
        if ctx.size > 1 and given.get("labels") is not None and given.get("shift_labels") is None:
            raise Unsupported(
                f"{operation}: labels without shift_labels on {ctx.size} ranks: the label of a rank's last token is on the next rank: pass "
                "shift_labels=, as ulysses.shard makes them"
            )
        if ctx.size > 1 and given.get("cu_seq_lens_q") is not None:
            raise Unsupported(
                f"{operation}: cu_seq_lens_q on {ctx.size} ranks: it counts the tokens of one rank: leave it out and pass position_ids that start anew "
                "with each document"
            )

    same = {
        "model": type(model).__name__,
        "hidden": describe(given.get("inputs_embeds"), free=(1,)),
        "training": model.training,
    }
    if past:

        def alone() -> tuple[dict[str, Any], tuple[int, ...], None]:
            check()
            return same, (), None

        ctx.agree(operation, alone)
        sequences = Sequences(batch, rows)
    else:
        sequences = settle(ctx, operation, batch, rows, text_positions(ids), mask, same, check)
        starts = given.get("cu_seq_lens_q")
        if starts is not None:
            cu = sorted(
                {
                    *(sequences.cu_seqlens or range(0, batch * rows + 1, rows)),
                    *(int(i) for i in starts),
                }
            )
            sequences = Sequences(batch, rows, None, tuple(cu))
    if (
        cache is None
        and not given.get("use_cache")
        and (ctx.size > 1 or model.training or sequences.cu_seqlens is not None)
    ):
        no_cache = {"use_cache": False} if "use_cache" in signature.parameters or rest else {}
    elif sequences.cu_seqlens is not None:  # on one rank
        raise Unsupported(
            f"{operation}: several documents, or padding, beside a key-value cache: call with use_cache=False"
        )
    else:
        no_cache = {}
    forward = Forward(ctx, sequences, rows, past)
    changed: dict[str, Any] = {
        name: None for name in ("attention_mask",) if given.get(name) is not None
    } | no_cache
    if ctx.size > 1:
        if ids is None:
            changed["position_ids"] = _positions(ctx, forward, tokens)
    if rest:
        changed[KEY] = forward
    for name, value in changed.items():
        if name in signature.parameters:
            bound.arguments[name] = value
        else:
            bound.arguments.setdefault(rest, {})[name] = value
    return bound.args, bound.kwargs, forward


def _check_cache(operation: str, ctx: Context, cache: Any, past: int, mask: Any, ids: Any) -> None:
    if ctx.size > 1:
        raise Unsupported(
            f"{operation}: a key-value cache on {ctx.size} ranks, where each rank has a shard of the sequence: call the model with use_cache=False, "
            "and generate on one rank"
        )
    if getattr(cache, "is_compileable", False):
        raise Unsupported(
            f"{operation}: a {type(cache).__name__} has rows for tokens that are not there yet: use transformers.DynamicCache (cache_implementation='dynamic')"
        )
    if past and mask is not None:
        raise Unsupported(
            f"{operation}: an attention_mask of shape {tuple(mask.shape)} beside a key-value cache of {past} tokens: padding is not built there: call with "
            "use_cache=False"
        )
    if past and ids is not None and ids.shape[1] > 1 and bool((ids.diff(dim=1) != 1).any()):
        raise Unsupported(
            f"{operation}: several documents in position_ids beside a key-value cache: call with use_cache=False"
        )


def _positions(ctx: Context, forward: Forward, tokens: Any) -> Any:
    """Positions [B, rows] of this rank's tokens, in their documents if Context.use has set some."""
    import torch

    s, known = forward.sequences, ctx.sequences
    if (
        known is not None
        and known.cu_seqlens is not None
        and (known.batch, known.seq, known.kv_seq) == (s.batch, s.seq, None)
    ):
        return torch.tensor(ctx._batch(known).positions(), device=tokens.device).reshape(
            s.batch, forward.rows
        )
    lo, hi = shard_rows(s.seq, ctx.size, ctx.rank)
    return torch.arange(lo, hi, device=tokens.device)[None].expand(s.batch, -1)
