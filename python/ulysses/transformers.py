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

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import forwards
from ._eager import eager
from .attention import attention
from .context import Context, current
from .errors import InvalidArgument, Unsupported
from .model_call import KEY, Forward, call_of, inside
from .parallel_state import ParallelState, check_size, parallel_state
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

    Raises:
        Unsupported: transformers is older than 4.53

    Example::

        >>> ulysses.use(ulysses.Context.torch())
        >>> ulysses.register_transformers()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="ulysses")
    """
    _register(name, forwards.Registration(context))


def _register(name: str, new: forwards.Registration) -> None:
    """Makes this package compute the attention implementation `name`.

    The functions of transformers under this name are kept for `unregister_transformers`. They are
    the ones of the first registration if the package computes the name already.
    """
    attentions, masks = _tables()
    old = forwards.registered.get(name)
    if old is None:
        old = replace(new, attention=attentions.get(name), mask=masks.get(name))
    new = replace(new, attention=old.attention, mask=old.mask)

    def forward(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        function: Callable[..., Any] = transformers_attention
        if new.attention is not None and not new.computes(module) and not _called(options):
            function = new.attention
        else:
            options["context"] = new.context
        return function(module, query, key, value, attention_mask, **options)

    def mask(*args: Any, **options: Any) -> Any:
        """Returns the mask of transformers in a call that this package does not compute."""
        own = new.mask is None or not new.disable_in_eval or inside() is not None
        return (_mask if own else new.mask)(*args, **options)  # type: ignore[misc]

    forwards.registered[name] = new
    forwards.install()
    attentions[name], masks[name] = forward, mask


def _tables() -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns transformers' tables of attention functions and of mask functions, by name.

    Raises:
        Unsupported: transformers is too old to have them
    """
    import transformers

    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as e:
        raise Unsupported(
            f"ulysses: transformers {transformers.__version__} has no tables of attention "
            "functions and mask functions; install transformers 4.53 or newer"
        ) from e
    return AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping


def _called(options: dict[str, Any]) -> bool:
    """Reports whether a layer runs in a call of a model that this package computes."""
    return options.get(KEY) is not None or inside() is not None


class UlyssesSPAttentionHF:
    """Registers this package under DeepSpeed's name and signature.

    `register_with_transformers` replaces DeepSpeed's class of this name
    (deepspeed.runtime.sequence_parallel.ulysses_sp), and `ulysses.loader` its data loader adapter.
    The package's own interface is `register_transformers`.
    """

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> ParallelState | None:
        """Makes this package compute an attention implementation of transformers.

        Collective over all ranks of torch.distributed. The entry of core_attn_implementation in
        transformers' tables of attention functions and masks is replaced, for all models that use
        it. Another call with this name changes the options and does not wrap the entry twice.
        Attention runs on this package's kernels: windows, packed documents, padding, sinks and
        soft caps work as in `transformers_attention`, whatever core_attn_implementation is.

        Args:
            model_name_or_path: a model, a wrapper with `.config`, a config, or a name or path
            core_attn_implementation (str): attn_implementation of the model, such as "sdpa" or
                "flash_attention_2", or the name "owner/name" of a kernel, which is loaded
            sequence_parallel_size (int): consecutive ranks of a sequence. 1 = nothing is registered
            micro_batch_size (int): sequences of each call
            seq_length (int, optional): tokens of each sequence over all ranks. Default: None
            seq_length_is_variable (bool): calls may have other lengths than seq_length. Default:
                True
            disable_in_eval (bool): a model in evaluation (model.eval()) calls the replaced
                function without communication; each rank then has whole sequences. Default: False
            max_length (int, optional): deprecated name of seq_length. Default: None

        Returns:
            The groups, `mpu` of deepspeed.initialize; None if sequence_parallel_size is 1.

        Raises:
            InvalidArgument: an argument is wrong, or torch.distributed is not initialized; it is a
                ValueError
            Unsupported: transformers is older than 4.53
            CommError: the communicator failed

        Example::

            >>> mpu = ulysses.UlyssesSPAttentionHF.register_with_transformers(
            ...     model, "sdpa", sequence_parallel_size=4, micro_batch_size=1
            ... )
        """
        operation = f"ulysses.{cls.__name__}.register_with_transformers"
        if max_length is not None:
            text = f"{operation}: max_length is deprecated; give seq_length"
            warnings.warn(text, FutureWarning, stacklevel=2)
            seq_length = max_length if seq_length is None else seq_length
        for name, n in (
            ("sequence_parallel_size", sequence_parallel_size),
            ("micro_batch_size", micro_batch_size),
            ("seq_length", 1 if seq_length is None else seq_length),
        ):
            if n < 1:
                raise InvalidArgument(f"{operation}: {name} is {n}; give 1 or more")
        if not seq_length_is_variable and seq_length is None:
            raise InvalidArgument(
                f"{operation}: seq_length_is_variable is False and seq_length is None; give the "
                "tokens of each sequence as seq_length"
            )
        if sequence_parallel_size == 1:
            return None
        _check_core(operation, core_attn_implementation)
        _check_config(operation, model_name_or_path, core_attn_implementation)
        check_size(operation, sequence_parallel_size)
        state = parallel_state(sequence_parallel_size)
        same: dict[str, Any] = dict(
            disable_in_eval=bool(disable_in_eval),
            batch=micro_batch_size,
            seq=None if seq_length_is_variable else seq_length,
        )
        given = {**same, "core_attn_implementation": core_attn_implementation}
        state.context.agree(operation, lambda: (given, (), None))
        _register(core_attn_implementation, forwards.Registration(state.context, **same))
        return state

    @classmethod
    def unregister(cls, core_attn_implementation: str) -> None:
        """Restores the functions of transformers that a registration has replaced. Not collective.

        Args:
            core_attn_implementation (str): the name that was registered

        Raises:
            InvalidArgument: nothing is registered under this name
        """
        unregister_transformers(core_attn_implementation)


