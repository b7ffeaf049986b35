"""Makes the goldens: tiny models, data, and the results that PyTorch computes for each case.

`make goldens` runs this program. Names of training cases as arguments make only these. Each case is a folder with a job (job.toml) and its expected
results (case.json, described in README.md). The program under test never writes these files.
"""

import hashlib
import json
import pathlib
import platform
import shutil
import sys

import attention
import chat
import megatron
import models
import numpy
import reference
import rope
import safetensors
import torch
import transformers
import vocabularies
from safetensors.torch import save_file

import data
import gdn

ROOT = pathlib.Path(__file__).resolve().parent
STEPS = 5
SGD = dict(name="sgd", lr=0.1, weight_decay=0.0, clip=0.0, schedule="constant", warmup=0)
ADAMW = dict(
    name="adamw",
    lr=3e-3,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.3,
    clip=1.0,
    schedule="cosine",
    warmup=2,
)
# Each data set, with a mesh and a batch that make it difficult. `pack` matters only for text.
PLAIN = dict(file="plain64.safetensors", sequence=64, batch=2)
IGNORED = dict(file="ignored61.safetensors", sequence=61, batch=2)
PACKED = dict(file="packed64.safetensors", sequence=64, batch=2)
DP2 = dict(file="packed64.safetensors", sequence=64, batch=1, accumulate=2, ulysses=2)


def cases() -> dict:
    """Returns the training cases by name: the model, the optimizer and the data set of each."""
    out = {}
    for m in ("llama", "qwen2", "qwen3"):
        for o in (SGD, ADAMW):
            for d, spec in dict(plain=PLAIN, ignored=IGNORED, packed=PACKED, dp2=DP2).items():
                out[f"{m}-{o['name']}-{d}"] = dict(model=m, optimizer=o, **spec)
    out["llama-sgd-plain"]["weights"] = True
    out["qwen2-adamw-dp2"].update(accumulate=1, global_batch=4)
    out["llama3-sgd-clip"] = dict(
        model="llama3", optimizer=SGD | dict(clip=0.5, weight_decay=0.1, warmup=3), **PLAIN
    )
    out["llama3-adamw-linear"] = dict(
        model="llama3", optimizer=ADAMW | dict(schedule="linear"), **PACKED
    )
    # With the lr of the other models, float32 would diverge from float64.
    slow = SGD | dict(lr=0.02)
    for o in (slow, ADAMW):
        for d, spec in dict(plain=PLAIN, packed=PACKED, dp2=DP2).items():
            out[f"qwen3_5-{o['name']}-{d}"] = dict(model="qwen3_5", optimizer=o, **spec)
    out["qwen3_5-tied-sgd-packed"] = dict(model="qwen3_5-tied", optimizer=slow, **PACKED)
    out["qwen3_5-tied-adamw-plain"] = dict(model="qwen3_5-tied", optimizer=ADAMW, **PLAIN)
    gentle = ADAMW | dict(lr=1e-3)
    for m in ("gemma2", "gemma3"):
        for o in (slow, gentle):
            for d, spec in dict(plain=PLAIN, packed=PACKED, dp2=DP2).items():
                out[f"{m}-{o['name']}-{d}"] = dict(model=m, optimizer=o, **spec)
    # With a higher lr, a choice of experts that rounding changes would change the losses of BF16.
    slowest = SGD | dict(lr=0.005)
    for m in ("mixtral", "qwen3_moe", "qwen3_5_moe"):
        for o in (slowest if m == "qwen3_5_moe" else slow, gentle):
            for d, spec in dict(plain=PLAIN, packed=PACKED, dp2=DP2).items():
                out[f"{m}-{o['name']}-{d}"] = dict(model=m, optimizer=o, **spec)
    # One sequence a step. Step 4 has no valid target: AdamW still applies weight decay, and updates
    # its moments.
    out["qwen3-adamw-no-targets"] = dict(model="qwen3", optimizer=ADAMW, **IGNORED | dict(batch=1))
    # RoPE scaling set by the job. The lengths of the batches are on both sides of the limits of
    # longrope and dynamic.
    yarn = dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=128)
    longrope = dict(
        rope_type="longrope",
        short_factor=[1.0, 1.25, 1.5, 2.0],
        long_factor=[2.0, 3.0, 5.0, 8.0],
        original_max_position_embeddings=48,
    )
    dynamic = dict(rope_type="dynamic", factor=2.0)
    for name, m, scaling, more in (
        ("llama-sgd-yarn", "llama", yarn, PACKED),
        ("llama-adamw-longrope", "llama", longrope, DP2 | dict(accumulate=1)),
        ("qwen2-sgd-dynamic", "qwen2", dynamic, DP2 | dict(accumulate=1)),
    ):
        override = dict(rope_scaling=scaling)
        if scaling is dynamic:
            override["max_position_embeddings"] = 48
        o = ADAMW if "adamw" in name else SGD
        out[name] = dict(model=m, optimizer=o, override=override, **more)
    # Sliding windows: in all layers, by a list of layers, and from a layer on.
    kinds = ["sliding_attention", "full_attention"]
    window = dict(use_sliding_window=True, sliding_window=5)
    for name, m, override, more in (
        ("mistral-sgd-window", "llama", dict(model_type="mistral", sliding_window=7), PACKED),
        (
            "ministral-adamw-window",
            "llama",
            dict(model_type="ministral", sliding_window=16, layer_types=kinds),
            PLAIN,
        ),
        ("qwen2-sgd-window", "qwen2", dict(window, max_window_layers=1), DP2),
        ("qwen3-adamw-window", "qwen3", dict(window, layer_types=kinds), PACKED),
    ):
        o = ADAMW if "adamw" in name else SGD
        out[name] = dict(model=m, optimizer=o, override=override, **more)
    out["llama-adamw-text-packed"] = dict(
        model="llama", optimizer=ADAMW, file="texts.jsonl", sequence=96, batch=1, accumulate=2
    )
    out["qwen2-sgd-text-rows"] = dict(
        model="qwen2", optimizer=SGD, file="texts.jsonl", sequence=100, batch=2, pack=False
    )
    # Conversations with a loss on the answers alone.
    chat = dict(file="chat.jsonl", sequence=160, batch=1, accumulate=2)
    out["qwen3-adamw-chat-packed"] = dict(model="qwen3", optimizer=ADAMW, **chat)
    out["llama-sgd-chat-dp2"] = dict(
        model="llama", optimizer=SGD, **chat | dict(ulysses=2, accumulate=1)
    )
    out["qwen2-sgd-chat-rows"] = dict(model="qwen2", optimizer=SGD, pack=False, **chat)
    return out


