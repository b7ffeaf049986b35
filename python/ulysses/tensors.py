"""Arrays of NumPy, PyTorch and any library with DLPack, seen by the library without a copy.

A `View` is a pointer, a shape and strides in elements; its axes can be reordered like an array's, whatever library made it.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import _struct
from .errors import InvalidArgument, Unsupported

_NUMPY = {
    "float32": _struct.F32,
    "float16": _struct.F16,
    "bfloat16": _struct.BF16,
    "int32": _struct.I32,
    "int64": _struct.I64,
    "uint8": _struct.U8,
}
NAMES = {code: name for name, code in _NUMPY.items()}


def torch_or_none() -> Any:
    """PyTorch if the host has imported it; it is never imported here."""
    return sys.modules.get("torch")


def is_torch(x: Any) -> bool:
    torch = torch_or_none()
    return torch is not None and isinstance(x, torch.Tensor)


def one_library(**arrays: Any) -> None:
    """Refuses PyTorch's tensors beside arrays of others: autograd would see a part of the inputs alone, and leave gradients out without a word."""
    torch = [name for name, x in arrays.items() if is_torch(x)]
    others = [name for name, x in arrays.items() if x is not None and name not in torch]
    if torch and others:
        raise InvalidArgument(
            f"ulysses: {', '.join(torch)} of PyTorch beside {', '.join(others)} of another library: give all of one, by torch.as_tensor or .numpy()"
        )


class View:
    """A tensor as the library takes it. Keeps the array alive, and the shape and strides that the C struct points to."""

    __slots__ = ("owner", "data", "device", "ordinal", "dtype", "shape", "strides", "_c")

    def __init__(
        self,
        owner: Any,
        data: int,
        device: int,
        ordinal: int,
        dtype: int,
        shape: Sequence[int],
        strides: Sequence[int],
    ):
        self.owner, self.data, self.device, self.ordinal, self.dtype = (
            owner,
            data,
            device,
            ordinal,
            dtype,
        )
        self.shape = tuple(shape)
        self._c: Any = None  # what pointer() returns, and what it points to
        self.strides = (
            tuple(strides) if 0 not in self.shape else tuple(dense_strides(self.shape))
        )  # NumPy gives empty arrays strides of 0

    def permute(self, *axes: int) -> View:
        """The same memory with its axes in another order."""
        return View(
            self.owner,
            self.data,
            self.device,
            self.ordinal,
            self.dtype,
            [self.shape[i] for i in axes],
            [self.strides[i] for i in axes],
        )

    def pointer(self) -> Any:
        """A ulysses_tensor* that lives as long as the view."""
        if self._c is None:
            n = len(self.shape)
            shape, strides = (ctypes.c_int64 * n)(*self.shape), (ctypes.c_int64 * n)(*self.strides)
            t = _struct.Tensor(
                data=self.data,
                device=self.device,
                ordinal=self.ordinal,
                ndim=n,
                code=self.dtype & 255,
                bits=self.dtype >> 8,
                lanes=1,
                shape=ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
                strides=ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
            )
            self._c = (ctypes.pointer(t), t, shape, strides)
        return self._c[0]


class _Managed(ctypes.Structure):  # DLPack's DLManagedTensor, the part that is read
    _fields_ = [("tensor", _struct.Tensor)]


def dtype_of(x: Any) -> int:
    """The library's number for an array's type; InvalidArgument where it has none."""
    name = str(x.dtype).removeprefix("torch.")
    if name not in _NUMPY:
        raise Unsupported(f"ulysses: dtype {name}: give one of {', '.join(_NUMPY)}")
    return _NUMPY[name]


