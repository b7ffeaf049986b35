"""Training jobs with LoRA, compared with PEFT in float64.

PEFT makes adapters for a tiny model of transformers. The program starts from their folder. The
tests compare logits, loss, the gradients of the adapters on every mesh, the adapters after five
steps of SGD, the logits of PEFT with the folder that the program has saved, and the merged model.
"""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import tempfile
import unittest
import warnings

import numpy as np
from need import need, packages
from reference import TOLERANCE, error, keeps, mix
from test_parity import FIRST_STEPS, LR, PROGRAM, RUNS, job, run, tensors_of

need_peft = need(
    PROGRAM.exists() and packages("torch", "transformers", "safetensors", "peft"),
    "no bin/ulysses-mpi, PyTorch, transformers, safetensors or peft",
    "run make build and make test-python TORCH=1",
)

if packages("torch", "transformers", "safetensors", "peft"):
    import peft
    import torch
    from families import float64, own_recurrence
    from parity import STEPS, Reference, build, data, dense
    from safetensors.torch import load_file, save_file

    class Dropout(torch.nn.Module):
        """The program's dropout of an adapter, in steps of a reference."""

        def __init__(self, reference: AdapterReference, number: int) -> None:
            super().__init__()
            self.of = [reference]  # in a list: not a submodule
            self.seed = mix(mix(np.uint64(SEED)) + np.uint64(number))

        def forward(self, x):
            if not self.of[0].stepping:
                return x
            s, lo = self.of[0].document
            tokens = (s << 32) + lo + np.arange(x.shape[-2])
            kept = torch.from_numpy(keeps(DROPOUT, self.seed, tokens, x.shape[-1]))
            return x * kept / (1 - DROPOUT)

    class AdapterReference(Reference):
        """A model of PEFT in float64."""

        stepping = False

        def drop(self) -> None:
            """Lets the adapters drop."""
            adapters = [
                (int(name.split(".layers.")[1].split(".")[0]), ORDER.index(name.split(".")[-1]), x)
                for name, x in self.model.named_modules()
                if isinstance(x, peft.tuners.lora.Linear)
            ]
            for number, (_, _, x) in enumerate(sorted(adapters, key=lambda a: a[:2])):
                x.lora_dropout["default"] = Dropout(self, number)

        def step(self, step: int, lr: float):
            self.model.zero_grad()
            self.stepping = True
            with float64(), own_recurrence():
                logits, loss, _ = self.forward(step)
                loss.backward()
            self.stepping = False
            gradients = {}
            with torch.no_grad():
                for name, p in self.model.named_parameters():
                    if p.requires_grad:
                        gradients[plain(name)] = p.grad.clone()
                        p -= lr * p.grad
            return logits.detach(), float(loss.detach()), gradients

        def adapters(self):
            """Returns a copy of the adapters by their names in the program."""
            return {
                plain(name): p.detach().clone()
                for name, p in self.model.named_parameters()
                if p.requires_grad
            }