def unregister_transformers(name: str = "ulysses") -> None:
    """Undoes `register_transformers` or `UlyssesSPAttentionHF.register_with_transformers`.

    Not collective. Functions of transformers that the registration has replaced are restored.

    Args:
        name (str): the attn_implementation. Default: "ulysses"

    Raises:
        InvalidArgument: nothing is registered under this name
    """
    old = forwards.registered.pop(name, None)
    if old is None:
        names = ", ".join(sorted(forwards.registered)) or "nothing"
        raise InvalidArgument(
            f"ulysses.unregister_transformers: {name!r} is not registered, {names} is; give the "
            "name of a registration"
        )
    for table, function in zip(_tables(), (old.attention, old.mask)):
        table.pop(name, None)
        if function is not None:
            table[name] = function


def _check_core(operation: str, name: str) -> None:
    """Raises InvalidArgument for an attention implementation that cannot be replaced.

    A kernel "owner/name" is loaded if transformers does not have it.
    """
    table = _tables()[0]
    if name in ("eager", "paged|eager"):
        raise InvalidArgument(
            f"{operation}: core_attn_implementation is {name!r}, which models call without the "
            "table of attention functions; load the model with attn_implementation='sdpa'"
        )
    if name not in table and "/" in name:
        try:
            from transformers.integrations.hub_kernels import load_and_register_attn_kernel

            load_and_register_attn_kernel(name)
        except Exception as e:
            raise InvalidArgument(
                f"{operation}: core_attn_implementation {name!r}: the kernel cannot be loaded "
                f"({type(e).__name__}: {e}); give 'sdpa', whose calls this package computes alike"
            ) from e
    if name not in table:
        names = ", ".join(sorted(n for n in table if n != "paged|eager"))
        raise InvalidArgument(
            f"{operation}: core_attn_implementation {name!r} is not registered in transformers; "
            f"give one of {names}"
        )


def _check_config(operation: str, model: Any, name: str) -> None:
    """Raises InvalidArgument if a model uses another attention implementation than `name`."""
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config"):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model)
    config = config.get_text_config()
    used = getattr(config, "_attn_implementation", None)
    if used is not None and used != name:
        raise InvalidArgument(
            f"{operation}: core_attn_implementation is {name!r} and the model uses {used!r}; load "
            f"the model with attn_implementation={name!r}"
        )


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
    call = inside()
    if call is not None:
        call.windows.add(options.get("local_size"))
    return attention_mask


def _window_of(module: Any, sliding_window: int | None, call: Forward | None) -> int | None:
    """Returns the keys that a query of a layer sees; None or 0 = all.

    Layers of some models, such as Qwen2-MoE and Phi-3.5-MoE, do not pass their window: it is in the
    mask alone. Their config lists the kinds of the layers, or all layers have the mask's window.
    """
    if sliding_window:
        return sliding_window
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types and layer is not None and layer < len(types):
        slides = types[layer] == "sliding_attention"
        return getattr(config, "sliding_window", None) if slides else None
    if call is not None and len(call.windows) == 1:
        return next(iter(call.windows))
    return None


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


@eager
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
        key, value: [B, Hkv, rows, D]. Under autocast, these three are converted to its dtype, as in
            scaled_dot_product_attention
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
    from ._torch import autocasted

    operation = "ulysses.transformers_attention"
    query, key, value = (autocasted(x) for x in (query, key, value))
    call = call_of(module, others)
    ctx = call.context if call is not None else current(context)
    refused = {
        "head_mask": others.get("head_mask"),
        "position_bias": others.get("position_bias"),
        "output_attentions": others.get("output_attentions") or None,
    }
    batch, rows, keys = query.shape[0], query.shape[2], key.shape[2]
    own = call is not None and (rows, batch) == (call.rows, call.sequences.batch)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal

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
        if call is not None and own and causal and keys != rows and not call.past:
            raise Unsupported(
                f"{operation}: {type(module).__name__} has {keys} keys for {rows} tokens without a "
                "key-value cache, and its mask of both is not implemented; load the model with "
                "attn_implementation='eager'"
            )
        types = getattr(getattr(module, "config", None), "layer_types", None) or ()
        if call is None and ctx.size > 1 and "linear_attention" in types:
            raise Unsupported(
                f"{operation}: model.forward of a model with linear attention, whose layers are "
                "replaced only in calls of the model; call model(...)"
            )

    size = _window_of(module, sliding_window, call)
    window = (size - 1, 0 if causal else size - 1) if size else None
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
        sequences = call.sequences if call is not None and own else None
    if sequences is not None and keys == rows:
        options.update(seq=sequences.seq, cu_seqlens=sequences.cu_seqlens)
    elif keys != rows or call is not None:
        # On one rank: a key-value cache, whose last key belongs to the last query, or the layers of
        # an image encoder.
        options.update(seq=rows, kv_seq=None if keys == rows else keys)
    # As of transformers' own functions, some models view the output with other axes.
    return attention(query, key, value, **options).transpose(1, 2).contiguous(), None
