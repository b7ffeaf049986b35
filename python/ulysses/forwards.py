"""Prepares calls of transformers models that use this package's attention.

`install` wraps PreTrainedModel.__call__. When a model with a registered attn_implementation is
called, `begin` runs before its first layer: the ranks compare their arguments, find the documents
from position ids and padding, and make positions if none are given. A model that cannot run on
several ranks is refused on every rank. Layers receive the result, a Forward, as a keyword argument,
or read it from `inside`. A layer that gradient checkpointing runs again in backward has the
documents of its own call.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from . import mixers
from ._eager import eager
from .agreement import describe
from .communicator import gather_objects
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .model_call import KEY, Forward, cache_of, entered, inside, running_again
from .packing import ShardPositions, check_tokens, sequences_of
from .sequences import Sequences


@dataclass(frozen=True)
class Registration:
    """An attn_implementation that this package computes.

    Attributes:
        context: the ranks; None = the context that ulysses.use has set when the model is called
        attention, mask: the functions of transformers that it replaces; None for a new name
        disable_in_eval: a model that is not in training calls the replaced functions
        batch, seq: every call has so many sequences, and so many tokens of each; None = any
    """

    context: Context | None = None
    attention: Callable[..., Any] | None = None
    mask: Callable[..., Any] | None = None
    disable_in_eval: bool = False
    batch: int | None = None
    seq: int | None = None

    def computes(self, module: Any) -> bool:
        """Reports whether this package computes a call of a model or of a layer."""
        return module.training or not self.disable_in_eval

    def check(self, operation: str, ctx: Context, batch: int, rows: int) -> None:
        """Raises InvalidArgument if a call on this rank has other lengths than registered."""
        want = None if self.seq is None else ctx.layout.rows(self.seq, ctx.rank)
        if batch != (self.batch or batch) or rows != (rows if want is None else want):
            length = "" if want is None else f" of {want} tokens on this rank"
            raise InvalidArgument(
                f"{operation}: the call has {batch} sequences of {rows} tokens on this rank, and "
                f"{self.batch or 'any number of'} sequences{length} were registered; register with "
                "this micro_batch_size, and with seq_length_is_variable=True for other lengths"
            )


registered: dict[str, Registration] = {}  # by attn_implementation


def install() -> None:
    """Wraps PreTrainedModel.__call__. Further calls do nothing. Not collective."""
    from transformers import PreTrainedModel

    original = PreTrainedModel.__call__
    if getattr(original, "ulysses", False):
        return

    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        running = inside()
        if KEY in kwargs or (running is not None and running.runs(self)):
            return original(self, *args, **kwargs)
        name = getattr(self.config, "_attn_implementation", None)
        found = registered.get(name or "")
        if found is None or not found.computes(self):
            if running is None:
                return original(self, *args, **kwargs)
            with entered(None):  # another model, which a hook of the running one calls
                return original(self, *args, **kwargs)
        args, kwargs, forward = begin(self, found, args, kwargs)
        with entered(forward), running_again(self, forward):
            out = original(self, *args, **kwargs)
        forward.check_masks()
        return out

    __call__.ulysses = True  # type: ignore[attr-defined]
    PreTrainedModel.__call__ = __call__


def text_positions(ids: Any) -> Any:
    """Returns the position ids [B, rows] that count tokens of text, or None.

    Models with images take [4, B, rows], whose first entry counts tokens of text, or [3, B, rows],
    where no entry does.
    """
    if ids is None or ids.ndim == 2:
        return ids
    return ids[0] if ids.ndim == 3 and ids.shape[0] == 4 else None


def agreed_sequences(
    ctx: Context,
    operation: str,
    batch: int,
    rows: int,
    position_ids: Any,
    mask: Any,
    same: Mapping[str, Any],
    check: Any = None,
) -> Sequences:
    """Returns lengths and documents of the whole sequences. Collective.

    Args:
        operation: the name of the call, for messages
        batch, rows: number of sequences, and tokens of each sequence on this rank
        position_ids, mask: [B, rows], or None
        same: other arguments, by name, that must be equal on all ranks
        check: a function that raises if another argument is wrong on this rank

    Raises:
        InvalidArgument, Unsupported: arguments are wrong on a rank or differ between ranks, or the
            mask hides tokens inside a document
    """

    def prepare() -> tuple[dict[str, Any], tuple[int, ...], None]:
        if check is not None:
            check()
        for name, x in (("position_ids", position_ids), ("attention_mask", mask)):
            if x is not None and (
                x.ndim != 2 or x.shape[1] != rows or x.shape[0] not in (1, batch)
            ):
                raise InvalidArgument(
                    f"{operation}: {name} has shape {tuple(x.shape)}, this rank has {batch} "
                    f"sequences of {rows} tokens; give [{batch}, {rows}]"
                )
        return (
            {
                "sequences": batch,
                "position_ids": position_ids is not None,
                "attention_mask": mask is not None,
                "Context.use": ctx.sequences,
                **same,
            },
            (rows,),
            None,
        )

    _, counts = ctx.agree(operation, prepare)
    check_tokens(ctx.layout, [n for (n,) in counts])
    seq = sum(n for (n,) in counts)
    lengths = [hi - lo for lo, hi in ctx.layout.ranges(seq, ctx.rank)]
    shard = ShardPositions.of(position_ids, mask, batch, lengths)
    each = gather_objects(ctx.communicator, shard)
    return sequences_of(batch, seq, ctx.layout, each, ctx.sequences)


@eager
def begin(
    model: Any, registration: Registration, args: tuple, kwargs: Mapping[str, Any]
) -> tuple[tuple, dict[str, Any], Forward]:
    """Checks a call of a model on all ranks, and finds its documents. Collective.

    Returns:
        (args, kwargs, forward): the arguments for the model, with positions and without a mask, and
        the `Forward` for its layers.
    """
    ctx, operation = current(registration.context), f"ulysses: {type(model).__name__}"
    signature = inspect.signature(model.forward)
    rest = next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)
    try:
        bound: Any = signature.bind_partial(*args, **kwargs)
        given = {name: value for name, value in bound.arguments.items() if name != rest}
        given.update(bound.arguments.get(rest, {}) if rest else {})
    except TypeError as e:  # raised below, on every rank
        bound, given, wrong = None, {}, e
    tokens = (
        given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
    )
    batch, rows = tuple(tokens.shape[:2]) if tokens is not None and tokens.ndim >= 2 else (0, 0)
    cache = cache_of(given)
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
            found = "neither input_ids nor inputs_embeds"
            if tokens is not None:
                found = f"input of shape {tuple(tokens.shape)}"
            raise InvalidArgument(
                f"{operation}: {found}; give input_ids [B, tokens of this rank], with one token or "
                "more"
            )
        registration.check(operation, ctx, batch, rows)
        mixers.prepare(model, ctx.size, ctx.layout.zigzag)
        if ctx.size > 1:
            _check_adapter(operation, ctx)
        if mask is not None and getattr(mask, "ndim", 0) != 2:
            raise Unsupported(
                f"{operation}: attention_mask has {getattr(mask, 'ndim', type(mask).__name__)} "
                "axes; give a padding mask [B, tokens] or None (causality, windows and documents "
                "need no mask)"
            )
        if cache is not None or (given.get("use_cache") and ctx.size > 1):
            _check_cache(operation, ctx, cache, past, mask, text_positions(ids))
        if ctx.size > 1 and given.get("labels") is not None and given.get("shift_labels") is None:
            raise Unsupported(
                f"{operation}: labels without shift_labels on {ctx.size} ranks, where the label of "
                "a rank's last token is on the next rank; pass shift_labels, which ulysses.shard "
                "makes"
            )
        if ctx.size > 1 and given.get("cu_seq_lens_q") is not None:
            raise Unsupported(
                f"{operation}: cu_seq_lens_q on {ctx.size} ranks counts the tokens of one rank; "
                "pass position_ids that restart at each document instead"
            )

    same = {
        "model": type(model).__name__,
        "hidden": describe(given.get("inputs_embeds"), free=(1,)),
        "training": model.training,
    }
    if past:

        def with_cache() -> tuple[dict[str, Any], tuple[int, ...], None]:
            check()
            return same, (), None

        ctx.agree(operation, with_cache)
        sequences = Sequences(batch, rows)
    else:
        sequences = agreed_sequences(
            ctx, operation, batch, rows, text_positions(ids), mask, same, check
        )
        starts = given.get("cu_seq_lens_q")
        if starts is not None:
            cu = sorted(
                {
                    *(sequences.cu_seqlens or range(0, batch * rows + 1, rows)),
                    *(int(i) for i in starts),
                }
            )
            sequences = Sequences(batch, rows, None, tuple(cu))
    if ctx.size == 1 and sequences.cu_seqlens is not None:
        mixers.check_documents(model)
    if (
        cache is None
        and not given.get("use_cache")
        and (ctx.size > 1 or model.training or sequences.cu_seqlens is not None)
    ):
        no_cache = {"use_cache": False} if "use_cache" in signature.parameters or rest else {}
    elif sequences.cu_seqlens is not None:  # on one rank
        raise Unsupported(
            f"{operation}: several documents or padding with a key-value cache; call the model "
            "with use_cache=False"
        )
    else:
        no_cache = {}
    forward = Forward(ctx, sequences, rows, past, model)
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


def _check_adapter(operation: str, ctx: Context) -> None:
    """Raises Unsupported if PEFT calls the model with an adapter that needs whole sequences.

    The model has no reference to the PeftModel around it, which has changed its arguments already.
    It is therefore looked for in the callers.
    """
    peft = sys.modules.get("peft")
    kind: Any = getattr(peft, "PeftModel", None)
    frame: Any = sys._getframe() if kind is not None else None
    while frame is not None:
        caller = frame.f_locals.get("self")
        frame = frame.f_back
        if not isinstance(caller, kind):
            continue
        config = caller.active_peft_config
        if config.is_prompt_learning:
            reason = "puts its virtual tokens before the tokens of every rank"
        elif getattr(config, "alora_invocation_tokens", None) is not None:
            reason = "looks for its invocation tokens among the tokens of one rank"
        else:
            return
        raise Unsupported(
            f"{operation} on {ctx.size} ranks: {type(config).__name__} of PEFT {reason}; use "
            "adapters that work on single tokens, such as LoRA, or run the model on one rank"
        )


def _check_cache(operation: str, ctx: Context, cache: Any, past: int, mask: Any, ids: Any) -> None:
    """Raises Unsupported for a key-value cache that this package cannot use."""
    if ctx.size > 1:
        raise Unsupported(
            f"{operation}: a key-value cache on {ctx.size} ranks, where each rank has a shard of "
            "the sequence; call the model with use_cache=False, and generate on one rank"
        )
    if getattr(cache, "is_compileable", False):
        raise Unsupported(
            f"{operation}: a {type(cache).__name__} has memory for tokens that do not exist yet; "
            "use transformers.DynamicCache (cache_implementation='dynamic')"
        )
    if past and mask is not None:
        raise Unsupported(
            f"{operation}: attention_mask {tuple(mask.shape)} with a key-value cache of {past} "
            "tokens, where padding is not implemented; call the model with use_cache=False"
        )
    if past and ids is not None and ids.shape[1] > 1 and bool((ids.diff(dim=1) != 1).any()):
        raise Unsupported(
            f"{operation}: several documents in position_ids with a key-value cache; call the "
            "model with use_cache=False"
        )


def _positions(ctx: Context, forward: Forward, tokens: Any) -> Any:
    """Returns the positions [B, rows] of this rank's tokens.

    They count from the start of the document if Context.use has set documents, else from the start
    of the sequence.
    """
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
    index = torch.from_numpy(ctx.layout.index(s.seq, ctx.rank)).to(tokens.device)
    return index[None].expand(s.batch, -1)
