"""Training jobs of every model type, compared with transformers in float64.

The program loads a folder that transformers has saved, and its ranks are threads. The tests compare
logits, loss and the gradient of every parameter, the weights after five steps of SGD, and the
logits of the folder that the program has saved.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from need import need, packages
from reference import TOLERANCE, error, per_head

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bin" / "ulysses-mpi"
need_program = need(
    PROGRAM.exists() and packages("torch", "transformers", "safetensors"),
    "no bin/ulysses-mpi, PyTorch, transformers or safetensors",
    "run make build and make test-python TORCH=1",
)

if packages("torch", "transformers", "safetensors"):
    import torch
    import transformers
    from parity import BATCH, FAMILIES, SEQUENCE, STEPS, Reference, build, data, load
    from safetensors.torch import load_file, save_file

LR = 0.05

# Meshes and options of the first step, and of five steps.
FIRST_STEPS = {
    "1 rank": (1, ["parallel.ulysses=1", "memory.head_groups=2"]),
    "2 ranks": (2, ["parallel.ulysses=2", "parallel.zero=1", "parallel.overlap=on"]),
    "4 ranks": (4, ["parallel.ulysses=4", "parallel.zero=3", "memory.attention=recompute"]),
    "2 x ring 2": (4, ["parallel.ulysses=2", "parallel.ring=2", "memory.qkv=recompute"]),
    "ring 4": (4, ["parallel.ulysses=1", "parallel.ring=4", "parallel.gather=on"]),
}
# The same for models with experts, which groups of ranks divide.
FIRST_STEPS_OF_EXPERTS = {
    "experts 2": (2, ["parallel.ulysses=2", "parallel.experts=2", "parallel.zero=1"]),
    "experts 4": (4, ["parallel.ulysses=4", "parallel.experts=4", "parallel.zero=3"]),
}
RUNS_OF_EXPERTS = {
    "experts 2 of 4": (4, ["parallel.ulysses=4", "parallel.experts=2", "parallel.zero=2"]),
}
RUNS = {
    "4 ranks": (4, ["parallel.ulysses=4", "parallel.zero=2"]),
    "2 x ring 2": (4, ["parallel.ulysses=2", "parallel.ring=2", "parallel.zero=3"]),
}


def job(folder: pathlib.Path, model: pathlib.Path) -> pathlib.Path:
    """Writes a job that trains a model by SGD, and returns its path."""
    path = folder / "job.toml"
    path.write_text(
        f"""kind = "train"
[device]
backend = "cpu"
threads = 1
[model]
path = {json.dumps(str(model))}
[data]
path = [{json.dumps(str(folder / "data.safetensors"))}]
sequence = {SEQUENCE}
batch = {BATCH}
shuffle = false
[optimizer]
name = "sgd"
lr = {LR}
weight_decay = 0.0
clip = 0.0
schedule = "constant"
warmup = 0
[train]
steps = {STEPS}
[output]
dir = {json.dumps(str(folder / "out"))}
"""
    )
    return path


def run(*words: object, ranks: int = 1, sets: list[str] | None = None) -> None:
    """Runs the program. A failure is an error with its output."""
    command = [str(PROGRAM), *map(str, words), "--ranks", str(ranks), "--quiet"]
    for s in sets or []:
        command += ["--set", s]
    environment = {name: x for name, x in os.environ.items() if not name.startswith("ULYSSES_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def tensors_of(path: pathlib.Path, job: pathlib.Path, ranks: int = 1, sets=None):
    """Returns the tensors of the first step of a job, by name."""
    run("verify", job, "--tensors", path, ranks=ranks, sets=sets)
    return load_file(path)


# The matrices of the program that are one matrix in the files of some families.
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fuse(found: dict[str, torch.Tensor], names) -> None:
    """Replaces gradients of parts by the gradients of the fused matrices of the reference."""
    for name in names:
        for whole, parts in FUSED.items():
            if f".{whole}." in name:
                found[f"{name} gradient"] = torch.cat(
                    [found.pop(f"{name.replace(whole, part)} gradient") for part in parts]
                )


@need_program
class Parity(unittest.TestCase):
    maxDiff = None

    def setUp(self) -> None:
        torch.set_num_threads(1)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def near(self, found, want, what: str, tolerance: float = TOLERANCE) -> None:
        self.assertLessEqual(error(found, want), tolerance, what)

    def check(self, family: str) -> None:
        source = self.folder / "source"
        # Newer folders may have the matrices of all experts in one tensor.
        build(family).save_pretrained(source, save_original_format="stacked" not in family)
        save_file(data(), self.folder / "data.safetensors")
        path = job(self.folder, source)
        reference = Reference(build(family))
        logits, loss, gradients = reference.step(0, LR)
        experts = any(".experts." in name for name in gradients)
        self.first_steps = FIRST_STEPS | (FIRST_STEPS_OF_EXPERTS if experts else {})
        self.runs = RUNS | (RUNS_OF_EXPERTS if experts else {})
        self.aux_loss = float(reference.aux_loss.detach()) if reference.coefficient else None
        self.first_step(path, logits, loss, gradients)
        for step in range(1, STEPS):
            reference.step(step, LR)
        self.five_steps(family, path, reference)
        self.round_trip(family, path, source)

    def first_step(self, path, logits, loss, gradients) -> None:
        """The first step has the reference's logits, loss and gradients, on every mesh."""
        for name, (ranks, sets) in self.first_steps.items():
            with self.subTest(name):
                found = tensors_of(self.folder / f"{name}.safetensors", path, ranks, sets)
                fuse(found, gradients)
                self.near(found["logits"], logits, "logits")
                self.near(found["loss"], loss, "loss")
                self.assertEqual("aux_loss" in found, self.aux_loss is not None)
                if self.aux_loss is not None:
                    self.near(found["aux_loss"], self.aux_loss, "aux_loss")
                for p, want in gradients.items():
                    got = found[f"{p} gradient"]
                    self.near(got, want, p)
                    # The error of a wrong head is as large as its gradient. The terms of one head
                    # cancel to a tenth here, so the tolerance is ten times as large.
                    if p.endswith(("A_log", "dt_bias")):
                        self.assertLessEqual(per_head(got, want), 10 * TOLERANCE, p)
                named = {n.removesuffix(" gradient") for n in found if n.endswith(" gradient")}
                self.assertEqual(named, set(gradients))

    def five_steps(self, family, path, reference) -> None:
        """Five steps have the reference's weights.

        transformers loads the saved folder. With it, the program, transformers and the reference
        have equal logits.
        """
        after, step = reference.weights(), STEPS - 1
        want = reference.logits(0)
        for name, (ranks, sets) in self.runs.items():
            with self.subTest(name):
                out = self.folder / name.replace(" ", "-")
                run(path, ranks=ranks, sets=[*sets, f'output.dir="{out}"'])
                saved = load(family, out / "model").double()
                for p, got in saved.named_parameters():
                    self.near(got.detach(), after[p], f"{p} after {step + 1} steps")
                logits = Reference(saved).logits(0)
                self.near(logits, want, "logits of transformers")
        own = tensors_of(
            self.folder / "saved.safetensors", path, sets=[f'model.path="{out / "model"}"']
        )
        self.near(own["logits"], logits, "logits of the saved folder")

    def round_trip(self, family, path, source) -> None:
        """A folder that is loaded and saved has equal weights, and an equal configuration."""
        out = self.folder / "unchanged"
        run(path, ranks=2, sets=["optimizer.lr=0.0", "train.steps=1", f'output.dir="{out}"'])
        a, b = load(family, source), load(family, out / "model")
        for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters(), strict=True):
            self.assertTrue(torch.equal(x, y), name)
        self.assertEqual(a.config.to_diff_dict(), b.config.to_diff_dict())


