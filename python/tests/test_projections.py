"""Asynchronous Ulysses projections on PyTorch tensors. Ranks are threads."""

import itertools
import unittest

import ulysses
from need import need_torch
from ranks import contexts, local
from reference import TOLERANCE, error

try:
    import torch
    from torch.nn import functional as F
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:
    torch = None

B, HIDDEN, HEADS, DIM, EPS = 2, 12, 4, 4, 1e-3
NORM = ("norm_q_weight", "norm_q_bias", "norm_k_weight", "norm_k_bias")


def case(seq, kv_heads, bias, norm):
    """Returns float64 tensors by name: x, dy, and the parameters of the projections."""
    g = torch.Generator().manual_seed(seq * 10 + kv_heads)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    t = {"x": draw(B, seq, HIDDEN), "dy": draw(B, seq, HIDDEN)}
    for name, heads in (("q", HEADS), ("k", kv_heads), ("v", kv_heads)):
        t[f"{name}_weight"] = draw(heads * DIM, HIDDEN) / 3
        t[f"{name}_bias"] = draw(heads * DIM) if bias else None
    t |= {"proj_weight": draw(HIDDEN, HEADS * DIM) / 3, "proj_bias": draw(HIDDEN) if bias else None}
    for name in NORM:
        wanted = norm == "layernorm" or (norm == "rmsnorm" and name.endswith("weight"))
        t[name] = 1 + draw(DIM) / 4 if wanted else None
    return t


def normalized(norm, x, weight, bias):
    if norm == "rmsnorm":
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return F.layer_norm(x, (DIM,), weight, bias, EPS) if norm else x


