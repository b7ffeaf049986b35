"""Training that balances experts by biases, compared with transformers in float64.

The routers of transformers have no such biases in these families. The reference adds them, and
moves them by the rule of Wang et al. 2024 (arXiv:2408.15664).
"""

from __future__ import annotations

import functools
import unittest

import test_parity
from reference import TOLERANCE, error
from test_parity import LR, job, need_program, run, tensors_of

try:
    import torch
    from parity import BATCH, IGNORED, STEPS, Reference, build, data, documents, load
    from safetensors.torch import load_file, save_file
except ImportError:
    pass  # need_program skips the test

RATE = 0.01
BIAS = "e_score_correction_bias"


def forward(router, normalize: bool, hidden):
    """Chooses experts by probability and bias, and weights them by the probability alone."""
    logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), router.weight)
    p = logits.softmax(-1)
    chosen = torch.topk(p + router.bias, router.top_k).indices
    weights = p.gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    router.chosen.append(chosen)
    return logits, weights, chosen


def valid(step: int):
    """Returns whether each token of a global batch has a target, in the order of the documents."""
    x, all = data(), []
    for s in range(step * BATCH, (step + 1) * BATCH):
        for lo, hi in documents(x["position_ids"][s]):
            all += [x["labels"][s, lo + 1 : hi] != IGNORED, torch.tensor([False])]
    return torch.cat(all)


class Biased:
    """A reference whose routers have biases."""

    def __init__(self, family: str, normalize: bool) -> None:
        self.reference = Reference(build(family))
        modules = self.reference.model.named_modules()
        self.routers = {name: m for name, m in modules if name.endswith(".gate")}
        for m in self.routers.values():
            m.bias = torch.zeros(m.weight.shape[0], dtype=torch.float64)
            m.forward = functools.partial(forward, m, normalize)

    def step(self, step: int):
        """Runs a step, and moves the biases."""
        for m in self.routers.values():
            m.chosen = []
        result = self.reference.step(step, LR)
        for m in self.routers.values():
            chosen = torch.cat(m.chosen)[valid(step)]
            counts = torch.bincount(chosen.flatten(), minlength=len(m.bias)).double()
            m.bias = m.bias + RATE * torch.sign(counts.mean() - counts)
        return result

    def logits(self, step: int):
        for m in self.routers.values():
            m.chosen = []
        return self.reference.logits(step)


@need_program
class ExpertBias(unittest.TestCase):
    setUp = test_parity.Parity.setUp
    near = test_parity.Parity.near

    def check(self, family: str, normalize: bool) -> None:
        source = self.folder / "source"
        build(family).save_pretrained(source)
        save_file(data(), self.folder / "data.safetensors")
        path = job(self.folder, source)
        more = [f"optimizer.expert_bias_rate={RATE}"]
        if not normalize:
            more.append("model.override={norm_topk_prob=false}")
        reference = Biased(family, normalize)
        for step in range(STEPS):
            reference.step(step)
        after, want = reference.reference.weights(), reference.logits(0)
        meshes = test_parity.FIRST_STEPS | test_parity.FIRST_STEPS_OF_EXPERTS
        for name, (ranks, sets) in (meshes | test_parity.RUNS_OF_EXPERTS).items():
            with self.subTest(name):
                out = self.folder / name.replace(" ", "-")
                run(path, ranks=ranks, sets=[*sets, *more, f'output.dir="{out}"'])
                saved = load(family, out / "model", BIAS).double()
                for p, got in saved.named_parameters():
                    self.near(got.detach(), after[p], f"{p} after {STEPS} steps")
                found = load_file(out / "model" / "model.safetensors")
                names = {n for n in found if n.endswith(BIAS)}
                self.assertEqual(len(names), len(reference.routers))
                for m, router in zip(sorted(names), sorted(reference.routers), strict=True):
                    bias = reference.routers[router].bias
                    self.assertEqual(found[m].dtype, torch.float32)
                    self.assertLessEqual(error(found[m], bias), 1e-6, m)
                    self.assertGreater(float(bias.abs().max()), 2 * RATE, m)
        saved = self.folder / "saved.safetensors"
        own = tensors_of(saved, path, 2, ["parallel.experts=2", f'model.path="{out / "model"}"'])
        self.assertLessEqual(error(own["logits"], want), TOLERANCE)
        # without the field, the biases are not dropped silently
        sets = [f'model.path="{out / "model"}"', "model.override={use_expert_bias=false}"]
        with self.assertRaisesRegex(AssertionError, "is not a parameter of a"):
            tensors_of(self.folder / "plain.safetensors", path, sets=sets)

    def test_mixtral(self) -> None:
        self.check("mixtral", True)

    def test_qwen3_moe(self) -> None:
        self.check("qwen3-moe", True)

    def test_qwen3_moe_not_normalized(self) -> None:
        self.check("qwen3-moe", False)


if __name__ == "__main__":
    unittest.main()
