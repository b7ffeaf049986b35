"""Tensors on a GPU.

Without a GPU, the tests use the emulated plug-in (make cuda-emulated) and a small module in place
of PyTorch, whose tensors are in the plug-in's memory. Run as a program on a machine with a GPU and
PyTorch (scripts/gpu-check.sh), the file tests PyTorch's tensors.
"""

import ctypes
import os
import pathlib
import sys
import types
import unittest

import children
import numpy as np
from need import need

ROOT = pathlib.Path(__file__).resolve().parents[2]
EMULATED = os.environ.get(
    "ULYSSES_CUDA_PLUGIN", str(ROOT / "build" / "cuda" / "libulysses_cuda_emulated.so")
)
SHAPE = (2, 13, 4, 8)


def runtime(path):
    """Returns a library with the functions of the CUDA runtime, with their signatures."""
    lib = ctypes.CDLL(path)
    lib.cudaMalloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t]
    lib.cudaMemcpyAsync.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    lib.cudaMemsetAsync.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p]
    lib.cudaStreamCreateWithFlags.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint]
    lib.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
    return lib


def torch_on(cuda):
    """Returns a module with the functions of PyTorch that the package calls.

    Its tensors are in the memory of a CUDA runtime. New memory holds NaN. The current stream is not
    the default stream.
    """
    torch = types.ModuleType("torch")
    stream = ctypes.c_void_p()
    assert cuda.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
    sizes = {"float32": 4, "uint8": 1}

    class Tensor:
        def __init__(self, shape, dtype, index=0, base=None, at=0):
            """A new tensor, or a row-major one at a number of bytes in the tensor `base`."""
            self.shape, self.dtype, self.is_cuda, self.layout = tuple(shape), dtype, True, "strided"
            self.device = types.SimpleNamespace(type="cuda", index=index)
            self.size = sizes[dtype.removeprefix("torch.")]
            self.bytes = int(np.prod(self.shape)) * self.size
            self.base, self.at = base or self, at
            if base is not None:
                assert 0 <= at <= base.bytes - self.bytes and at % self.size == 0
                self.memory = ctypes.c_void_p(base.memory.value + at)
                return
            self.memory = ctypes.c_void_p()
            assert cuda.cudaMalloc(ctypes.byref(self.memory), max(self.bytes, 1)) == 0
            assert cuda.cudaMemsetAsync(self.memory, 255, self.bytes, stream) == 0

        def __getitem__(self, part):
            """A range of a tensor with one axis."""
            lo, hi, _ = part.indices(self.shape[0])
            at = self.at + lo * self.size
            return Tensor((hi - lo,), self.dtype, self.device.index, self.base, at)

        def view(self, dtype):
            n = self.bytes // sizes[dtype.removeprefix("torch.")]
            return Tensor((n,), dtype, self.device.index, self.base, self.at)

        def storage_offset(self):
            return self.at // self.size

        def as_strided(self, shape, strides, offset):
            found = Tensor(shape, self.dtype, self.device.index, self.base, offset * self.size)
            assert tuple(strides) == found.stride(), "only row-major tensors"
            return found

        def copy_(self, array):
            """Writes an array of NumPy in the order of the stream."""
            array = np.ascontiguousarray(array, np.float32)
            assert array.shape == self.shape
            data = array.ctypes.data
            assert cuda.cudaMemcpyAsync(self.memory, data, self.bytes, 1, stream) == 0
            assert cuda.cudaStreamSynchronize(stream) == 0

        def data_ptr(self):
            return self.memory.value

        def stride(self):
            return tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))

        def is_neg(self):
            return False

        def numpy(self):
            out = np.empty(self.shape, np.float32)
            assert cuda.cudaMemcpyAsync(out.ctypes.data, self.memory, self.bytes, 2, stream) == 0
            assert cuda.cudaStreamSynchronize(stream) == 0
            return out

        def peek(self):
            """Returns the first element without waiting; this GPU memory is host memory."""
            return ctypes.c_float.from_address(self.memory.value).value

    def tensor(array):
        t = Tensor(array.shape, "torch.float32")
        array = np.ascontiguousarray(array, np.float32)
        assert cuda.cudaMemcpyAsync(t.memory, array.ctypes.data, t.bytes, 1, stream) == 0
        return t

    torch.Tensor, torch.tensor, torch.strided, torch.uint8, torch.float32 = (
        Tensor,
        tensor,
        "strided",
        "torch.uint8",
        "torch.float32",
    )
    torch.empty = lambda shape, dtype, device: Tensor(
        (shape,) if isinstance(shape, int) else shape, dtype, device.index
    )
    torch.cuda = types.SimpleNamespace(
        current_stream=lambda device: types.SimpleNamespace(cuda_stream=stream.value),
        current_device=lambda: 0,
        is_available=lambda: True,
    )
    return torch


