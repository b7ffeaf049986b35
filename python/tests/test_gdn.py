"""The gated delta rule, compared with its recurrence in float64 and with transformers.

Ranks are threads.
"""

import unittest

import numpy as np
import ulysses
from need import need_torch
from ranks import contexts, local
from reference import TOLERANCE, error

try:
    import torch
except ImportError:
    torch = None
try:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule
except ImportError:
    torch_chunk_gated_delta_rule = None


def draw(seed, b, s, hk, hv, dk, dv, docs):
    rng = np.random.default_rng(seed)
    x = [
        rng.standard_normal(shape, np.float32)
        for shape in ((b, s, hk, dk), (b, s, hk, dk), (b, s, hv, dv))
    ]
    g = -np.abs(rng.standard_normal((b, s, hv), np.float32)) * np.where(
        rng.random((b, s, hv)) < 0.1, 20, 1
    ).astype(np.float32)
    beta = rng.random((b, s, hv), np.float32)
    return (*x, g, beta, 0.3 * rng.standard_normal((docs, hv, dk, dv), np.float32))


def recurrence(q, k, v, g, beta, state, cu, l2norm):
    """Returns (o, final states), computed token by token in float64."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    b, s, hk, dk = q.shape
    hv = v.shape[2]
    if l2norm:
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k, v, g, beta = (x.reshape(b * s, *x.shape[2:]) for x in (q, k, v, g, beta))
    out, state = np.zeros_like(v), state.copy()
    for h in range(hv):
        for doc, (lo, hi) in enumerate(zip(cu, cu[1:])):
            S, j = state[doc, h], h // (hv // hk)
            for t in range(lo, hi):
                S *= np.exp(g[t, h])
                S += np.outer(k[t, j], beta[t, h] * (v[t, h] - S.T @ k[t, j]))
                out[t, h] = S.T @ q[t, j] / np.sqrt(dk)
    return out.reshape(b, s, hv, -1), state


CASES = [
    ((1, 21, 2, 4, 16, 8), None),
    ((2, 17, 2, 2, 8, 8), None),
    ((1, 23, 1, 3, 8, 16), (0, 1, 8, 12, 23)),
    ((1, 3, 2, 2, 8, 8), None),
]


class NumPy(unittest.TestCase):
    def test_against_the_recurrence(self):
        for seed, ((b, s, hk, hv, dk, dv), cu) in enumerate(CASES):
            ends = cu or tuple(range(0, b * s + 1, s))
            *x, state = draw(seed, b, s, hk, hv, dk, dv, len(ends) - 1)
            want, last = recurrence(*x, state, ends, True)
            for strategy in ("heads", "state"):

                def body(ctx):
                    return ulysses.chunk_gated_delta_rule(
                        *(local(y, ctx) for y in x),
                        initial_state=state,
                        output_final_state=True,
                        use_qk_l2norm_in_kernel=True,
                        cu_seqlens=cu,
                        seq=s,
                        strategy=strategy,
                        context=ctx,
                    )

                for size in (1, 2, 4):
                    with self.subTest(strategy, ranks=size, case=seed):
                        found = contexts(size, body)
                        self.assertLess(
                            error(np.concatenate([o for o, _ in found], 1), want), TOLERANCE
                        )
                        for _, final in found:
                            self.assertLess(error(final, last), TOLERANCE)

    def test_gradients(self):
        """Gradients of all inputs, compared with difference quotients of the recurrence."""
        (b, s, hk, hv, dk, dv), cu = (1, 13, 1, 2, 4, 6), (0, 1, 7, 13)
        inputs = draw(5, b, s, hk, hv, dk, dv, 3)
        rng = np.random.default_rng(6)
        do, dlast = (
            rng.standard_normal((b, s, hv, dv), np.float32),
            rng.standard_normal((3, hv, dk, dv), np.float32),
        )

        def loss(x):
            o, last = recurrence(*x, cu, False)
            return (o * do).sum() + (last * dlast).sum()

        want = []
        for i, x in enumerate(inputs):
            grad = np.zeros(x.shape)
            for at in np.ndindex(x.shape):
                moved = [y.astype(np.float64) for y in inputs]
                moved[i][at] += 1e-5
                up = loss(moved)
                moved[i][at] -= 2e-5
                grad[at] = (up - loss(moved)) / 2e-5
            want.append(grad)
        *x, state = inputs
        for strategy in ("heads", "state"):

            def body(ctx):
                _, _, call = ulysses.gated_delta_rule_forward(
                    *(local(y, ctx) for y in x),
                    initial_state=state,
                    output_final_state=True,
                    cu_seqlens=cu,
                    strategy=strategy,
                    context=ctx,
                )
                return ulysses.gated_delta_rule_backward(call, local(do, ctx), dlast)

            for size in (1, 3):
                found = contexts(size, body)
                for name, i in zip(("dq", "dk", "dv", "dg", "dbeta"), range(5)):
                    self.assertLess(
                        error(np.concatenate([r[i] for r in found], 1), want[i]),
                        2e-5,
                        (name, strategy, size),
                    )
                for r in found:
                    self.assertLess(error(r[5], want[5]), 2e-5, (strategy, size))

    def test_refusals(self):
        *x, state = draw(1, 1, 8, 2, 4, 8, 8, 1)
        with ulysses.Context() as ctx:
            for words, call in (
                (
                    "strategy",
                    lambda: ulysses.chunk_gated_delta_rule(*x, strategy="ring", context=ctx),
                ),
                (
                    "axes",
                    lambda: ulysses.chunk_gated_delta_rule(*x[:3], x[3][0], x[4], context=ctx),
                ),
                (
                    "multiple",
                    lambda: ulysses.chunk_gated_delta_rule(
                        *x[:2], x[2][:, :, :3], x[3], x[4], context=ctx
                    ),
                ),
                ("scale 0", lambda: ulysses.chunk_gated_delta_rule(*x, scale=0, context=ctx)),
                ("chunk", lambda: ulysses.chunk_gated_delta_rule(*x, chunk_size=3, context=ctx)),
                (
                    "chunk_size 16.7; .*0 to 65536",
                    lambda: ulysses.chunk_gated_delta_rule(*x, chunk_size=16.7, context=ctx),
                ),
                (
                    "chunk_size 4294967296",
                    lambda: ulysses.chunk_gated_delta_rule(*x, chunk_size=1 << 32, context=ctx),
                ),
                (
                    "state_in",
                    lambda: ulysses.chunk_gated_delta_rule(
                        *x, initial_state=state[:, :2], context=ctx
                    ),
                ),
                (
                    "cu_seqlens",
                    lambda: ulysses.chunk_gated_delta_rule(
                        *x, cu_seqlens=[0, 5, 3, 8], context=ctx
                    ),
                ),
                (
                    "save=False",
                    lambda: ulysses.gated_delta_rule_backward(
                        ulysses.gated_delta_rule_forward(*x, save=False, context=ctx)[2], x[2]
                    ),
                ),
            ):
                with self.subTest(words), self.assertRaisesRegex(ulysses.InvalidArgument, words):
                    call()
            ulysses.chunk_gated_delta_rule(*x, context=ctx)
            self.assertEqual(next(iter(ctx._plans.values())).describe()["strategy"], "heads")


@need_torch
class Torch(unittest.TestCase):
    @need_torch
    def test_many_lengths(self):
        """Each number of tokens has a plan. The context keeps some of them, a call has its own."""

        def body(ctx):
            def forward(s):
                x, g = (np.ones((1, s, 1, n), np.float32) for n in (16, 1))
                return ulysses.gated_delta_rule_forward(x, x, x, -g[..., 0], g[..., 0], context=ctx)

            out, _, call = forward(8)
            want = ulysses.gated_delta_rule_backward(call, out)
            for s in range(9, 80):
                forward(s)
            self.assertEqual(len(ctx._plans), 64)
            for a, b in zip(ulysses.gated_delta_rule_backward(call, out)[:5], want):
                np.testing.assert_array_equal(a, b)
            np.testing.assert_array_equal(forward(8)[0], out)

        contexts(2, body)

    def test_against_transformers(self):
        """Output, final state and all gradients, compared with transformers in float64."""
        b, s, hk, hv, dk, dv = 2, 70, 2, 4, 16, 8
        *x, state = (torch.from_numpy(y) for y in draw(9, b, s, hk, hv, dk, dv, b))
        w, wl = (
            torch.randn(b, s, hv, dv, generator=torch.Generator().manual_seed(1)),
            torch.randn(b, hv, dk, dv, generator=torch.Generator().manual_seed(2)),
        )

        class Float64:  # transformers' function converts its inputs to torch.float32
            def __enter__(self):
                self.kept, torch.float32 = torch.float32, torch.float64

            def __exit__(self, *_):
                torch.float32 = self.kept

        exact = [y.double().requires_grad_() for y in (*x, state)]
        with Float64():
            q, k = (y.repeat_interleave(hv // hk, 2) for y in exact[:2])
            o, last = torch_chunk_gated_delta_rule(
                q,
                k,
                exact[2],
                exact[3],
                exact[4],
                initial_state=exact[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
        self.assertEqual(o.dtype, torch.float64)
        ((o * w).sum() + (last * wl).sum()).backward()

        for strategy in ("heads", "state"):

            def body(ctx):
                shards = [local(y, ctx).clone().requires_grad_() for y in x]
                whole = state.clone().requires_grad_()
                o, last = ulysses.chunk_gated_delta_rule(
                    *shards,
                    initial_state=whole,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                    strategy=strategy,
                    seq=s,
                    context=ctx,
                )
                ((o * local(w, ctx)).sum() + (last * wl).sum()).backward()
                return [o.detach(), *(y.grad for y in shards)], last.detach(), whole.grad

            for size in (1, 2, 3):
                found = contexts(size, body)
                want = [o.detach(), *(y.grad for y in exact[:5])]
                for name, parts, y in zip(
                    ("o", "dq", "dk", "dv", "dg", "dbeta"), zip(*(r[0] for r in found)), want
                ):
                    self.assertLess(
                        error(torch.cat(parts, 1), y), TOLERANCE, (name, strategy, size)
                    )
                for _, final, grad in found:
                    self.assertLess(error(final, last.detach()), TOLERANCE)
                    self.assertLess(error(grad, exact[5].grad), TOLERANCE)

    def test_optional_outputs_and_gradients(self):
        """No final state, no gradient of o, gates of other dtypes, and inference."""
        *x, state = (torch.from_numpy(y) for y in draw(3, 1, 9, 1, 2, 8, 8, 1))

        def body(ctx):
            shards = [local(y, ctx).clone().requires_grad_() for y in x]
            gate = shards[4].detach().double().requires_grad_()
            o, last = ulysses.chunk_gated_delta_rule(*shards[:4], gate, seq=9, context=ctx)
            self.assertIsNone(last)
            o.sum().backward()
            self.assertEqual(gate.grad.dtype, torch.float64)
            o, last = ulysses.chunk_gated_delta_rule(
                *shards, output_final_state=True, seq=9, context=ctx
            )
            last.sum().backward()
            with torch.no_grad():
                self.assertIsNone(
                    ulysses.chunk_gated_delta_rule(*shards, seq=9, context=ctx)[0].grad_fn
                )

        contexts(2, body)


if __name__ == "__main__":
    unittest.main()