def attention(q, k, v):
    """Causal attention of [B, S, H, D] with rotated q and k, for whole sequences of some heads."""
    angle = torch.arange(q.shape[1], dtype=torch.float64)[:, None, None] * 0.1 ** torch.arange(2)
    cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)

    def rotated(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    q, k, v = (x.transpose(1, 2) for x in (rotated(q), rotated(k), v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def plain(t, norm):
    """The layer without ranks, on the whole sequence."""
    q, k, v = (
        F.linear(t["x"], t[f"{n}_weight"], t[f"{n}_bias"]).unflatten(-1, (-1, DIM)) for n in "qkv"
    )
    q = normalized(norm, q, t["norm_q_weight"], t["norm_q_bias"])
    k = normalized(norm, k, t["norm_k_weight"], t["norm_k_bias"])
    return F.linear(attention(q, k, v).flatten(2), t["proj_weight"], t["proj_bias"])


def overlapped(t, norm, seq, padded, ctx):
    """The layer with asynchronous projections, on this rank's tokens."""
    options = dict(unpadded_dim_size=seq, padded=padded, context=ctx)
    qkv = [t[f"{n}_{kind}"] for n in "qkv" for kind in ("weight", "bias")]
    q, k, v = ulysses.async_ulysses_qkv_projection(
        t["x"], 1, 2, *qkv, norm, *(t[n] for n in NORM), DIM, EPS, head_dim=DIM, **options
    )
    mixed = attention(q, k, v)
    return ulysses.async_ulysses_output_projection(
        mixed, 1, 2, t["proj_weight"], t["proj_bias"], **options
    )


class Linear(torch.autograd.Function if torch else object):
    """torch.nn.functional.linear whose backward pass has the products of the overlapped form."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight, bias = ctx.saved_tensors
        return (
            dy @ weight,
            dy.flatten(0, 1).t() @ x.flatten(0, 1),
            None if bias is None else dy.flatten(0, 1).sum(0),
        )


def synchronous(t, norm, seq, padded, ctx):
    """The layer with reshards after all projections, and copies of key heads made before."""
    options = dict(padded=padded, context=ctx)
    whole = []
    for name in "qkv":
        x = Linear.apply(t["x"], t[f"{name}_weight"], t[f"{name}_bias"]).unflatten(-1, (-1, DIM))
        if x.shape[2] < ctx.size:
            x = x.repeat_interleave(ctx.size // x.shape[2], 2)
        whole.append(ulysses.gather_seq_scatter_heads(x, 1, 2, seq, **options))
    q, k, v = whole
    q = normalized(norm, q, t["norm_q_weight"], t["norm_q_bias"])
    k = normalized(norm, k, t["norm_k_weight"], t["norm_k_bias"])
    mixed = ulysses.gather_heads_scatter_seq(attention(q, k, v), 2, 1, heads=HEADS, **options)
    return Linear.apply(mixed.flatten(2), t["proj_weight"], t["proj_bias"])


def run(layer, t, norm, padded, ctx):
    """Returns y and the gradients by name, on this rank, in float32."""
    seq, mine = t["x"].shape[1], {}
    for name, x in t.items():
        if x is not None and name in ("x", "dy"):
            x = F.pad(x, (0, 0, 0, -seq % ctx.size if padded else 0))
            x = local(x, ctx)
        mine[name] = None if x is None else x.float().detach().clone().requires_grad_()
    y = layer(mine, norm, seq, padded, ctx)
    y.backward(mine.pop("dy").detach())
    return {"y": y.detach()} | {n: x.grad for n, x in mine.items() if x is not None}


class Log(TorchDispatchMode if torch else object):
    """Logs the products and norms that PyTorch computes."""

    def __init__(self, log):
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm"):
            self.log.append("product")
        if name in ("rsqrt", "native_layer_norm_backward"):
            self.log.append("norm")
        return function(*args, **(kwargs or {}))


@need_torch
class Projections(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        torch.set_num_threads(1)

    def cases(self):
        norms = (None, "rmsnorm", "layernorm")
        for i, (seq, kv, bias) in enumerate(itertools.product((8, 9), (4, 2, 1), (True, False))):
            yield case(seq, kv, bias, norms[i % 3]), norms[i % 3], dict(seq=seq, kv=kv, bias=bias)

    def test_equals_synchronous(self):
        """Results and gradients are bitwise equal to the ones of projections before reshards.

        There are 1, 2 and 4 ranks, more ranks than key heads, lengths that are no multiple of the
        ranks with and without padding, biases, norms and two sequences.
        """
        for t, norm, name in self.cases():
            for size, padded in itertools.product((1, 2, 4), (True, False)):

                def body(ctx):
                    want = run(synchronous, t, norm, padded, ctx)
                    found = run(overlapped, t, norm, padded, ctx)
                    self.assertEqual(found.keys(), want.keys())
                    for key in want:
                        self.assertTrue(torch.equal(found[key], want[key]), (key, name, size))

                contexts(size, body)

    def test_against_float64(self):
        """The sums of the ranks' gradients, also of norms and biases, are the ones of one rank."""
        for t, norm, name in self.cases():
            exact = {n: None if x is None else x.clone().requires_grad_() for n, x in t.items()}
            y = plain(exact, norm)
            y.backward(t["dy"])
            want = {n: x.grad for n, x in exact.items() if x is not None and n != "dy"}
            for size, padded in itertools.product((1, 2, 4), (True, False)):
                ranks = contexts(size, lambda ctx: run(overlapped, t, norm, padded, ctx))
                for key in want:
                    if key == "x":
                        found = torch.cat([r["x"] for r in ranks], 1)[:, : y.shape[1]]
                    else:
                        found = sum(r[key] for r in ranks)
                    self.assertLess(error(found, want[key]), TOLERANCE, (key, name, size))
                found = torch.cat([r["y"] for r in ranks], 1)[:, : y.shape[1]]
                self.assertLess(error(found, y.detach()), TOLERANCE, (name, size))

    def test_order(self):
        """Each all-to-all starts after its product, and is waited for when its result is used."""
        t = case(8, 2, False, "rmsnorm")

        def body(ctx):
            log, call = [], ctx._call

            def logged(name, *args):
                word = "wait" if name.endswith("wait") else "start"
                if name.endswith(("start", "wait", "heads_to_seq", "seq_to_heads")):
                    log.append(word if name.endswith(("start", "wait")) else "blocking")
                return call(name, *args)

            ctx._call = logged
            mine = {n: local(x, ctx).float() for n, x in t.items() if n in ("x", "dy")}
            mine |= {n: x.float() for n, x in t.items() if n not in mine and x is not None}
            mine = {n: x.detach().clone().requires_grad_() for n, x in mine.items()}
            with Log(log):
                q, k, v = ulysses.async_ulysses_qkv_projection(
                    mine["x"], 1, 2, mine["q_weight"], None, mine["k_weight"], None,
                    mine["v_weight"], None, "rmsnorm", mine["norm_q_weight"], None,
                    mine["norm_k_weight"], head_dim=DIM, context=ctx,
                )  # fmt: skip
                self.assertEqual(
                    log, ["product", "start"] * 3 + ["wait"] * 2 + ["norm"] * 2 + ["wait"]
                )
                log.clear()
                torch.autograd.backward([q, k, v], [torch.ones_like(x) for x in (q, k, v)])
                # the norm is computed again; the products of a tensor are dx and dw
                products = ["product"] * 2
                self.assertEqual(
                    log,
                    ["start", "norm", "norm", "wait", "start", *products, "wait", "start"]
                    + [*products, "wait", *products],
                )
                log.clear()
                mixed = torch.randn(B, 8, HEADS // ctx.size, DIM, requires_grad=True)
                y = ulysses.async_ulysses_output_projection(
                    mixed, 1, 2, mine["proj_weight"], context=ctx
                )
                self.assertEqual(log, ["blocking", "product"])
                log.clear()
                y.backward(mine["dy"].detach())
                self.assertEqual(log, ["product", "start", "product", "wait"])

        contexts(2, body)

    def test_results_without_gradient(self):
        """A result that the loss does not use has a gradient of zeros; frozen weights have none."""
        t = case(8, 4, True, None)

        def body(ctx):
            x = local(t["x"], ctx).float().requires_grad_()
            w = {n: t[n].float() for n in ("q_weight", "q_bias", "k_weight", "k_bias", "v_bias")}
            w["v_weight"] = t["v_weight"].float().requires_grad_()
            qkv = [w[f"{n}_{kind}"] for n in "qkv" for kind in ("weight", "bias")]
            q, k, v = ulysses.async_ulysses_qkv_projection(x, 1, 2, *qkv, head_dim=4, context=ctx)
            q.sum().backward()
            want = w["q_weight"].sum(0).expand_as(x)
            torch.testing.assert_close(x.grad, want)
            self.assertEqual(w["v_weight"].grad.abs().max(), 0)
            self.assertIsNone(w["q_weight"].grad)

        contexts(2, body)

    def test_autocast(self):
        """Autocast projects in its dtype; the gradients of parameters keep theirs."""
        t = case(9, 4, True, "rmsnorm")

        def body(ctx):
            def layer(*args):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    return overlapped(*args).float()

            want, found = (run(f, t, "rmsnorm", True, ctx) for f in (overlapped, layer))
            self.assertFalse(torch.equal(found["y"], want["y"]))
            for name in want:
                self.assertEqual(found[name].dtype, torch.float32)
                self.assertLess(error(found[name], want[name]), 5e-2, name)

        contexts(2, body)

    def test_refusals(self):
        """Arguments that are wrong on one rank are refused on all ranks, with their names."""
        t = {n: None if x is None else x.float() for n, x in case(8, 2, True, "rmsnorm").items()}

        def body(ctx):
            def call(**change):
                a = dict(
                    hidden_states=local(t["x"], ctx),
                    seq_dimension=1,
                    head_dimension=2,
                    head_dim=DIM,
                    norm_type="rmsnorm",
                    context=ctx,
                    **{n: x for n, x in t.items() if "proj" not in n and len(n) > 2},
                )
                if ctx.rank == 1:
                    a |= change
                return ulysses.async_ulysses_qkv_projection(**a)

            call()
            for change, words in (
                (dict(q_weight=t["q_weight"].numpy()), "q_weight is ndarray"),
                (dict(k_weight=None), "k_weight is NoneType"),
                (dict(k_weight=t["k_weight"].double()), "k_weight is torch.float64"),
                (dict(k_weight=t["k_weight"][:7]), "k_weight has 7 rows"),
                (dict(v_weight=t["v_weight"][:4]), "v_bias has shape"),
                (dict(q_bias=t["k_bias"]), "q_bias has shape"),
                (dict(head_dim=0), "head_dim 0"),
                (dict(head_dim=8), "norm_q_weight has shape"),
                (dict(norm_type="batchnorm"), "norm_type 'batchnorm'"),
                (dict(norm_type=None), "norm_type None"),
                (dict(norm_k_weight=None), "give both"),
                (dict(norm_q_bias=t["norm_q_weight"]), "norm_q_bias"),
                (dict(normalized_shape=2 * DIM), "normalized_shape 8"),
                (dict(seq_dimension=2), "seq_dimension 2"),
                (dict(head_dimension=1), "head_dimension 1"),
                (dict(eps=1.0), "eps is"),
                (dict(padded=False), "padded=False"),
                (dict(hidden_states=local(t["x"], ctx)[:, 1:]), "tokens on the ranks"),
            ):
                with self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    call(**change)
            call()

        contexts(2, body)

        def odd(ctx):
            t = case(9, 2, False, None)
            x = local(t["x"], ctx).float()
            qkv = [t["q_weight"].float(), None, *[t["k_weight"].float(), None] * 2]
            with self.assertRaisesRegex(ulysses.InvalidArgument, "4 heads and 2 key heads on 3"):
                ulysses.async_ulysses_qkv_projection(x, 1, 2, *qkv, head_dim=4, context=ctx)
            with self.assertRaisesRegex(ulysses.InvalidArgument, "proj_weight has shape"):
                ulysses.async_ulysses_output_projection(x, 1, 2, torch.ones(2, 4), context=ctx)
            with self.assertRaisesRegex(ulysses.InvalidArgument, "unpadded_dim_size 2"):
                ulysses.async_ulysses_output_projection(
                    torch.ones(1, 9, 4), 1, 2, torch.ones(2, 12), None, 2, context=ctx
                )

        contexts(3, odd)

        def copies(ctx):
            t = {n: None if x is None else x.half() for n, x in case(8, 1, False, None).items()}
            qkv = [t["q_weight"], None, *[t["k_weight"], None] * 2]
            with self.assertRaisesRegex(ulysses.Unsupported, "dtype is F16"):
                ulysses.async_ulysses_qkv_projection(
                    local(t["x"], ctx), 1, 2, *qkv, head_dim=DIM, context=ctx
                )

        contexts(2, copies)
        with self.assertRaisesRegex(ulysses.Unsupported, "ring 2"):
            contexts(
                2, lambda ctx: run(overlapped, case(8, 2, False, None), None, True, ctx), ring=2
            )
