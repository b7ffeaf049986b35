"""Attention on NumPy arrays, compared with float64. Ranks are threads of this process."""

import copy
import ctypes
import pickle
import threading
import unittest

import numpy as np
import ulysses
from ranks import contexts, local, run
from reference import TOLERANCE, attention, draw, error, mask


class Attention(unittest.TestCase):
    CASES = {
        "plain": dict(s=16, h=4),
        "causal, uneven rows, 3 heads": dict(s=11, h=3, causal=True),
        "2 key heads, 2 sequences": dict(b=2, s=13, h=6, hkv=2, causal=True),
        "1 key head": dict(s=12, h=4, hkv=1),
        "wider values": dict(s=9, h=2, d=8, dv=24),
        "window": dict(s=20, h=2, causal=True, window=(5, 0)),
        "window, both sides": dict(s=20, h=2, window=(3, 2)),
        "window, own key": dict(s=20, h=2, window=(0, 0)),
        "window, own key, causal": dict(s=19, h=2, causal=True, window=(0, 0), cu=[0, 1, 8, 19]),
        "documents": dict(s=17, h=4, hkv=2, causal=True, cu=[0, 1, 6, 17]),
        "cross": dict(s=7, sk=15, h=4),
        "cross, causal": dict(s=7, sk=15, h=4, causal=True),
        "scale": dict(s=8, h=2, scale=0.3),
        "fewer rows than ranks": dict(s=2, h=1),
    }

    def check(
        self,
        size,
        b=1,
        s=16,
        sk=None,
        h=4,
        hkv=None,
        d=16,
        dv=None,
        causal=False,
        window=None,
        cu=None,
        scale=None,
    ):
        hkv, dv = hkv or h, dv or d
        q, k, v, dout = (
            draw(1, b, s, h, d),
            draw(2, b, sk or s, hkv, d),
            draw(3, b, sk or s, hkv, dv),
            draw(4, b, s, h, dv),
        )

        options = dict(causal=causal, window=window, scale=scale, seq=s, kv_seq=sk, cu_seqlens=cu)

        def body(ctx):
            shards = [local(x, ctx) for x in (q, k, v)]
            out, lse, call = ulysses.attention_forward(*shards, lse=True, context=ctx, **options)
            again = ulysses.attention(*shards, context=ctx, **options)
            np.testing.assert_array_equal(out, again)
            return out, lse, *ulysses.attention_backward(call, local(dout, ctx))

        found = [np.concatenate(x, 1) for x in zip(*contexts(size, body))]
        want = attention(q, k, v, dout, scale, mask(s, sk or s, causal, window, cu))
        for name, a, b_ in zip(("out", "lse", "dq", "dk", "dv"), found, want):
            self.assertLess(error(a, b_), TOLERANCE, name)
        return found

    def test_cases(self):
        for name, case in self.CASES.items():
            one = None
            for size in (1, 2, 3):
                with self.subTest(name, ranks=size):
                    found = self.check(size, **case)
                    one = one or found
                    np.testing.assert_array_equal(found[0], one[0])  # bitwise equal to one rank
                    np.testing.assert_array_equal(found[2], one[2])

    def test_layouts(self):
        """Results are bitwise equal in any layout, and for views of other arrays."""
        q, k, v, dout = (
            draw(1, 2, 10, 4, 8),
            draw(2, 2, 10, 2, 8),
            draw(3, 2, 10, 2, 8),
            draw(4, 2, 10, 4, 8),
        )

        def body(ctx):
            shards = [local(x, ctx) for x in (q, k, v, dout)]
            out, _, call = ulysses.attention_forward(*shards[:3], causal=True, seq=10, context=ctx)
            grads = ulysses.attention_backward(call, shards[3])
            for layout, axes in (("SBHD", (1, 0, 2, 3)), ("BHSD", (0, 2, 1, 3))):
                for prepare in (
                    lambda x: np.ascontiguousarray(x.transpose(axes)),
                    lambda x: x.transpose(axes),
                ):
                    moved = [prepare(x) for x in shards]
                    other, _, call = ulysses.attention_forward(
                        *moved[:3], causal=True, seq=10, layout=layout, context=ctx
                    )
                    np.testing.assert_array_equal(other, out.transpose(axes))
                    for a, b in zip(ulysses.attention_backward(call, moved[3]), grads):
                        np.testing.assert_array_equal(a, b.transpose(axes))
            packed = [x[0] for x in shards]
            other, lse, call = ulysses.attention_forward(
                *packed[:3], causal=True, seq=10, layout="THD", lse=True, context=ctx
            )
            np.testing.assert_array_equal(other, out[0])
            self.assertEqual(lse.shape, packed[0].shape[:2])
            np.testing.assert_array_equal(
                ulysses.attention_backward(call, packed[3])[0], grads[0][0]
            )

        for size in (1, 2):
            contexts(size, body)

    def test_reversed_view(self):
        q = draw(1, 1, 8, 4, 8)
        with ulysses.Context() as ctx:
            np.testing.assert_array_equal(
                ulysses.attention(q[:, ::-1], q, q, context=ctx),
                ulysses.attention(q[:, ::-1].copy(), q, q, context=ctx),
            )

    def test_expanded_gradient(self):
        """A gradient with zero strides, such as the gradient of sum(), is copied."""
        q = draw(1, 1, 6, 2, 8)

        def body(ctx):
            x = local(q, ctx)
            out, _, call = ulysses.attention_forward(x, x, x, seq=6, context=ctx)
            a = ulysses.attention_backward(call, np.broadcast_to(np.float32(2), out.shape))
            b = ulysses.attention_backward(call, np.full(out.shape, 2, np.float32))
            for x, y in zip(a, b):
                np.testing.assert_array_equal(x, y)

        contexts(2, body)

    def test_200_lengths_on_one_plan(self):
        def body(ctx):
            for s in range(1, 201):
                q = local(draw(s, 1, s, 2, 8), ctx)
                out = ulysses.attention(q, q, q, causal=True, seq=s, context=ctx)
                if s % 40 == 1:
                    whole = draw(s, 1, s, 2, 8)
                    want, _ = attention(whole, whole, whole, see=mask(s, s, True))
                    self.assertLess(error(out, local(want, ctx)), TOLERANCE)
            self.assertEqual(len(ctx._plans), 1)
            self.assertLessEqual(len(ctx._batches), 64)

        contexts(2, body)

    def test_backward_after_the_context_dropped_its_batch(self):
        def body(ctx):
            q = local(draw(1, 1, 300, 2, 8), ctx)
            _, _, call = ulysses.attention_forward(q, q, q, seq=300, context=ctx)
            want = ulysses.attention_backward(call, q)
            for s in range(2, 80):
                x = local(draw(s, 1, s, 2, 8), ctx)
                ulysses.attention(x, x, x, seq=s, context=ctx)
            for a, b in zip(ulysses.attention_backward(call, q), want):
                np.testing.assert_array_equal(a, b)

        contexts(2, body)

    def test_dlpack(self):
        """An array of another library needs only __dlpack__."""

        class Other:
            def __init__(self, x):
                self.x, self.shape, self.dtype = x, x.shape, x.dtype

            def __dlpack__(self, **_):
                return self.x.__dlpack__()

            def __dlpack_device__(self):
                return self.x.__dlpack_device__()

        from ulysses.tensors import view

        x = draw(1, 2, 3, 4).transpose(1, 0, 2)
        a, b = view(Other(x)), view(x)
        self.assertEqual(
            (a.data, a.shape, a.strides, a.dtype, a.device),
            (b.data, b.shape, b.strides, b.dtype, b.device),
        )
        q = draw(2, 1, 9, 2, 8)
        for kind in (lambda x: x, lambda x: x[..., ::-1], lambda x: x.transpose(0, 1, 3, 2)):
            q, results = kind(q), []
            with ulysses.Context(threads=1) as ctx:
                for array in (lambda x: x, Other):
                    out, _, call = ulysses.attention_forward(*(array(q),) * 3, context=ctx)
                    results.append((out, *ulysses.attention_backward(call, array(q))))
            for found, want in zip(*results):
                np.testing.assert_array_equal(found, want)


