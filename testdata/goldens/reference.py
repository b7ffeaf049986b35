"""The reference: results of a job from PyTorch, without sharding, packing or accumulation.

Each document is run separately through the transformers model. The loss is the sum of the negative
log-likelihoods of all valid targets of the global batch, divided by their number. Clipping and
optimizers are torch's own. In float64, the operations that transformers computes in float32 (norms,
rotary angles, the gated delta rule) are replaced, so the result is exact to about 1e-12. The plain
float32 run is recorded beside it.
"""

import math
from dataclasses import dataclass

import torch
import transformers

IGNORED = -100


@dataclass
class Document:
    """One document of a sequence: ids [n], targets [n] (-100 = none), positions [n]."""

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor


def learning_rate(o: dict, step: int, steps: int) -> float:
    """Returns the learning rate of a step, from 0: warmup, then constant, linear or cosine."""
    if step < o["warmup"]:
        return o["lr"] * (step + 1) / o["warmup"]
    span = steps - 1 - o["warmup"]
    t = (step - o["warmup"]) / span if span > 0 else 1.0
    return (
        o["lr"]
        * {"constant": 1.0, "linear": 1 - t, "cosine": 0.5 * (1 + math.cos(math.pi * t))}[
            o["schedule"]
        ]
    )


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gated_delta_net(m: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Computes the layer by its recurrence, with the convolution and the gates of Qwen3.5.

    Source: Yang, Kautz & Hatamizadeh 2024, arXiv:2412.06464.
    """
    n, width, hk, hv = x.shape[1], m.conv_kernel_size, m.num_k_heads, m.num_v_heads
    mixed = torch.nn.functional.pad(m.in_proj_qkv(x[0]), (0, 0, width - 1, 0))  # [width - 1 + n, C]
    mixed = torch.nn.functional.silu(
        sum(mixed[i : i + n] * m.conv1d.weight[:, 0, i] for i in range(width))
    )
    q, k, v = mixed.split([m.key_dim, m.key_dim, m.value_dim], dim=-1)
    q, k = (y.reshape(n, hk, -1).repeat_interleave(hv // hk, dim=1) for y in (q, k))
    q, k = (y * torch.rsqrt(y.pow(2).sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    v = v.reshape(n, hv, -1)
    beta = torch.sigmoid(m.in_proj_b(x[0]))
    decay = torch.exp(
        -torch.exp(m.A_log) * torch.nn.functional.softplus(m.in_proj_a(x[0]) + m.dt_bias)
    )
    state, out = torch.zeros(hv, m.head_k_dim, m.head_v_dim, dtype=x.dtype), []
    for t in range(n):
        state = decay[t, :, None, None] * state
        u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None, :]
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(m.head_k_dim))
    gate = m.in_proj_z(x[0]).reshape(n, hv, -1)
    return m.out_proj(m.norm(torch.stack(out), gate).reshape(1, n, -1))


def capped_attention(m, q, k, v, mask, scaling, dropout=0.0, softcap=None, **_):
    """Computes attention with capped scores in the type of q. torch's sdpa has no caps.

    q [B, Hq, n, D], k and v [B, Hkv, n, D], mask [1, 1, n, n].
    """
    k, v = (x.repeat_interleave(m.num_key_value_groups, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scaling
    scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2), None


transformers.AttentionInterface.register("capped", capped_attention)


def route(m, x):
    """Chooses the experts of x [n, hidden] in the type of x. transformers has float32 here."""
    logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), m.weight)
    weights, chosen = logits.softmax(-1).topk(m.top_k, -1)
    if getattr(m, "norm_topk_prob", True):  # Mixtral always divides them by their sum
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, chosen


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """Converts all arithmetic of the model to float64."""
    model = model.double()
    model.config._experts_implementation = "eager"  # the others have no float64
    for m in model.modules():
        name = type(m).__name__
        if name in (
            "Qwen3_5RMSNorm",
            "Qwen3_5MoeRMSNorm",
            "Gemma2RMSNorm",
            "Gemma3RMSNorm",
        ):  # weights are stored as their difference from 1
            m.forward = lambda x, m=m: (1 + m.weight) * rms(x, m.eps)
        elif name.endswith("RMSNorm"):
            m.forward = lambda x, m=m: m.weight * rms(x, m.variance_epsilon)
        elif name.endswith("RMSNormGated"):
            m.forward = lambda x, gate, m=m: (
                m.weight * rms(x, m.variance_epsilon) * torch.nn.functional.silu(gate)
            )
        elif name.endswith("TopKRouter"):
            m.forward = lambda x, m=m: route(m, x)
        elif name.endswith("GatedDeltaNet"):
            m.forward = lambda hidden_states, m=m, **_: gated_delta_net(m, hidden_states)
    rotary = model.model.rotary_emb
    switch = rotary.forward  # chooses the frequencies, if they depend on the length

    def angles(x, position_ids, *kind):
        switch(x, position_ids, *kind)
        if position_ids.ndim == 3:  # time, height and width, which are the same for text
            position_ids = position_ids[0]
        prefix = f"{kind[0]}_" if kind else ""  # Gemma 3: a set for each kind of layer
        freq = getattr(rotary, prefix + "inv_freq")
        factor = getattr(rotary, prefix + "attention_scaling")
        a = position_ids[..., None].double() * freq.double()
        a = torch.cat((a, a), dim=-1)
        return a.cos() * factor, a.sin() * factor

    rotary.forward = angles
    return model


def nll_sum(model: torch.nn.Module, d: Document) -> torch.Tensor:
    """Returns the sum of the negative log-likelihoods of a document's targets."""
    n = len(d.ids)
    # The masks are given. Otherwise the library treats jumps of the positions as document starts.
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    kinds = getattr(model.config, "layer_types", None)
    if window := getattr(model.config, "sliding_window", None):
        sliding = mask & torch.ones(n, n, dtype=torch.bool).triu(1 - window)
        mask = dict(full_attention=mask, sliding_attention=sliding) if kinds else sliding
    logits = model(
        input_ids=d.ids[None], position_ids=d.positions[None], attention_mask=mask, use_cache=False
    ).logits[0]
    return torch.nn.functional.cross_entropy(
        logits, d.targets, ignore_index=IGNORED, reduction="sum"
    )


def optimizer(model: torch.nn.Module, o: dict) -> torch.optim.Optimizer:
    """Returns torch's SGD or AdamW. Weight decay applies to matrices only."""
    groups = [
        dict(
            params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=o["weight_decay"]
        ),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    if o["name"] == "sgd":  # without momentum, torch's coupled decay equals decoupled decay
        return torch.optim.SGD(groups, lr=o["lr"], foreach=False)
    return torch.optim.AdamW(
        groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], foreach=False
    )


def load(folder, dtype: torch.dtype, override: dict | None = None) -> torch.nn.Module:
    """Returns a model in float32, or in float64 with all arithmetic in float64.

    override has fields of config.json to replace, as the job's model.override.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    override = dict(override or {})
    if "model_type" in override or "sliding_window" in override:  # the kinds of layers follow
        fields = config.to_dict() | override
        fields.pop("layer_types", None)
        fields |= {k: v for k, v in override.items() if k == "layer_types"}
        config = transformers.AutoConfig.for_model(**fields)
        override = {}
    for name, value in override.items():
        if name == "rope_scaling":
            theta = config.rope_parameters["rope_theta"]
            name, value = "rope_parameters", dict(value, rope_theta=theta)
        setattr(config, name, value)
    attention = "capped" if config.model_type == "gemma2" else "sdpa"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=attention
    )
    return exact(model) if dtype == torch.float64 else model


def set_length(model: torch.nn.Module, n: int) -> None:
    """Makes the model choose RoPE's frequencies for a batch whose largest position is n - 1.

    Each document is a call, but the whole batch has one choice of frequencies. Each call gets one
    more position, n - 1, whose angles are dropped.
    """
    rotary = model.model.rotary_emb
    if getattr(rotary, "rope_type", None) not in ("dynamic", "longrope"):
        return
    rotary.chosen_by = getattr(rotary, "chosen_by", rotary.forward)

    def forward(x, position_ids):
        rotary.max_seq_len_cached = 0  # the choice does not depend on earlier batches
        longest = torch.full_like(position_ids[:, :1], n - 1)
        cos, sin = rotary.chosen_by(x, torch.cat((position_ids, longest), 1))
        return cos[:, :-1], sin[:, :-1]

    rotary.forward = forward


def train(
    folder,
    o: dict,
    batches: list[list[list[Document]]],
    dtype: torch.dtype,
    override: dict | None = None,
) -> dict:
    """Trains a model, and returns the results of the run and the model.

    batches has for each step the sequences of the global batch, each as its documents.
    """
    model = load(folder, dtype, override).train()
    opt = optimizer(model, o)
    out = dict(losses=[], grad_norms=[], lr=[], target_tokens=[], tokens=[], model=model)
    for step, sequences in enumerate(batches):
        docs = [d for sequence in sequences for d in sequence]
        valid = sum(int((d.targets != IGNORED).sum()) for d in docs)
        set_length(model, max(int(d.positions.max()) + 1 for d in docs))
        lr = learning_rate(o, step, len(batches))
        for g in opt.param_groups:
            g["lr"] = lr
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        total = 0.0
        for d in docs:
            nll = nll_sum(model, d)
            total += nll.item()
            (nll / max(valid, 1)).backward()
        norm = torch.nn.utils.clip_grad_norm_(
            model.parameters(), o["clip"] if o["clip"] > 0 else math.inf
        )
        opt.step()
        out["losses"].append(total / max(valid, 1))
        out["grad_norms"].append(norm.item())
        out["lr"].append(lr)
        out["target_tokens"].append(valid)
        out["tokens"].append(sum(len(d.ids) for d in docs))
    return out
