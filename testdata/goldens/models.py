"""The tiny random models of the goldens, written as Hugging Face folders to models/."""

import copy
import json
import math
import pathlib

import torch
import transformers

VOCAB = 256
COMMON = dict(
    vocab_size=VOCAB,
    num_hidden_layers=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
    attn_implementation="sdpa",
)

# The numbers of heads are difficult for 4 ranks: with 8 query heads on 2 key heads, keys are
# replicated; 6 and 5 are not multiples of 4.
MODELS = {
    "llama": dict(
        config=transformers.LlamaConfig,
        fields=dict(
            hidden_size=64,
            intermediate_size=112,
            num_attention_heads=8,
            num_key_value_heads=2,
            rope_theta=10000.0,
        ),
    ),
    # bf16 weights in two files with an index, RoPE scaled as in Llama 3, config.json with the keys
    # of transformers 4. With theta 500 and head_dim 16, there are wavelengths below 32/4, above
    # 32/1 and between them.
    "llama3": dict(
        config=transformers.LlamaConfig,
        fields=dict(
            hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2
        ),
        rope_theta=500.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        dtype=torch.bfloat16,
        shard="80KB",
    ),
    "qwen2": dict(  # biases on q, k, v; embedding and head tied
        config=transformers.Qwen2Config,
        fields=dict(
            hidden_size=48,
            intermediate_size=80,
            num_attention_heads=6,
            num_key_value_heads=2,
            rope_theta=1e6,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3": dict(  # norms on the heads of q and k, head_dim other than hidden/heads
        config=transformers.Qwen3Config,
        fields=dict(
            hidden_size=48,
            intermediate_size=100,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=12,
            rope_theta=1e6,
            tie_word_embeddings=False,
            rms_norm_eps=1e-2,  # so large that a wrong eps changes the result
        ),
    ),
    # Hybrids. Linear layers have two value heads for each key head, so 4 ranks share key heads, and
    # d_k != d_v. Gated attention has RoPE on a quarter of the features. layer_types equal those of
    # full_attention_interval 4.
    "qwen3_5": dict(
        config=transformers.Qwen3_5TextConfig,
        fields=dict(
            hidden_size=40,
            intermediate_size=56,
            num_hidden_layers=4,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=8,
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1000.0,
                partial_rotary_factor=0.25,
                mrope_section=[1, 1, 0],
            ),
            tie_word_embeddings=False,
            rms_norm_eps=1e-3,
        ),
    ),
    # Tied embeddings; fewer value heads than 4 ranks; a short convolution; RoPE on half of the
    # features, set at the top level of config.json.
    "qwen3_5-tied": dict(
        config=transformers.Qwen3_5TextConfig,
        fields=dict(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=8,
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            linear_conv_kernel_dim=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
            tie_word_embeddings=True,
            rms_norm_eps=1e-2,
        ),
        at_the_top=dict(rope_theta=100.0, partial_rotary_factor=0.5),
    ),
    # Windows in the even layers, shorter than the documents; capped scores and logits; a factor of
    # scores other than 1/sqrt(head_dim). 6 heads on 3 key heads over 4 ranks.
    "gemma2": dict(
        seed=1010,
        config=transformers.Gemma2Config,
        fields=dict(
            hidden_size=48,
            intermediate_size=72,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=12,
            rope_theta=1000.0,
            query_pre_attn_scalar=20,
            sliding_window=5,
            attn_implementation="eager",  # sdpa has no soft caps
            attn_logit_softcapping=3.0,
            final_logit_softcapping=5.0,
            rms_norm_eps=1e-3,
        ),
    ),
    # Full attention in every third layer, with its own RoPE, which is scaled; norms on the heads of
    # q and k; biases; 5 heads on one key head. config.json has the keys of transformers 4.
    "gemma3": dict(
        seed=1011,
        config=transformers.Gemma3TextConfig,
        fields=dict(
            hidden_size=40,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=7,
            sliding_window_pattern=3,
            attention_bias=True,
            final_logit_softcapping=6.0,
            rms_norm_eps=1e-3,
        ),
        rope_theta=5000.0,
        rope_local_base_freq=100.0,
        rope_scaling=dict(rope_type="linear", factor=4.0),
    ),
    # Experts of which some get no token in a step; a window; 6 heads on 2 key heads.
    "mixtral": dict(
        seed=1012,
        config=transformers.MixtralConfig,
        fields=dict(
            hidden_size=48,
            intermediate_size=28,
            num_attention_heads=6,
            num_key_value_heads=2,
            num_local_experts=7,
            num_experts_per_tok=2,
            sliding_window=11,
            rope_theta=1e4,
            rms_norm_eps=1e-3,
        ),
    ),
    # A hybrid whose layers have experts, and one that all tokens have.
    "qwen3_5_moe": dict(
        seed=1014,
        config=transformers.Qwen3_5MoeTextConfig,
        fields=dict(
            hidden_size=40,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=28,
            num_experts=6,
            num_experts_per_tok=2,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            rope_parameters=dict(
                rope_type="default",
                rope_theta=1000.0,
                partial_rotary_factor=0.25,
                mrope_section=[1, 1, 0],
            ),
            tie_word_embeddings=False,
            rms_norm_eps=1e-3,
        ),
    ),
    # A dense layer between layers with experts; weights of experts that are not divided by their
    # sum; 5 heads on one key head.
    "qwen3_moe": dict(
        seed=1013,
        config=transformers.Qwen3MoeConfig,
        fields=dict(
            hidden_size=40,
            intermediate_size=64,
            moe_intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=12,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=False,
            mlp_only_layers=[1],
            tie_word_embeddings=True,
            rope_theta=1e4,
            rms_norm_eps=1e-3,
        ),
    ),
}


