"""Sequences in a zigzag over a ring: the order, batches of data loaders, and refusals."""

import unittest

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts, joined, local
from reference import TOLERANCE, draw, error

try:
    import torch
except ImportError:
    torch = None

# Ranks and ring.
MESHES = ((2, 2), (4, 2), (3, 3), (4, 4), (6, 3))


class Order(unittest.TestCase):
    def test_layout_of_the_library(self):
        """The ranges of a Layout are the rows of the library's batches, on every rank."""

        def body(ctx):
            for n in (1, 2, 5, 13, 24, 25):
                for sequences in (ulysses.Sequences(2, n), ulysses.Sequences(1, n, n + 3)):
                    batch = ctx.batch(sequences)
                    ranges = ctx.layout.ranges(n, ctx.rank)
                    self.assertEqual(batch.ranges, ranges, (n, ctx.rank))
                    self.assertEqual(batch.rows, ctx.layout.rows(n, ctx.rank))
                    keys = ctx.layout.rows(sequences.kv_seq or n, ctx.rank)
                    self.assertEqual(batch.kv_rows, keys)
                positions = ctx.batch(ulysses.Sequences(1, n)).positions()
                self.assertEqual(positions, ctx.layout.index(n, ctx.rank).tolist())

        for size, ring in MESHES:
            for zigzag in (False, True):
                contexts(size, body, ring=ring, zigzag=zigzag)
        contexts(2, body, zigzag=True)  # without a ring, a zigzag is in order
        self.assertEqual(ulysses.Layout(2, zigzag=True), ulysses.Layout(2))

    def test_no_such_rank(self):
        for n, size, rank in ((10, 4, 4), (10, 4, -1), (10, 0, 0), (10, -2, -1), (-1, 4, 0)):
            with self.assertRaises(ulysses.InvalidArgument) as raised:
                ulysses.shard_rows(n, size, rank)
            self.assertIn(f"{n} tokens, {size} ranks, rank {rank}", str(raised.exception))
        self.assertEqual(ulysses.shard_rows(0, 4, 3), (0, 0))

    def test_there_and_back(self):
        whole = {
            "numbers": draw(1, 2, 13, 3),
            "whole numbers": np.arange(7)[None],
            "few": draw(2, 1, 2),
        }

        def body(ctx):
            for name, x in whole.items():
                for dim in (1, 1 - x.ndim):
                    found = ulysses.gather_tokens(local(x, ctx, dim), dim, context=ctx)
                    np.testing.assert_array_equal(found, x, name)
                    self.assertEqual(found.dtype, x.dtype)
            with self.assertRaisesRegex(ulysses.InvalidArgument, "dim 3 of 3 axes"):
                ulysses.gather_tokens(whole["numbers"], 3, context=ctx)
            if ctx.size > 1:
                with self.assertRaisesRegex(ulysses.InvalidArgument, "its shard of .* has"):
                    x = np.zeros((1, 2 + 3 * (ctx.rank == 1)))
                    ulysses.gather_tokens(x, context=ctx)
            if torch is not None:
                x = torch.tensor(whole["numbers"]).bfloat16()
                self.assertTrue(torch.equal(ulysses.gather_tokens(local(x, ctx), context=ctx), x))

        for size, ring in ((1, 1), *MESHES):
            contexts(size, body, ring=ring, zigzag=True)

    def test_gather_keys(self):
        """The form of the ring is the context's, unless the plan has its own."""

        def body(ctx):
            sizes = dict(heads=2, head_dim=8)
            plans = (ctx.plan(**sizes), ctx.plan(**sizes, gather_keys=False))
            return [plan.describe()["form"] for plan in plans]

        for form in contexts(2, body, ring=2, gather_keys=True):
            self.assertEqual(form, ["all-gather", "ring"])

    def test_ranks_that_disagree(self):
        from ranks import run

        def body(comm):
            with self.assertRaisesRegex(ulysses.InvalidArgument, "zigzag"):
                ulysses.Context(comm, ring=2, zigzag=comm.rank == 0)

        run(2, body)