@need_program
class MXFP4(unittest.TestCase):
    def test_logits(self) -> None:
        """A folder of gpt-oss in MXFP4 has the logits of the matrices that transformers unpacks."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            model = build("gpt-oss, in blocks")
            random = torch.Generator().manual_seed(5)
            packed = {}
            for i, layer in enumerate(model.model.layers):
                for kind in ("gate_up_proj", "down_proj"):
                    matrix = getattr(layer.mlp.experts, kind)
                    e, rows, columns = matrix.shape
                    shape = (e, columns, rows // 32)
                    blocks = torch.randint(256, (*shape, 16), generator=random, dtype=torch.uint8)
                    scales = torch.randint(122, 125, shape, generator=random, dtype=torch.uint8)
                    with torch.no_grad():
                        matrix.copy_(convert_moe_packed_tensors(blocks, scales))
                    name = f"model.layers.{i}.mlp.experts.{kind}"
                    packed[name] = {f"{name}_blocks": blocks, f"{name}_scales": scales}
            source = folder / "source"
            model.save_pretrained(source)
            tensors = load_file(source / "model.safetensors")
            for name, parts in packed.items():
                del tensors[name]
                tensors |= parts
            save_file(tensors, source / "model.safetensors")
            config = json.loads((source / "config.json").read_text())
            config["quantization_config"] = {"quant_method": "mxfp4"}
            (source / "config.json").write_text(json.dumps(config))
            save_file(data(), folder / "data.safetensors")
            logits, _, _ = Reference(model).step(0, LR)
            path = job(folder, source)
            found = tensors_of(folder / "found.safetensors", path, 2, ["parallel.experts=2"])
            self.assertLessEqual(error(found["logits"], logits), TOLERANCE)


@need_program
class Vision(unittest.TestCase):
    def test_text_model(self) -> None:
        """Of a mistral3, the language model is read, and saved as transformers loads it."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            source, out = folder / "source", folder / "out"
            model = build("ministral3")
            vision = dict(model_type="pixtral", hidden_size=32, intermediate_size=32)
            vision |= dict(num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
            config = transformers.Mistral3Config(
                text_config=model.config.to_dict(), vision_config=vision, tie_word_embeddings=False
            )
            whole = transformers.Mistral3ForConditionalGeneration(config)
            whole.model.language_model.load_state_dict(model.model.state_dict())
            whole.lm_head.load_state_dict(model.lm_head.state_dict())
            whole.save_pretrained(source)
            save_file(data(), folder / "data.safetensors")
            path = job(folder, source)
            logits, _, _ = Reference(build("ministral3")).step(0, LR)
            found = tensors_of(folder / "found.safetensors", path, 2, ["parallel.ulysses=2"])
            self.assertLessEqual(error(found["logits"], logits), TOLERANCE)
            run(path, sets=["optimizer.lr=0.0", "train.steps=1", f'output.dir="{out}"'])
            saved = load("ministral3", out / "model")
            pairs = zip(model.named_parameters(), saved.named_parameters(), strict=True)
            for (name, x), (_, y) in pairs:
                self.assertTrue(torch.equal(x, y), name)


def _family(name: str):
    def test(self: Parity) -> None:
        self.check(name)

    return test


if packages("torch", "transformers", "safetensors"):
    for _name in FAMILIES:
        _words = "".join(c if c.isalnum() else " " for c in _name).split()
        setattr(Parity, "test_" + "_".join(_words), _family(_name))


if __name__ == "__main__":
    unittest.main()
