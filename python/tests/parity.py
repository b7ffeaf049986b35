"""Tiny models with awkward shapes for test_parity.py, and their float64 reference."""

from __future__ import annotations

import contextlib
import math
import unittest.mock

import torch
import transformers
from families import float64, own_recurrence
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mixtral import modeling_mixtral

transformers.utils.logging.disable_progress_bar()

VOCAB = 43
SEQUENCE = 37  # tokens; not a multiple of the ranks
BATCH = 2
STEPS = 5
IGNORED = -100

# The deviation of what a random matrix makes of inputs of deviation 1. It is large enough for
# sharp attention. With 1.3, layers and steps enlarged the rounding errors of transformers itself in
# float32 to 4e-5 of the largest logit. With 0.9 they are 3e-6, and no choice of experts is nearly
# tied: the scores at its limit differ by 3e-5 of themselves or more.
GAIN = 0.9

# 6 query heads on 2 key heads: 4 ranks share key heads, and have 2, 2, 1 and 1 query heads. The
# features of all heads are not hidden_size, and no extent is a power of 2.
SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=36,
    intermediate_size=52,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-3,  # so large that a wrong eps changes the result
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
DELTA = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=12,
    linear_value_head_dim=10,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    head_dim=16,
    rope_parameters=dict(
        rope_type="default", rope_theta=100.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0]
    ),
)

# The gain of queries has five steps in the longest document.
MINISTRAL3 = dict(
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=100.0,
        factor=8.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=8,
        llama_4_scaling_beta=0.4,
    ),
)

EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=22)
BIAS = "e_score_correction_bias"  # by which experts are chosen
# Experts in groups, chosen by sigmoids.
GROUPS = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=22,
    n_shared_experts=2,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
)

# As many key heads as query heads, and heads of q and k that are larger than the heads of v.
LATENT = dict(
    num_key_value_heads=6,
    head_dim=6,  # of transformers: the features with RoPE
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
)

