"""The reference: what a job computes, told by PyTorch without sharding, packing or accumulation.

Every document is run alone through the transformers model; the loss is the sum of the negative log-likelihoods of all valid targets of the
global batch over their number; clipping and optimizers are torch's own. In float64 the two places where transformers falls back to
float32 (norms, rotary angles) are replaced, so that the result is exact to about 1e-12; the plain float32 run is recorded beside it.
"""

import math
from dataclasses import dataclass

import torch
import transformers

IGNORED = -100


@dataclass
class Document:
    """One document inside one row: ids [n], targets [n] (-100 = none), positions [n]."""

    ids: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor


def learning_rate(o: dict, step: int, steps: int) -> float:
    """lr(s) for s from 0: warmup, then constant, linear or cosine to 0 at the last step."""
    if step < o["warmup"]:
        return o["lr"] * (step + 1) / o["warmup"]
    span = steps - 1 - o["warmup"]
    t = (step - o["warmup"]) / span if span > 0 else 1.0
    return o["lr"] * {"constant": 1.0, "linear": 1 - t, "cosine": 0.5 * (1 + math.cos(math.pi * t))}[o["schedule"]]


def exact(model: torch.nn.Module) -> torch.nn.Module:
    """The model in float64 throughout."""
    model = model.double()
    for m in model.modules():
        if type(m).__name__.endswith("RMSNorm"):
            m.forward = lambda x, m=m: m.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon))
    rotary = model.model.rotary_emb
    freq = rotary.inv_freq.double()

    def angles(x, position_ids):
        a = position_ids[..., None].double() * freq
        a = torch.cat((a, a), dim=-1)
        return a.cos() * rotary.attention_scaling, a.sin() * rotary.attention_scaling

    rotary.forward = angles
    return model


def nll_sum(model: torch.nn.Module, d: Document) -> torch.Tensor:
    n = len(d.ids)
    # The mask is given, lest the library reads jumps of the positions as starts of documents.
    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    logits = model(input_ids=d.ids[None], position_ids=d.positions[None], attention_mask=mask, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, d.targets, ignore_index=IGNORED, reduction="sum")


def optimizer(model: torch.nn.Module, o: dict) -> torch.optim.Optimizer:
    groups = [
        dict(params=[p for p in model.parameters() if p.dim() >= 2], weight_decay=o["weight_decay"]),
        dict(params=[p for p in model.parameters() if p.dim() < 2], weight_decay=0.0),
    ]
    if o["name"] == "sgd":  # without momentum torch's coupled decay is the decoupled one
        return torch.optim.SGD(groups, lr=o["lr"], foreach=False)
    return torch.optim.AdamW(groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], foreach=False)


def load(folder, dtype: torch.dtype) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return exact(model) if dtype == torch.float64 else model


def train(folder, o: dict, batches: list[list[list[Document]]], dtype: torch.dtype) -> dict:
    """batches: per step the global batch, rows of documents. Returns the run's figures and the model as trained."""
    model = load(folder, dtype).train()
    opt = optimizer(model, o)
    out = dict(losses=[], grad_norms=[], lr=[], target_tokens=[], tokens=[], model=model)
    for step, rows in enumerate(batches):
        docs = [d for row in rows for d in row]
        valid = sum(int((d.targets != IGNORED).sum()) for d in docs)
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
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), o["clip"] if o["clip"] > 0 else math.inf)
        opt.step()
        out["losses"].append(total / max(valid, 1))
        out["grad_norms"].append(norm.item())
        out["lr"].append(lr)
        out["target_tokens"].append(valid)
        out["tokens"].append(sum(len(d.ids) for d in docs))
    return out
