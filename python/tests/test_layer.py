"""Halos, whole layers, and a caller's own attention between the all-to-alls. Ranks are threads."""

import unittest
import warnings

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts, joined, local
from reference import TOLERANCE, attention, draw, error, mask

try:
    import torch
    from torch.nn.functional import conv1d
    from torch.nn.functional import scaled_dot_product_attention as sdpa
except ImportError:
    torch = None
else:
    from exact import attend, expanded, kept_by_dropout, visible


class Halo(unittest.TestCase):
    def test_tokens_of_neighbouring_ranks(self):
        """Halos before and after, larger than shards, with documents, and with few tokens.

        The gradient of a token is the sum over the halos that have it.
        """
        for b, s, cu in ((2, 9, None), (1, 7, (0, 2, 7)), (1, 3, None)):
            x = draw(1, b, s, 3, 2)
            starts = sorted({i * s for i in range(b)} | set((cu or ())[:-1]))

            def source(i, lo, hi, n, k):
                """Returns the token at index k of the halo of tokens [lo, hi), or None."""
                near, t = (lo, lo - n + k) if n > 0 else (hi - 1, hi + k)
                same = (
                    0 <= t < s
                    and lo < hi
                    and max(y for y in starts if y <= i * s + t)
                    == max(y for y in starts if y <= i * s + near)
                )
                return t if same else None

            for n in (1, 3, -2):

                def body(ctx):
                    found = ulysses.halo(local(x, ctx), n, seq=s, cu_seqlens=cu, context=ctx)
                    dx = np.zeros_like(local(x, ctx))
                    ulysses.halo_backward(
                        np.full_like(found, 1 + ctx.rank), n, dx, seq=s, cu_seqlens=cu, context=ctx
                    )
                    return found, dx

                for size in (1, 2, 4):
                    found, want = contexts(size, body), np.zeros_like(x)
                    for rank, (halo, _) in enumerate(found):
                        lo, hi = ulysses.shard_rows(s, size, rank)
                        for i in range(b):
                            for k in range(abs(n)):
                                t = source(i, lo, hi, n, k)
                                np.testing.assert_array_equal(
                                    halo[i, k], 0 if t is None else x[i, t]
                                )
                                if t is not None:
                                    want[i, t] += 1 + rank
                    np.testing.assert_array_equal(np.concatenate([dx for _, dx in found], 1), want)

    @need_torch
    def test_a_convolution_over_ranks(self):
        x, w, up = (
            torch.from_numpy(draw(2, 1, 11, 4)),
            torch.from_numpy(draw(3, 4, 1, 3)),
            torch.from_numpy(draw(4, 1, 11, 4)),
        )

        def convolve(x):
            return conv1d(x.transpose(1, 2), w, groups=4).transpose(1, 2)

        exact = x.clone().requires_grad_()
        want = convolve(torch.nn.functional.pad(exact, (0, 0, 2, 0)))
        (want * up).sum().backward()

        def body(ctx):
            shard = local(x, ctx).clone().requires_grad_()
            y = convolve(torch.cat([ulysses.halo(shard, 2, seq=11, context=ctx), shard], 1))
            (y * local(up, ctx)).sum().backward()
            return y.detach(), shard.grad

        for size in (1, 2, 4):
            found = [torch.cat(x, 1) for x in zip(*contexts(size, body))]
            torch.testing.assert_close(found[0], want.detach(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found[1], exact.grad, rtol=1e-6, atol=1e-6)

    def test_a_convolution_over_documents(self):
        """Documents shorter than the kernel and on several ranks, different in each sequence.

        Outputs of NumPy and PyTorch, and all gradients, are compared with sums over the documents
        in float64. The plain convolution over [halo, x] raises nothing, but its error is far above
        the tolerance.
        """
        b, s, c, width = 2, 13, 6, 4
        cu = (0, 1, 2, 3, 5, 6, 13, 20, 22, 26)
        x, w, bias, up = draw(2, b, s, c), draw(3, c, width), draw(4, c), draw(5, b, s, c)
        for activation in (None, "silu"):

            def exact(x, w, bias):
                y = np.zeros((b * s, c))
                flat = x.reshape(b * s, c)
                for lo, hi in zip(cu, cu[1:]):
                    for t in range(lo, hi):
                        for j in range(min(width, t - lo + 1)):
                            y[t] += flat[t - j] * w[:, width - 1 - j]
                y += bias
                return (y if activation is None else y / (1 + np.exp(-y))).reshape(b, s, c)

            want = exact(*(a.astype(np.float64) for a in (x, w, bias)))
            slopes = []
            for i in range(3):
                given = [a.astype(np.float64) for a in (x, w, bias)]
                slope = np.zeros(given[i].shape)
                for at in np.ndindex(slope.shape):
                    kept = given[i][at]
                    given[i][at] = kept + 1e-5
                    up_ = (exact(*given) * up).sum()
                    given[i][at] = kept - 1e-5
                    slope[at] = (up_ - (exact(*given) * up).sum()) / 2e-5
                    given[i][at] = kept
                slopes.append(slope)

            def numpy(ctx):
                shard = local(x, ctx)
                naive = np.concatenate(
                    [ulysses.halo(shard, width - 1, seq=s, cu_seqlens=cu, context=ctx), shard], 1
                )
                naive = bias + sum(naive[:, k : k + shard.shape[1]] * w[:, k] for k in range(width))
                return ulysses.causal_conv1d(
                    shard, w, bias, activation, cu_seqlens=cu, context=ctx
                ), naive if activation is None else None

            for size in (1, 2, 4, 8):
                found = contexts(size, numpy)
                self.assertLess(
                    error(np.concatenate([y for y, _ in found], 1), want),
                    TOLERANCE,
                    (activation, size),
                )
                if activation is None:
                    self.assertGreater(error(np.concatenate([y for _, y in found], 1), want), 0.1)
            if torch is None:
                continue

            def body(ctx):
                shard, *parameters = [
                    torch.from_numpy(np.ascontiguousarray(a)).requires_grad_()
                    for a in (local(x, ctx), w, bias)
                ]
                y = ulysses.causal_conv1d(
                    shard, *parameters, activation, cu_seqlens=cu, context=ctx
                )
                (y * torch.from_numpy(local(up, ctx))).sum().backward()
                return y.detach(), shard.grad, parameters[0].grad, parameters[1].grad

            for size in (1, 2, 4, 8):
                y, dx, dw, db = zip(*contexts(size, body))
                for name, a, e in (
                    ("y", torch.cat(y, 1), want),
                    ("dx", torch.cat(dx, 1), slopes[0]),
                    ("dw", sum(dw), slopes[1]),
                    ("db", sum(db), slopes[2]),
                ):
                    self.assertLess(error(a, e), TOLERANCE, (name, activation, size))

    @need_torch
    def test_a_convolution_on_ranks_without_tokens(self):
        """They take part in both passes, and their share of the gradients of weights is 0."""
        b, s, c, width = 2, 2, 3, 4
        given = draw(6, b, s, c), draw(7, c, width), draw(8, c)

        def body(ctx):
            x, *parameters = (torch.from_numpy(a).clone().requires_grad_() for a in given)
            y = ulysses.causal_conv1d(local(x, ctx), *parameters, "silu", context=ctx)
            (y * y).sum().backward()
            return y.detach(), *(t.grad for t in (x, *parameters))

        y, *grads = contexts(1, body)[0]
        for size in (3, 5):
            found = list(zip(*contexts(size, body)))
            self.assertLess(error(torch.cat(found[0], 1), y), TOLERANCE, size)
            for shares, grad in zip(found[1:], grads):
                self.assertLess(error(sum(shares), grad), TOLERANCE, size)

    @need_torch
    def test_a_convolution_in_autocast(self):
        """The result has the dtype of x on a rank where a document starts, and on the others."""
        x, w = torch.from_numpy(draw(1, 1, 8, 4)), torch.from_numpy(draw(2, 4, 3))

        def body(ctx):
            y = ulysses.causal_conv1d(local(x, ctx), w, cu_seqlens=(0, 6, 8), context=ctx)
            with torch.autocast("cpu", torch.bfloat16):
                again = ulysses.causal_conv1d(local(x, ctx), w, cu_seqlens=(0, 6, 8), context=ctx)
            self.assertEqual(again.dtype, torch.float32)
            self.assertTrue(torch.equal(again, y))

        contexts(2, body)

    def test_convolution_of_numpy(self):
        """NumPy's result has the dtype of x, and large negative sums give no warning."""
        x, w = np.full((1, 4, 2), -200, np.float32), np.ones((2, 3), np.float32)
        with warnings.catch_warnings(), ulysses.Context(threads=1) as ctx:
            warnings.simplefilter("error")
            y = ulysses.causal_conv1d(x, w, np.zeros(2), "silu", context=ctx)
        self.assertEqual(y.dtype, np.float32)
        self.assertTrue((y == 0).all())

    def test_refusals(self):
        with ulysses.Context() as ctx:
            for call in (
                lambda: ulysses.halo(draw(1, 1, 4), 0, context=ctx),
                lambda: ulysses.halo(draw(1, 4), 1, context=ctx),
                lambda: ulysses.halo(draw(1, 1, 4, 2), 1, seq=9, context=ctx),
            ):
                with self.assertRaises(ulysses.InvalidArgument):
                    call()


MESHES = (
    (1, {}),
    (2, {}),
    (4, {}),
    (2, dict(ring=2)),
    (4, dict(ring=2)),
    (2, dict(ring=2, zigzag=True)),
    (4, dict(ring=2, zigzag=True, gather_keys=True)),
)


@need_torch
class Layer(unittest.TestCase):
    """A layer with biases, norms, rotary embeddings and key heads that ranks share.

    Outputs and all gradients are compared with PyTorch in float64.
    """

    B, S, H, HKV, D, N = 2, 13, 6, 2, 8, 20
    CU = (0, 4, 5, 13, 22, 26)  # documents of both sequences
    BLOCK = 4

    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        b, s, h, hkv, d, n = self.B, self.S, self.H, self.HKV, self.D, self.N
        self.x, self.up = torch.randn(b, s, n), torch.randn(b, s, n)
        self.weights = {
            "wq": torch.randn(h * d, n) / 4,
            "wk": torch.randn(hkv * d, n) / 4,
            "wv": torch.randn(hkv * d, n) / 4,
            "wo": torch.randn(n, h * d) / 4,
            "bq": torch.randn(h * d),
            "bk": torch.randn(hkv * d),
            "bv": torch.randn(hkv * d),
            "bo": torch.randn(n),
            "q_norm": 1 + torch.randn(d) / 8,
            "k_norm": 1 + torch.randn(d) / 8,
        }
        angle = torch.arange(s)[None, :, None] / 50 ** (torch.arange(d // 2) / (d // 2))
        self.angle = angle.expand(b, s, d // 2)
        mask = ulysses.patterns.bigbird(
            h, -(-s // self.BLOCK), different_layout_per_head=True, seed=3
        )
        self.mask = torch.tensor(mask)

    def layer(self, x, w, **options):
        """The layer in the dtype of x. options are the ones of `attend`."""
        d, angle = self.D, self.angle[:, :, None].to(x.dtype)
        cos, sin = angle.cos(), angle.sin()

        def heads(name, k):
            return (x @ w["w" + name].T + w["b" + name]).unflatten(-1, (k, d))

        def rope(y):
            a, c = y[..., : d // 2], y[..., d // 2 :]
            return torch.cat([a * cos - c * sin, c * cos + a * sin], -1)

        def norm(y, g):
            return y * torch.rsqrt((y * y).mean(-1, keepdim=True) + 1e-6) * g

        q, k = rope(norm(heads("q", self.H), w["q_norm"])), norm(heads("k", self.HKV), w["k_norm"])
        y = attend(q, rope(k), heads("v", self.HKV), **options)
        return y.flatten(2) @ w["wo"].T + w["bo"]

    def compare(self, parameters, exactly, options, meshes):
        """Compares layers on several meshes with the reference.

        exactly are the options of the reference, options the ones of `attention_layer`.
        """
        named = {"x": self.x, **parameters}
        exact = {name: t.double().requires_grad_() for name, t in named.items()}
        vectors = {name: exact.get(name) for name in ("sinks", "alibi")}
        want = self.layer(exact["x"], exact, **vectors, **exactly)
        (want * self.up).sum().backward()

        def body(ctx):
            inputs = {name: t.clone().requires_grad_() for name, t in named.items()}
            inputs["x"] = local(self.x, ctx).clone().requires_grad_()
            rotary = {
                name: local(t, ctx).flatten(0, 1).contiguous()
                for name, t in (("cos", self.angle.cos()), ("sin", self.angle.sin()))
            }
            given = dict(heads=self.H, kv_heads=self.HKV, seq=self.S, context=ctx, **options)
            y = ulysses.attention_layer(**inputs, **rotary, **given)
            (y * local(self.up, ctx)).sum().backward()
            with torch.no_grad():
                again = ulysses.attention_layer(**inputs, **rotary, **given)
                torch.testing.assert_close(again, y.detach(), rtol=0, atol=0)
            return y.detach(), {name: t.grad for name, t in inputs.items()}

        for size, mesh in meshes:
            found = contexts(size, body, **mesh)
            y, dx = (joined(x, **mesh) for x in zip(*((y, g["x"]) for y, g in found)))
            self.assertLess(error(y, want.detach()), TOLERANCE, (size, mesh))
            self.assertLess(error(dx, exact["x"].grad), TOLERANCE, (size, mesh))
            for name in parameters:
                got = sum(g[name] for _, g in found)
                self.assertLess(error(got, exact[name].grad), TOLERANCE, (name, size, mesh))

    def test_against_torch(self):
        see = visible(self.S, causal=True, b=self.B)
        meshes = ((1, {}), (2, {}), (4, {}))
        self.compare(self.weights, {"see": see}, {"causal": True}, meshes)

    def test_options(self):
        """Sinks, slopes, soft caps, block masks, windows and dropout, packed or not."""
        vectors = {
            "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -0.5]),
            "alibi": 0.5 ** torch.arange(1.0, 7.0),
        }
        dropped = dict(dropout=0.3, seed=11)
        kept = kept_by_dropout(self.B, self.S, self.H, **dropped)
        blocks = dict(block_mask=self.mask, block=self.BLOCK)
        for names, see, exactly, options in (
            ("sinks", dict(causal=True, cu=self.CU), dict(softcap=1.5), dict(softcap=1.5)),
            ("alibi", dict(causal=True, window=(5, -1)), dict(kept=kept, p=0.3), dropped),
            ("sinks alibi", {}, dict(mask=expanded(self.mask, self.BLOCK, self.S)), blocks),
        ):
            given = {"cu_seqlens" if name == "cu" else name: x for name, x in see.items()}
            with self.subTest(names, see=see):
                self.compare(
                    {**self.weights, **{name: vectors[name] for name in names.split()}},
                    {"see": visible(self.S, b=self.B, **see), **exactly},
                    {**given, **options},
                    MESHES,
                )

    def test_overlap(self):
        """With overlap, results are bitwise equal, and each tensor has an all-to-all of its own."""
        arrays = {name: t.numpy() for name, t in {"x": self.x, **self.weights}.items()}

        def body(ctx):
            shards = arrays | {"x": local(arrays["x"], ctx)}
            found, sent = [], []
            comm = ctx.communicator
            alltoallv = comm.alltoallv
            for overlap in (False, True):
                calls = []
                comm.alltoallv = lambda *a: (calls.append(1), alltoallv(*a))[1]
                y, call = ulysses.attention_layer_forward(
                    **shards,
                    heads=self.H,
                    kv_heads=self.HKV,
                    seq=self.S,
                    causal=True,
                    overlap=overlap,
                    context=ctx,
                )
                grads = ulysses.attention_layer_backward(call, local(self.up.numpy(), ctx))
                found.append({"y": y, **grads})
                sent.append(len(calls))
            for name, want in found[0].items():
                np.testing.assert_array_equal(found[1][name], want)
            if ctx.size > 1:
                self.assertEqual(sent, [4, 8])

        for size in (1, 2, 4):
            contexts(size, body)

    def test_numpy(self):
        """NumPy arrays have the results of PyTorch's tensors, and gradients of sinks in float32."""
        arrays = {name: t.numpy() for name, t in {"x": self.x, **self.weights}.items()}
        options = dict(heads=self.H, kv_heads=self.HKV, causal=True)
        sinks = np.linspace(-1, 1, self.H, dtype=np.float32)
        blocks = dict(block_mask=self.mask.numpy().astype(bool), block=self.BLOCK)
        with ulysses.Context(threads=1) as ctx:
            y, call = ulysses.attention_layer_forward(
                **arrays, **options, **blocks, sinks=sinks, context=ctx
            )
            grads = ulysses.attention_layer_backward(call, self.up.numpy())
            tensors = {name: torch.tensor(a).requires_grad_() for name, a in arrays.items()}
            tensors["sinks"] = torch.tensor(sinks).requires_grad_()
            blocks["block_mask"] = self.mask
            want = ulysses.attention_layer(**tensors, **options, **blocks, context=ctx)
            (want * self.up).sum().backward()
        np.testing.assert_array_equal(y, want.detach())
        self.assertEqual(set(grads), set(tensors))
        for name, t in tensors.items():
            np.testing.assert_array_equal(grads[name], t.grad)

    def test_faults(self):
        arguments = {"x": self.x, **{name: self.weights[name] for name in ("wq", "wk", "wv", "wo")}}
        with ulysses.Context(threads=1) as ctx:
            for words, options in (
                ("sinks has shape", dict(sinks=torch.zeros(3))),
                ("block_mask and block", dict(block=4)),
                ("dropout", dict(dropout=1.5)),
                ("left, right", dict(window=5)),
                ("another library", dict(sinks=np.zeros(self.H, np.float32))),
            ):
                with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    ulysses.attention_layer(
                        **arguments, heads=self.H, kv_heads=self.HKV, context=ctx, **options
                    )

    def test_rotation_that_needs_a_gradient(self):
        """It would get none, so all ranks refuse it, also if it needs one on one rank only."""
        weights = {name: self.weights[name] for name in ("wq", "wk", "wv", "wo")}

        def body(ctx):
            x, angle = (local(t, ctx) for t in (self.x, self.angle))
            cos, sin = (t.flatten(0, 1).contiguous() for t in (angle.cos(), angle.sin()))
            if ctx.rank == ctx.size - 1:
                cos.requires_grad_()

            def layer():
                return ulysses.attention_layer(
                    x, **weights, heads=self.H, kv_heads=self.HKV, cos=cos, sin=sin, context=ctx
                )

            with self.assertRaisesRegex(ulysses.InvalidArgument, "cos.detach()"):
                layer()
            with torch.no_grad():
                self.assertEqual(layer().shape, x.shape)

        for size in (1, 2):
            contexts(size, body)


class Local(unittest.TestCase):
    def test_numpy(self):
        q, k, v, dout = (
            draw(1, 2, 11, 6, 8),
            draw(2, 2, 11, 2, 8),
            draw(3, 2, 11, 2, 8),
            draw(4, 2, 11, 6, 8),
        )
        want = attention(q, k, v, dout, see=mask(11, 11, True))

        def attend(q, k, v, heads, kv_heads, dout=None):
            # The key head of each query head. A group of three query heads may lie on two ranks.
            each = [h // 3 - kv_heads[0] for h in range(*heads)]
            out = attention(q, k[:, :, each], v[:, :, each], dout, see=mask(11, 11, True))
            if dout is None:
                return out[0]
            dk, dv = (
                np.stack(
                    [
                        x[:, :, [i for i, e in enumerate(each) if e == j]].sum(2)
                        for j in range(k.shape[2])
                    ],
                    2,
                )
                for x in out[3:]
            )
            return out[2], dk, dv

        def forward(t):
            t.out[...] = attend(t.q, t.k, t.v, t.heads, t.kv_heads)

        def backward(t):
            t.dq[...], t.dk[...], t.dv[...] = attend(t.q, t.k, t.v, t.heads, t.kv_heads, t.dout)

        def body(ctx):
            out, call = ulysses.local_attention_forward(
                *(local(x, ctx) for x in (q, k, v)), forward, seq=11, context=ctx
            )
            return out, *ulysses.local_attention_backward(call, local(dout, ctx), backward)

        for size in (1, 2, 4, 7):  # with 7 ranks, one has no head
            for name, a, b in zip(
                ("out", "dq", "dk", "dv"), zip(*contexts(size, body)), (want[0], *want[2:])
            ):
                self.assertLess(error(np.concatenate(a, 1), b), TOLERANCE, (name, size))

    @need_torch
    def test_torch(self):
        torch.manual_seed(0)
        q, k, v, up = (torch.randn(1, 9, n, 8) for n in (4, 4, 4, 4))

        def attend(q, k, v):
            return sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)

        exact = [x.double().requires_grad_() for x in (q, k, v)]
        want = attend(*exact)
        (want * up).sum().backward()

        def body(ctx):
            shards = [local(x, ctx).clone().requires_grad_() for x in (q, k, v)]
            out = ulysses.local_attention(*shards, attend, seq=9, context=ctx)
            (out * local(up, ctx)).sum().backward()
            return out.detach(), *(x.grad for x in shards)

        for size in (1, 2, 3):
            for name, a, b in zip(
                ("out", "dq", "dk", "dv"),
                zip(*contexts(size, body)),
                (want.detach(), *(x.grad for x in exact)),
            ):
                self.assertLess(error(torch.cat(a, 1), b), TOLERANCE, (name, size))

    @need_torch
    def test_bfloat16(self):
        """Views of the call's memory in bfloat16 have the values and the shapes of q, k and v."""
        q = torch.randn(2, 9, 4, 8).bfloat16().requires_grad_()
        with ulysses.Context(threads=1) as ctx:
            out = ulysses.local_attention(q, q, q, lambda q, k, v: q + 2 * v, context=ctx)
            out.backward(torch.ones_like(out))
        self.assertTrue(torch.equal(out, (q + 2 * q).detach()))
        self.assertTrue(bool((q.grad == 3).all()))

    @need_torch
    def test_a_function_with_dropout(self):
        """Backward differentiates the function with the random numbers and the autocast of forward.

        It draws no numbers from the program's generator.
        """
        one, seen = torch.ones(1, 8, 2, 8), []

        def attend(q, k, v):
            seen.append(torch.is_autocast_enabled("cpu"))
            return torch.nn.functional.dropout(q, 0.5)

        with ulysses.Context(threads=1) as ctx:
            q = one.clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                out = ulysses.local_attention(q, one, one, attend, context=ctx)
            state = torch.get_rng_state()
            out.sum().backward()
            self.assertTrue(torch.equal(torch.get_rng_state(), state))
        self.assertTrue(torch.equal(q.grad, out.detach()))  # 0 or 2, as q is 1
        self.assertTrue(0 < int((q.grad == 0).sum()) < q.numel())
        self.assertEqual(seen, [True, True])

    @need_torch
    def test_a_function_with_parameters(self):
        """Backward raises on every rank, because the gradients of the parameters would be lost."""
        slope, q = torch.ones(1, requires_grad=True), torch.randn(1, 8, 2, 8)

        def body(ctx):
            shard = local(q, ctx).clone().requires_grad_()
            out = ulysses.local_attention(
                shard, shard, shard, lambda q, k, v: v * slope, seq=8, context=ctx
            )
            with self.assertRaises(ulysses.UlyssesError) as caught:
                out.sum().backward()
            self.assertIn("[(1,)] that need a gradient", str(caught.exception.__cause__))
            ulysses.local_attention(
                shard, shard, shard, lambda q, k, v: v * slope.detach(), seq=8, context=ctx
            ).sum().backward()

        contexts(2, body)

    def test_a_function_that_fails(self):
        """The call raises on every rank, and the next call works.

        The exception of the function is the cause of the call's exception on its rank.
        """
        q = draw(1, 1, 8, 2, 8)

        def body(ctx):
            def attend(q, k, v):
                if ctx.rank == 0:
                    raise RuntimeError("no such mask")
                return v

            with self.assertRaisesRegex(ulysses.InvalidArgument, "no such mask") as caught:
                ulysses.local_attention(*(local(q, ctx),) * 3, attend, seq=8, context=ctx)
            if ctx.rank == 0:
                self.assertIn("no such mask", str(caught.exception.__cause__))
            else:
                self.assertIn("rank 0 of 2", str(caught.exception))
            np.testing.assert_array_equal(
                ulysses.local_attention(
                    *(local(q, ctx),) * 3, lambda q, k, v: v, seq=8, context=ctx
                ),
                local(q, ctx),
            )

        contexts(2, body)

    def test_a_function_that_returns_another_shape(self):
        """Assigning to out would broadcast one row, one number, or None, which becomes NaN."""
        q = draw(1, 1, 8, 2, 8)
        arrays = [q] if torch is None else [q, torch.from_numpy(q)]
        with ulysses.Context(threads=1) as ctx:
            for x in arrays:
                for result in (x[:, :1], x[:, :, :1], x[0], 0.0, None):
                    with self.assertRaisesRegex(
                        ulysses.InvalidArgument,
                        r"it must return out, an array of shape \(1, 8, 2, 8",
                    ):
                        ulysses.local_attention(x, x, x, lambda *_, y=result: y, context=ctx)


if __name__ == "__main__":
    unittest.main()