class Batches(unittest.TestCase):
    def test_shard(self):
        """Micro-batches hold the tokens of the layout; joined, they are the batch."""
        ids = np.arange(26).reshape(2, 13)
        cu = [0, 4, 13, 15, 26]
        starts = [0, 4, 13, 15]
        positions = np.concatenate([np.arange(b - a) for a, b in zip(cu, cu[1:])]).reshape(2, 13)

        def body(ctx):
            batch = {"input_ids": ids + 100 * ctx.rank, "labels": ids, "cu_seqlens": cu}
            found = []
            for micro_batch in ulysses.shard(batch, ctx):
                self.assertEqual(micro_batch.ranges, ctx.layout.ranges(13, ctx.rank))
                self.assertEqual(ctx.sequences.cu_seqlens, tuple(cu))
                found.append(dict(micro_batch))
            return found

        for size, ring in MESHES:
            mesh = dict(ring=ring, zigzag=True)
            each = contexts(size, body, **mesh)
            for owner in range(size):
                whole = {
                    name: joined([shards[owner][name] for shards in each], **mesh)
                    for name in ("input_ids", "position_ids", "shift_labels")
                }
                np.testing.assert_array_equal(whole["input_ids"], ids + 100 * owner)
                np.testing.assert_array_equal(whole["position_ids"], positions)
                labels = whole["shift_labels"].reshape(-1)
                for t in range(26):
                    last = t == 25 or t + 1 in starts
                    self.assertEqual(labels[t], -100 if last else t + 1)


class Refusals(unittest.TestCase):
    def test_calls(self):
        """Calls that need tokens in order, or whole sequences, are refused on every rank."""
        x = np.ones((1, 4, 2, 8), np.float32)

        def body(ctx):
            for words, call in (
                ("ZIGZAG", lambda: ulysses.halo(x, 1, context=ctx)),
                (
                    "ZIGZAG",
                    lambda: ulysses.chunk_gated_delta_rule(
                        x, x, x, x[..., 0], x[..., 0], context=ctx
                    ),
                ),
                (
                    "ring 2",
                    lambda: ulysses.local_attention(x, x, x, lambda q, k, v: v, context=ctx),
                ),
                ("ring 2", lambda: ulysses.gather_seq_scatter_heads(x, 1, 2, context=ctx)),
                ("ring 2", lambda: ulysses.gather_heads_scatter_seq(x, 2, 1, context=ctx)),
                (
                    "ring 2",
                    lambda: ulysses.gather_seq_scatter_heads_qkv(
                        np.ones((1, 4, 12), np.float32), 1, context=ctx
                    ),
                ),
            ):
                with self.assertRaisesRegex(ulysses.Unsupported, words):
                    call()
            ulysses.attention(x, x, x, causal=True, context=ctx)

        contexts(2, body, ring=2, zigzag=True)

    @need_torch
    def test_positions(self):
        """Positions that count a rank's own tokens are refused, and missing positions are made."""
        from families import build
        from test_transformers import register

        ids = torch.arange(8)[None]
        models = [build("llama") for _ in range(2)]
        want = build("llama", "sdpa")(input_ids=ids, use_cache=False).logits.detach()

        def body(ctx):
            model = register(ctx, models[ctx.rank])
            mine = local(ids, ctx)
            with self.assertRaisesRegex(ulysses.InvalidArgument, "start at 0 on rank 1 of 2"):
                model(input_ids=mine, position_ids=torch.arange(4)[None])
            return ulysses.gather_tokens(model(input_ids=mine).logits.detach(), context=ctx)

        for found in contexts(2, body, ring=2, zigzag=True):
            self.assertLess(error(found, want), TOLERANCE)

    @need_torch
    def test_models(self):
        """A model with recurrent states is refused in a zigzag."""
        from families import build
        from test_transformers import register

        models = [build("qwen3.5 text") for _ in range(2)]

        def body(ctx):
            with self.assertRaisesRegex(ulysses.Unsupported, "linear_attn .* tokens in order"):
                register(ctx, models[ctx.rank])(input_ids=torch.ones(1, 4, dtype=torch.long))

        contexts(2, body, ring=2, zigzag=True)


if __name__ == "__main__":
    unittest.main()
