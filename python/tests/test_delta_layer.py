"""The whole gated delta layer, compared with float64, which transformers' layer has proven.

Ranks are threads.
"""

import copy
import unittest

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts, local
from reference import TOLERANCE, error, per_head

try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None
if transformers is not None:
    from families import build, float64, own_recurrence, recurrence

HK, HV, DK, DV, WIDTH = 2, 4, 8, 6, 4  # of the layers of families.py
CHANNELS = 2 * HK * DK + HV * DV
ACTIVATIONS = ("qkv", "a", "b", "z")
WEIGHTS = ("conv_weight", "A_log", "dt_bias", "norm_weight")
OPTIONS = dict(key_heads=HK, key_dim=DK)


def draw(b, s):
    g = torch.Generator().manual_seed(4)
    x = {
        "qkv": torch.randn(b, s, CHANNELS, generator=g),
        "a": torch.randn(b, s, HV, generator=g),
        "b": torch.randn(b, s, HV, generator=g),
        "z": torch.randn(b, s, HV, DV, generator=g),
        "conv_weight": torch.randn(CHANNELS, WIDTH, generator=g),
        "A_log": torch.tensor([-4.0, 0.0, 1.0, 2.5]),
        "dt_bias": torch.randn(HV, generator=g),
        "norm_weight": 1 + 0.3 * torch.randn(DV, generator=g),
    }
    return x, torch.randn(b, s, HV, DV, generator=g)


def exact(x, cu):
    """Returns the output, computed for one document at a time, of float64 inputs."""
    b, s = x["qkv"].shape[:2]
    flat = {n: x[n].reshape(1, b * s, *x[n].shape[2:]) for n in ACTIVATIONS}
    out = []
    for lo, hi in zip(cu, cu[1:]):
        d = {n: y[:, lo:hi] for n, y in flat.items()}
        extended = torch.nn.functional.pad(d["qkv"], (0, 0, WIDTH - 1, 0))
        y = sum(extended[:, j : j + hi - lo] * x["conv_weight"][:, j] for j in range(WIDTH))
        y = torch.nn.functional.silu(y)
        q, k, v = y.split([HK * DK, HK * DK, HV * DV], -1)
        q, k, v = (t.reshape(1, hi - lo, -1, n) for t, n in ((q, DK), (k, DK), (v, DV)))
        g = -x["A_log"].exp() * torch.nn.functional.softplus(d["a"] + x["dt_bias"])
        o, _ = recurrence(q, k, v, g, d["b"].sigmoid(), use_qk_l2norm_in_kernel=True)
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-6) * x["norm_weight"]
        out.append(o * torch.nn.functional.silu(d["z"]))
    return torch.cat(out, 1).reshape(b, s, HV, DV)


def leaves(x):
    return {n: y.detach().clone().requires_grad_(True) for n, y in x.items()}


