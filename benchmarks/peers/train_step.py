"""One of our training jobs in transformers (Llama, Qwen3, Qwen3-MoE or DeepSeek-V3).

    train_step.py ../../examples/quickstart.toml --threads 2    seconds of a training step
    train_step.py job.toml --train [--set train.steps=300]      the whole run, and its loss on the
                                                                held-out text in nats a byte

The program reads these keys of our job file, TOML or JSON: [model.new] (fields of the config),
[data] path, sequence, batch, accumulate, [eval] split, [optimizer], [train] steps, seed. Bytes,
sequences, labels, learning rates and clipping equal ours; the optimizer is PyTorch's AdamW.

--dtype bf16 computes as transformers' Trainer does with bf16 = True, and as our program does:
autocast, with weights and moments in F32. --bf16-weights has weights, gradients and moments in BF16
as well, which is faster, and loses small updates.

--lora R trains adapters of PEFT with rank R on all linear layers, beside a frozen model.
"""

import json
import pathlib
import sys
import time

import common
import tomllib
import torch
import torch.nn.functional as F
import transformers

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "testdata" / "goldens"))
from reference import learning_rate  # noqa: E402

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
    """Reads a job file, changes keys, and adds defaults."""
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


def sequences_of(job: dict, base: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns training and held-out sequences [n, sequence] of one text file.

    An incomplete last sequence is left out.
    """
    paths = job["data"]["path"]
    text = (base / (paths[0] if isinstance(paths, list) else paths)).read_bytes()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    s = job["data"]["sequence"]
    cut = len(ids) - round(len(ids) * job["eval"]["split"])
    return tuple(x[: len(x) // s * s].view(-1, s) for x in (ids[:cut], ids[cut:]))


def model_of(job: dict) -> torch.nn.Module:
    """Returns a model of transformers with the sizes of the job and random weights."""
    fields = {k: v for k, v in job["model"]["new"].items() if k != "model_type"}
    ends = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    names = {
        "llama": "Llama",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3Moe",
        "deepseek_v3": "DeepseekV3",
    }
    name = names[job["model"]["new"]["model_type"]]
    config = getattr(transformers, name + "Config")(**ends | fields, attn_implementation="sdpa")
    return getattr(transformers, name + "ForCausalLM")(config)


def losses(model, x: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Returns the mean loss over the targets of sequences x [b, s], and what is added to it.

    With output_router_logits, that is the loss that balances experts, times its coefficient.
    """
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
        out = model(input_ids=x, use_cache=False)
    logits, aux = out.logits[:, :-1], getattr(out, "aux_loss", None)
    nll = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), x[:, 1:].reshape(-1))
    return nll, 0.0 if aux is None else model.config.router_aux_loss_coef * aux


class Trainer:
    """Model, optimizer and order of the data of a run."""

    def __init__(
        self, job: dict, train: torch.Tensor, dtype: str, weights: torch.dtype, rank: int = 0
    ):
        self.job, self.sequences, self.dtype = job, train, dtype
        self.model = model_of(job).to(weights)
        if rank:
            import peft

            config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
            self.model = peft.get_peft_model(self.model, config)
        o = job["optimizer"]
        trained = [p for p in self.model.parameters() if p.requires_grad]
        matrices = [p for p in trained if p.dim() >= 2]
        vectors = [p for p in trained if p.dim() < 2]
        groups = [
            dict(params=matrices, weight_decay=o["weight_decay"]),
            dict(params=vectors, weight_decay=0.0),
        ]
        self.opt = torch.optim.AdamW(
            groups, lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], fused=True
        )
        self.order = torch.Generator().manual_seed(job.get("seed", 1))
        self.queue: list[int] = []

    def batch(self) -> torch.Tensor:
        """Returns the sequences of the next micro-batch."""
        if len(self.queue) < self.job["data"]["batch"]:
            self.queue += torch.randperm(len(self.sequences), generator=self.order).tolist()
        n = self.job["data"]["batch"]
        chosen, self.queue = self.queue[:n], self.queue[n:]
        return self.sequences[chosen]

    def step(self, lr: float) -> float:
        """Runs one optimizer step, and returns its mean loss."""
        for g in self.opt.param_groups:
            g["lr"] = lr
        self.opt.zero_grad()
        n, total = self.job["data"]["accumulate"], 0.0
        for _ in range(n):
            nll, more = losses(self.model, self.batch(), self.dtype)
            ((nll + more) / n).backward()
            total += nll.item() / n
        if self.job["optimizer"]["clip"] > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job["optimizer"]["clip"])
        self.opt.step()
        return total


def evaluate(model, held_out: torch.Tensor, dtype: str) -> float:
    with torch.no_grad():
        return sum(losses(model, r[None], dtype)[0].item() for r in held_out) / len(held_out)


def main() -> None:
    p = common.parser(__doc__)
    p.add_argument("job", type=pathlib.Path)
    p.add_argument("--train", action="store_true")
    p.add_argument("--set", action="append", default=[], metavar="table.key=value")
    p.add_argument("--bf16-weights", action="store_true")
    p.add_argument("--lora", type=int, default=0, help="the rank of adapters", metavar="R")
    p.add_argument("--log", type=int, default=0, help="print the loss every N steps", metavar="N")
    a = p.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(a.threads)
    job = read_job(a.job, a.set)
    torch.manual_seed(job.get("seed", 1))
    train, held_out = sequences_of(job, a.job.parent)
    weights = torch.bfloat16 if a.bf16_weights else torch.float32
    trainer = Trainer(job, train, a.dtype, weights, a.lora)
    tokens = job["data"]["sequence"] * job["data"]["batch"] * job["data"]["accumulate"]
    size = dict(
        parameters=sum(p.numel() for p in trainer.model.parameters()),
        tokens_per_step=tokens,
        threads=a.threads,
    )
    if not a.train:
        m = common.measure(lambda: trainer.step(1e-4), a.repeat)
        common.emit(
            "transformers", a.job.stem, **size, **m, tokens_per_second=tokens / m["median_s"]
        )
        return
    steps, start, mean = job["train"]["steps"], time.perf_counter(), 0.0
    for i in range(steps):
        loss = trainer.step(learning_rate(job["optimizer"], i, steps))
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
        eval_loss=evaluate(trainer.model, held_out, a.dtype) if len(held_out) else None,
    )


if __name__ == "__main__":
    main()