def on_disk(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights by their names on disk, where each expert has its own."""
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, p in model.named_parameters():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, kind = name.rpartition(".experts.")
        if not prefix:
            found[name] = p
        for e in range(len(p) if prefix else 0):
            part = f"{prefix}.experts.{e}."
            if kind == "gate_up_proj":
                found[f"{part}{gate}.weight"], found[f"{part}{up}.weight"] = p[e].chunk(2)
            else:
                found[f"{part}{down}.weight"] = p[e]
    return found


# The keys of RoPE's parameters in transformers 4.
OLD_ROPE = ("rope_theta", "rope_local_base_freq", "rope_scaling")


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Sets random weights.

    They are so large that attention is far from uniform, and every bias and norm matters. The
    initial weights of transformers are too small for that.
    """
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            r = torch.randn(p.shape, generator=g, dtype=torch.float64)
            if "embed_tokens" in name:
                p.copy_((0.15 if model.config.tie_word_embeddings else 0.5) * r)
            elif p.dim() == 3 and ".experts." in name:  # [experts, out, in]
                p.copy_(1.5 * r / math.sqrt(p.shape[2]))
            elif p.dim() >= 2:
                p.copy_(1.5 * r / math.sqrt(p[0].numel()))
            elif name.endswith("bias"):
                p.copy_(0.3 * r)
            elif name.endswith("A_log"):
                p.copy_(1.5 * r - 3)  # slow decay in most heads, fast decay in some
            else:
                zero_centred = model.config.model_type in (
                    "qwen3_5_text",
                    "qwen3_5_moe_text",
                    "gemma2",
                    "gemma3_text",
                ) and not name.endswith("linear_attn.norm.weight")
                p.copy_(0.2 * r + (0 if zero_centred else 1))


def write_models(root: pathlib.Path, only: set[str] | None = None) -> None:
    """Writes the models, or only those of these names, to a folder."""
    for i, (name, m) in enumerate(MODELS.items()):
        if only is not None and name not in only:
            continue
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        old_keys = {k: copy.deepcopy(m[k]) for k in OLD_ROPE if k in m}
        config = m["config"](**COMMON | m["fields"] | m.get("at_the_top", {}) | old_keys)
        model = transformers.AutoModelForCausalLM.from_config(config)
        randomize(model, m.get("seed", 1000 + i))
        model.to(m.get("dtype", torch.float32))
        model.save_pretrained(folder, max_shard_size=m.get("shard", "1GB"))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if "rope_scaling" in m:
            use_keys_of_transformers_4(folder / "config.json", m)
        if "at_the_top" in m:
            path = folder / "config.json"
            c = json.loads(path.read_text()) | m["at_the_top"]
            c.pop("rope_parameters")
            path.write_text(json.dumps(c, indent=2, sort_keys=True) + "\n")


def use_keys_of_transformers_4(path: pathlib.Path, m: dict) -> None:
    """Changes a config.json to the keys of transformers 4."""
    c = json.loads(path.read_text())
    c.pop("rope_parameters", None)
    c |= {k: m[k] for k in OLD_ROPE if k in m}
    c["torch_dtype"] = c.pop("dtype")
    c["transformers_version"] = "4.57.0"
    path.write_text(json.dumps(c, indent=2, sort_keys=True) + "\n")