@need_torch
class Layer(unittest.TestCase):
    def setUp(self):
        torch.set_num_threads(1)

    def test_exact(self):
        """The reference of these tests is the layer of transformers."""
        for family in ("qwen3.5 text", "qwen3-next"):
            layer = copy.deepcopy(build(family).model.layers[0].linear_attn).double()
            hidden = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(1)).double()
            with float64(), own_recurrence():
                want = layer(hidden)
                if family == "qwen3-next":
                    q, k, v, z, b, a = layer.fix_query_key_value_ordering(
                        layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
                    )
                    qkv = torch.cat([y.reshape(2, 13, -1) for y in (q, k, v)], -1)
                else:
                    qkv, z = layer.in_proj_qkv(hidden), layer.in_proj_z(hidden)
                    b, a = layer.in_proj_b(hidden), layer.in_proj_a(hidden)
                x = dict(qkv=qkv, a=a, b=b, z=z.reshape(2, 13, HV, DV))
                x.update(A_log=layer.A_log, dt_bias=layer.dt_bias, norm_weight=layer.norm.weight)
                x["conv_weight"] = layer.conv1d.weight.squeeze(1)
                found = layer.out_proj(exact(x, (0, 13, 26)).reshape(2, 13, -1))
            self.assertLess(error(found.detach(), want.detach()), 1e-12, family)

    def test_results(self):
        """Outputs and all gradients, with documents that start anywhere, on 1 to 4 ranks."""
        for b, s, cu, strategy in (
            (2, 17, (0, 17, 34), "auto"),
            (1, 23, (0, 3, 4, 12, 23), "heads"),
            (1, 23, (0, 1, 2, 12, 23), "state"),
            (2, 11, (0, 5, 11, 13, 22), "state"),
            (1, 5, (0, 5), "state"),  # shards shorter than the convolution
        ):
            x, w = draw(b, s)
            ref = leaves({n: y.double() for n, y in x.items()})
            want = exact(ref, cu)
            (want * w.double()).sum().backward()

            def body(ctx):
                mine = leaves({n: local(y, ctx) if n in ACTIVATIONS else y for n, y in x.items()})
                options = dict(**OPTIONS, strategy=strategy, cu_seqlens=cu, context=ctx)
                out = ulysses.gated_delta_layer(**mine, **options)
                (out * local(w, ctx)).sum().backward()
                plain = ulysses.gated_delta_layer(
                    **{n: y.detach().numpy() for n, y in mine.items()}, **options
                )
                self.assertLess(np.abs(plain - out.detach().numpy()).max(), 1e-5)
                return out.detach(), {n: y.grad for n, y in mine.items()}

            for size in (1, 2, 3, 4):
                found = contexts(size, body)
                at = (b, s, strategy, size)
                self.assertLess(
                    error(torch.cat([y for y, _ in found], 1), want.detach()), TOLERANCE
                )
                for name in x:
                    grads = [g[name] for _, g in found]
                    got = torch.cat(grads, 1) if name in ACTIVATIONS else sum(grads)
                    self.assertLess(error(got, ref[name].grad), TOLERANCE, (name, *at))
                    if name in ("A_log", "dt_bias"):
                        # The terms of one head cancel, so its error is relative to a small sum.
                        e = per_head(got, ref[name].grad)
                        self.assertLess(e, 10 * TOLERANCE, (name, *at))

    def test_without_norm(self):
        x, _ = draw(1, 9)
        x = {n: y for n, y in x.items() if n not in ("z", "norm_weight")}
        ones = dict(z=torch.zeros(1, 9, HV, DV))

        def body(ctx):
            mine = {n: local(y, ctx) if n in ACTIVATIONS else y for n, y in x.items()}
            out = ulysses.gated_delta_layer(**mine, **OPTIONS, context=ctx)
            zero = ulysses.gated_delta_layer(
                **mine, z=local(ones["z"], ctx), **OPTIONS, context=ctx
            )
            self.assertEqual(float(zero.abs().max()), 0)
            return out

        one = torch.cat(contexts(1, body), 1)
        for size in (2, 3):
            self.assertLess(error(torch.cat(contexts(size, body), 1), one), TOLERANCE)

    def test_defaults_and_frozen_weights(self):
        """norm_weight None is ones. Weights that need no gradient get none, and any dtype is
        converted."""
        x, w = draw(1, 9)
        ones = {**x, "norm_weight": torch.ones(DV)}

        def run(ctx, given, eps):
            qkv = given["qkv"].clone().requires_grad_(True)
            out = ulysses.gated_delta_layer(
                **{**given, "qkv": qkv}, **OPTIONS, eps=eps, context=ctx
            )
            (out * w).sum().backward()
            return out.detach(), qkv.grad

        def body(ctx):
            found = run(ctx, {**x, "norm_weight": None, "A_log": x["A_log"].double()}, 0)
            for got, want in zip(found, run(ctx, ones, 1e-6)):
                self.assertTrue(torch.equal(got, want))
            self.assertIsNone(x["conv_weight"].grad)
            self.assertFalse(torch.equal(found[0], run(ctx, ones, 1e-2)[0]))

        contexts(1, body)

    def test_bfloat16(self):
        """The errors are at most twice the errors of PyTorch in bfloat16."""
        b, s, cu = 1, 33, (0, 20, 33)
        x, w = draw(b, s)
        low = {n: y if n in ("A_log", "dt_bias") else y.bfloat16() for n, y in x.items()}
        w = w.bfloat16()
        ref, plain = leaves({n: y.double() for n, y in low.items()}), leaves(low)
        want = exact(ref, cu)
        (want * w).sum().backward()
        rounded = exact(plain, cu)
        (rounded * w).sum().backward()

        def body(ctx):
            mine = leaves({n: local(y, ctx) if n in ACTIVATIONS else y for n, y in low.items()})
            out = ulysses.gated_delta_layer(**mine, **OPTIONS, cu_seqlens=cu, context=ctx)
            (out * local(w, ctx)).sum().backward()
            self.assertEqual(out.dtype, torch.bfloat16)
            return out.detach(), {n: y.grad for n, y in mine.items()}

        for size in (1, 2):
            found = contexts(size, body)
            got = {"out": torch.cat([y for y, _ in found], 1)}
            for name in x:
                grads = [g[name].double() for _, g in found]
                got[name] = torch.cat(grads, 1) if name in ACTIVATIONS else sum(grads)
                self.assertEqual(found[0][1][name].dtype, low[name].dtype, name)
            for name, y in got.items():
                expected, other = (
                    (t.detach() if name == "out" else leaf[name].grad)
                    for t, leaf in ((want, ref), (rounded, plain))
                )
                limit = 2 * error(other.double(), expected)
                self.assertLess(error(y.double(), expected), limit, (name, size))

    def test_refusals(self):
        """An argument that is wrong on one rank raises on every rank, with its name."""
        x, _ = draw(1, 8)
        for words, wrong in (
            ("qkv has .* channels", dict(key_heads=3)),
            ("qkv has shape", dict(qkv=torch.ones(1, 4))),
            ("b has shape", dict(b=torch.ones(1, 4, HV + 1))),
            ("z has shape", dict(z=torch.ones(1, 4, HV, DV + 1))),
            ("conv_weight has shape", dict(conv_weight=torch.ones(CHANNELS - 1, WIDTH))),
            ("A_log has shape", dict(A_log=torch.ones(HV + 1))),
            ("norm_weight is given and z is None", dict(z=None)),
            ("activation 'gelu'", dict(activation="gelu")),
            ("eps is", dict(eps=1e-3)),
            ("eps 1e-50 is 0", dict(eps=1e-50)),
            ("numpy|NumPy|library|PyTorch", dict(a=np.ones((1, 4, HV), np.float32))),
        ):
            for bad in (0, 1):

                def body(ctx):
                    mine = {n: local(y, ctx) if n in ACTIVATIONS else y for n, y in x.items()}
                    options = {**mine, **OPTIONS, **(wrong if ctx.rank == bad else {})}
                    with self.assertRaisesRegex(ulysses.UlyssesError, words):
                        ulysses.gated_delta_layer(**options, context=ctx)
                    ulysses.gated_delta_layer(**mine, **OPTIONS, context=ctx)

                with self.subTest(words, rank=bad):
                    contexts(2, body)


if __name__ == "__main__":
    unittest.main()