# Name: (prefix of the classes, fields of the config that differ). Documents have up to 37 tokens
# and a rank of 4 has 9 or 10, so there are windows below and above both.
FAMILIES = {
    "llama": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral, window in a shard": ("Mistral", dict(sliding_window=4)),
    "mistral, window over shards": ("Mistral", dict(sliding_window=23)),
    "ministral": ("Ministral", dict(sliding_window=13, layer_types=MIXED)),
    "ministral3": ("Ministral3", MINISTRAL3),
    "ministral3, window, rotation without scaling": (
        "Ministral3",
        dict(
            MINISTRAL3,
            sliding_window=12,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=100.0,
                original_max_position_embeddings=5,
                llama_4_scaling_beta=-0.2,
            ),
        ),
    ),
    "qwen2": ("Qwen2", dict(head_dim=6, tie_word_embeddings=True)),
    "qwen2, window": (
        "Qwen2",
        dict(head_dim=6, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    ),
    "qwen3": ("Qwen3", dict(attention_bias=True)),
    "qwen3, window": (
        "Qwen3",
        dict(use_sliding_window=True, sliding_window=12, layer_types=MIXED),
    ),
    "qwen3.5": ("Qwen3_5", DELTA),
    "gemma2": (
        "Gemma2",
        dict(
            tie_word_embeddings=True,
            sliding_window=5,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
        ),
    ),
    "gemma3": (
        "Gemma3",
        dict(
            tie_word_embeddings=True,
            sliding_window=12,
            layer_types=MIXED,
            query_pre_attn_scalar=24,
            final_logit_softcapping=6.0,
            attention_bias=True,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", rope_theta=5000.0, factor=4.0),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
    "granite": (
        "Granite",
        dict(
            attention_bias=True,
            mlp_bias=True,
            embedding_multiplier=3.0,
            residual_multiplier=0.6,
            attention_multiplier=0.2,
            logits_scaling=2.5,
        ),
    ),
    "mixtral": (
        "Mixtral",
        dict(num_local_experts=5, num_experts_per_tok=2, sliding_window=None),
    ),
    "mixtral, balanced": (
        "Mixtral",
        dict(
            num_local_experts=4,
            num_experts_per_tok=3,
            sliding_window=12,
            output_router_logits=True,
            router_aux_loss_coef=0.3,
        ),
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        dict(
            EXPERTS,
            head_dim=6,
            shared_expert_intermediate_size=26,
            mlp_only_layers=[1],
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=2,
        ),
    ),
    "qwen2-moe, without biases": (
        "Qwen2Moe",
        dict(
            EXPERTS,
            head_dim=6,
            shared_expert_intermediate_size=14,
            qkv_bias=False,
            norm_topk_prob=True,
            output_router_logits=True,
            router_aux_loss_coef=0.2,
            tie_word_embeddings=True,
        ),
    ),
    "olmoe": (
        "Olmoe",
        dict(head_dim=6, num_experts=6, num_experts_per_tok=3, attention_bias=True),
    ),
    "olmoe, balanced, stacked": (
        "Olmoe",
        dict(
            head_dim=6,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            output_router_logits=True,
        ),
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(EXPERTS, norm_topk_prob=True, mlp_only_layers=[1], attention_bias=True),
    ),
    "qwen3-moe, balanced": (
        "Qwen3Moe",
        dict(
            EXPERTS,
            norm_topk_prob=False,
            use_sliding_window=True,
            sliding_window=7,
            output_router_logits=True,
            router_aux_loss_coef=0.2,
        ),
    ),
    "qwen3-moe, all experts, stacked": (
        "Qwen3Moe",
        dict(EXPERTS, num_experts=4, num_experts_per_tok=4, decoder_sparse_step=2),
    ),
    "qwen3-next": (
        "Qwen3Next",
        dict(
            DELTA,
            **EXPERTS,
            shared_expert_intermediate_size=26,
            mlp_only_layers=[1],
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.25),
        ),
    ),
    "qwen3.5-moe, stacked": (
        "Qwen3_5Moe",
        dict(DELTA, **EXPERTS, shared_expert_intermediate_size=26, attention_bias=True),
    ),
    "smollm3": ("SmolLM3", dict(no_rope_layers=[1, 0, 1], tie_word_embeddings=True)),
    "smollm3, window": (
        "SmolLM3",
        dict(no_rope_layer_interval=2, use_sliding_window=True, sliding_window=6),
    ),
    "glm": (
        "Glm",
        dict(
            pad_token_id=None,  # the defaults are ids of the published tokenizer
            eos_token_id=1,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.6),
        ),
    ),
    "seed-oss": (
        "SeedOss",
        dict(
            head_dim=10,
            attention_dropout=0.0,
            residual_dropout=0.0,
            mlp_bias=True,
            pad_token_id=None,  # whose embedding transformers does not train
        ),
    ),
    "glm4": (
        "Glm4",
        dict(
            eos_token_id=1,  # the default is a list of ids of the published tokenizer
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.6),
        ),
    ),
    "glm4, without biases": (
        "Glm4",
        dict(
            head_dim=12,
            attention_bias=False,
            eos_token_id=1,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="linear", factor=2.0, rope_theta=100.0, partial_rotary_factor=0.5
            ),
        ),
    ),
    "glm4-moe": (
        "Glm4Moe",
        dict(
            GROUPS,
            attention_bias=True,
            use_qk_norm=True,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.6),
        ),
    ),
    "glm4-moe, not normalized, stacked": (
        "Glm4Moe",
        dict(
            GROUPS,
            n_group=1,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=0,
            norm_topk_prob=False,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.4),
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=22,
            rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.6),
        ),
    ),
    "ernie": ("Ernie4_5", dict(use_bias=True)),
    "ernie-moe": (
        "Ernie4_5_Moe",
        dict(
            moe_num_experts=6,
            moe_k=2,
            moe_intermediate_size=22,
            moe_num_shared_experts=2,
            moe_layer_end_index=1,
            tie_word_embeddings=False,
        ),
    ),
    "ernie-moe, balanced, stacked": (
        "Ernie4_5_Moe",
        dict(
            moe_num_experts=5,
            moe_k=3,
            moe_intermediate_size=22,
            moe_num_shared_experts=0,
            moe_layer_start_index=0,
            moe_layer_interval=2,
            output_router_logits=True,
            router_aux_loss_coef=0.2,
        ),
    ),
    "deepseek-v2": (
        "DeepseekV2",
        dict(
            LATENT | GROUPS,
            topk_method="group_limited_greedy",
            norm_topk_prob=False,
            routed_scaling_factor=4.0,
            q_lora_rank=16,
            attention_bias=True,
        ),
    ),
    "deepseek-v2, without groups and compressed queries, yarn, stacked": (
        "DeepseekV2",
        dict(
            LATENT | GROUPS,
            topk_method="greedy",
            norm_topk_prob=False,
            n_group=1,
            topk_group=1,
            q_lora_rank=None,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=100.0,
                factor=4.0,
                mscale=0.7,
                mscale_all_dim=0.7,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "deepseek-v3": (
        "DeepseekV3",
        dict(LATENT | GROUPS, q_lora_rank=16, attention_bias=True),
    ),
    "deepseek-v3, dense, without compressed queries": (
        "DeepseekV3",
        dict(
            LATENT,
            first_k_dense_replace=3,
            q_lora_rank=None,
            rope_interleave=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "deepseek-v3, yarn, stacked": (
        "DeepseekV3",
        dict(
            LATENT | GROUPS,
            n_shared_experts=1,
            first_k_dense_replace=2,
            q_lora_rank=9,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=100.0,
                factor=4.0,
                mscale=0.7,
                mscale_all_dim=1.2,
                original_max_position_embeddings=16,
            ),
        ),
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        dict(
            LATENT | GROUPS,
            q_lora_rank=11,
            mlp_layer_types=["sparse", "dense", "sparse"],
            eos_token_id=1,
        ),
    ),
    "olmo2": ("Olmo2", dict(attention_bias=True)),
    "olmo3": ("Olmo3", dict(sliding_window=9, num_hidden_layers=4)),
    "olmo3, two kinds of RoPE": (
        "Olmo3",
        dict(
            sliding_window=5,
            layer_types=MIXED,
            tie_word_embeddings=True,
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="yarn",
                    rope_theta=5000.0,
                    factor=4.0,
                    original_max_position_embeddings=16,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=100.0),
            ),
        ),
    ),
    "phi3": (
        "Phi3",
        dict(
            partial_rotary_factor=0.6,
            rope_parameters=dict(rope_type="default", rope_theta=100.0),
        ),
    ),
    "phi3, window and longrope": (
        "Phi3",
        dict(
            head_dim=6,
            sliding_window=7,
            tie_word_embeddings=True,
            max_position_embeddings=256,  # the documents are short, so short_factor applies
            original_max_position_embeddings=64,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=100.0,
                short_factor=[1.0, 1.5, 2.0],
                long_factor=[1.5, 3.0, 5.0],
            ),
        ),
    ),
    "gpt-oss": (
        "GptOss",
        dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            intermediate_size=22,
            sliding_window=5,
            max_position_embeddings=131072,
        ),
    ),
    "gpt-oss, balanced": (
        "GptOss",
        dict(
            num_local_experts=5,
            num_experts_per_tok=3,
            intermediate_size=22,
            output_router_logits=True,
            router_aux_loss_coef=0.3,
        ),
    ),
    "gpt-oss, in blocks": (
        "GptOss",
        dict(
            hidden_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=32,
            sliding_window=5,
        ),
    ),
    "gpt-oss, dense": (
        "GptOss",
        dict(num_local_experts=0, sliding_window=5, max_position_embeddings=131072),
    ),
    "gpt-oss, without biases": (
        "GptOss",
        dict(
            num_local_experts=0,
            sliding_window=17,
            attention_bias=False,
            layer_types=MIXED[1:] + MIXED[1:2],
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=100.0,
                factor=4.0,
                truncate=False,
                original_max_position_embeddings=16,
            ),
        ),
    ),
}


