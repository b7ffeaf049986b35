#!/usr/bin/env python3
"""Compares all model types of the installed transformers with one process. Not one of the tests.

    python model_types.py [TYPE ...]

For each type of AutoModelForCausalLM, or for the given ones, it builds a tiny model with random
weights. Two packed sequences of two documents run forward and backward with
attn_implementation="ulysses" on 1 and on 2 ranks. Logits and gradients are compared with the same
model and transformers' own attention, which computes each document alone. It prints a line for each
type and number of ranks: equal, refused with the reason, or wrong with the errors. The exit code is
1 if one is wrong.
"""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import warnings

import torch
import transformers
import ulysses
from ranks import contexts, joined, local
from reference import error
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LOGITS, GRADIENTS = 2e-3, 1e-2  # largest errors of equal results in float32
LARGEST = 3_000_000  # parameters
SECONDS = 60  # for a model on some ranks

# The names that configurations of various types have for a size, a probability or a mark.
TINY = dict(
    {name: 64 for name in ("vocab_size", "max_position_embeddings", "n_positions")},
    **{name: 32 for name in ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")},
    **{name: 48 for name in ("intermediate_size", "ffn_dim")},
    **{name: 24 for name in ("moe_intermediate_size",)},
    **{name: 16 for name in ("shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank")},
    **{name: 4 for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers")},
    **{name: 4 for name in ("num_attention_heads", "n_head", "n_heads", "sliding_window")},
    **{name: 4 for name in ("num_experts", "num_local_experts", "n_routed_experts")},
    **{name: 2 for name in ("num_key_value_heads", "num_experts_per_tok", "max_window_layers")},
    **{name: 8 for name in ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
    **{name: 1 for name in ("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group")},
    **{name: 0.0 for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "residual_dropout")},
    **{name: 0.0 for name in ("attention_dropout", "hidden_dropout", "dropout")},
    **{name: None for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    moe_num_experts=4,
    moe_k=2,
    moe_layer_end_index=3,
    use_sliding_window=True,
)
LATENT = dict(num_key_value_heads=4)  # keys of all heads from one latent vector
OWN: dict[str, dict] = {  # what a type needs besides
    "codegen": dict(rotary_dim=8),
    "cwm": dict(bos_token_id=1, eos_token_id=2),
    "gemma3n_text": dict(num_kv_shared_layers=0),
    "gpt_neo": dict(attention_types=[[["global", "local"], 2]], window_size=4),
    "gptj": dict(rotary_dim=8),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"] * 2),
    "modernbert-decoder": dict(pad_token_id=0, bos_token_id=1, eos_token_id=2),
    **{
        name: LATENT
        for name in (
            "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa "
            "longcat_flash minicpm3 youtu"
        ).split()
    },
}
IDS = torch.arange(26).reshape(2, 13)
CUT = 9  # tokens of the first document
POSITIONS = torch.cat([torch.arange(CUT), torch.arange(13 - CUT)]).expand(2, 13)
LABELS = torch.roll(IDS, -1, 1)
LABELS[:, [CUT - 1, 12]] = -100


class Unbuilt(Exception):
    """No tiny model of the type can be made."""


@contextlib.contextmanager
def limit(seconds: int):
    """Raises TimeoutError if the with statement takes longer."""

    def late(*_) -> None:
        raise TimeoutError(f"more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def build(model_type: str):
    """Returns a tiny model in training, with the same weights at every call."""
    kind = CONFIG_MAPPING[model_type]
    known = kind()
    if getattr(known, "text_config", None) is not None:
        raise Unbuilt("it has several parts")
    names = {*vars(known), *dir(known), *kind.attribute_map}
    fields = {name: x for name, x in TINY.items() if name in names} | OWN.get(model_type, {})
    try:
        config = kind(**fields, attn_implementation="eager")
    except Exception:  # the type has another rule for it
        fields.pop("head_dim", None)
        config = kind(**fields, attn_implementation="eager")
    torch.manual_seed(1)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config)
    if sum(p.numel() for p in model.parameters()) > LARGEST:
        raise Unbuilt("it is large")
    for m in model.modules():
        if isinstance(m, torch.nn.Dropout):
            m.p = 0.0
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.15 * torch.randn_like(p))
    return model.train(model_type != "phimoe")  # its router draws experts in training


def loss(logits, labels):
    """Returns the sum of the losses of the tokens."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def reference(model):
    """Returns logits, and gradients by name. Each document is a call of its own."""
    logits, total = [], torch.zeros(())
    for part in (slice(0, CUT), slice(CUT, 13)):
        y = model(input_ids=IDS[:, part], position_ids=POSITIONS[:, part], use_cache=False).logits
        total = total + loss(y, LABELS[:, part])
        logits.append(y.detach())
    total.backward()
    return torch.cat(logits, 1), {n: p.grad for n, p in model.named_parameters()}


def compare(model, size: int, logits, gradients) -> str:
    """Returns how the results on some ranks differ; "" if they are equal."""
    models = [copy.deepcopy(model) for _ in range(size)]

    def body(ctx):
        name = f"ulysses_{ctx.rank}"
        ulysses.register_transformers(name, ctx)
        mine = models[ctx.rank]
        mine.set_attn_implementation(name)
        for m in mine.modules():  # of models that do not change it themselves, as if loaded with it
            if hasattr(m, "config"):
                m.config._attn_implementation_internal = name
        y = mine(
            input_ids=local(IDS, ctx), position_ids=local(POSITIONS, ctx), use_cache=False
        ).logits
        loss(y, local(LABELS, ctx)).backward()
        return y.detach()

    off = error(joined(contexts(size, body)), logits)
    worst, where = 0.0, ""
    for name, want in gradients.items():
        if want is None or want.abs().max() < 1e-6:
            continue
        parts = [dict(m.named_parameters())[name].grad for m in models]
        found = sum(g for g in parts if g is not None)
        worst, where = max((worst, where), (float(error(found, want)), name))
    if off < LOGITS and worst < GRADIENTS:
        return ""
    return f"logits off by {off:.2g}, gradient of {where} by {worst:.2g}"


def main(types: list[str]) -> int:
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    wrong = 0
    for model_type in types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            with limit(SECONDS):
                model = build(model_type)
                logits, gradients = reference(copy.deepcopy(model))
        except Exception as e:
            print(f"{model_type}: not built: {str(e).splitlines()[0][:100] if str(e) else e!r}")
            continue
        for size in (1, 2):
            try:
                with limit(SECONDS):
                    off = compare(model, size, logits, gradients)
                text = f"WRONG: {off}" if off else "equal"
                wrong += bool(off)
            except ulysses.UlyssesError as e:
                text = f"refused: {e}"
            except Exception as e:  # of the model without its mask: nothing is wrong silently
                text = f"error: {type(e).__name__}: {e}"
            print(f"{model_type}, {size} ranks: {text.splitlines()[0][:150]}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
