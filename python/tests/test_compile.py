"""torch.compile of what calls this package: results and gradients are those without it."""

import unittest

import ulysses
from need import need_torch

try:
    import torch
    import transformers
    from families import TINY, VOCAB
except ImportError:
    torch = transformers = None


def compiled(function):
    return torch.compile(function, backend="aot_eager")


@need_torch
class Compile(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        torch.compiler.reset()
        self.ctx = ulysses.Context(threads=1)
        self.addCleanup(self.ctx.close)

    def check(self, function, *inputs):
        """Compares results and gradients of a function, between operations of PyTorch."""

        def between(*inputs):
            return function(*[x * 2 for x in inputs]).sin()

        found = []
        for f in (between, compiled(between)):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out = f(*leaves)
            out.pow(2).sum().backward()
            found.append((out.detach(), *(x.grad for x in leaves)))
        for want, got in zip(*found):
            torch.testing.assert_close(got, want)

    def test_functions(self):
        ctx, x, gate = self.ctx, torch.randn(1, 8, 4, 4), -torch.rand(1, 8, 4)
        self.check(
            lambda q, k: ulysses.attention(q, k, k, causal=True, context=ctx), x, x[:, :, :2]
        )
        self.check(
            lambda q: ulysses.chunk_gated_delta_rule(q, q, q, gate, -gate, context=ctx)[0], x
        )
        self.check(lambda y: ulysses.causal_conv1d(y, torch.ones(4, 3), context=ctx), x[0])
        self.check(lambda y: ulysses.tiled_compute(torch.tanh, y, tile_rows=3), x)
        self.check(
            lambda y: ulysses.gather_seq_scatter_heads(y, 1, 2, async_op=True, context=ctx).wait(),
            x,
        )

    def test_whole_graph(self):
        x = torch.randn(1, 8, 4, 4)
        whole = torch.compile(
            lambda q: ulysses.attention(q, q, q, context=self.ctx),
            backend="aot_eager",
            fullgraph=True,
        )
        with self.assertRaisesRegex(Exception, "disable"):
            whole(x)

    def test_model(self):
        ulysses.register_transformers(context=self.ctx)
        config = transformers.LlamaConfig(**TINY, attn_implementation="ulysses")
        model = transformers.LlamaForCausalLM(config)
        ids = torch.randint(0, VOCAB, (1, 12))
        found = []
        for f in (model, compiled(model)):
            model.zero_grad()
            f(input_ids=ids, labels=ids).loss.backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for want, got in zip(*found):
            torch.testing.assert_close(got, want)


if __name__ == "__main__":
    unittest.main()
