"""A training job of ours run by transformers' LlamaForCausalLM or Qwen3ForCausalLM: time per step, and what it learns.

    train_step.py ../../examples/quickstart.toml --threads 2                 seconds per training step
    train_step.py job.toml --train [--set train.steps=300]                   the whole run; then nats per byte on the held-out tail

The job is a TOML or JSON file with the tables of our job file: [model.new] (fields of the config), [data] path, sequence, batch,
accumulate, [eval] split, [optimizer], [train] steps, seed. Same bytes, rows, labels, learning rates, clipping; torch's AdamW.

--dtype bf16 is what transformers' Trainer does with bf16 = True: autocast, with weights and moments in F32, as ours has. --bf16-weights has weights, gradients
and moments in BF16 as well, which is faster and loses small steps.
"""

import json
import math
import pathlib
import time

import common
import tomllib
import torch
import torch.nn.functional as F
import transformers

DEFAULTS = dict(
    data=dict(sequence=4096, batch=1, accumulate=1),
    eval=dict(split=0.0),
    optimizer=dict(
        lr=1e-3,
        betas=[0.9, 0.95],
        eps=1e-8,
        weight_decay=0.0,
        clip=1.0,
        schedule="cosine",
        warmup=10,
    ),
    train=dict(steps=100),
)


def read_job(path: pathlib.Path, sets: list[str]) -> dict:
    job = (
        json.loads(path.read_text()) if path.suffix == ".json" else tomllib.loads(path.read_text())
    )
    for s in sets:
        key, value = s.split("=", 1)
        table = job
        *parents, last = key.split(".")
        for k in parents:
            table = table.setdefault(k, {})
        table[last] = tomllib.loads("x = " + value)["x"]
    for name, defaults in DEFAULTS.items():
        job[name] = defaults | job.get(name, {})
    return job


def rows(job: dict, base: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Training rows [n, sequence] and held-out rows, of one text file; a tail shorter than a row is left out."""
    paths = job["data"]["path"]
    text = (base / (paths[0] if isinstance(paths, list) else paths)).read_bytes()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    s = job["data"]["sequence"]
    cut = len(ids) - round(len(ids) * job["eval"]["split"])
    return tuple(x[: len(x) // s * s].view(-1, s) for x in (ids[:cut], ids[cut:]))


def model_of(job: dict) -> torch.nn.Module:
    fields = {k: v for k, v in job["model"]["new"].items() if k != "model_type"}
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    name = {"llama": "Llama", "qwen3": "Qwen3"}[job["model"]["new"]["model_type"]]
    config = getattr(transformers, name + "Config")(**ends | fields, attn_implementation="sdpa")
    return getattr(transformers, name + "ForCausalLM")(config)


def nll(model, x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Mean over the targets of rows x [b, s]."""
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        logits = model(input_ids=x, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), x[:, 1:].reshape(-1))


def learning_rate(o: dict, step: int, steps: int) -> float:
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


class Stepper:
    def __init__(self, job: dict, train: torch.Tensor, dtype: str, weights: torch.dtype):
        self.job, self.rows, self.model, self.dtype = job, train, model_of(job).to(weights), dtype
        o = job["optimizer"]
        wide = [p for p in self.model.parameters() if p.dim() >= 2]
        rest = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            dict(params=wide, weight_decay=o["weight_decay"]),
            dict(params=rest, weight_decay=0.0),
        ]
        self.opt = torch.optim.AdamW(
            groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], fused=True
        )
        self.order = torch.Generator().manual_seed(job.get("seed", 1))
        self.queue: list[int] = []

    def batch(self) -> torch.Tensor:
        if len(self.queue) < self.job["data"]["batch"]:
            self.queue += torch.randperm(len(self.rows), generator=self.order).tolist()
        n = self.job["data"]["batch"]
        take, self.queue = self.queue[:n], self.queue[n:]
        return self.rows[take]

    def step(self, lr: float) -> float:
        for g in self.opt.param_groups:
            g["lr"] = lr
        self.opt.zero_grad()
        n, total = self.job["data"]["accumulate"], 0.0
        for _ in range(n):
            loss = nll(self.model, self.batch(), self.dtype) / n
            loss.backward()
            total += loss.item()
        if self.job["optimizer"]["clip"] > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job["optimizer"]["clip"])
        self.opt.step()
        return total


def evaluate(model, held_out: torch.Tensor, dtype: str) -> float:
    with torch.no_grad():
        return sum(nll(model, r[None], dtype).item() for r in held_out) / len(held_out)


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("job", type=pathlib.Path)
    p.add_argument("--train", action="store_true")
    p.add_argument("--set", action="append", default=[], metavar="table.key=value")
    p.add_argument("--bf16-weights", action="store_true")
    p.add_argument("--log", type=int, default=0, help="print the loss every so many steps")
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(a.threads)
    job = read_job(a.job, a.set)
    torch.manual_seed(job.get("seed", 1))
    train, held_out = rows(job, a.job.parent)
    s = Stepper(job, train, a.dtype, torch.bfloat16 if a.bf16_weights else torch.float32)
    tokens = job["data"]["sequence"] * job["data"]["batch"] * job["data"]["accumulate"]
    size = dict(
        parameters=sum(p.numel() for p in s.model.parameters()),
        tokens_per_step=tokens,
        threads=a.threads,
    )
    if not a.train:
        m = common.measure(lambda: s.step(1e-4), a.repeat)
        common.emit(
            "transformers", a.job.stem, **size, **m, tokens_per_second=tokens / m["median_s"]
        )
        return
    steps, start, mean = job["train"]["steps"], time.perf_counter(), 0.0
    for i in range(steps):
        loss = s.step(learning_rate(job["optimizer"], i, steps))
        mean = loss if i == 0 else 0.95 * mean + 0.05 * loss
        if a.log and (i + 1) % a.log == 0:
            print(f"step {i + 1} loss {mean:.3f} {time.perf_counter() - start:.0f} s", flush=True)
    seconds = time.perf_counter() - start
    common.emit(
        "transformers",
        a.job.stem,
        **size,
        steps=steps,
        seconds=seconds,
        train_loss=mean,
        eval_loss=evaluate(s.model, held_out, a.dtype) if len(held_out) else None,
    )


if __name__ == "__main__":
    main()
