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

    def test_no_rank_has_a_token(self):
        self.assertEqual(
            contexts(
                2, lambda ctx: ulysses.reduce_sequence_parallel_loss(float("nan"), 0, context=ctx)
            ),
            [0, 0],
        )


if __name__ == "__main__":
    unittest.main()