def local_on_gpu(ctx, tensors, arrays, grads, want):
    """A caller's own attention on a GPU: it reads and writes the memory of the call in place.

    The function is the causal attention of NumPy, so that results are the ones of `attention`.
    """
    import ulysses
    from reference import attention, mask

    see, seen = mask(SHAPE[1], SHAPE[1], True), []

    def forward(t):
        seen.append((t.heads, t.kv_heads, t.q.is_cuda, t.q.shape))
        assert (t.q.numpy() == arrays[0]).all() and (t.v.numpy() == arrays[2]).all()
        t.out.copy_(attention(t.q.numpy(), t.k.numpy(), t.v.numpy(), see=see)[0])

    def backward(t):
        read = [x.numpy() for x in (t.q, t.k, t.v, t.dout)]
        assert np.abs(t.out.numpy() - want).max() <= 4e-5 * np.abs(want).max()
        for target, x in zip((t.dq, t.dk, t.dv), attention(*read, see=see)[2:]):
            target.copy_(x)

    heads = (0, SHAPE[2])
    for save in (False, True):
        out, call = ulysses.local_attention_forward(*tensors[:3], forward, save=save, context=ctx)
        assert np.abs(out.numpy() - want).max() <= 4e-5 * np.abs(want).max()
    assert seen == [(heads, heads, True, SHAPE)] * 2, seen
    for a, b in zip(ulysses.local_attention_backward(call, tensors[3], backward), grads):
        assert np.abs(a.numpy() - b).max() <= 4e-5 * np.abs(b).max()
    ctx.check()


def emulated():
    """Compares attention on the emulated GPU with the CPU. Runs in a separate process."""
    import ulysses
    from ulysses import InvalidArgument, Unsupported
    from ulysses.attention import attention_backward, attention_forward

    r = np.random.default_rng(7)
    q, k, v, dout = (r.standard_normal(SHAPE).astype(np.float32) for _ in range(4))
    with ulysses.Context(threads=1) as cpu:
        want, _, call = attention_forward(q, k, v, save=True, causal=True, context=cpu)
        grads = attention_backward(call, dout)
    torch = sys.modules["torch"] = torch_on(runtime(os.environ["ULYSSES_CUDA_PLUGIN"]))
    assert ulysses.build_info()["devices"] == ["cpu", "cuda"], ulysses.build_info()
    with ulysses.Context(device="cuda") as ctx:
        assert (ctx.device, ctx.ordinal) == ("cuda", 0)
        x = [torch.tensor(a) for a in (q, k, v, dout)]
        out, lse, call = attention_forward(*x[:3], save=True, lse=True, causal=True, context=ctx)
        got = attention_backward(call, x[3])
        assert np.isnan(out.peek()) and np.isnan(got[0].peek()), "a call has waited for the GPU"
        for a, b in zip((out, *got), (want, *grads)):
            assert np.abs(a.numpy() - b).max() <= 4e-5 * np.abs(b).max()
        plans = {}
        for deterministic in (False, True):
            out, _, call = attention_forward(
                *x[:3], save=True, causal=True, deterministic=deterministic, context=ctx
            )
            plans[deterministic] = call.plan
            again = attention_backward(call, x[3])
            assert all((a.numpy() == b.numpy()).all() for a, b in zip(again, got)), deterministic
        assert plans[False] is not plans[True] and plans[True].describe()["attention"] == {
            "forward": "own",
            "backward": "own",
        }, plans[True].describe()
        try:
            ctx.plan(heads=1, head_dim=272, deterministic=True)
            raise AssertionError("no kernel has 272 features, but the plan was made")
        except Unsupported as e:
            assert "dim 272" in str(e) and "256 features at most" in str(e), e
        ctx.check()
        local_on_gpu(ctx, x, (q, k, v, dout), grads, want)

        class Array:
            shape, dtype = SHAPE, "float32"
            __cuda_array_interface__ = {
                "shape": SHAPE,
                "typestr": "<f4",
                "data": (x[0].data_ptr(), False),
                "version": 3,
            }

        view = ulysses.tensors.view(Array())
        assert (view.device, view.ordinal, view.dtype, view.strides) == (
            ulysses._struct.CUDA,
            0,
            ulysses._struct.F32,
            (416, 32, 8, 1),
        )
        for error, tensors in (
            (Unsupported, [Array()] * 3),
            (InvalidArgument, [q, k, v]),
            # another GPU than the context's
            (InvalidArgument, [torch.Tensor(SHAPE, "torch.float32", 1)] + x[1:3]),
        ):
            try:
                attention_forward(*tensors, save=False, context=ctx)
                raise AssertionError(f"{error.__name__} was expected")
            except error as e:
                assert "GPU" in str(e) or "device" in str(e), e
    with ulysses.Context(threads=1) as cpu:
        try:
            attention_forward(*x[:3], save=False, context=cpu)
            raise AssertionError("a context on the CPU accepted GPU memory")
        except InvalidArgument as e:
            assert "q is on a GPU" in str(e) and "the CPU" in str(e), e
    for options in ({"ordinal": 99}, {"ordinal": -1}, {"way": "pigeon"}, {"threads": 3}):
        try:
            ulysses.Context(device="cuda", **options)
            raise AssertionError(f"Context accepted {options}")
        except InvalidArgument:
            pass
    print("ok")