class DenseMLP(torch.nn.Module):
    """The MLP of gpt-oss models without experts, whose attention is that of transformers."""

    def __init__(self, config) -> None:
        super().__init__()
        n, wide = config.hidden_size, config.intermediate_size
        self.gate_proj = torch.nn.Linear(n, wide, bias=False)
        self.up_proj = torch.nn.Linear(n, wide, bias=False)
        self.down_proj = torch.nn.Linear(wide, n, bias=False)

    def forward(self, x):
        gate = torch.nn.functional.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x)), None  # None: scores of the router


def dense(family: str):
    """Makes transformers build gpt-oss without experts, inside a with statement."""
    if FAMILIES[family][1].get("num_local_experts") != 0:
        return contextlib.nullcontext()
    return unittest.mock.patch.object(modeling_gpt_oss, "GptOssMLP", DenseMLP)


def classes(family: str) -> tuple[type, type]:
    """Returns the classes of a family's config and model."""
    prefix = FAMILIES[family][0]
    text = prefix in ("Qwen3_5", "Qwen3_5Moe", "Gemma3")
    config = prefix + ("TextConfig" if text else "Config")
    return getattr(transformers, config), getattr(transformers, prefix + "ForCausalLM")


def randomize(model: torch.nn.Module) -> None:
    """Sets random weights, so large that attention is far from uniform and every weight matters.

    They are not so large that float32 is far from float64 (GAIN).
    """
    g = torch.Generator().manual_seed(3)
    centred = model.config.model_type in (
        "qwen3_5_text",
        "qwen3_5_moe_text",
        "qwen3_next",
        "gemma2",
        "gemma3_text",
    )
    with torch.no_grad():
        # transformers counts choices without the biases, for the loss that balances experts.
        bias = 0.0 if getattr(model.config, "output_router_logits", False) else 0.2
        for name, p in model.named_buffers():
            if name.endswith(BIAS):
                p.copy_(bias * torch.randn(p.shape, generator=g))
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=g)
            if name.endswith(BIAS):
                p.copy_(bias * r)
            elif "embed_tokens" in name:
                p.copy_((0.2 if model.config.tie_word_embeddings else 0.6) * r)
            elif p.dim() == 3 and model.config.model_type == "gpt_oss":  # [experts, in, out]
                p.copy_(GAIN * r / math.sqrt(p.shape[1]))
            elif name.endswith("gate_up_proj_bias"):
                p.copy_(0.3 * r)
                p[:, ::5] += 12  # some of gate and up are far beyond their limits of 7
                p[:, 3::10] -= 12
            elif p.dim() == 3 and "experts" in name:  # [experts, out, in]
                p.copy_(GAIN * r / math.sqrt(p.shape[2]))
            elif p.dim() >= 2:
                p.copy_(GAIN * r / math.sqrt(p[0].numel()))
            elif name.endswith("bias"):
                p.copy_(0.3 * r)
            elif name.endswith("A_log"):
                p.copy_(r - 2)
            elif name.endswith("sinks"):
                p.copy_(r)
            else:  # norms
                zero = centred and not name.endswith("linear_attn.norm.weight")
                p.copy_(0.2 * r + (0 if zero else 1))


