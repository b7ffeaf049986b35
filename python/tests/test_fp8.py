"""Folders in FP8 compared with transformers: with scales of blocks, as DeepSeek-V3 is published,
and with a scale for each matrix, as the Instruct models of Ministral 3."""

from __future__ import annotations

import json
import subprocess
import unittest

import test_parity
from reference import TOLERANCE, error
from test_parity import LR, PROGRAM, job, need_program, run, tensors_of

try:
    import torch
    from parity import Reference, build, data, load
    from safetensors.torch import load_file, save_file
except ImportError:
    pass  # need_program skips the test

BLOCK = (16, 10)  # does not divide the matrices
SCALES = "_scale_inv"


def quantized(x, block=BLOCK):
    """Returns a matrix in FP8, its scales, and the matrix that they are. None = one block."""
    size = block or x.shape
    rows, columns = ((n + b - 1) // b for n, b in zip(x.shape, size))
    padded = torch.zeros(rows * size[0], columns * size[1])
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.view(rows, size[0], columns, size[1])
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    low = (blocks / scales).to(torch.float8_e4m3fn)
    cut = [y.reshape(padded.shape)[: x.shape[0], : x.shape[1]] for y in (low, low.float() * scales)]
    return cut[0].contiguous(), scales.view((rows, columns) if block else ()), cut[1]


def export(*words: object) -> None:
    """Runs the verb export. A failure is an error with its output."""
    done = subprocess.run([PROGRAM, "export", *words], capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stdout + done.stderr)


def is_matrix(name: str) -> bool:
    """Reports whether a folder in FP8 has a tensor in FP8."""
    return "_proj" in name and name.endswith(".weight")


@need_program
class FP8(unittest.TestCase):
    setUp = test_parity.Parity.setUp

    def quantize(self, family: str, block=BLOCK):
        """Writes a folder, and a model's folder with the same numbers in F32. Returns both."""
        plain, packed = self.folder / "plain", self.folder / "packed"
        build(family).save_pretrained(plain)
        build(family).save_pretrained(packed)
        numbers = load_file(plain / "model.safetensors")
        stored = dict(numbers)
        for name, x in list(numbers.items()):
            if is_matrix(name):
                stored[name], stored[name + SCALES], numbers[name] = quantized(x, block)
                if not block:
                    stored[name.replace(".weight", ".activation_scale")] = torch.tensor(0.5)
        save_file({n: x.contiguous() for n, x in numbers.items()}, plain / "model.safetensors")
        save_file(stored, packed / "model.safetensors")
        self.configure(packed, quant_method="fp8", fmt="e4m3", weight_block_size=block)
        save_file(data(), self.folder / "data.safetensors")
        return plain, packed

    def configure(self, folder, **fields) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = fields
        (folder / "config.json").write_text(json.dumps(config))

    def check(self, family: str, *sets: str, ranks: int = 1, block=BLOCK) -> None:
        plain, packed = self.quantize(family, block)
        path = job(self.folder, packed)
        logits, loss, _ = Reference(load(family, plain)).step(0, LR)
        found = tensors_of(self.folder / "found.safetensors", path, ranks, list(sets))
        self.assertLessEqual(error(found["logits"], logits), TOLERANCE)
        self.assertLessEqual(error(found["loss"], loss), TOLERANCE)
        # The saved folder has the matrices in BF16, and transformers loads it.
        out = self.folder / "out"
        run(
            path,
            ranks=ranks,
            sets=[*sets, "optimizer.lr=0.0", "train.steps=1", f'output.dir="{out}"'],
        )
        saved = load_file(out / "model" / "model.safetensors")
        for name, x in load_file(plain / "model.safetensors").items():
            low = is_matrix(name)
            self.assertEqual(saved[name].dtype, torch.bfloat16 if low else x.dtype, name)
            self.assertTrue(torch.equal(saved[name], x.to(saved[name].dtype)), name)
        load(family, out / "model")

    def test_dense(self) -> None:
        self.check("qwen3")

    def test_scale_of_a_matrix(self) -> None:
        self.check("ministral3", "parallel.zero=3", "parallel.ulysses=2", ranks=2, block=None)

    def test_fused_matrices_whose_rows_are_reordered(self) -> None:
        self.check("glm4", "parallel.zero=3", "parallel.ulysses=2", ranks=2)

    def test_latent_attention(self) -> None:
        self.check("deepseek-v3", "parallel.experts=2", "parallel.ulysses=2", ranks=2)

    def test_experts(self) -> None:
        self.check("glm4-moe", "parallel.experts=2", "parallel.ulysses=2", ranks=2)

    def test_two_copies_of_tied_weights(self) -> None:
        """The embedding and a second copy as the head are compared by their numbers."""
        _, packed = self.quantize("llama, tied")
        weights, embedding = packed / "model.safetensors", "model.embed_tokens.weight"
        stored = load_file(weights)
        stored[embedding], stored[embedding + SCALES], numbers = quantized(stored[embedding])
        path = job(self.folder, packed)
        scales = stored[embedding + SCALES]
        copies = {"lm_head.weight": stored[embedding].clone(), f"lm_head.weight{SCALES}": scales}
        for head in (copies, {"lm_head.weight": numbers}):
            save_file({n: x.clone() for n, x in (stored | head).items()}, weights)
            run(path, sets=["output.overwrite=true"])
        copies[f"lm_head.weight{SCALES}"] = 2 * scales
        save_file({n: x.clone() for n, x in (stored | copies).items()}, weights)
        with self.assertRaisesRegex(AssertionError, "differs from .* tie_word_embeddings is true"):
            run(path, sets=["output.overwrite=true"])

    def test_export(self) -> None:
        """The folder of a checkpoint has the frozen weights of a base model in FP8."""
        _, packed = self.quantize("phi3")
        path = job(self.folder, packed)
        for kind, sets, words in (
            ("adapters", ["lora.rank=2", 'lora.targets=["all-linear"]'], ["--merge"]),
            ("frozen", ['train.freeze=["*.self_attn.*"]'], []),
        ):
            out, found = self.folder / kind, self.folder / f"{kind}-exported"
            run(path, sets=[*sets, "checkpoint.every=5", f'output.dir="{out}"'])
            export(out / "checkpoints", found, *words)
            want = out / "model"
            if words:
                export(out / "adapter", want, *words)
            a, b = (load_file(folder / "model.safetensors") for folder in (found, want))
            self.assertEqual(set(a), set(b))
            for name, x in a.items():
                self.assertTrue(torch.equal(x, b[name]), name)
            load("phi3", found)

    def test_faults(self) -> None:
        """A folder without some of its scales, or in another form, is refused by name."""
        _, packed = self.quantize("qwen3")
        path, weights = job(self.folder, packed), packed / "model.safetensors"
        whole = load_file(weights)
        name = "model.layers.0.mlp.up_proj.weight"
        for change, want in (
            ({name + SCALES: None}, f"{name}{SCALES} is missing; restore the folder"),
            ({name + SCALES: whole[name + SCALES][:1]}, "has scales of .* .weight_block_size."),
            (
                {name + SCALES: whole[name + SCALES].to(torch.uint8)},
                f"{name}{SCALES} U8.* scales in F32, BF16 and F16 can be read",
            ),
            ({name: None}, f"{name} has scales, and is not in F8_E4M3"),
            (
                {name: torch.full_like(whole[name].float(), float("nan")).to(whole[name].dtype)},
                "NaN",
            ),
        ):
            stored = {n: x for n, x in (whole | change).items() if x is not None}
            save_file({n: x.contiguous() for n, x in stored.items()}, weights)
            with self.assertRaisesRegex(AssertionError, want):
                run(path)
        save_file(whole, weights)
        self.configure(packed, quant_method="fp8", weight_block_size=None)
        with self.assertRaisesRegex(AssertionError, r"has scales of \[1 1\] .weight_block_size."):
            run(path)
        for fields in (
            dict(quant_method="fp8"),
            dict(quant_method="fp8", fmt="e5m2", weight_block_size=BLOCK),
            dict(quant_method="fp8", weight_block_size=[0, 128]),
            dict(quant_method="awq"),
        ):
            self.configure(packed, **fields)
            with self.assertRaisesRegex(AssertionError, "quantization_config is not built"):
                run(path)


if __name__ == "__main__":
    unittest.main()
