"""Training that balances experts by biases, compared with transformers in float64.

The reference moves the biases by the rule of Wang et al. 2024 (arXiv:2408.15664). In some families
the routers of transformers have no such biases; there, it also adds them.
"""

from __future__ import annotations

import functools
import unittest

import test_parity
from reference import TOLERANCE, error
from test_parity import LR, job, need_program, run, tensors_of

try:
    import torch
    from parity import BATCH, BIAS, IGNORED, STEPS, Reference, build, data, documents, load
    from safetensors.torch import load_file, save_file
except ImportError:
    pass  # need_program skips the test

RATE = 0.01


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


class Native:
    """A reference whose routers have biases."""

    def __init__(self, family: str) -> None:
        self.reference = Reference(build(family))
        modules = dict(self.reference.model.named_modules())
        self.routers = {name: m for name, m in modules.items() if name.endswith(".gate")}
        for name, m in self.routers.items():
            self.adapt(m, modules[name.removesuffix(".gate")])

    def adapt(self, m, block) -> None:
        owners = (m, getattr(m, "moe_statics", m), block)
        m.bias = next(getattr(x, BIAS) for x in owners if hasattr(x, BIAS)).detach()
        m.register_forward_hook(lambda m, _, out: m.chosen.append(out[2]))

    def step(self, step: int):
        """Runs a step, and moves the biases."""
        for m in self.routers.values():
            m.chosen = []
        result = self.reference.step(step, LR)
        for m in self.routers.values():
            chosen = torch.cat(m.chosen)[valid(step)]
            counts = torch.bincount(chosen.flatten(), minlength=m.bias.numel()).double()
            m.bias += (RATE * torch.sign(counts.mean() - counts)).view(m.bias.shape)
        return result

    def logits(self, step: int):
        for m in self.routers.values():
            m.chosen = []
        return self.reference.logits(step)


class Added(Native):
    """A reference to whose routers biases are added."""

    def __init__(self, family: str, normalize: bool) -> None:
        self.normalize = normalize
        super().__init__(family)

    def adapt(self, m, block) -> None:
        m.bias = torch.zeros(m.weight.shape[0], dtype=torch.float64)
        m.forward = functools.partial(forward, m, self.normalize)


@need_program
class ExpertBias(unittest.TestCase):
    setUp = test_parity.Parity.setUp
    near = test_parity.Parity.near

    def check(self, family: str, reference: Native, *more: str) -> None:
        source = self.folder / "source"
        build(family).save_pretrained(source)
        save_file(data(), self.folder / "data.safetensors")
        path = job(self.folder, source)
        more = (f"optimizer.expert_bias_rate={RATE}", *more)
        for step in range(STEPS):
            reference.step(step)
        after, want = reference.reference.weights(), reference.logits(0)
        meshes = test_parity.FIRST_STEPS | test_parity.FIRST_STEPS_OF_EXPERTS
        for name, (ranks, sets) in (meshes | test_parity.RUNS_OF_EXPERTS).items():
            with self.subTest(name):
                out = self.folder / name.replace(" ", "-")
                run(path, ranks=ranks, sets=[*sets, *more, f'output.dir="{out}"'])
                added = isinstance(reference, Added)
                saved = load(family, out / "model", BIAS if added else "").double()
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
        if not added:
            return
        # without the field, the biases are not dropped silently
        sets = [f'model.path="{out / "model"}"', "model.override={use_expert_bias=false}"]
        with self.assertRaisesRegex(AssertionError, "is not a parameter of a"):
            tensors_of(self.folder / "plain.safetensors", path, sets=sets)

    def test_mixtral(self) -> None:
        self.check("mixtral", Added("mixtral", True))

    def test_qwen3_moe(self) -> None:
        self.check("qwen3-moe", Added("qwen3-moe", True))

    def test_qwen3_moe_not_normalized(self) -> None:
        override = "model.override={norm_topk_prob=false}"
        self.check("qwen3-moe", Added("qwen3-moe", False), override)

    def test_glm4_moe(self) -> None:
        self.check("glm4-moe", Native("glm4-moe"))

    def test_minimax_m2(self) -> None:
        self.check("minimax-m2", Native("minimax-m2"))

    def test_ernie_moe(self) -> None:
        self.check("ernie-moe", Native("ernie-moe"))


if __name__ == "__main__":
    unittest.main()