def build(family: str):
    """Returns a model of transformers in float32, with the same weights at every call."""
    config, model = classes(family)
    fields = SHAPE | FAMILIES[family][1]
    if config is transformers.Qwen3_5MoeTextConfig:  # all layers have experts
        del fields["intermediate_size"]
    with dense(family):
        made = model(config(**fields, attn_implementation="eager"))
    randomize(made)
    return made


def load(family: str, folder: str, unknown: str = ""):
    """Returns a model of transformers from a folder, in which no weight is missing or unknown.

    Weights whose names end with unknown, if it is given, are ignored.
    """
    with dense(family):
        model, info = classes(family)[1].from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    if unknown:
        info["unexpected_keys"] = {n for n in info["unexpected_keys"] if not n.endswith(unknown)}
    wrong = {kind: names for kind, names in info.items() if names}
    if wrong:
        raise AssertionError(f"{folder}: {wrong}")
    return model


def data() -> dict[str, torch.Tensor]:
    """Returns STEPS · BATCH sequences: input_ids, labels and position_ids.

    Some have one document, others documents that end inside of shards, of one token and longer than
    the windows. Some targets are ignored.
    """
    g = torch.Generator().manual_seed(5)
    n = STEPS * BATCH
    ids = torch.randint(0, VOCAB, (n, SEQUENCE), generator=g)
    labels = torch.where(torch.rand(n, SEQUENCE, generator=g) < 0.15, IGNORED, ids)
    ends = ((0, 3, 4, 20, 37), (0, 37), (0, 29, 36, 37))
    positions = torch.stack(
        [
            torch.cat([torch.arange(b - a) for a, b in zip(cu, cu[1:])])
            for cu in (ends[i % 3] for i in range(n))
        ]
    )
    return dict(input_ids=ids, labels=labels, position_ids=positions)


