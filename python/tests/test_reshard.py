"""Reshards and the loss of a sequence group, on NumPy arrays. Ranks are threads."""

import unittest

import numpy as np
import ulysses
from ranks import contexts, local


def padded(x, axis, size):
    more = [(0, 0)] * x.ndim
    more[axis] = (0, -x.shape[axis] % size)
    return np.pad(x, more)


class Reshard(unittest.TestCase):
    SHAPES = [
        ((2, 7, 6, 4), 1, 2),
        ((7, 2, 6, 4), 0, 2),
        ((2, 6, 7, 4), 2, 1),
        ((7, 6), 0, 1),
        ((2, 8, 6, 3, 2), 1, 2),
        ((6, 3, 8), 2, 0),
    ]

    def test_there_and_back(self):
        """Tokens and heads on any two axes, any number of heads, several dtypes.

        The inverse is bitwise exact.
        """
        for size in (1, 2, 3, 4):
            for shape, seq, head in self.SHAPES:
                for dtype in (np.float32, np.int64, np.uint8):
                    x = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
                    n = shape[seq]

                    def body(ctx):
                        for pad in (True, False):
                            whole = padded(x, seq, ctx.size) if pad else x
                            shard = local(whole, ctx, seq)
                            got = ulysses.gather_seq_scatter_heads(
                                shard, seq, head, n, padded=pad, context=ctx
                            )
                            np.testing.assert_array_equal(got, local(x, ctx, head))
                            back = ulysses.gather_heads_scatter_seq(
                                got, head, seq, heads=shape[head], padded=pad, context=ctx
                            )
                            np.testing.assert_array_equal(back, shard)

                    with self.subTest(ranks=size, shape=shape, dtype=dtype.__name__):
                        contexts(size, body)

    def test_async(self):
        x = np.arange(2 * 8 * 4 * 3, dtype=np.float32).reshape(2, 8, 4, 3)

        def body(ctx):
            shard = local(x, ctx)
            a = ulysses.gather_seq_scatter_heads(shard, 1, 2, 8, True, padded=False, context=ctx)
            b = ulysses.gather_seq_scatter_heads(
                shard + 1, 1, 2, 8, True, padded=False, context=ctx
            )
            np.testing.assert_array_equal(a.wait(), local(x, ctx, 2))
            np.testing.assert_array_equal(b(), local(x, ctx, 2) + 1)
            self.assertIs(a.wait(), a.wait())

        for size in (1, 2, 3):
            contexts(size, body)

    def test_ranks_that_wait_for_different_requests(self):
        """All ranks raise, and no request is lost: the ranks wait again, in the right order."""
        x = np.arange(2 * 8 * 4 * 3, dtype=np.float32).reshape(2, 8, 4, 3)

        def body(ctx):
            shard = local(x, ctx)
            a, b = (
                ulysses.gather_seq_scatter_heads(shard + i, 1, 2, async_op=True, context=ctx)
                for i in range(2)
            )
            with self.assertRaisesRegex(ulysses.InvalidArgument, "the number of the request"):
                (b if ctx.rank else a).wait()
            self.assertEqual(len(ctx._pending), 2)
            np.testing.assert_array_equal(a.wait(), local(x, ctx, 2))
            np.testing.assert_array_equal(b.wait(), local(x, ctx, 2) + 1)
            self.assertEqual(len(ctx._pending), 0)

        for size in (2, 4):
            contexts(size, body)

    def test_a_request_that_is_dropped(self):
        """The context keeps its memory until it is closed, because other ranks write to it."""
        x = np.arange(2 * 8 * 4 * 3, dtype=np.float32).reshape(2, 8, 4, 3)

        def body(ctx):
            shard = local(x, ctx)
            for _ in range(3):
                ulysses.gather_seq_scatter_heads(shard, 1, 2, async_op=True, context=ctx)
            self.assertEqual(len(ctx._pending), 3)
            request = ulysses.gather_seq_scatter_heads(shard, 1, 2, async_op=True, context=ctx)
            self.assertEqual(len(ctx._pending), 4)
            del request

        contexts(2, body)

    def test_several_in_one_call(self):
        """Arrays with different heads, features and axes, in one all-to-all, there and back."""

        def body(ctx, calls):
            p = ctx.size
            q = np.arange(2 * 7 * 4 * p * 3, dtype=np.float32).reshape(2, 7, 4 * p, 3)
            k = np.arange(2 * 7 * p * 5, dtype=np.float32).reshape(2, 7, p, 5) + 0.5
            b = np.arange(2 * 7 * 2 * p, dtype=np.float32).reshape(2, 7, 2 * p) + 0.25
            for pad in (True, False):
                whole = [padded(x, 1, p) if pad else x for x in (q, k, b)]
                shards = [local(x, ctx, 1) for x in whole]
                before = len(calls)
                got = ulysses.gather_seq_scatter_heads(shards, 1, 2, 7, padded=pad, context=ctx)
                self.assertEqual(calls[before:], ["ulysses_seq_to_heads"])
                self.assertIsInstance(got, tuple)
                for y, x in zip(got, (q, k, b)):
                    np.testing.assert_array_equal(y, local(x, ctx, 2))
                request = ulysses.gather_heads_scatter_seq(got, 2, 1, True, padded=pad, context=ctx)
                for y, x in zip(request.wait(), shards):
                    np.testing.assert_array_equal(y, x)
            one = ulysses.gather_seq_scatter_heads(
                [local(q, ctx, 1)], 1, 2, 7, padded=False, context=ctx
            )
            self.assertEqual(len(one), 1)

        for size in (1, 2, 3, 4):

            def counted(ctx):
                calls, call = [], ctx._call
                ctx._call = lambda name, *args: (
                    calls.append(name) if "_workspace" not in name and "seq" in name else None,
                    call(name, *args),
                )[1]
                body(ctx, calls)

            with self.subTest(ranks=size):
                contexts(size, counted)

    def test_qkv(self):
        """[q | k | v] in the last axis equals three calls, for any axis of tokens and any padding.

        By tokens again, the gradient has zeros for the padding.
        """
        for size in (1, 2, 3, 4):
            for shape, seq in (((2, 7), 1), ((7, 2), 0), ((7,), 0), ((2, 3, 8), 2), ((5, 2, 3), 0)):
                c = 2 * size
                x = np.arange(np.prod(shape) * 3 * c, dtype=np.float32).reshape(*shape, 3 * c)
                n, parts = shape[seq], np.split(x, 3, -1)

                def body(ctx):
                    want = [local(p, ctx, len(shape)) for p in parts]
                    for pad in (True, False):
                        shard = local(padded(x, seq, size) if pad else x, ctx, seq)
                        for restore in (True, False):
                            joined = (np.concatenate if restore else np.stack)(
                                want, -1 if restore else -2
                            )
                            for sync in (False, True):
                                got = ulysses.gather_seq_scatter_heads_qkv(
                                    shard, seq, n, restore, sync, padded=pad, context=ctx
                                )
                                got = got.wait() if sync else got
                                np.testing.assert_array_equal(got, joined)
                    if n % size == 0:  # without unpadded_dim_size there is no padding
                        got = ulysses.gather_seq_scatter_heads_qkv(
                            local(x, ctx, seq), seq, context=ctx
                        )
                        np.testing.assert_array_equal(got, np.concatenate(want, -1))

                with self.subTest(ranks=size, shape=shape):
                    contexts(size, body)

    def test_refusals_of_several(self):
        x = np.zeros((1, 4, 4, 2), np.float32)

        def body(ctx):
            heads, seq = ulysses.gather_seq_scatter_heads, ulysses.gather_heads_scatter_seq
            qkv = ulysses.gather_seq_scatter_heads_qkv
            for words, call in (
                ("0 arrays", lambda: heads([], 1, 2, context=ctx)),
                ("17 arrays", lambda: heads([x] * 17, 1, 2, context=ctx)),
                (r"x\[1\] is int", lambda: heads([x, 3], 1, 2, context=ctx)),
                ("one dtype", lambda: heads([x, x.astype(np.int64)], 1, 2, context=ctx)),
                ("same tokens", lambda: heads([x, x[:, :2]], 1, 2, context=ctx)),
                ("same sequences", lambda: heads([x, x.repeat(3, 0)], 1, 2, context=ctx)),
                ("3 heads on 2 ranks", lambda: heads([x, x[:, :, :3]], 1, 2, context=ctx)),
                ("leave it 0", lambda: seq([x, x], 2, 1, heads=8, context=ctx)),
                ("8 features", lambda: qkv(x[..., 0].repeat(2, -1), 1, context=ctx)),
                ("3 features", lambda: qkv(x[..., :3, 0], 1, context=ctx)),
                ("0 features", lambda: qkv(x[..., 0, :0], 1, context=ctx)),
                ("two different axes", lambda: qkv(x, 3, context=ctx)),
                ("padded=False", lambda: qkv(np.zeros((4, 6), "f"), 0, padded=False, context=ctx)),
                ("unpadded_dim_size 11", lambda: qkv(np.zeros((4, 6), "f"), 0, 11, context=ctx)),
                ("is not an array", lambda: qkv([x], 1, context=ctx)),
            ):
                with self.subTest(words), self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    call()

        contexts(2, body)

    def test_refusals(self):
        x = np.zeros((1, 4, 4, 2), np.float32)
        with ulysses.Context() as ctx:
            for words, call in (
                (
                    "unpadded_dim_size",
                    lambda: ulysses.gather_seq_scatter_heads(x, 1, 2, 9, context=ctx),
                ),
                (
                    "padded=False",
                    lambda: ulysses.gather_seq_scatter_heads(x, 1, 2, padded=False, context=ctx),
                ),
                ("seq_dim", lambda: ulysses.gather_seq_scatter_heads(x, 1, 1, context=ctx)),
                ("heads", lambda: ulysses.gather_heads_scatter_seq(x, 2, 1, heads=5, context=ctx)),
            ):
                with self.subTest(words), self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    call()


class Loss(unittest.TestCase):
    def test_mean_by_valid_tokens(self):
        means, counts = [1.5, float("nan"), 4.0], [3, 0, 5]

        def body(ctx):
            return ulysses.reduce_sequence_parallel_loss(
                means[ctx.rank], counts[ctx.rank], context=ctx
            )

        self.assertEqual(contexts(3, body), [(1.5 * 3 + 4.0 * 5) / 8] * 3)

    def test_count_that_is_a_fraction(self):
        with ulysses.Context() as ctx:
            for count in (2.5, float("nan"), float("inf")):
                with self.assertRaisesRegex(
                    ulysses.InvalidArgument, f"num_valid_tokens {count}; give a whole number"
                ):
                    ulysses.reduce_sequence_parallel_loss(1.0, count, context=ctx)

    def test_no_rank_has_a_token(self):
        self.assertEqual(
            contexts(
                2, lambda ctx: ulysses.reduce_sequence_parallel_loss(float("nan"), 0, context=ctx)
            ),
            [0, 0],
        )


if __name__ == "__main__":
    unittest.main()