PREFIX = "base_model.model."
RANK, ALPHA, SEED, DROPOUT = 3, 7, 1, 0.25
# The matrices of a layer in the order in which the program numbers adapters.
ORDER = [
    *("in_proj_qkvz", "in_proj_ba"),
    *("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z", "out_proj"),
    *("q_a_proj", "q_b_proj", "q_proj", "k_proj", "v_proj", "qkv_proj"),
    *("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
]

# Family: targets and whether the scale is alpha/√rank.
CASES = {
    "llama": (["q_proj", "v_proj", "down_proj"], False),
    "qwen3": ("all-linear", True),
    "qwen2": ("all-linear", False),
    "qwen2-moe": (["q_proj", "v_proj", "o_proj"], False),
    "olmoe": (["q_proj", "o_proj"], True),
    "glm4-moe": (["q_proj", "k_proj", "o_proj"], False),
    "ernie-moe": (["q_proj", "k_proj"], True),
    "ernie": ("all-linear", False),
    "qwen3.5": ("all-linear", False),
    "gemma3": (["k_proj", "o_proj", "gate_proj", "up_proj"], False),
    "gpt-oss": ("all-linear", False),
    "phi3": ("all-linear", False),
    "glm": ("all-linear", False),
    "glm4": ("all-linear", True),
    "ministral3": ("all-linear", False),
    "deepseek-v2": (["q_b_proj", "kv_a_proj_with_mqa", "o_proj"], False),
    "deepseek-v3": (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        True,
    ),
    "deepseek-v3, dense, without compressed queries": (["q_proj", "kv_b_proj"], False),
    "qwen3-next": (["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "o_proj"], False),
}

# Families whose targets are a regular expression in adapter_config.json.
EXPRESSIONS = {"gemma3"}


def plain(name: str) -> str:
    """Returns the program's name of a parameter of PEFT."""
    return name.removeprefix(PREFIX).replace(".default", "")


@need_peft
class LoRA(unittest.TestCase):
    maxDiff = None

    def setUp(self) -> None:
        torch.set_num_threads(1)
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)

    def near(self, found, want, what: str, tolerance: float = TOLERANCE) -> None:
        self.assertLessEqual(error(found, want), tolerance, what)

    def adapted(self, family: str):
        """Returns a model of PEFT with random adapters, the same at every call."""
        targets, rslora = CASES[family]
        if family in EXPRESSIONS:
            targets = rf".*\.({'|'.join(targets)})"
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=targets,
            use_rslora=rslora,
            task_type="CAUSAL_LM",
        )
        with dense(family):
            made = peft.get_peft_model(build(family), config)
        g = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for _, p in made.named_parameters():
                if p.requires_grad:
                    p.copy_(0.1 * torch.randn(p.shape, generator=g))
        return made

    def start(self, family: str, dropout: bool):
        """Writes a job that starts from adapters of PEFT. Returns its path and a reference."""
        source, init = self.folder / "source", self.folder / "init"
        build(family).save_pretrained(source)
        self.adapted(family).save_pretrained(init)
        config = json.loads((init / "adapter_config.json").read_text())
        config["base_model_name_or_path"] = str(source)
        (init / "adapter_config.json").write_text(json.dumps(config))
        save_file(data(), self.folder / "data.safetensors")
        path = job(self.folder, source)
        targets, rslora = CASES[family]
        listed = [targets] if isinstance(targets, str) else targets
        with path.open("a") as f:
            f.write(
                f"[lora]\nrank = {RANK}\nalpha = {ALPHA}\ntargets = {json.dumps(listed)}\n"
                f"rslora = {json.dumps(rslora)}\ninit = {json.dumps(str(init))}\n"
                f"dropout = {DROPOUT if dropout else 0.0}\n"
            )
        reference = AdapterReference(self.adapted(family))
        if dropout:
            reference.drop()
        return path, reference

    def first_step(self, path, reference) -> None:
        logits, loss, gradients = reference.step(0, LR)
        for name, (ranks, sets) in FIRST_STEPS.items():
            with self.subTest(name):
                found = tensors_of(self.folder / f"{name}.safetensors", path, ranks, sets)
                self.near(found["logits"], logits, "logits")
                self.near(found["loss"], loss, "loss")
                for p, want in gradients.items():
                    self.near(found[f"{p} gradient"], want, p)
                named = {n.removesuffix(" gradient") for n in found if n.endswith(" gradient")}
                self.assertEqual(named, set(gradients))

    def check(self, family: str, dropout: bool = False) -> None:
        path, reference = self.start(family, dropout)
        self.first_step(path, reference)
        for step in range(1, STEPS):
            reference.step(step, LR)
        after, want = reference.adapters(), reference.logits(0)
        for name, (ranks, sets) in RUNS.items():
            with self.subTest(name):
                out = self.folder / name.replace(" ", "-")
                run(
                    path,
                    ranks=ranks,
                    sets=[*sets, f"checkpoint.every={STEPS}", f'output.dir="{out}"'],
                )
                saved = load_file(out / "adapter" / "adapter_model.safetensors")
                self.assertEqual({plain(n) for n in saved}, set(after))
                for p, got in saved.items():
                    self.near(got, after[plain(p)], f"{p} after {STEPS} steps")
                with dense(family):
                    loaded = peft.PeftModel.from_pretrained(build(family), out / "adapter")
                self.near(evaluated(loaded), want, "logits of PEFT")
        loaded = evaluated(loaded)
        again = [f'lora.init="{out / "adapter"}"', "lora.dropout=0.0"]
        own = tensors_of(self.folder / "saved.safetensors", path, sets=again)
        self.near(own["logits"], loaded, "logits of the saved folder")
        self.merges(family, self.folder / "init", out / "adapter")
        self.exports(out)

    def test_dropout(self) -> None:
        self.check("qwen3", dropout=True)

    def test_dropout_of_fused_matrices(self) -> None:
        self.check("phi3", dropout=True)

    def test_dropout_of_linear_attention(self) -> None:
        self.check("qwen3.5", dropout=True)

    def test_dropout_of_fused_linear_attention(self) -> None:
        self.first_step(*self.start("qwen3-next", dropout=True))

    def test_experts(self) -> None:
        """PEFT loads adapters of models with experts, whose targets it may rename, completely."""
        families = ["mixtral", "qwen3-moe", "qwen3-next", "qwen3.5-moe, stacked"]
        for family in [*families, "glm4-moe", "ernie-moe", "minimax-m2", "deepseek-v2"]:
            with self.subTest(family), tempfile.TemporaryDirectory() as temporary:
                folder = pathlib.Path(temporary)
                source, out = folder / "source", folder / "out"
                build(family).save_pretrained(source)
                save_file(data(), folder / "data.safetensors")
                path = job(folder, source)
                with path.open("a") as f:
                    f.write(f"[lora]\nrank = {RANK}\nalpha = {ALPHA}\n")
                run(path, sets=["optimizer.lr=3.0", f'output.dir="{out}"'])
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    loaded = peft.PeftModel.from_pretrained(build(family), out / "adapter")
                self.assertEqual([w for w in caught if "adapter keys" in str(w.message)], [])
                init = [f'lora.init="{out / "adapter"}"']
                own = tensors_of(folder / "own.safetensors", path, sets=init)
                self.near(own["logits"], evaluated(loaded), "logits of PEFT")

    def exports(self, out) -> None:
        """A checkpoint has the adapters and the merged model of the folder that the run wrote."""

        def exported(source, *flags):
            folder = self.folder / f"exported-{source.name}-{len(flags)}"
            command = [str(PROGRAM), "export", *flags, str(source), str(folder)]
            subprocess.run(command, check=True, capture_output=True)
            return folder

        checkpoints, adapter = out / "checkpoints", out / "adapter"
        for file, first, second in (
            ("adapter_model.safetensors", adapter, exported(checkpoints)),
            ("model.safetensors", exported(adapter, "--merge"), exported(checkpoints, "--merge")),
        ):
            want, got = load_file(first / file), load_file(second / file)
            self.assertEqual(set(want), set(got))
            for p, x in want.items():
                self.assertTrue(torch.equal(x, got[p]), f"{p} of {second}")

    def merges(self, family, init, trained) -> None:
        """Merged models equal the models that PEFT merges, in F32 and in BF16.

        In F32 the error is compared with the terms W and s·B·A, which may cancel. In BF16 the
        result is rounded once, so it is PEFT's or a neighbour.
        """
        base = self.folder / "bf16"
        build(family).bfloat16().save_pretrained(base)
        low = self.folder / "low"
        shutil.copytree(trained, low)
        config = json.loads((low / "adapter_config.json").read_text())
        (low / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": str(base)})
        )
        for name, adapter in (("init", init), ("trained", trained), ("low", low)):
            merged = self.folder / f"merged-{name}"
            command = [str(PROGRAM), "export", "--merge", str(adapter), str(merged)]
            subprocess.run(command, check=True, capture_output=True)
            model = build(family)
            if name == "low":
                model = model.bfloat16()
            with dense(family):
                model = peft.PeftModel.from_pretrained(model, adapter)
                terms = bounds(model)
                model = model.merge_and_unload()
                loaded = type(model).from_pretrained(merged, dtype="auto")
            own, want = dict(loaded.named_parameters()), dict(model.named_parameters())
            self.assertEqual(set(own), set(want))
            strict = getattr(loaded, "_keep_in_fp32_modules_strict", None) or []
            for p, x in want.items():
                if not any(module in p for module in strict):
                    self.assertEqual(own[p].dtype, x.dtype)
                off = (own[p].double() - x.double()).abs()
                # on both sides: products and sums over the rank, the scale, and the sum with W
                unit = 2 * (RANK + 3) * 2.0**-24 * terms.get(p, 0 * off)
                if name == "low":
                    unit = unit + spacing(x).double()
                self.assertTrue(bool((off <= unit).all()), f"{p} of {name}")
                self.assertEqual(p in terms, p not in same(build(family), own, x.dtype))


def evaluated(model) -> torch.Tensor:
    """Returns the logits of a model of PEFT, without dropout."""
    reference = Reference(model)
    reference.model.eval()
    return reference.logits(0)


def bounds(model) -> dict[str, torch.Tensor]:
    """Returns |W| + s·|B|·|A| for each matrix with an adapter, in float64."""
    found = {}
    for name, x in model.named_modules():
        if isinstance(x, peft.tuners.lora.Linear):
            a, b = (m["default"].weight.double().abs() for m in (x.lora_A, x.lora_B))
            total = x.base_layer.weight.double().abs() + x.scaling["default"] * (b @ a)
            found[f"{plain(name)}.weight"] = total.detach()
    return found


def same(model, tensors, dtype) -> set[str]:
    """Returns the names of the tensors that are equal to the weights of a model."""
    own = dict(model.to(dtype).named_parameters())
    return {name for name, x in tensors.items() if name in own and torch.equal(own[name], x)}


def spacing(x):
    """Returns the distance from each BF16 value to the next one."""
    return torch.nextafter(x.abs(), torch.full_like(x, float("inf"))) - x.abs()


def _family(name: str):
    def test(self: LoRA) -> None:
        self.check(name)

    return test


for _name in CASES:
    setattr(LoRA, "test_" + "".join(c if c.isalnum() else "_" for c in _name), _family(_name))


if __name__ == "__main__":
    unittest.main()
