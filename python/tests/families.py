"""Tiny models for test_transformers.py, and their float64 reference on one process."""

from __future__ import annotations

import contextlib
import importlib

import torch
import transformers

VOCAB = 31
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
COMMON = dict(
    TINY,
    max_position_embeddings=64,
    head_dim=8,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    layer_types=["linear_attention", "full_attention"],
)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)

# Name: (class of the config, class of the model, what differs).
FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral with a window": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=5)),
    "qwen2 with a window": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        dict(
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=1,
            layer_types=["full_attention", "sliding_attention"],
        ),
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", dict(EXPERTS, decoder_sparse_step=1)),
    "qwen2-moe with a window": (  # of every second layer; the mask alone has it
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        dict(
            EXPERTS,
            shared_expert_intermediate_size=16,
            use_sliding_window=True,
            sliding_window=4,
            max_window_layers=2,
        ),
    ),
    "phimoe": (  # all layers have a window, which the mask alone has
        "PhimoeConfig",
        "PhimoeForCausalLM",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=4,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "gemma3 text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
        ),
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            query_pre_attn_scalar=8,
            attn_logit_softcapping=1.5,
        ),
    ),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        dict(
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        ),
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)),
    "qwen3.5 text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", DELTA),
    "qwen3.5-moe text": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        dict(DELTA, **EXPERTS, shared_expert_intermediate_size=16),
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        dict(
            DELTA,
            **EXPERTS,
            shared_expert_intermediate_size=16,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
    ),
}


def build(family: str, attention: str = "eager"):
    """Returns a model in float32, with the same weights at every call."""
    config, model, more = FAMILIES[family]
    torch.manual_seed(3)
    made = getattr(transformers, model)(
        getattr(transformers, config)(**{**COMMON, **more}, attn_implementation=attention)
    )
    # No weight is 0 or 1, so each one matters, and decays are from weak to strong.
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(
                torch.linspace(-1.5, 2, p.numel())
                if name.endswith("A_log")
                else (p + torch.randn_like(p) * 0.15)
            )
    return made.train()


@contextlib.contextmanager
def float64():
    """Makes torch.float32 mean float64, for code of transformers that converts to float32.

    Norms, softmax, gates and rotary embeddings do so.
    """
    kept = torch.float32, torch.float, torch.Tensor.float
    torch.float32, torch.float = torch.float64, torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = kept


def recurrence(
    query,
    key,
    value,
    g,
    beta,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    **_,
):
    """Computes the gated delta rule by its definition, token by token, in float64.

    The function of transformers converts to float32. If decay is strong, the errors of its
    gradients are as large as the gradients.
    """
    q, k, v, g, beta = (x.double() for x in (query, key, value, g, beta))
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    state, out = q.new_zeros(q.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * q.shape[3] ** -0.5)
    return torch.stack(out, 1), None


@contextlib.contextmanager
def own_recurrence():
    """Makes the layers of transformers call `recurrence`."""
    kept = []
    for name in ("qwen3_5", "qwen3_5_moe", "qwen3_next"):
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        kept.append((module, module.torch_chunk_gated_delta_rule))
        module.torch_chunk_gated_delta_rule = recurrence
    try:
        yield
    finally:
        for module, f in kept:
            module.torch_chunk_gated_delta_rule = f


def loss_of(logits, labels):
    """Returns the mean loss over labels that are not -100. Labels are already shifted."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=-100
    )


def reference(family, ids, positions, labels, documents):
    """Returns (logits, loss, gradients by name) of one process in float64.

    Each document (sequence, lo, hi) is a separate call. Logits of tokens in no document are NaN.
    """
    with float64(), own_recurrence():
        model = build(family).double()
        model.config._experts_implementation = "eager"  # the others have no float64
        logits = torch.full((*ids.shape, VOCAB), float("nan"), dtype=torch.float64)
        total, count = 0, int((labels != -100).sum())
        for b, lo, hi in documents:
            y = model(
                input_ids=ids[b : b + 1, lo:hi],
                position_ids=positions[b : b + 1, lo:hi],
                use_cache=False,
            ).logits
            logits[b, lo:hi] = y[0].detach()
            seen = int((labels[b, lo:hi] != -100).sum())
            total = total + (loss_of(y, labels[b : b + 1, lo:hi]) * seen if seen else 0)
        (total / count).backward()
    return logits, float(total / count), {name: p.grad for name, p in model.named_parameters()}