def view(x: Any) -> View:
    """A view of a NumPy array, a PyTorch tensor on the CPU or a CUDA device, or anything with __dlpack__ or __cuda_array_interface__. Nothing is copied."""
    if isinstance(x, np.ndarray):
        if any(s % x.itemsize for s in x.strides):
            raise InvalidArgument(
                f"ulysses: an array with strides of {x.strides} bytes and elements of {x.itemsize}: copy it first"
            )
        return View(
            x,
            x.ctypes.data,
            _struct.CPU,
            0,
            dtype_of(x),
            x.shape,
            [s // x.itemsize for s in x.strides],
        )
    if is_torch(x):
        device = {"cpu": _struct.CPU, "cuda": _struct.CUDA}.get(x.device.type)
        if device is None or x.layout is not torch_or_none().strided:
            raise Unsupported(
                f"ulysses: a tensor on {x.device} with layout {x.layout}: bring a strided one on the CPU or a CUDA device"
            )
        return View(x, x.data_ptr(), device, x.device.index or 0, dtype_of(x), x.shape, x.stride())
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda(x)
    raise InvalidArgument(
        f"ulysses: {type(x).__name__} is no array: give a NumPy array, a PyTorch tensor or an object with __dlpack__"
    )


_TYPESTR = {
    "<f4": _struct.F32,
    "<f2": _struct.F16,
    "<i4": _struct.I32,
    "<i8": _struct.I64,
    "|u1": _struct.U8,
}


def _from_cuda(x: Any) -> View:
    """The CUDA array interface does not name the GPU: it is the current one, and the library refuses memory of another."""
    a = x.__cuda_array_interface__
    dtype, strides = _TYPESTR.get(a["typestr"]), a.get("strides")
    if dtype is None:
        raise Unsupported(
            f"ulysses: __cuda_array_interface__ of type {a['typestr']}: give one of {', '.join(_TYPESTR)}"
        )
    size = int(a["typestr"][2:])
    if strides is not None and any(s % size for s in strides):
        raise InvalidArgument(
            f"ulysses: an array with strides of {strides} bytes and elements of {size}: copy it first"
        )
    steps = dense_strides(a["shape"]) if strides is None else [s // size for s in strides]
    return View(x, a["data"][0], _struct.CUDA, current_gpu(), dtype, a["shape"], steps)


def _from_dlpack(x: Any) -> View:
    capsule = x.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    t = _Managed.from_address(get(capsule, b"dltensor")).tensor
    shape = [t.shape[i] for i in range(t.ndim)]
    strides = [t.strides[i] for i in range(t.ndim)] if t.strides else dense_strides(shape)
    # The capsule, which was not consumed, frees the tensor when the view goes.
    return View(
        (x, capsule),
        (t.data or 0) + t.byte_offset,
        t.device,
        t.ordinal,
        t.code | t.bits << 8,
        shape,
        strides,
    )


def dense_strides(shape: Sequence[int]) -> list[int]:
    """The row-major strides of a shape, in elements."""
    strides, n = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i], n = n, n * max(1, shape[i])
    return strides


def dense(x: Any) -> Any:
    """x, or a row-major copy if x is not row-major."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(x)


def without_zero_strides(x: Any) -> Any:
    """x, or a copy where it repeats elements (stride 0, as the gradient of sum() does), runs backwards or its last axis is not dense. The library refuses them."""
    v = x if isinstance(x, View) else view(x)
    refused = any(s <= 0 and n > 1 for n, s in zip(v.shape, v.strides))
    if not refused and (v.shape[-1:] in ((), (0,), (1,)) or v.strides[-1] == 1):
        return x
    return dense(x)


def empty(like: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """An array of like's library and device, not filled. dtype is one of the library's numbers; None = like's."""
    if is_torch(like):
        torch = torch_or_none()
        return torch.empty(
            tuple(shape),
            dtype=like.dtype if dtype is None else getattr(torch, NAMES[dtype]),
            device=like.device,
        )
    _host_only(like)
    return np.empty(tuple(shape), dtype=np.asarray(like).dtype if dtype is None else NAMES[dtype])


def _host_only(like: Any) -> None:
    if not isinstance(like, np.ndarray) and view(like).device != _struct.CPU:
        raise Unsupported(
            f"ulysses: {type(like).__name__} lies on a GPU, where results are made for PyTorch alone: give torch.as_tensor of it"
        )


def block(like: Any, size: int) -> Any:
    """size bytes where like lives, aligned to 64 bytes on the CPU (256 on CUDA, by PyTorch's allocator)."""
    if is_torch(like):
        return torch_or_none().empty(size, dtype=torch_or_none().uint8, device=like.device)
    _host_only(like)
    whole = np.empty(size + 64, np.uint8)
    lo = -whole.ctypes.data % 64
    return whole[lo : lo + size]


def stream_of(x: Any) -> int | None:
    """PyTorch's current stream on a CUDA tensor's device: the library enqueues there. None on the CPU."""
    if is_torch(x) and x.is_cuda:
        return torch_or_none().cuda.current_stream(x.device).cuda_stream
    return None


def current_gpu() -> int:
    """PyTorch's current GPU in this thread; 0 without PyTorch."""
    torch = torch_or_none()
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
