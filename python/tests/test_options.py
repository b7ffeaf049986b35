"""Options of attention: soft caps, sinks, slopes, block masks, dropout, and patterns of masks."""

import unittest
import warnings

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts, joined, local
from reference import TOLERANCE, error

try:
    import torch
except ImportError:
    torch = None
else:
    from exact import attend, expanded, visible

B, S, H, HKV, D = 2, 26, 4, 2, 8
# Ranks, and arguments of Context.
MESHES = (
    (1, {}),
    (2, {}),
    (3, {}),
    (4, {}),
    (2, dict(ring=2)),
    (4, dict(ring=2)),
    (2, dict(ring=2, zigzag=True)),
    (4, dict(ring=2, zigzag=True, gather_keys=True)),
    (3, dict(ring=3, zigzag=True)),
    (4, dict(ring=4, gather_keys=True)),
)


@need_torch
class Options(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.q, self.k, self.v, self.w = (torch.randn(B, S, n, D) for n in (H, HKV, HKV, H))

    def test_against_torch(self):
        block = 4
        mask = torch.tensor(
            ulysses.patterns.bigbird(H, -(-S // block), different_layout_per_head=True, seed=3)
        )
        for case in (
            dict(causal=True, softcap=1.5, sinks=True),
            dict(causal=True, window=(5, -1), alibi=True),
            dict(causal=False, alibi=True, sinks=True, mask=True),
        ):
            causal, window, softcap = case["causal"], case.get("window"), case.get("softcap", 0.0)
            vectors = [
                torch.tensor(x) if case.get(name) else None
                for name, x in (
                    ("sinks", [0.5, -1.0, 2.0, 0.0]),
                    ("alibi", [0.5, 0.25, 0.125, 0.0625]),
                )
            ]
            exact = [
                None if x is None else x.double().requires_grad_()
                for x in (self.q, self.k, self.v, *vectors)
            ]
            want = attend(
                *exact[:3],
                see=visible(S, causal=causal, window=window, b=B),
                softcap=softcap,
                sinks=exact[3],
                alibi=exact[4],
                mask=expanded(mask, block, S) if case.get("mask") else None,
            )
            (want * self.w).sum().backward()

            def body(ctx):
                shards = [
                    local(x, ctx, 1).detach().requires_grad_() for x in (self.q, self.k, self.v)
                ]
                sinks, alibi = (None if x is None else x.clone().requires_grad_() for x in vectors)
                out = ulysses.attention(
                    *shards,
                    causal=causal,
                    window=window,
                    softcap=softcap,
                    sinks=sinks,
                    alibi=alibi,
                    block_mask=mask if case.get("mask") else None,
                    block=block if case.get("mask") else None,
                    context=ctx,
                )
                (out * local(self.w, ctx, 1)).sum().backward()
                shares = [torch.zeros(H) if x is None else x.grad for x in (sinks, alibi)]
                return (out.detach(), *(x.grad for x in shards), *shares)

            for size, mesh in MESHES:
                found = list(zip(*contexts(size, body, **mesh)))
                for name, each, exactly in zip(
                    ("out", "dq", "dk", "dv"), found, (want.detach(), *(x.grad for x in exact[:3]))
                ):
                    self.assertLess(
                        error(joined(each, **mesh), exactly), TOLERANCE, (name, size, mesh, case)
                    )
                for name, each, exactly in zip(("dsinks", "dalibi"), found[4:], exact[3:]):
                    if exactly is not None:
                        got = torch.stack(each).sum(0)
                        self.assertLess(
                            error(got, exactly.grad), TOLERANCE, (name, size, mesh, case)
                        )

    def test_rings_in_bfloat16(self):
        """Errors do not grow with the ring: partial results and gradients are added in float32."""
        s, h, d = 256, 2, 16
        q, k, v, w = (torch.randn(1, s, h, d).bfloat16() for _ in range(4))
        logits, cu = torch.randn(h), [0, 70, 71, s]
        exact = [x.double().requires_grad_() for x in (q, k, v, logits)]
        see = visible(s, causal=True, window=(100, 0), cu=cu)
        want = attend(*exact[:3], see=see, sinks=exact[3])
        (want * w.double()).sum().backward()

        def errors(size, mesh):
            def body(ctx):
                x = [local(y, ctx).clone().requires_grad_() for y in (q, k, v)]
                sinks = logits.clone().requires_grad_()
                out = ulysses.attention(
                    *x, causal=True, window=(100, 0), sinks=sinks, cu_seqlens=cu, context=ctx
                )
                (out * local(w, ctx)).sum().backward()
                return (out.detach(), *(y.grad for y in x), sinks.grad)

            *found, sinks = zip(*contexts(size, body, **mesh))
            pairs = zip(
                [*(joined(x, **mesh) for x in found), sum(sinks)],
                [want.detach(), *(x.grad for x in exact)],
            )
            return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

        one = errors(1, {})
        for mesh in (dict(ring=4), dict(ring=16, zigzag=True), dict(ring=16, gather_keys=True)):
            for name, e, least in zip(
                ("out", "dq", "dk", "dv", "dsinks"), errors(mesh["ring"], mesh), one
            ):
                self.assertLess(e, 1.2 * least, (name, mesh))

    def test_dropout(self):
        """A seed chooses the same weights on every number of ranks; without one, rank 0 draws."""

        def whole(size, **options):
            def body(ctx):
                shards = [local(x, ctx, 1) for x in (self.q, self.k, self.v)]
                return ulysses.attention(*shards, context=ctx, **options)

            return torch.cat(contexts(size, body), 1)

        one = whole(1, dropout=0.5, seed=7)
        self.assertTrue(torch.equal(one, whole(3, dropout=0.5, seed=7)))
        self.assertFalse(torch.equal(one, whole(1, dropout=0.5, seed=8)))
        self.assertFalse(torch.equal(one, whole(1)))
        self.assertFalse(torch.equal(whole(2, dropout=0.5), whole(2, dropout=0.5)))

    def test_slopes(self):
        """Slopes of powers of 2 are halves; other numbers of heads interleave the next power."""
        for heads, want in (
            (1, [2**-8]),
            (3, [0.0625, 0.00390625, 0.25]),
            (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
            (8, [2.0**-k for k in range(1, 9)]),
            (12, [2.0**-k for k in range(1, 9)] + [2 ** (-k / 2) for k in (1, 3, 5, 7)]),
        ):
            found = ulysses.alibi_slopes(heads)
            self.assertEqual((found.dtype, found.shape), (np.float32, (heads,)))
            np.testing.assert_allclose(found, want, rtol=1e-7)
        for heads in (0, -1, 2.5, "8", None):
            with self.assertRaises(ulysses.InvalidArgument):
                ulysses.alibi_slopes(heads)

    def test_faults(self):
        mask = torch.ones(1, 7, 7, dtype=torch.uint8)
        with ulysses.Context() as ctx:
            for text, options in (
                ("sinks", dict(sinks=torch.zeros(3))),
                ("alibi", dict(alibi=torch.zeros(H, dtype=torch.float16))),
                ("block_mask and block", dict(block_mask=torch.ones(1, 2, 2, dtype=torch.uint8))),
                ("block_mask", dict(block_mask=torch.ones(1, 2, 2, dtype=torch.uint8), block=4)),
                ("dropout", dict(dropout=1.5)),
                ("softcap", dict(softcap=-1.0)),
                ("softcap 1e-50 is 0", dict(softcap=1e-50)),
                ("scale 1e-50 is 0", dict(scale=1e-50)),
                ("seed -1", dict(dropout=0.5, seed=-1)),
                ("seed 1.5", dict(dropout=0.5, seed=1.5)),
                ("seed 18446744073709551616", dict(dropout=0.5, seed=1 << 64)),
                ("block 3.5", dict(block_mask=mask, block=3.5)),
                ("block 3.5", dict(block_mask=mask, block=(3.5, 4))),
                ("block 4294967300", dict(block_mask=mask, block=(1 << 32) + 4)),
                ("window 2.7", dict(window=(2.7, 0))),
                ("window 18446744073709551617", dict(window=((1 << 64) + 1, 0))),
                ("cu_seqlens", dict(cu_seqlens=[0, (1 << 64) + 2, self.q.shape[1]])),
            ):
                with self.assertRaises((ulysses.InvalidArgument, ulysses.Unsupported)) as raised:
                    ulysses.attention(self.q, self.k, self.v, context=ctx, **options)
                self.assertIn(text, str(raised.exception))


class Patterns(unittest.TestCase):
    def test_layouts(self):
        for mask, want in (
            (
                ulysses.patterns.fixed(1, 8, attention="unidirectional"),
                "10000000/11000000/11100000/11110000/00011000/00011100/00011110/00011111",
            ),
            (
                ulysses.patterns.variable(1, 8, local_window_blocks=[1, 2, 3]),
                "10000000/11100000/11100000/10011100/10011100/10011100/10000011/10000011",
            ),
            (ulysses.patterns.bslongformer(1, 6), "111111/111000/111100/101110/100111/100011"),
            (
                ulysses.patterns.local_sliding_window(1, 6),
                "100000/110000/011000/001100/000110/000011",
            ),
            (
                ulysses.patterns.bigbird(1, 5, num_random_blocks=0),
                "11111/11100/11110/10111/10011",
            ),
            (ulysses.patterns.dense(1, 2), "11/11"),
        ):
            self.assertEqual("/".join("".join(map(str, row)) for row in mask[0]), want)
        several = ulysses.patterns.fixed(
            8,
            8,
            attention="unidirectional",
            num_different_global_patterns=4,
            different_layout_per_head=True,
        )
        self.assertTrue(np.array_equal(several[0], several[4]))
        self.assertFalse(np.array_equal(several[0], several[1]))

    def test_dropped_blocks(self):
        """Unidirectional masks drop DeepSpeed's blocks above the diagonal, and say so once."""
        patterns = ulysses.patterns
        patterns._reported.clear()
        uni = dict(attention="unidirectional")

        def several(heads):  # 2 global blocks: one of them is above the diagonal in each group
            return patterns.fixed(heads, 7, num_global_blocks=2, **uni)

        upstream = np.tril(patterns.variable(1, 6, local_window_blocks=[2]))
        upstream[:, 1:, 1:3] = 1
        upstream[:, :, 0] = np.tril(np.ones(6, np.uint8))[:, 0] * (np.arange(6) < 2)
        for count, make in (
            (2, lambda: several(1)),
            (6, lambda: several(3)),
            (
                3,
                lambda: patterns.variable(
                    3,
                    6,
                    local_window_blocks=[2],
                    global_block_indices=[1],
                    global_block_end_indices=[3],
                    **uni,
                ),
            ),
            (1, lambda: patterns.from_layout(upstream, **uni)),
        ):
            with self.assertWarnsRegex(UserWarning, f": {count} blocks above the diagonal"):
                mask = make()
            self.assertEqual(np.triu(mask, 1).sum(), 0)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                np.testing.assert_array_equal(make(), mask)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            patterns.fixed(4, 8, **uni)
            patterns.variable(2, 8, **uni)
            patterns.bslongformer(2, 8, **uni)
            patterns.fixed(2, 8, num_global_blocks=2)

    def test_layouts_of_others(self):
        patterns = ulysses.patterns
        mask = patterns.bigbird(4, 6, different_layout_per_head=True)
        for same in (mask, mask.tolist(), mask.astype(np.int64)):
            np.testing.assert_array_equal(patterns.from_layout(same), mask)
        if torch is not None:
            np.testing.assert_array_equal(patterns.from_layout(torch.tensor(mask)), mask)
        for one in (mask[0], mask[:1]):
            np.testing.assert_array_equal(patterns.from_layout(one, 3), mask[[0, 0, 0]])
        for wrong in (mask[:, :5], mask + 1, mask[0, 0], np.zeros((0, 2, 2))):
            with self.assertRaisesRegex(ulysses.InvalidArgument, "a layout of shape"):
                patterns.from_layout(wrong)
        with self.assertRaisesRegex(ulysses.InvalidArgument, "for 3 heads"):
            patterns.from_layout(mask, 3)

    def test_numbers_that_ctypes_would_cut(self):
        patterns, large = ulysses.patterns, (1 << 64) + 2
        for name, call in (
            ("heads", lambda: patterns.dense(large, 4)),
            ("blocks", lambda: patterns.dense(1, large)),
            (
                "a number of blocks 4294967300",
                lambda: patterns.fixed(1, 8, num_local_blocks=(1 << 32) + 4),
            ),
            ("a number of blocks", lambda: patterns.bigbird(1, 8, num_global_blocks=large)),
            ("seed", lambda: patterns.bigbird(1, 8, seed=large)),
            ("layer", lambda: patterns.variable(1, 8, layer=large)),
            ("index or size", lambda: patterns.variable(1, 8, local_window_blocks=[large])),
            ("index or size", lambda: patterns.bslongformer(1, 8, global_block_indices=[large])),
        ):
            with self.assertRaisesRegex(ulysses.InvalidArgument, name):
                call()

    def test_configuration(self):
        """The key sparse_attention of DeepSpeed gives the mask of its mode's function."""
        patterns = ulysses.patterns
        for config, want, block in (
            ({}, patterns.fixed(2, 7), 16),
            (
                {"mode": "fixed", "block": 32, "attention": "unidirectional"},
                patterns.fixed(2, 4, attention="unidirectional"),
                32,
            ),
            ({"mode": "bigbird"}, patterns.bigbird(2, 7, num_random_blocks=0), 16),
            (
                {"mode": "bigbird", "num_random_blocks": 2, "different_layout_per_head": True},
                patterns.bigbird(
                    2, 7, num_random_blocks=2, different_layout_per_head=True, seed=5, layer=1
                ),
                16,
            ),
            (
                {"mode": "variable", "local_window_blocks": [1, 2]},
                patterns.variable(2, 7, local_window_blocks=[1, 2]),
                16,
            ),
            (
                {"mode": "bslongformer", "different_layout_per_head": False},
                patterns.bslongformer(2, 7),
                16,
            ),
            ({"mode": "dense"}, patterns.dense(2, 7), 16),
            ({"mode": "local_sliding_window"}, patterns.local_sliding_window(2, 7), 16),
        ):
            mask, found = patterns.from_config(config, 2, 100, seed=5, layer=1)
            np.testing.assert_array_equal(mask, want, str(config))
            self.assertEqual(found, block)
        for words, config in (
            ("mode 'sparse'; give one of dense, fixed", {"mode": "sparse"}),
            ("mode 'fixed' has no num_random_blocks", {"num_random_blocks": 1}),
            ("has no different_layout_per_head", {"mode": "dense", "different_layout_per_head": 1}),
            ("has no heads", {"heads": 3}),
            ("block 0; give", {"block": 0}),
        ):
            with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                patterns.from_config(config, 2, 100)

    def test_faults(self):
        for text, make in (
            ("not a multiple", lambda: ulysses.patterns.fixed(1, 8, num_global_blocks=3)),
            ("attention", lambda: ulysses.patterns.fixed(1, 8, attention="both")),
            ("random", lambda: ulysses.patterns.bigbird(1, 4, num_random_blocks=5)),
            ("end", lambda: ulysses.patterns.variable(1, 4, global_block_end_indices=[1, 2])),
        ):
            with self.assertRaises(ulysses.InvalidArgument) as raised:
                make()
            self.assertIn(text, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
