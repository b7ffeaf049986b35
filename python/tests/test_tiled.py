"""Tiled compute: values and gradients are equal to those without tiles. Needs PyTorch, no library.

The letters in the docstrings name faults of other implementations.
"""

import functools
import unittest

import ulysses
from need import need_torch

try:
    import torch
    from torch import nn
except ImportError:
    torch = None


class Tiles(unittest.TestCase):
    def test_arithmetic(self):
        self.assertEqual(ulysses.tiles(5, 2, 8), [(0, 2), (2, 4), (4, 5), (5, 5)])
        self.assertEqual(ulysses.tiles(5, 0), [(0, 5)])
        self.assertEqual(ulysses.tiles(0, 4), [(0, 0)])
        self.assertEqual(ulysses.tiles(0, 4, 9), [(0, 0)] * 3)
        self.assertEqual(len(ulysses.tiles(300, 2)), 150)
        for rows in range(40):
            for tile in range(0, 45, 3):
                for most in (0, rows, rows + 5):
                    found = ulysses.tiles(rows, tile, most)
                    self.assertEqual(len(found), max(1, -(-(most or rows) // tile)) if tile else 1)
                    self.assertEqual([found[0][0], found[-1][1]], [0, rows])
                    for (_, hi), (lo, _) in zip(found, found[1:]):
                        self.assertEqual(hi, lo)
        with self.assertRaisesRegex(ulysses.InvalidArgument, "7 rows"):
            ulysses.tiles(7, 2, 6)


if torch is not None:

    class MLP(nn.Module):
        def __init__(self, n=8, m=24):
            super().__init__()
            self.gate, self.up, self.down = (
                nn.Linear(n, m),
                nn.Linear(n, m, bias=False),
                nn.Linear(m, n),
            )

        def forward(self, x):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@need_torch
class Compute(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)

    def compare(self, make, tiled, whole, tol=1e-12):
        """Compares values and gradients of two functions on the same parameters."""
        results = []
        for function in (tiled, whole):
            torch.manual_seed(1)
            tensors = make()
            out = function(*tensors)
            (
                out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)
            ).sum().backward()
            results.append(
                [out.detach()]
                + [t.grad for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
                + [p.grad for m in tensors if isinstance(m, nn.Module) for p in m.parameters()]
            )
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)

    def test_stacked_mlps(self):
        """(b) Several lengths and tile sizes; two MLPs, to test the gradients of inputs."""
        for batch, rows in ((1, 125), (2, 85), (1, 5)):
            for tile in (1, 2, 7, 64, 1000):

                def make():
                    return (
                        torch.randn(batch, rows, 8, dtype=torch.float64, requires_grad=True),
                        MLP().double(),
                        MLP().double(),
                    )

                self.compare(
                    make,
                    lambda x, a, b: ulysses.tiled_compute(
                        b, ulysses.tiled_compute(a, x, tile_rows=tile), tile_rows=tile
                    ),
                    lambda x, a, b: b(a(x)),
                )

    def test_tiles_of_nothing(self):
        """(c) A rank with fewer rows than other ranks, or none, has the same number of tiles."""
        for rows in (5, 1, 0):
            calls = []
            mlp = MLP().double()

            def fn(x):
                calls.append(x.shape[1])
                return mlp(x)

            x = torch.randn(1, rows, 8, dtype=torch.float64, requires_grad=True)
            out = ulysses.tiled_compute(
                fn, x, tile_rows=2, max_rows=8, params=list(mlp.parameters())
            )
            self.assertEqual((out.shape[1], len(calls)), (rows, 4))
            out.sum().backward()
            self.assertEqual(len(calls), 8)
            self.assertTrue(all(p.grad is not None for p in mlp.parameters()))

    def test_gradients_are_complete_once(self):
        """(c) The hook of a parameter runs once in each backward, with the complete gradient."""
        mlp, x = MLP().double(), torch.randn(1, 13, 8, dtype=torch.float64)
        whole = MLP().double()
        whole.load_state_dict(mlp.state_dict())
        whole(x).sum().backward()
        seen = []

        def hook(name, want, p):
            seen.append(name)
            torch.testing.assert_close(p.grad, want)

        for (name, p), w in zip(mlp.named_parameters(), whole.parameters()):
            p.register_post_accumulate_grad_hook(functools.partial(hook, name, w.grad))
        for tile, most in ((1, 0), (4, 0), (100, 0), (3, 40)):
            seen.clear()
            mlp.zero_grad()
            ulysses.tiled_compute(mlp, x, tile_rows=tile, max_rows=most).sum().backward()
            self.assertEqual(sorted(seen), sorted(n for n, _ in mlp.named_parameters()))

    def test_a_function_that_returns_a_leaf(self):
        """nn.Identity, and dropout in evaluation mode, return their argument itself."""
        x, scale = torch.randn(1, 9, 8, requires_grad=True), torch.ones(1, 3, 8).requires_grad_()
        for function in (nn.Identity(), nn.Dropout(0.5).eval()):
            x.grad = None
            ulysses.tiled_compute(function, x, tile_rows=4).mul(2).sum().backward()
            torch.testing.assert_close(x.grad, torch.full_like(x, 2))
        ulysses.tiled_compute(lambda t: scale, x, tile_rows=3).sum().backward()
        torch.testing.assert_close(scale.grad, torch.full_like(scale, 3))
        with self.assertRaisesRegex(ulysses.InvalidArgument, "params="):
            ulysses.tiled_compute(lambda t: scale, x, tile_rows=3, params=[]).sum().backward()

    def test_a_function_that_changes_its_input(self):
        """It is refused, because backward runs the function again. Without gradients it works."""
        mlp = MLP()
        for params in (None, list(mlp.parameters())):
            with self.assertRaisesRegex(ulysses.InvalidArgument, "input 1 .*in place"):
                ulysses.tiled_compute(
                    lambda s, t: s * mlp(t.mul_(2)), 1.0, torch.ones(1, 9, 8), params=params
                )
        x = torch.randn(1, 9, 8)
        with torch.no_grad():
            want = mlp(2 * x)
            got = ulysses.tiled_compute(lambda t: mlp(t.mul_(2)), x, tile_rows=4)
        torch.testing.assert_close(got, want)

    def test_params(self):
        """(a) params=None finds the parameters. A list without a parameter raises."""
        mlp, x = MLP(), torch.randn(1, 9, 8)
        ulysses.tiled_compute(lambda t: mlp(t), x, tile_rows=4, params=None).sum().backward()
        self.assertTrue(all(p.grad is not None for p in mlp.parameters()))
        out = ulysses.tiled_compute(mlp, x, tile_rows=4, params=list(mlp.gate.parameters()))
        with self.assertRaisesRegex(ulysses.InvalidArgument, r"\(24, 8\).*params="):
            out.sum().backward()
        out = ulysses.tiled_compute(mlp, x, tile_rows=4)
        with torch.no_grad():
            mlp.down.weight.add_(1)
        with self.assertRaisesRegex(ulysses.InvalidArgument, "changed in place"):
            out.sum().backward()

    def test_a_tensor_computed_outside(self):
        """It is refused, because every tile would differentiate its graph. As an input it works."""
        x, leaf = torch.randn(1, 9, 8), torch.randn(8, requires_grad=True)
        scale = leaf.exp()
        with self.assertRaisesRegex(ulysses.InvalidArgument, "ExpBackward0.*Whole"):
            ulysses.tiled_compute(lambda t: t * scale, x, tile_rows=4)
        ulysses.tiled_compute(
            lambda t, s: t * s, x, ulysses.Whole(scale), tile_rows=4
        ).sum().backward()
        torch.testing.assert_close(leaf.grad, x.sum((0, 1)) * leaf.detach().exp())

    def test_inside_checkpoints(self):
        """Checkpointing and offloading copy saved tensors, but not the parameters."""
        from torch.utils.checkpoint import checkpoint

        def whole(x, mlp):
            return mlp(x)

        def tiled(x, mlp):
            return ulysses.tiled_compute(mlp, x, tile_rows=4)

        def offloaded(x, mlp):
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: t.detach().clone(), lambda t: t
            ):
                return tiled(x, mlp)

        def make():
            return torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True), MLP().double()

        self.compare(make, offloaded, whole)
        for reentrant in (False, True):
            self.compare(
                make, lambda x, mlp: checkpoint(tiled, x, mlp, use_reentrant=reentrant), whole
            )

    def loss(self, head, reduction):
        def fn(h, y):
            nll = torch.nn.functional.cross_entropy(
                head(h).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum"
            )
            return (nll, (y != -100).sum()) if reduction == "mean" else nll

        return fn

    def test_loss(self):
        """(d, f) The mean over unequal tiles and masked labels is exact, with its gradients.

        A tile without labels counts nothing, and the mean of no labels is 0.
        """

        def make(valid=slice(0, 9)):
            y = torch.full((2, 17), -100)
            y[:, valid] = torch.randint(0, 11, y[:, valid].shape)
            return (
                torch.randn(2, 17, 8, dtype=torch.float64, requires_grad=True),
                y,
                nn.Linear(8, 11).double(),
            )

        for tile in (1, 5, 7, 64):
            for reduction in ("mean", "sum"):
                self.compare(
                    make,
                    lambda h, y, head: ulysses.tiled_compute(
                        self.loss(head, reduction), h, y, tile_rows=tile, reduction=reduction
                    ),
                    lambda h, y, head: torch.nn.functional.cross_entropy(
                        head(h).flatten(0, 1), y.flatten(), reduction=reduction
                    ),
                )
        h, y, head = make(slice(0, 0))
        out = ulysses.tiled_compute(self.loss(head, "mean"), h, y, tile_rows=4, reduction="mean")
        out.backward()
        self.assertEqual((out.item(), h.grad.abs().sum().item()), (0, 0))

    def test_backward_in_autocast(self):
        """Backward may run inside autocast, which keeps the weights that forward has converted."""
        linear, x = torch.nn.Linear(4, 4, bias=False), torch.randn(1, 6, 4)
        grads = []
        for tiled in (False, True):
            linear.weight.grad = None
            with torch.autocast("cpu", torch.bfloat16):
                y = ulysses.tiled_compute(linear, x, tile_rows=2) if tiled else linear(x)
                (y.sum() + linear(2 * x).sum()).backward()
            grads.append(linear.weight.grad)
        torch.testing.assert_close(*grads, rtol=0.02, atol=0.02)

    def test_incoming_gradient_stays(self):
        """(e) Backward does not change the incoming gradient in place."""
        h, y, head = (
            torch.randn(1, 6, 8, requires_grad=True),
            torch.randint(0, 11, (1, 6)),
            nn.Linear(8, 11),
        )
        out = ulysses.tiled_compute(self.loss(head, "mean"), h, y, tile_rows=2, reduction="mean")
        grad = torch.tensor(3.0)
        out.backward(grad)
        self.assertEqual(float(grad), 3)

    def test_sums_of_bf16(self):
        """Results and gradients are added up in float32: 256 + 1 is 256 in bfloat16."""
        w = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
        x = torch.ones(1, 1024, 1, dtype=torch.bfloat16, requires_grad=True)
        for reduction, result in (("sum", lambda y: y.sum()), ("mean", lambda y: (y.sum(), 1))):
            w.grad = x.grad = None
            out = ulysses.tiled_compute(
                lambda t, result=result: result(t * w), x, tile_rows=1, reduction=reduction
            )
            out.backward()
            n = 1024 if reduction == "sum" else 1
            self.assertEqual((out.dtype, w.grad.dtype), (torch.bfloat16, torch.bfloat16))
            self.assertEqual((out.item(), w.grad.item(), x.grad[0, 0, 0].item()), (n, n, n / 1024))

    def test_shapes(self):
        """(g) Results of any shape, concatenated on any axis; inputs tiled on any axis."""
        w = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)

        def make():
            return (torch.randn(10, 2, 8, dtype=torch.float64, requires_grad=True),)

        self.compare(
            make,
            lambda x: ulysses.tiled_compute(
                lambda t: (t @ w).permute(1, 2, 0), x, tile_rows=4, dim=0, out_dim=2
            ),
            lambda x: (x @ w).permute(1, 2, 0),
        )

    def test_whole_and_others(self):
        def fn(x, table, scale, nothing):
            self.assertIsNone(nothing)
            return x * table.sum(0) * scale

        def make():
            return torch.randn(1, 7, 4, dtype=torch.float64, requires_grad=True), torch.randn(
                3, 4, dtype=torch.float64, requires_grad=True
            )

        self.compare(
            make,
            lambda x, t: ulysses.tiled_compute(fn, x, ulysses.Whole(t), 2.0, None, tile_rows=3),
            lambda x, t: fn(x, t, 2.0, None),
        )

    def test_decorator_and_dropout(self):
        """Both runs of a tile use the same random numbers: the gradient is the output's mask."""

        @ulysses.tiled_compute(tile_rows=3)
        def drop(x):
            return torch.nn.functional.dropout(x, 0.5)

        x = torch.ones(1, 50, 4, requires_grad=True)
        out = drop(x)
        out.sum().backward()
        torch.testing.assert_close(x.grad, out.detach())
        self.assertTrue(0 < float((out == 0).sum()) < out.numel())

    def test_no_grad_keeps_nothing(self):
        x = torch.randn(1, 8, 8, requires_grad=True)
        with torch.no_grad():
            self.assertFalse(ulysses.tiled_compute(MLP(), x, tile_rows=3).requires_grad)

    def test_memory_of_inner_activations(self):
        """Forward saves its inputs and parameters, and no activations of fn."""
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t
        ):
            ulysses.tiled_compute(
                MLP(8, 4096), torch.randn(1, 64, 8, requires_grad=True), tile_rows=8
            )
        # The search for parameters runs fn on one row, and drops its activations.
        self.assertFalse([s for s in kept if s[-1] == 4096 and len(s) == 3 and s[1] > 1])
        self.assertIn((1, 64, 8), kept)

    def test_statistics_over_rows(self):
        """A tile has other statistics than all rows, and a tile that runs again changes them."""

        class Normed(torch.nn.Module):
            def __init__(self, norm):
                super().__init__()
                self.norm = norm

            def forward(self, x):
                return self.norm(x.transpose(1, 2)).transpose(1, 2)

            def run(self, x):
                return self(x)

        x = torch.randn(3, 8, 6, requires_grad=True)
        for norm in (torch.nn.BatchNorm1d(6), torch.nn.InstanceNorm1d(6, track_running_stats=True)):
            module = Normed(norm)
            before = norm.running_mean.clone()
            for function, inputs in (
                (module, (x,)),
                (module.run, (x[:1],)),
                (lambda m, x: m(x), (module, x)),
            ):
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        with self.assertRaisesRegex(ulysses.InvalidArgument, "statistics"):
                            ulysses.tiled_compute(function, *inputs, tile_rows=3)
            self.assertTrue(torch.equal(norm.running_mean, before))
            module.eval()
            y = ulysses.tiled_compute(module, x, tile_rows=3)
            self.assertTrue(torch.allclose(y, module(x), atol=1e-6))
        norm = torch.nn.BatchNorm1d(6)  # found in the graph
        with self.assertRaisesRegex(ulysses.InvalidArgument, "statistics"):
            ulysses.tiled_compute(lambda x: Normed(norm)(x), x, tile_rows=3)
        with self.assertRaisesRegex(ulysses.InvalidArgument, "InstanceNorm1d norm"):
            ulysses.tiled_compute(Normed(torch.nn.InstanceNorm1d(6)).eval(), x, tile_rows=3)

    def test_refusals(self):
        x, y = torch.randn(1, 4, 2), torch.randn(1, 5, 2)
        for words, call in (
            ("rows", lambda: ulysses.tiled_compute(lambda a, b: a, x, y)),
            ("reduction", lambda: ulysses.tiled_compute(lambda a: a, x, reduction="max")),
            (
                r"\(sum, count\)",
                lambda: ulysses.tiled_compute(lambda a: a.sum(), x, reduction="mean"),
            ),
            ("scalar", lambda: ulysses.tiled_compute(lambda a: a, x, reduction="sum")),
            (
                "count 2.5",
                lambda: ulysses.tiled_compute(lambda a: (a.sum(), 2.5), x, reduction="mean"),
            ),
            (
                "count nan",
                lambda: ulysses.tiled_compute(
                    lambda a: (a.sum(), float("nan")), x, reduction="mean"
                ),
            ),
            ("one tensor", lambda: ulysses.tiled_compute(lambda a: (a, a), x)),
        ):
            with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                call()


if __name__ == "__main__":
    unittest.main()
