"""Wrong arguments on one rank: every collective call raises on every rank, and no rank waits.

The context works afterwards. Ranks are threads. If a rank does not reach the barrier, the barrier
times out and the test fails.
"""

import unittest

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts

try:
    import torch
except ImportError:
    torch = None

ROWS = 4


def x(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def attention(q=(1, ROWS, 4, 8), k=(1, ROWS, 4, 8), dtype=np.float32, **options):
    return lambda ctx: ulysses.attention(
        x(*q, dtype=dtype), x(*k, dtype=dtype), x(*k, dtype=dtype), context=ctx, **options
    )


def backward(rows=ROWS, dtype=np.float32, save=True):
    def call(ctx):
        q = x(1, ROWS, 4, 8)
        made = ulysses.attention_forward(q, q, q, context=ctx)[2]
        if not save:
            made.saved = None
        return ulysses.attention_backward(made, x(1, rows, 4, 8, dtype=dtype))

    return call


def delta(rows=ROWS, gates=ROWS, heads=4, dtype=np.float32, **options):
    q, g = (1, rows, heads, 8), (1, gates, heads)
    return lambda ctx: ulysses.chunk_gated_delta_rule(
        x(*q, dtype=dtype),
        x(*q, dtype=dtype),
        x(*q, dtype=dtype),
        -x(*g),
        x(*g),
        context=ctx,
        **options,
    )


def delta_backward(heads=4, save=True, dfinal=False):
    def call(ctx):
        q, g = x(1, ROWS, 4, 8), x(1, ROWS, 4)
        made = ulysses.gated_delta_rule_forward(
            q, q, q, -g, g, output_final_state=True, context=ctx
        )[2]
        if not save:
            made.saved = None
        return ulysses.gated_delta_rule_backward(
            made, x(1, ROWS, heads, 8), x(1, 4, 8, 8) if dfinal else None
        )

    return call


def layer(hidden=8, weight=8, heads=2, **options):
    return lambda ctx: ulysses.attention_layer(
        x(1, ROWS, hidden),
        x(8, weight),
        x(8, weight),
        x(8, weight),
        x(weight, 8),
        heads=heads,
        context=ctx,
        **options,
    )


def layer_backward(rows=ROWS):
    def call(ctx):
        made = ulysses.attention_layer_forward(
            x(1, ROWS, 8), *(x(8, 8) for _ in range(4)), heads=2, context=ctx
        )[1]
        return ulysses.attention_layer_backward(made, x(1, rows, 8))

    return call


def local_attention(fail=False, rows=ROWS):
    def function(q, k, v):
        if fail:
            raise RuntimeError("no such mask")
        return v

    return lambda ctx: ulysses.local_attention(*(x(1, rows, 4, 8),) * 3, function, context=ctx)


def halo(n=2, shape=(1, ROWS, 8), **options):
    return lambda ctx: ulysses.halo(x(*shape), n, context=ctx, **options)


def halo_backward(n=2, rows=2):
    return lambda ctx: ulysses.halo_backward(x(1, rows, 8), n, x(1, ROWS, 8), context=ctx)


def conv(width=3, channels=8, activation="silu", **options):
    return lambda ctx: ulysses.causal_conv1d(
        x(1, ROWS, 8), x(channels, width), activation=activation, context=ctx, **options
    )


def scatter_heads(shape=(1, ROWS, 4, 8), dtype=np.float32, **options):
    return lambda ctx: ulysses.gather_seq_scatter_heads(
        x(*shape, dtype=dtype), 1, 2, context=ctx, **options
    )


def scatter_qkv(shape=(1, ROWS, 12), dtype=np.float32, **options):
    return lambda ctx: ulysses.gather_seq_scatter_heads_qkv(
        x(*shape, dtype=dtype), 1, context=ctx, **options
    )


def scatter_seq(shape=(1, 2 * ROWS, 2, 8), **options):
    return lambda ctx: ulysses.gather_heads_scatter_seq(x(*shape), 2, 1, context=ctx, **options)


def loss(value=1.0, count=3, **options):
    return lambda ctx: ulysses.reduce_sequence_parallel_loss(value, count, context=ctx, **options)


def shard(batch=None):
    return lambda ctx: list(
        ulysses.shard({"input_ids": x(1, 5, dtype=np.int64)} if batch is None else batch, ctx)
    )


# For each function: a correct call, and calls with one wrong argument.
ENTRIES = {
    "attention": (
        attention(),
        [
            attention(q=(1, ROWS, 4)),
            attention(q=(1, ROWS, 6, 8)),
            attention(k=(1, ROWS + 3, 4, 8)),
            attention(dtype=np.float64),
            attention(causal=True),
            attention(dtype=np.int64),
            attention(q=(1, ROWS + 2, 4, 8), k=(1, ROWS + 2, 4, 8)),
            attention(seq=9),
            attention(window=(3,)),
            attention(layout="HDSB"),
            attention(cu_seqlens=[0, 3, 8]),
            attention(cu_seqlens=[0, 2.5, 8]),
            attention(q=(2, ROWS, 4, 8), k=(2, ROWS, 4, 8)),
            lambda ctx: ulysses.attention(None, None, None, context=ctx),
        ],
    ),
    "attention_backward": (
        backward(),
        [backward(rows=ROWS + 1), backward(dtype=np.float64), backward(save=False)],
    ),
    "chunk_gated_delta_rule": (
        delta(),
        [
            delta(gates=ROWS + 1),
            delta(heads=6),
            delta(dtype=np.float64),
            delta(strategy="state"),
            delta(strategy="ring"),
            delta(rows=ROWS + 2, gates=ROWS + 2),
            delta(use_qk_l2norm_in_kernel=True),
            delta(output_final_state=True),
            lambda ctx: ulysses.chunk_gated_delta_rule(
                *(x(1, ROWS, 4, 8),) * 3, None, None, context=ctx
            ),
        ],
    ),
    "gated_delta_rule_backward": (
        delta_backward(),
        [delta_backward(heads=3), delta_backward(save=False), delta_backward(dfinal=True)],
    ),
    "attention_layer": (
        layer(),
        [
            layer(hidden=6),
            layer(heads=3),
            layer(heads=0),
            layer(q_norm=x(4), k_norm=x(4)),
            layer(cos=x(3, 2), sin=x(3, 2)),
            layer(causal=True),
            lambda ctx: ulysses.attention_layer(
                x(1, ROWS, 8), None, None, None, None, heads=2, context=ctx
            ),
        ],
    ),
    "attention_layer_backward": (layer_backward(), [layer_backward(rows=ROWS + 1)]),
    "local_attention": (
        local_attention(),
        [local_attention(fail=True), local_attention(rows=ROWS + 2)],
    ),
    "halo": (
        halo(),
        [
            halo(n=0),
            halo(n=3),
            halo(shape=(1, ROWS)),
            halo(shape=(ROWS,)),
            halo(shape=(1, ROWS + 2, 8)),
            halo(seq=9),
        ],
    ),
    "halo_backward": (halo_backward(), [halo_backward(rows=1), halo_backward(n=1, rows=1)]),
    "causal_conv1d": (
        conv(),
        [
            conv(width=4),
            conv(channels=6),
            conv(activation="tanh"),
            conv(activation=None),
            conv(bias=x(3)),
            conv(cu_seqlens=(0, 3, 8)),
        ],
    ),
    "gather_seq_scatter_heads": (
        scatter_heads(),
        [
            scatter_heads((1, ROWS, 6, 8)),
            scatter_heads((1, ROWS + 1, 4, 8)),
            scatter_heads((4,)),
            scatter_heads(dtype=np.float64),
            scatter_heads(padded=False),
            scatter_heads(unpadded_dim_size=7),
            lambda ctx: ulysses.gather_seq_scatter_heads([x(1, ROWS, 4, 8)], 1, 2, context=ctx),
            lambda ctx: ulysses.gather_seq_scatter_heads(None, 1, 2, context=ctx),
        ],
    ),
    "gather_seq_scatter_heads_qkv": (
        scatter_qkv(),
        [
            scatter_qkv((1, ROWS + 1, 12)),
            scatter_qkv((1, ROWS, 18)),
            scatter_qkv((1, ROWS, 10)),
            scatter_qkv(dtype=np.float64),
            scatter_qkv(padded=False),
            scatter_qkv(unpadded_dim_size=7),
            scatter_qkv(restore_shape=False),
            lambda ctx: ulysses.gather_seq_scatter_heads_qkv(None, 1, context=ctx),
        ],
    ),
    "gather_heads_scatter_seq": (
        scatter_seq(),
        [
            scatter_seq((1, 2 * ROWS + 1, 2, 8)),
            scatter_seq((1, 2 * ROWS, 5, 8)),
            scatter_seq(heads=5),
            scatter_seq((4,)),
        ],
    ),
    "plan": (
        lambda ctx: ctx.plan(heads=4, head_dim=8),
        [
            lambda ctx: ctx.plan(heads=3, head_dim=8),
            lambda ctx: ctx.plan(heads=4, head_dim=8, causal=True),
        ],
    ),
    "delta_plan": (
        lambda ctx: ctx.delta_plan(qk_heads=2, v_heads=2, qk_dim=8, v_dim=8),
        [lambda ctx: ctx.delta_plan(qk_heads=2, v_heads=4, qk_dim=8, v_dim=8)],
    ),
    "batch": (
        lambda ctx: ctx.batch(ulysses.Sequences(1, 8)),
        [
            lambda ctx: ctx.batch(ulysses.Sequences(1, 9)),
            lambda ctx: ctx.batch(ulysses.Sequences(1, 8, None, (0, 3, 8))),
        ],
    ),
    "reduce_sequence_parallel_loss": (
        loss(),
        [
            loss(gradients="mean"),
            loss(value="much"),
            loss(gradients="summed"),
            loss(count=-1),
            loss(count=2.5),
            loss(count=(1 << 64) + 3),
        ],
    ),
    "shard": (shard(), [shard({}), shard({"input_ids": x(3, dtype=np.int64)})]),
}


class WrongOnOneRank(unittest.TestCase):
    def test_every_function(self):
        for name, (right, faults) in ENTRIES.items():
            for i, wrong in enumerate(faults):
                for bad in (0, 1):

                    def body(ctx):
                        with self.assertRaises(ulysses.UlyssesError) as caught:
                            (wrong if ctx.rank == bad else right)(ctx)
                        right(ctx)
                        return str(caught.exception)

                    with self.subTest(name, fault=i, rank=bad):
                        for text in contexts(2, body):
                            self.assertGreater(len(text), 20)

    def test_a_length_that_one_rank_has_cached(self):
        """Rank 0 has a batch of 74 tokens when rank 1 calls with 35 of 70 tokens."""

        def body(ctx):
            f = attention
            f(q=(1, 36, 4, 8), k=(1, 36, 4, 8))(ctx)
            f(q=(1, 37, 4, 8), k=(1, 37, 4, 8))(ctx)
            n = 37 if ctx.rank == 0 else 35
            with self.assertRaisesRegex(
                ulysses.InvalidArgument, "rank 0 of 2 has 37 rows, its shard of 72 has 36"
            ):
                f(q=(1, n, 4, 8), k=(1, n, 4, 8))(ctx)
            f(q=(1, 37, 4, 8), k=(1, 37, 4, 8))(ctx)

        contexts(2, body)

    def test_rows_are_added_up(self):
        """Shards of unequal size need no seq=."""

        def body(ctx):
            lo, hi = ulysses.shard_rows(9, ctx.size, ctx.rank)
            shard = x(1, hi - lo, 4, 8)
            self.assertEqual(
                ulysses.attention(shard, shard, shard, causal=True, context=ctx).shape, shard.shape
            )
            self.assertEqual(ulysses.halo(shard, 2, context=ctx).shape, (1, 2, 4, 8))

        contexts(4, body)

    def test_equal_numbers_of_different_types(self):
        """A number of NumPy is the same argument as one of Python."""

        def body(ctx):
            number = np.int64 if ctx.rank else int
            q = x(1, ROWS, 4, 8)
            ulysses.attention(
                q,
                q,
                q,
                seq=number(2 * ROWS),
                kv_seq=number(2 * ROWS),
                dropout=0.5,
                seed=number(7),
                block_mask=np.ones((1, 2, 2), np.uint8),
                block=number(ROWS),
                context=ctx,
            )

        contexts(2, body)

    def test_numbers_of_numpy_on_one_rank(self):
        def layer(ctx, n):
            w = x(8, 8)
            return ulysses.attention_layer(x(1, ROWS, 8), w, w, w, w, heads=n, context=ctx)

        def delta_layer(ctx, n):
            channels, heads = 3 * 2 * 8, 2
            return ulysses.gated_delta_layer(
                x(1, ROWS, channels),
                *[x(1, ROWS, heads)] * 2,
                x(channels, 4),
                *[x(heads)] * 2,
                key_heads=n,
                key_dim=type(n)(8),
                context=ctx,
            )

        def used(ctx, n):
            ctx.use(ulysses.Sequences(1, 2 * ROWS, cu_seqlens=(type(n)(0), n, type(n)(2 * ROWS))))
            return attention()(ctx)

        for call in (
            lambda ctx, n: ulysses.halo(x(1, ROWS, 3), n, context=ctx),
            lambda ctx, n: ulysses.halo_backward(x(1, 2, 3), n, x(1, ROWS, 3), context=ctx),
            layer,
            delta_layer,
            used,
        ):
            contexts(2, lambda ctx, call=call: call(ctx, (2, np.int64(2))[ctx.rank]))

    def test_backward_passes_of_different_calls(self):
        """The ranks' calls are alike, so plan, lengths and shapes do not tell them apart."""
        q, g = x(1, ROWS, 2, 4), x(1, ROWS, 2)

        def both(forward, backward):
            def body(ctx):
                calls = [forward(ctx) for _ in range(2)]
                with self.assertRaisesRegex(ulysses.InvalidArgument, "number of the forward pass"):
                    backward(calls[ctx.rank])
                for call in calls:
                    backward(call)

            contexts(2, body)

        both(
            lambda ctx: ulysses.attention_forward(q, q, q, context=ctx)[2],
            lambda call: ulysses.attention_backward(call, q),
        )
        both(
            lambda ctx: ulysses.gated_delta_rule_forward(q, q, q, -g, g, context=ctx)[2],
            lambda call: ulysses.gated_delta_rule_backward(call, q),
        )
        both(
            lambda ctx: ulysses.attention_layer_forward(
                x(1, ROWS, 8), *(x(8, 8) for _ in range(4)), heads=2, context=ctx
            )[1],
            lambda call: ulysses.attention_layer_backward(call, x(1, ROWS, 8)),
        )

    def test_contexts(self):
        from ranks import run

        def body(comm):
            with self.assertRaises(ulysses.InvalidArgument):
                ulysses.Context(comm, device="tpu" if comm.rank else "cpu")
            with self.assertRaises(ulysses.UlyssesError):
                ulysses.Context(comm, ulysses=1 + comm.rank)

        run(2, body)

    def test_an_exception_of_python(self):
        """The other ranks raise InvalidArgument for a value that Python refuses on a rank."""

        class Unreadable:
            def __index__(self):
                raise ValueError("not a number")

        def body(ctx):
            q = x(1, ROWS, 4, 8)
            wanted, text = ValueError, "^not a number"
            if ctx.rank == 0:
                wanted, text = ulysses.InvalidArgument, "rank 1 of 2 refused the call: not a number"
            with self.assertRaisesRegex(wanted, text):
                left = Unreadable() if ctx.rank else 1
                ulysses.attention(q, q, q, window=(left, 0), context=ctx)

        contexts(2, body)

    def test_memory_that_one_rank_cannot_pass(self):
        """A view with strides of 5 bytes, and a sparse tensor, on one rank."""
        fields = np.zeros((1, ROWS, 4, 8), np.dtype([("x", np.float32), ("y", np.uint8)]))

        def body(ctx):
            q = np.zeros((1, ROWS, 4, 8), np.float32)
            with self.assertRaisesRegex(ulysses.InvalidArgument, "strides of"):
                ulysses.attention(q, fields["x"] if ctx.rank else q, q, context=ctx)

        contexts(2, body)

    @need_torch
    def test_sparse_on_one_rank(self):
        def body(ctx):
            q = torch.zeros(1, ROWS, 4, 8)
            with self.assertRaisesRegex(ulysses.Unsupported, "sparse"):
                ulysses.attention(q, q.to_sparse() if ctx.rank else q, q, context=ctx)

        contexts(2, body)

    @need_torch
    def test_negated_views(self):
        """PyTorch negates the elements of x.conj().imag when it reads them; their memory is x's."""
        v = torch.complex(torch.ones(1, ROWS, 4, 8), torch.ones(1, ROWS, 4, 8)).conj().imag

        def body(ctx):
            q = torch.zeros(1, ROWS, 4, 8)
            with self.assertRaisesRegex(ulysses.Unsupported, "resolve_neg"):
                ulysses.attention(q, q, v if ctx.rank else q, context=ctx)
            out = ulysses.attention(q, q, v.resolve_neg(), context=ctx)
            self.assertTrue((out == -1).all())

        contexts(2, body)

    @need_torch
    def test_gradients_that_one_rank_wants(self):
        """Otherwise the backward pass of this rank would wait for the other ranks."""

        def body(ctx):
            q = torch.ones(1, ROWS, 4, 8, requires_grad=ctx.rank == 0)
            with self.assertRaisesRegex(
                ulysses.InvalidArgument, "save is True on rank 0 and False on rank 1"
            ):
                ulysses.attention(q, q, q, context=ctx)

        contexts(2, body)


def _gated_delta_layer(q, ctx):
    a, weight, gates = torch.zeros(1, ROWS, 2), torch.ones(32, 2), torch.zeros(2)
    return ulysses.gated_delta_layer(
        q.flatten(2), a, a, weight, gates, gates, key_heads=2, key_dim=4, context=ctx
    )


def _reshard_async(q, ctx):
    started = [
        ulysses.gather_seq_scatter_heads(x, 1, 2, async_op=True, context=ctx) for x in (q, q)
    ]
    return started[0].wait() + 2 * started[1].wait()


# Calls of tensors [1, rows, 4, 8] whose backward pass is collective.
COLLECTIVE_BACKWARD = {
    "attention": lambda q, ctx: ulysses.attention(q, q, q, context=ctx),
    "gated_delta_layer": _gated_delta_layer,
    "halo": lambda q, ctx: ulysses.halo(q, 2, context=ctx),
    "causal_conv1d": lambda q, ctx: ulysses.causal_conv1d(
        q.flatten(2), torch.ones(32, 3), context=ctx
    ),
    "gather_seq_scatter_heads": lambda q, ctx: ulysses.gather_seq_scatter_heads(
        q, 1, 2, context=ctx
    ),
    "several": lambda q, ctx: ulysses.gather_seq_scatter_heads((q, 2 * q), 1, 2, context=ctx)[1],
    "async": _reshard_async,
    "gather_heads_scatter_seq": lambda q, ctx: ulysses.gather_heads_scatter_seq(
        q, 2, 1, context=ctx
    ),
    "gather_seq_scatter_heads_qkv": lambda q, ctx: ulysses.gather_seq_scatter_heads_qkv(
        torch.cat([q.flatten(2)] * 3, 2), 1, context=ctx
    ),
    "async_ulysses_qkv_projection": lambda q, ctx: sum(
        ulysses.async_ulysses_qkv_projection(
            q.flatten(2),
            seq_dimension=1,
            head_dimension=2,
            head_dim=8,
            **{f"{name}_weight": torch.eye(32) for name in "qkv"},
            **{f"{name}_bias": None for name in "qkv"},
            context=ctx,
        )
    ),
    "async_ulysses_output_projection": lambda q, ctx: ulysses.async_ulysses_output_projection(
        q, 1, 2, torch.ones(32, 64), context=ctx
    ),
}


@need_torch
class BackwardPasses(unittest.TestCase):
    def test_gradient_that_one_rank_wants(self):
        """The backward pass of this rank would wait for the other ranks."""
        for name, call in COLLECTIVE_BACKWARD.items():

            def body(ctx, call=call):
                q = torch.ones(1, ROWS, 4, 8, requires_grad=ctx.rank == 0)
                with self.assertRaisesRegex(ulysses.InvalidArgument, "True on rank 0 and False"):
                    call(q, ctx)
                call(q.detach(), ctx)

            with self.subTest(name):
                contexts(2, body)

    def test_another_order(self):
        """Two calls are alike, so gradients of one would be added to the other call."""
        for name, call in COLLECTIVE_BACKWARD.items():

            def body(ctx, call=call):
                q = torch.ones(1, ROWS, 4, 8, requires_grad=True)
                made = [call(q, ctx) for _ in range(2)]
                with self.assertRaisesRegex(ulysses.InvalidArgument, "number of the forward pass"):
                    made[ctx.rank].sum().backward(retain_graph=True)
                for y in made:
                    y.sum().backward()
                self.assertIsNotNone(q.grad)

            with self.subTest(name):
                contexts(2, body)


if __name__ == "__main__":
    unittest.main()