def toml(v) -> str:
    if isinstance(v, dict):
        return "{ " + ", ".join(f"{k} = {toml(x)}" for k, x in v.items()) + " }"
    return json.dumps(v) if not isinstance(v, float) else repr(v)


def job_text(c: dict) -> str:
    """Returns the text of job.toml for a training case."""
    tables = dict(
        parallel=dict(ulysses=c.get("ulysses", 4)),
        device=dict(backend="cpu"),
        model=dict(path=f"../models/{c['model']}"),
        data=dict(
            path=[f"../data/{c['file']}"],
            tokenizer="bytes",
            sequence=c["sequence"],
            batch=c["batch"],
            accumulate=c.get("accumulate", 1),
            pack=c.get("pack", True),
            shuffle=False,
        ),
        optimizer=c["optimizer"],
        train=dict(steps=STEPS),
        output=dict(dir="out"),
    )
    if "global_batch" in c:
        tables["data"].pop("accumulate")
        tables["data"]["global_batch"] = c["global_batch"]
    if c["file"] == "chat.jsonl":
        tables["data"]["chat_template"] = "../data/chat.jinja"
    if "override" in c:
        tables["model"]["override"] = c["override"]
    lines = ['kind = "train"']
    for name, keys in tables.items():
        lines += [f"[{name}]"] + [f"{k} = {toml(v)}" for k, v in keys.items()]
    return "\n".join(lines) + "\n"


def hashes(folder: pathlib.Path, paths: list[pathlib.Path]) -> dict:
    return {
        str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(paths + [folder / "job.toml"])
    }


def versions() -> dict:
    return dict(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        safetensors=safetensors.__version__,
        numpy=numpy.__version__,
    )


def write_json(path: pathlib.Path, x) -> None:
    path.write_text(json.dumps(x, indent=1) + "\n")