def documents(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Returns the documents [lo, hi) of a sequence."""
    starts = [i for i, p in enumerate(positions.tolist()) if p == 0]
    return list(zip(starts, [*starts[1:], len(positions)]))


def unfused(config, name: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Returns q|k|v and z, or b and a, of Qwen3-Next, whose rows are by key head in one tensor."""
    hk, dk, dv = (
        config.linear_num_key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    group = config.linear_num_value_heads // hk
    qkvz = "in_proj_qkvz" in name
    sizes = [dk, dk, group * dv, group * dv] if qkvz else [group, group]
    parts = [p.flatten(0, 1) for p in x.unflatten(0, (hk, -1)).split(sizes, 1)]
    if qkvz:
        return {
            name.replace("qkvz", "qkv"): torch.cat(parts[:3]),
            name.replace("qkvz", "z"): parts[3],
        }
    return {name.replace("in_proj_ba", f"in_proj_{i}"): p for i, p in zip("ba", parts)}


def on_disk(model: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns tensors of a model by their names on disk, where each expert has its own."""
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, x in tensors.items():
        if "in_proj_qkvz" in name or "in_proj_ba" in name:
            found |= unfused(model.config, name, x)
            continue
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, kind = name.rpartition(".experts.")
        for e in range(len(x) if prefix else 0):
            if model.config.model_type == "gpt_oss":
                found[f"{prefix}.experts.{e}.{kind}"] = x[e]
            elif kind == "gate_up_proj":
                found[f"{prefix}.experts.{e}.{gate}.weight"] = x[e, : x.shape[1] // 2]
                found[f"{prefix}.experts.{e}.{up}.weight"] = x[e, x.shape[1] // 2 :]
            else:
                found[f"{prefix}.experts.{e}.{down}.weight"] = x[e]
        if not prefix:
            found[name] = x
    return found


class Reference:
    """A model of transformers in float64, which computes each document in a call of its own."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.double().train()
        self.model.config._experts_implementation = "eager"  # the others have no float64
        self.coefficient = 0.0  # of the loss that balances experts
        if getattr(model.config, "output_router_logits", False):
            self.coefficient = model.config.router_aux_loss_coef
        self.data = data()

    def forward(self, step: int):
        """Returns (logits [tokens, V], mean loss, loss that balances experts) of a global batch."""
        logits, total, count = [], torch.zeros((), dtype=torch.float64), 0
        balance = torch.zeros((), dtype=torch.float64)
        for s in range(step * BATCH, (step + 1) * BATCH):
            routers, masks = [], []  # of the documents
            for lo, hi in documents(self.data["position_ids"][s]):
                ids = self.data["input_ids"][s, lo:hi]
                self.document = s, lo
                out = self.model(
                    input_ids=ids[None], position_ids=torch.arange(hi - lo)[None], use_cache=False
                )
                y = out.logits[0]
                targets = self.data["labels"][s, lo + 1 : hi]
                total = total + torch.nn.functional.cross_entropy(
                    y[: hi - lo - 1], targets, ignore_index=IGNORED, reduction="sum"
                )
                count += int((targets != IGNORED).sum())
                logits.append(y)
                masks.append(torch.cat([targets != IGNORED, torch.tensor([False])]))
                if self.coefficient:
                    routers.append(out.router_logits)
            balance = balance + torch.cat(masks).sum() * self.balance(routers, torch.cat(masks))
        return torch.cat(logits), total / count, balance / count

    def balance(self, routers, mask):
        """Returns the mean over the layers of transformers' loss for one sequence.

        transformers itself computes it for all layers as if they were one layer with more tokens.
        """
        if not routers:
            return 0.0
        config = self.model.config
        return sum(
            modeling_mixtral.load_balancing_loss_func(
                (torch.cat(layer),), config.num_experts, config.num_experts_per_tok, mask[None]
            )
            for layer in zip(*routers)
        ) / len(routers[0])

    def step(self, step: int, lr: float):
        """Runs a step of SGD. Returns (logits, loss, gradients by name) before it."""
        self.model.zero_grad()
        with float64(), own_recurrence():
            logits, loss, self.aux_loss = self.forward(step)
            (loss + self.coefficient * self.aux_loss).backward()
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        with torch.no_grad():
            for p in trained.values():
                p -= lr * p.grad
        return logits.detach(), float(loss.detach()), on_disk(self.model, gradients)

    def logits(self, step: int) -> torch.Tensor:
        """Returns the logits of a global batch."""
        with torch.no_grad(), float64(), own_recurrence():
            return self.forward(step)[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the weights."""
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}