class Faults(unittest.TestCase):
    def test_dtypes(self):
        """A message names the types that the call accepts, which are not all of the library's."""
        q, g = draw(1, 1, 8, 4, 8), draw(2, 1, 8, 4)
        want = "give float32 or bfloat16, in which the devices compute"
        with ulysses.Context() as ctx:
            for name in ("float64", "float16", "int32"):
                x = q.astype(name)
                for call in (
                    lambda: ulysses.attention(x, x, x, context=ctx),
                    lambda: ulysses.attention(q, q, x, context=ctx),
                    lambda: ulysses.chunk_gated_delta_rule(x, x, x, g, g, context=ctx),
                ):
                    with self.assertRaisesRegex(ulysses.Unsupported, f"dtype {name}; {want}"):
                        call()

    def test_arguments(self):
        q = draw(1, 1, 8, 4, 8)
        with ulysses.Context() as ctx:
            for words, call in (
                ("layout", lambda: ulysses.attention(q, q, q, layout="BSDH", context=ctx)),
                ("axes", lambda: ulysses.attention(q[0], q, q, context=ctx)),
                ("float64", lambda: ulysses.attention(q.astype(np.float64), q, q, context=ctx)),
                ("heads", lambda: ulysses.attention(q, q[:, :, :3], q[:, :, :3], context=ctx)),
                ("rows", lambda: ulysses.attention(q, q, q, seq=9, context=ctx)),
                (
                    "cu_seqlens",
                    lambda: ulysses.attention(q, q, q, cu_seqlens=[0, 5, 3, 8], context=ctx),
                ),
                (
                    "whole numbers",
                    lambda: ulysses.attention(q, q, q, cu_seqlens=[0, 5.5, 8], context=ctx),
                ),
                ("whole numbers", lambda: ulysses.attention(q, q, q, cu_seqlens=[], context=ctx)),
                (
                    "of 2 sequences",
                    lambda: ulysses.attention(
                        *[q.reshape(2, 4, 4, 8)] * 3, cu_seqlens=[0, 4, 7], context=ctx
                    ),
                ),
                ("whole numbers", lambda: ulysses.halo(q, 1, cu_seqlens=[0.5, 8], context=ctx)),
                ("left, right", lambda: ulysses.attention(q, q, q, window=5, context=ctx)),
                (
                    "save=False",
                    lambda: ulysses.attention_backward(
                        ulysses.attention_forward(q, q, q, save=False, context=ctx)[2], q
                    ),
                ),
                ("not an array", lambda: ulysses.attention([1], q, q, context=ctx)),
                ("seq 8.0; .*from 1", lambda: ulysses.attention(q, q, q, seq=8.0, context=ctx)),
                ("kv_seq 0; .*from 1", lambda: ulysses.attention(q, q, q, kv_seq=0, context=ctx)),
                (
                    "8 tokens and 0 keys",
                    lambda: ulysses.attention(q, q[:, :0], q[:, :0], context=ctx),
                ),
            ):
                with self.subTest(words), self.assertRaisesRegex(Exception, words) as caught:
                    call()
                self.assertIsInstance(caught.exception, ulysses.UlyssesError)
            ulysses.attention(q, q, q, context=ctx)  # the context still works

    def test_batches_that_are_deleted_during_a_call(self):
        """They are destroyed after the call, and no other thread waits for its end."""

        def valid(handle):
            info = ulysses._struct.BatchInfo()
            library = ulysses._library.library()
            return library.ulysses_batch_query(handle, ctypes.byref(info)) == 0

        def body(comm):
            batches, found = {}, []

            def allgather(send, receive):
                if batches:
                    batches.pop("own")
                    other = threading.Thread(target=lambda: batches.pop("other"))
                    other.start()
                    other.join(30)
                    found.append(other.is_alive())
                comm.allgather(send, receive)

            callbacks = ulysses.Callbacks(comm.rank, comm.size, allgather, comm.alltoallv)
            with ulysses.Context(callbacks, threads=1) as ctx:
                own, other = (ctx._batch(ulysses.Sequences(1, seq)) for seq in (8, 9))
                handles = [ctypes.c_void_p(b.handle.value) for b in (own, other)]
                self.assertTrue(all(map(valid, handles)))
                ctx._batches.clear()
                batches.update(own=own, other=other)
                del own, other
                ctx._call("ulysses_loss_reduce", ctx.handle, *map(ctypes.byref, numbers()))
                return found, [valid(h) for h in handles]

        def numbers():
            return ctypes.c_double(1), ctypes.c_int64(1), ctypes.c_double()

        self.assertEqual(run(2, body), [([False], [False, False])] * 2)

    def test_after_close(self):
        q = draw(1, 1, 8, 4, 8)
        ctx = ulysses.Context()
        _, _, call = ulysses.attention_forward(q, q, q, context=ctx)
        ctx.close()
        ctx.close()
        for late in (
            lambda: ulysses.attention(q, q, q, context=ctx),
            lambda: ulysses.attention_backward(call, q),
        ):
            with self.assertRaisesRegex(ulysses.InvalidArgument, "closed"):
                late()
        with self.assertRaisesRegex(ulysses.InvalidArgument, "no context"):
            ulysses.attention(q, q, q)
        group = object()  # such as a process group
        with self.assertRaisesRegex(ulysses.InvalidArgument, "type object; give a ulysses.Context"):
            ulysses.attention(q, q, q, context=group)

    def test_copies(self):
        """The message names the context: copy.deepcopy of a model does not say what it reached."""
        with ulysses.Context() as ctx:
            q = draw(1, 1, 8, 4, 8)
            call = ulysses.attention_forward(q, q, q, context=ctx)[2]
            for x in (ctx, call, {"model": [ctx]}):
                for copied in (copy.deepcopy, copy.copy, pickle.dumps):
                    if copied is not copy.copy or x is ctx:
                        with self.assertRaisesRegex(ulysses.Unsupported, "ulysses.use"):
                            copied(x)

    def test_two_contexts(self):
        q = draw(1, 1, 8, 4, 8)

        def body(ctx):
            with ulysses.Context() as alone:
                whole = ulysses.attention(q, q, q, context=alone)
                x = local(q, ctx)
                out = ulysses.attention(x, x, x, seq=8, context=ctx)
                np.testing.assert_array_equal(out, local(whole, ctx))
            return out

        contexts(2, body)

    def test_ranks_that_disagree(self):
        """Every rank raises, and the context still works."""

        def body(ctx):
            q = draw(1, 1, 4, 4 + 4 * ctx.rank, 8)
            with self.assertRaisesRegex(ulysses.UlyssesError, "heads"):
                ulysses.attention(q, q, q, context=ctx)
            q = draw(1, 1, 4, 4, 8)
            ulysses.attention(q, q, q, context=ctx)

        contexts(2, body)

    def test_a_callback_that_fails(self):
        """The exception of the callback is the cause of the call's exception."""

        def fail(*_):
            raise RuntimeError("network gone")

        with self.assertRaises(ulysses.UlyssesError) as caught:
            ulysses.Context(ulysses.Callbacks(0, 2, fail, fail))
        self.assertIn("network gone", str(caught.exception.__cause__))

    def test_library_not_found(self):
        import os

        from ulysses import _library

        before = os.environ.get("ULYSSES_LIBRARY")
        os.environ["ULYSSES_LIBRARY"] = "/nowhere/libulysses.so"
        try:
            with self.assertRaisesRegex(ulysses.DeviceError, "/nowhere.*make lib"):
                _library._open()
        finally:
            if before is None:
                del os.environ["ULYSSES_LIBRARY"]
            else:
                os.environ["ULYSSES_LIBRARY"] = before
        with self.assertRaisesRegex(ulysses.DeviceError, "version 1.0"):
            _library.check_version(10000)
        with self.assertRaisesRegex(ulysses.DeviceError, "version 0.0"):
            _library.check_version(99)


if __name__ == "__main__":
    unittest.main()
