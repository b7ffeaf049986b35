"""PyTorch tensors, compared with PyTorch's attention (SDPA) in float64; a Llama of transformers.

Ranks are threads.
"""

import copy
import unittest

import ulysses
from need import need_torch
from ranks import contexts, local
from reference import TOLERANCE, error

try:
    import torch
    from torch.nn.functional import scaled_dot_product_attention as sdpa
except ImportError:
    torch = None
try:
    import transformers
    from families import TINY, VOCAB
except ImportError:
    transformers = None


@need_torch
class Torch(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)

    def test_against_sdpa(self):
        b, s, h, hkv, d = 2, 37, 6, 2, 16
        q, k, v, w = (
            torch.randn(b, h, s, d),
            torch.randn(b, hkv, s, d),
            torch.randn(b, hkv, s, d),
            torch.randn(b, h, s, d),
        )
        for causal in (False, True):
            exact = [x.double().requires_grad_() for x in (q, k, v)]
            want = sdpa(*exact, is_causal=causal, enable_gqa=True)
            (want * w).sum().backward()

            def body(ctx):
                shards = [local(x, ctx, 2).detach().requires_grad_() for x in (q, k, v)]
                out = ulysses.attention(*shards, causal=causal, seq=s, layout="BHSD", context=ctx)
                (out * local(w, ctx, 2)).sum().backward()
                return (out.detach(), *(x.grad for x in shards))

            for size in (1, 2, 4):
                found = [torch.cat(x, 2) for x in zip(*contexts(size, body))]
                for name, a, b_ in zip(
                    ("out", "dq", "dk", "dv"), found, (want.detach(), *(x.grad for x in exact))
                ):
                    self.assertLess(error(a, b_), TOLERANCE, (name, size, causal))

    def test_expanded_gradient_and_hooks(self):
        """The gradient of sum() has zero strides. Hooks for saved tensors see the saved memory."""
        seen = []

        def body(ctx):
            x = torch.randn(1, 5, 2, 8, requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t: (seen.append(t.dtype), t.clone())[1], lambda t: t
            ):
                ulysses.attention(x, x, x, context=ctx).sum().backward()
            self.assertEqual(x.grad.shape, x.shape)

        contexts(2, body)
        self.assertEqual(seen, [torch.uint8] * 2)

    def test_bf16(self):
        """bfloat16 is refused by name, or the result is bfloat16 and correct."""
        x = torch.randn(1, 9, 2, 16).bfloat16()
        with ulysses.Context() as ctx:
            try:
                out = ulysses.attention(x, x, x, context=ctx)
            except ulysses.Unsupported as e:
                self.assertIn("BF16", str(e))
                return
            want = sdpa(*(x.double().transpose(1, 2),) * 3).transpose(1, 2)
            self.assertEqual(out.dtype, torch.bfloat16)
            self.assertLess(error(out.double(), want), 2e-2)

    def test_arrays_of_two_libraries(self):
        """They are refused, because autograd would see only some of the inputs."""
        x = torch.randn(1, 6, 2, 8, requires_grad=True)
        g = torch.zeros(1, 6, 2)
        with ulysses.Context() as ctx:
            for q, k in ((x.detach().numpy(), x), (x, x.detach().numpy())):
                with self.assertRaisesRegex(ulysses.InvalidArgument, "another library"):
                    ulysses.attention(q, k, k, context=ctx)
                with self.assertRaisesRegex(ulysses.InvalidArgument, "another library"):
                    ulysses.chunk_gated_delta_rule(q, k, k, g, g, context=ctx)

    def test_no_grad_saves_nothing(self):
        with ulysses.Context() as ctx, torch.no_grad():
            x = torch.randn(1, 5, 2, 8, requires_grad=True)
            self.assertIsNone(ulysses.attention(x, x, x, context=ctx).grad_fn)

    def test_reshards(self):
        """The backward pass of a reshard is the inverse reshard, also with padding."""
        x, w = torch.randn(2, 7, 6, 4), torch.randn(2, 7, 6, 4)

        def body(ctx):
            full = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -7 % ctx.size))
            shard = local(full, ctx, 1).clone().requires_grad_()
            for async_op in (False, True):
                shard.grad = None
                y = ulysses.gather_seq_scatter_heads(shard, 1, 2, 7, async_op, context=ctx)
                y = y.wait() if async_op else y
                z = ulysses.gather_heads_scatter_seq(
                    y * local(w, ctx, 2), 2, 1, async_op, heads=6, context=ctx
                )
                z = z.wait() if async_op else z
                z.sum().backward()
                torch.testing.assert_close(
                    z.detach(),
                    local(torch.nn.functional.pad(x * w, (0, 0, 0, 0, 0, -7 % ctx.size)), ctx, 1),
                    rtol=0,
                    atol=0,
                )
                torch.testing.assert_close(
                    shard.grad,
                    local(torch.nn.functional.pad(w, (0, 0, 0, 0, 0, -7 % ctx.size)), ctx, 1),
                    rtol=0,
                    atol=0,
                )

        for size in (1, 2, 3):
            contexts(size, body)

    def test_reshards_of_several(self):
        """Gradients of several tensors in one call, also where a result has no gradient."""

        def body(ctx):
            p = ctx.size
            g = torch.Generator().manual_seed(3)  # the same values on all ranks
            q = torch.randn(2, 7, 2 * p, 3, generator=g)
            k = torch.randn(2, 7, p, 5, generator=g)
            w = torch.randn(2, 7, 2 * p, 3, generator=g)
            pad = (0, 0, 0, 0, 0, -7 % p)
            for async_op in (False, True):
                shards = [
                    local(torch.nn.functional.pad(t, pad), ctx, 1).clone().requires_grad_()
                    for t in (q, k)
                ]
                y = ulysses.gather_seq_scatter_heads(shards, 1, 2, 7, async_op, context=ctx)
                y = y.wait() if async_op else y
                for got, want in zip(y, (q, k)):
                    torch.testing.assert_close(got, local(want, ctx, 2), rtol=0, atol=0)
                (y[0] * local(w, ctx, 2)).sum().backward()
                for got, want in zip(shards, (w, torch.zeros_like(k))):
                    want = local(torch.nn.functional.pad(want, pad), ctx, 1)
                    torch.testing.assert_close(got.grad, want, rtol=0, atol=0)

        for size in (1, 2, 3):
            contexts(size, body)

    def test_reshard_of_qkv(self):
        """The gradient of padding is zero, for both shapes of the result."""

        def body(ctx):
            p = ctx.size
            g = torch.Generator().manual_seed(5)  # the same values on all ranks
            x = torch.randn(2, 7, 6 * p, generator=g)
            w = torch.randn(2, 7, 6 * p, generator=g)
            pad = (0, 0, 0, -7 % p)
            for restore in (True, False):
                for async_op in (False, True):
                    shard = local(torch.nn.functional.pad(x, pad), ctx, 1).clone().requires_grad_()
                    y = ulysses.gather_seq_scatter_heads_qkv(
                        shard, 1, 7, restore, async_op, context=ctx
                    )
                    y = y.wait() if async_op else y
                    each = [local(t, ctx, 2) for t in w.chunk(3, -1)]
                    weight = torch.cat(each, -1) if restore else torch.stack(each, -2)
                    self.assertEqual(y.shape, weight.shape)
                    (y * weight).sum().backward()
                    want = local(torch.nn.functional.pad(w, pad), ctx, 1)
                    torch.testing.assert_close(shard.grad, want, rtol=0, atol=0)

        for size in (1, 2, 3):
            contexts(size, body)

    def test_loss(self):
        """The gradient is ranks * n / N if gradients are averaged, and n / N if they are summed.

        It is 0 on a rank without tokens.
        """
        counts = [3, 0, 5]
        for gradients, factor in (("averaged", 3), ("summed", 1)):

            def body(ctx):
                loss = torch.tensor(
                    2.0 + ctx.rank if counts[ctx.rank] else float("nan"), requires_grad=True
                )
                out = ulysses.reduce_sequence_parallel_loss(
                    loss, torch.tensor(counts[ctx.rank]), gradients=gradients, context=ctx
                )
                (out * 2).backward()
                return out.item(), loss.grad.item()

            found = contexts(3, body)
            for rank, (mean, grad) in enumerate(found):
                self.assertAlmostEqual(mean, (2.0 * 3 + 4.0 * 5) / 8, places=6)
                self.assertAlmostEqual(grad, 2 * factor * counts[rank] / 8, places=6)

    def test_loss_with_axes(self):
        with ulysses.Context() as ctx:
            for shape in ((), (1,), (1, 1)):
                loss = torch.full(shape, 2.0, requires_grad=True)
                ulysses.reduce_sequence_parallel_loss(loss, 3, context=ctx).backward()
                self.assertTrue(torch.equal(loss.grad, torch.ones(shape)))

    def test_gradient_is_that_of_the_whole(self):
        """The gradients of a sharded layer, summed over ranks, are the gradients on one rank."""
        s, n, h, vocab = 13, 16, 4, 11
        ids, labels = torch.randint(0, vocab, (1, s)), torch.randint(0, vocab, (1, s))
        labels[:, 3:7] = -100

        layers = torch.nn.Embedding(vocab, n), torch.nn.Linear(n, 3 * n), torch.nn.Linear(n, vocab)

        def gradients(dtype, attend, reduce, ids, labels):
            embed, qkv, head = modules = [copy.deepcopy(m).to(dtype) for m in layers]
            x = qkv(embed(ids)).unflatten(-1, (3, h, n // h))
            y = head(attend(*x.unbind(2)).flatten(2))
            reduce(
                torch.nn.functional.cross_entropy(
                    y.flatten(0, 1), labels.flatten(), ignore_index=-100
                ),
                (labels != -100).sum(),
            ).backward()
            return [p.grad for m in modules for p in m.parameters()]

        want = gradients(
            torch.float64,
            lambda q, k, v: sdpa(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
            ).transpose(1, 2),
            lambda mean, count: mean,
            ids,
            labels,
        )

        def body(ctx):
            return gradients(
                torch.float32,
                lambda q, k, v: ulysses.attention(q, k, v, causal=True, seq=s, context=ctx),
                lambda mean, count: ulysses.reduce_sequence_parallel_loss(
                    mean, count, gradients="summed", context=ctx
                ),
                local(ids, ctx, 1),
                local(labels, ctx, 1),
            )

        for size in (1, 2, 4):  # of 4 ranks, one holds no valid token
            for a, b in zip(zip(*contexts(size, body)), want):
                self.assertLess(error(sum(a), b), TOLERANCE)


@need_torch
class Transformers(unittest.TestCase):
    def model(self, attention):
        torch.manual_seed(1)
        config = transformers.LlamaConfig(**TINY, attn_implementation=attention)
        return transformers.LlamaForCausalLM(config).train()

    def test_llama(self):
        """Loss and all gradients of a Llama on sequences sharded by `shard`, compared with SDPA."""
        ulysses.register_transformers()
        x = torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(2))
        whole = self.model("sdpa")
        out = whole(input_ids=x, labels=x)
        out.loss.backward()
        want = {n: p.grad for n, p in whole.named_parameters()}
        for size in (1, 2, 3):
            models = [self.model("ulysses") for _ in range(size)]

            def body(ctx):
                ulysses_model = models[ctx.rank]
                # Threads share `ulysses.use`, so each rank registers its context with its own name.
                ulysses.register_transformers(f"ulysses_{ctx.rank}", ctx)
                ulysses_model.set_attn_implementation(f"ulysses_{ctx.rank}")
                micro_batch = next(iter(ulysses.shard({"input_ids": x, "labels": x}, ctx)))
                logits = ulysses_model(
                    input_ids=micro_batch["input_ids"],
                    position_ids=micro_batch["position_ids"],
                    use_cache=False,
                ).logits
                labels = micro_batch["shift_labels"]
                mean = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=-100
                )
                loss = ulysses.reduce_sequence_parallel_loss(
                    mean, (labels != -100).sum(), gradients="summed", context=ctx
                )
                loss.backward()
                return loss.item()

            for loss in contexts(size, body):
                self.assertAlmostEqual(loss, out.loss.item(), places=5)
            for name, grad in want.items():
                found = sum(dict(m.named_parameters())[name].grad for m in models)
                self.assertLess(error(found, grad), 1e-5, (name, size))


if __name__ == "__main__":
    unittest.main()