@need(
    "emulated" in EMULATED and os.path.exists(EMULATED),
    "no emulated plug-in",
    "run make cuda-emulated",
)
class Emulated(unittest.TestCase):
    def test_calls(self):
        for seed in ("1", "2", "3"):
            done = children.run(
                ["python", "-c", "import test_gpu; test_gpu.emulated()"],
                env=children.environment(ULYSSES_CUDA_PLUGIN=EMULATED, ULYSSES_EMULATED_SEED=seed),
            )
            self.assertEqual(done.stdout, "ok\n", done.stderr)


def on_gpu():
    """Tests tensors, streams and autograd of PyTorch on a GPU."""
    import torch
    import ulysses

    torch.manual_seed(7)
    with ulysses.Context(device="cuda") as ctx:
        for dtype, limit in ((torch.float32, 4e-5), (torch.bfloat16, 2e-2)):
            x = [torch.randn(SHAPE, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # The first call makes the plan, and PyTorch allocates its memory.
                ulysses.attention(*x, causal=True, context=ctx).sum().backward()
                torch.cuda.synchronize()
                for t in x:
                    t.grad = None
                torch.cuda._sleep(1_000_000_000)  # half a second, for which the call must not wait
                out = ulysses.attention(*x, causal=True, context=ctx)
                asynchronous = not side.query()
                (out * 2).sum().backward()  # an expanded gradient
            torch.cuda.current_stream().wait_stream(side)
            got = [out.detach()] + [t.grad for t in x]
            y = [t.detach().double().transpose(1, 2).requires_grad_() for t in x]
            want = torch.nn.functional.scaled_dot_product_attention(*y, is_causal=True)
            (want * 2).sum().backward()
            for a, b in zip(got, [want.transpose(1, 2)] + [t.grad.transpose(1, 2) for t in y]):
                assert (a.double() - b).abs().max() <= limit * b.abs().max(), (
                    dtype,
                    (a.double() - b).abs().max(),
                    b.abs().max(),
                )
            assert asynchronous, "a call has waited for the GPU"
            local_in_torch(ctx, dtype, limit)
        ctx.check()
    print("ok")


def local_in_torch(ctx, dtype, limit):
    """A caller's own attention on a GPU, forward and backward, on a stream of its own."""
    import torch
    import ulysses

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2)

    x = [torch.randn(SHAPE, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        out = ulysses.local_attention(*x, attend, context=ctx)
        out.square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    exact = [t.detach().double().requires_grad_() for t in x]
    want = attend(*exact)
    want.square().sum().backward()
    for a, b in zip([out.detach(), *(t.grad for t in x)], [want, *(t.grad for t in exact)]):
        assert (a.double() - b).abs().max() <= limit * b.abs().max(), dtype


if __name__ == "__main__":  # scripts/gpu-check.sh
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        print("SKIPPED: no PyTorch with a GPU")
        sys.exit(77)
    on_gpu()
