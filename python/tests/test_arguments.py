"""Arguments of a wrong type or size: the error names the argument, its value and the fix."""

import re
import unittest

import numpy as np
import ulysses
from need import need_torch

try:
    import torch
except ImportError:
    torch = None


def tokens(*shape):
    return np.ones(shape, np.float32)


class WrongArguments(unittest.TestCase):
    def refuse(self, words, call):
        """The call raises InvalidArgument, whose message has `words`, a value and a fix."""
        with self.subTest(words), self.assertRaisesRegex(ulysses.InvalidArgument, f"{words}.*; "):
            call()

    def setUp(self):
        self.context = ulysses.Context()
        self.addCleanup(self.context.close)
        ulysses.use(self.context)

    def test_numbers(self):
        x, h = tokens(1, 4, 2, 8), tokens(1, 4, 2)
        for value in (1.5, "2", 1 << 40):
            self.refuse(f"halo: n {value!r}", lambda value=value: ulysses.halo(h, value))
        self.refuse("dhalo .*NoneType", lambda: ulysses.halo_backward(None, 1, h))
        for name in ("scale", "softcap", "dropout"):
            self.refuse(f"{name} 'a'", lambda name=name: ulysses.attention(x, x, x, **{name: "a"}))
        self.refuse(r"layout \['B'\]", lambda: ulysses.attention(x, x, x, layout=["B"]))
        self.refuse("2.5 tokens", lambda: ulysses.shard_rows(2.5, 2, 0))
        self.refuse("rank 0.5", lambda: ulysses.shard_rows(5, 2, 0.5))
        self.refuse("rows 1.5", lambda: ulysses.tiles(1.5, 1))
        self.refuse("tile_rows None", lambda: ulysses.tiles(4, None))

    def test_flags(self):
        """A text such as "no" would count as true."""
        x, gate = tokens(1, 4, 2, 8), tokens(1, 4, 2)
        plan, delta = self.context.plan, self.context.delta_plan
        for value in ("no", 2, [True], np.ones(2)):
            shown = re.escape(repr(value))
            for name in ("causal", "deterministic"):
                self.refuse(f"{name} {shown}", lambda: ulysses.attention(x, x, x, **{name: value}))
            for name in ("sinks", "overlap"):
                self.refuse(f"{name} {shown}", lambda: plan(heads=2, head_dim=8, **{name: value}))
            self.refuse(f"save {shown}", lambda: ulysses.attention_forward(x, x, x, save=value))
            for name in ("use_qk_l2norm_in_kernel", "output_final_state"):
                self.refuse(
                    f"{name} {shown}",
                    lambda: ulysses.chunk_gated_delta_rule(x, x, x, gate, gate, **{name: value}),
                )
            dims = dict(qk_heads=2, v_heads=2, qk_dim=8, v_dim=8)
            self.refuse(f"states {shown}", lambda: delta(**dims, states=value))
            self.refuse(
                f"padded {shown}", lambda: ulysses.gather_seq_scatter_heads(x, 1, 2, padded=value)
            )
            for name in ("zigzag", "gather_keys"):
                self.refuse(f"{name} {shown}", lambda: ulysses.Context(**{name: value}))
        dims = dict(heads=2, head_dim=8)
        self.assertIs(plan(**dims, window=[3, 0]), plan(**dims, window=(np.int64(3), 0)))
        for value in (1, np.True_, np.ones(1)):
            self.assertIs(plan(**dims, causal=value), plan(**dims, causal=True))
        self.assertEqual(ulysses.attention(x, x, x, causal=None).shape, x.shape)

    def test_axes(self):
        x = tokens(1, 4, 2, 8)
        self.refuse("local_tokens: dim 7 of 4 axes", lambda: ulysses.local_tokens(x, 7))
        self.refuse("local_tokens: x is int", lambda: ulysses.local_tokens(3))
        self.refuse("gather_tokens: dim 'a'", lambda: ulysses.gather_tokens(x, "a"))
        for operation in (ulysses.gather_seq_scatter_heads, ulysses.gather_heads_scatter_seq):
            self.refuse("_dim 1.0 of 4 axes", lambda call=operation: call(x, 1.0, 2))
            self.refuse("_dim None", lambda call=operation: call(x, 1, None))
        self.refuse("heads 4.0", lambda: ulysses.gather_heads_scatter_seq(x, 2, 1, heads=4.0))
        self.refuse("unpadded_dim_size 'a'", lambda: ulysses.gather_seq_scatter_heads(x, 1, 2, "a"))
        self.assertEqual(ulysses.gather_tokens(x, -3).shape, x.shape)
        self.assertEqual(ulysses.local_tokens(x, -3).shape, x.shape)

    def test_contexts(self):
        """ctypes would use the low bits of a number that its field cannot hold."""
        for name in ("threads", "ulysses", "ring", "timeout", "ordinal"):
            for value in ("a", 1.5, 1 << 40, -1):
                self.refuse(f"{name} {value!r}", lambda: ulysses.Context(**{name: value}))
        self.refuse(r"device \['cpu'\]", lambda: ulysses.Context(device=["cpu"]))
        self.refuse(r"way \['nccl'\]", lambda: ulysses.Context(way=["nccl"]))
        self.refuse("log is int", lambda: ulysses.Context(log=3))

    def test_plans_and_batches(self):
        plan, batch = self.context.plan, self.context.batch
        self.refuse("heads 'a'", lambda: plan(heads="a", head_dim=8))
        self.refuse("head_dim 8.5", lambda: plan(heads=2, head_dim=8.5))
        self.refuse("window 3", lambda: plan(heads=2, head_dim=8, window=3))
        self.refuse(
            "qk_heads 1.5",
            lambda: self.context.delta_plan(qk_heads=1.5, v_heads=2, qk_dim=8, v_dim=8),
        )
        self.refuse("sequences is int", lambda: batch(3))
        self.refuse("seq 8.5", lambda: batch(ulysses.Sequences(1, 8.5)))
        self.refuse("2.5", lambda: batch(ulysses.Sequences(1, 8, None, (0, 2.5, 8))))
        self.assertIs(
            batch(ulysses.Sequences(1, 8, None, [0, 3, 8])),
            batch(ulysses.Sequences(1, 8, None, (0, 3, 8))),
        )

    def test_starts_of_documents(self):
        """Lists, arrays and tensors of the same numbers are the same documents."""
        same = ulysses.Sequences(1, 8, 8, (0, 3, 8), (0, 3, 8))
        kinds = [list, np.array, lambda cu: np.array(cu, np.int32)]
        if torch is not None:
            kinds += [torch.tensor, lambda cu: torch.tensor(cu, dtype=torch.int32)]
        for kind in kinds:
            given = ulysses.Sequences(1, 8, 8, kind([0, 3, 8]), kind([0, 3, 8]))
            self.assertEqual((given, hash(given), repr(given)), (same, hash(same), repr(same)))
        self.assertEqual(ulysses.Sequences(1, 8, None, range(0, 9, 4)).cu_seqlens, (0, 4, 8))
        for cu in ([[0, 3, 8]], np.array([0.0, 2.5, 8.0]), np.array([[0, 3, 8]]), 8, "038"):
            for place in ({"cu_seqlens": cu}, {"kv_cu_seqlens": cu}):
                self.refuse(next(iter(place)), lambda p=place: ulysses.Sequences(1, 8, 8, **p))

    @need_torch
    def test_tiles(self):
        x = torch.ones(1, 4, 2, requires_grad=True)

        def tiled(f=lambda a: 2 * a, **options):
            return lambda: ulysses.tiled_compute(f, x, **options)

        for name in ("dim", "out_dim", "tile_rows", "max_rows"):
            for value in (1.5, "a"):
                self.refuse(f"{name} {value!r}", tiled(**{name: value}))
        self.refuse(r"shape \(1, 1, 2\)", tiled(out_dim=7))
        self.refuse(r"shape \(\)", tiled(lambda a: a.sum()))
        self.refuse("params is int", tiled(params=3))
        self.refuse(r"params\[0\] is str", tiled(params=["weight"]))
        self.refuse("fn is int", tiled(3))

    @need_torch
    def test_no_channels(self):
        y = ulysses.causal_conv1d(torch.ones(1, 4, 0), torch.ones(0, 3))
        self.assertEqual(tuple(y.shape), (1, 4, 0))


if __name__ == "__main__":
    unittest.main()