def final(model, start) -> dict:
    """Returns for each tensor its norm, its sum, and the norm of its change, in float64."""
    first, out = models.on_disk(start), {}
    for n, p in models.on_disk(model).items():
        w, w0 = p.detach().double(), first[n].detach().double()
        out[n] = dict(norm=w.norm().item(), sum=w.sum().item(), change=(w - w0).norm().item())
    return out


def train_case(name: str, c: dict) -> None:
    """Trains a case in float64 and in float32, and writes its folder."""
    folder = ROOT / name
    folder.mkdir()
    (folder / "job.toml").write_text(job_text(c))
    ranks, path, model = 4, ROOT / "data" / c["file"], ROOT / "models" / c["model"]
    dp = ranks // c.get("ulysses", 4)
    batch = c.get("global_batch", dp * c["batch"] * c.get("accumulate", 1))
    found = data.sequences_of(path, c["sequence"], c.get("pack", True))
    steps = [[found[(s * batch + i) % len(found)] for i in range(batch)] for s in range(STEPS)]
    override = c.get("override", {})
    exact = reference.train(model, c["optimizer"], steps, torch.float64, override)
    plain = reference.train(model, c["optimizer"], steps, torch.float32, override)
    dloss = max(abs(a - b) for a, b in zip(exact["losses"], plain["losses"]))
    dnorm = max(abs(a - b) / a for a, b in zip(exact["grad_norms"], plain["grad_norms"]) if a > 0)
    # float32, and the replacements of reference.exact, must not change the result.
    assert dloss < 2e-5 and dnorm < 2e-4, (name, dloss, dnorm)
    result = {k: exact[k] for k in ("losses", "grad_norms", "lr", "target_tokens", "tokens")}
    result |= dict(losses_f32=plain["losses"], grad_norms_f32=plain["grad_norms"])
    result["final"] = final(exact["model"], reference.load(model, torch.float64))
    if c.get("weights"):
        save_file(
            {n: p.detach().float() for n, p in exact["model"].named_parameters()},
            folder / "final.safetensors",
        )
        result["final_weights"] = "final.safetensors"
    inputs = [
        path,
        *path.parent.glob(path.stem + ".jinja"),
        *model.glob("*.json"),
        *model.glob("*.safetensors"),
    ]
    write_json(
        folder / "case.json",
        dict(
            kind="train",
            name=name,
            job="job.toml",
            model=f"../models/{c['model']}",
            ranks=ranks,
            steps=STEPS,
            **result,
            versions=versions(),
            sha256=hashes(folder, inputs),
        ),
    )
    print(
        f"{name:26} loss {' '.join(f'{x:.4f}' for x in exact['losses'])}  norm {exact['grad_norms'][0]:.3f} "
        f" f32: {dloss:.1e} {dnorm:.1e}"
    )


def operator_case(kind: str, name: str, c: dict, seed: int) -> None:
    """Writes an operator job: a job of kind attention or gdn."""
    folder = ROOT / name
    folder.mkdir()
    (folder / "job.toml").write_text(
        {"attention": attention, "gdn": gdn}[kind].write_case(folder, c, seed)
    )
    write_json(
        folder / "case.json",
        dict(
            kind=kind,
            name=name,
            what=c["what"],
            job="job.toml",
            input="in.safetensors",
            expected="expected.safetensors",
            ranks=4,
            versions=versions(),
            sha256=hashes(folder, [folder / "in.safetensors", folder / "expected.safetensors"]),
        ),
    )
    print(name)


def main(names: list[str]) -> None:
    """Makes all goldens, or the training cases of these names and their models."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    if names:
        some = {name: cases()[name] for name in names}
        models.write_models(ROOT / "models", {c["model"] for c in some.values()})
        for name, c in some.items():
            shutil.rmtree(ROOT / name, ignore_errors=True)
            train_case(name, c)
        return
    for old in ROOT.glob("*/case.json"):
        shutil.rmtree(old.parent)
    models.write_models(ROOT / "models")
    data.write_data(ROOT / "data")
    vocabularies.make()
    chat.write()
    megatron.write_all(ROOT / "megatron")
    rope.write(ROOT / "rope.json")
    for i, (name, c) in enumerate(attention.CASES.items()):
        operator_case("attention", name, c, 50 + i)
    for i, (name, c) in enumerate(gdn.CASES.items()):
        operator_case("gdn", name, c, 60 + i)
    for name, c in cases().items():
        train_case(name, c)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main(sys.argv[1:])
