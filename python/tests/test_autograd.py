"""What autograd may do with this package's functions, and what they refuse."""

import unittest

import ulysses
from need import need_torch

try:
    import torch
    from torch.autograd import forward_ad
except ImportError:
    torch = None


@need_torch
class Autograd(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.ctx = ulysses.Context(threads=1)
        self.addCleanup(self.ctx.close)
        self.x = torch.randn(1, 8, 4, 4, requires_grad=True)

    def attention(self, x, **options):
        return ulysses.attention(x, x, x, causal=True, context=self.ctx, **options)

    def delta_rule(self, x):
        gate = torch.zeros(1, 8, 4)
        return ulysses.chunk_gated_delta_rule(x, x, x, gate, gate + 0.5, context=self.ctx)[0]

    def cube(self, x):
        return ulysses.tiled_compute(lambda t: t.pow(3), x, tile_rows=3)

    def test_second_derivatives(self):
        """They are refused, also where the gradient of the output is a constant, as of a sum."""
        for function in (self.attention, self.delta_rule, self.cube):
            for power in (1, 2):
                out = function(self.x).pow(power).sum()
                (grad,) = torch.autograd.grad(out, self.x, create_graph=True)
                with self.assertRaisesRegex(ulysses.Unsupported, "second derivatives"):
                    grad.pow(2).sum().backward()

    def test_second_derivatives_of_linear_functions(self):
        """The gradient of the loss of all ranks is a constant. After a reshard, one that is not a
        constant is refused."""
        loss = ulysses.reduce_sequence_parallel_loss(self.x.pow(3).mean(), 7, context=self.ctx)
        (grad,) = torch.autograd.grad(loss, self.x, create_graph=True)
        grad.sum().backward()
        want = 6 * self.x.detach() / self.x.numel()
        torch.testing.assert_close(self.x.grad, want)
        y = ulysses.gather_seq_scatter_heads(self.x, 1, 2, context=self.ctx)
        (grad,) = torch.autograd.grad(y.pow(3).sum(), self.x, create_graph=True)
        with self.assertRaisesRegex(ulysses.Unsupported, "second derivatives"):
            grad.sum().backward()

    def test_numbers_that_need_a_gradient(self):
        """They would have none, as a learned scale, without an error."""
        scale = torch.tensor(0.5, requires_grad=True)
        for option in ("scale", "softcap"):
            with self.assertRaisesRegex(
                ulysses.InvalidArgument, f"{option} is a tensor that needs"
            ):
                self.attention(self.x, **{option: scale})
        want = self.attention(self.x, scale=0.5)
        self.assertTrue(torch.equal(self.attention(self.x, scale=scale.detach()), want))

    def test_forward_mode(self):
        """A result without a tangent would be a derivative of 0."""
        x = self.x.detach()
        for function in (self.attention, self.delta_rule):
            with forward_ad.dual_level(), self.assertRaises(NotImplementedError):
                function(forward_ad.make_dual(x, x))

    def test_mask_that_changes_before_backward(self):
        """Backward reads the mask again, so autograd refuses another one."""
        for dtype in (torch.bool, torch.uint8):
            mask = torch.ones(1, 2, 2, dtype=dtype)
            out = self.attention(self.x, block_mask=mask, block=4)
            mask.zero_()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                out.sum().backward()


if __name__ == "__main__":
    unittest.main()
