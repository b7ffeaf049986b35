"""Passes arrays of NumPy, PyTorch and other libraries to libulysses.so without copying them.

`view` returns a `View` of an array: its address, shape and strides. `empty` and `block` allocate
results and memory on the device of another array. The other functions hide the differences between
NumPy and PyTorch.
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
_COMPUTE = ("float32", "bfloat16")
NAMES = {code: name for name, code in _NUMPY.items()}


def torch_or_none() -> Any:
    """Returns the module torch if the program has imported it, else None. Imports nothing."""
    return sys.modules.get("torch")


def is_torch(x: Any) -> bool:
    torch = torch_or_none()
    return torch is not None and isinstance(x, torch.Tensor)


def wants_gradient(*arrays: Any) -> bool:
    """Reports whether autograd will want gradients of a call with these arrays.

    Ranks agree on it: a rank without a backward pass would let those with one wait.
    """
    if not any(is_torch(x) for x in arrays):
        return False
    from ._torch import wants_gradient

    return wants_gradient(*arrays)


def one_library(**arrays: Any) -> None:
    """Raises InvalidArgument if some arrays are PyTorch tensors and others are not.

    Autograd would see only the tensors, and the gradients of the other arrays would be lost.
    """
    torch = [name for name, x in arrays.items() if is_torch(x)]
    others = [name for name, x in arrays.items() if x is not None and name not in torch]
    if torch and others:
        raise InvalidArgument(
            f"ulysses: PyTorch tensors ({', '.join(torch)}) together with arrays of another "
            f"library ({', '.join(others)}); convert all of them with torch.as_tensor or .numpy()"
        )


class View:
    """Address, shape and strides of an array, for the C struct ulysses_tensor.

    A view owns no elements. It keeps the array alive, and the shape and strides that the C struct
    points to, so it must live as long as the library uses the pointer.

    Attributes:
        owner: the array
        data: address of the first element
        device, ordinal: where the memory is: a device number of _struct, and the index of the GPU
        dtype: a type number of _struct
        shape, strides: in elements
    """

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
        self._c: Any = None  # the result of pointer(), and the memory that it points to
        # NumPy gives empty arrays strides of 0, which the library refuses.
        self.strides = tuple(dense_strides(self.shape) if 0 in self.shape else strides)

    def permute(self, *axes: int) -> View:
        """Returns a view of the same memory with the axes in the given order."""
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
        """Returns a ulysses_tensor*, which is valid as long as the view lives."""
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


class _Managed(ctypes.Structure):
    """The first field of DLPack's DLManagedTensor."""

    _fields_ = [("tensor", _struct.Tensor)]


def dtype_of(x: Any) -> int:
    """Returns the type number of an array's dtype. Raises Unsupported if there is none."""
    name = str(x.dtype).removeprefix("torch.")
    if name not in _NUMPY:
        raise Unsupported(
            f"ulysses: dtype {name}; convert the array: the library has the types "
            f"{', '.join(_NUMPY)}"
        )
    return _NUMPY[name]


def compute_dtype_of(operation: str, *arrays: Any) -> int:
    """Returns the type number of the first array.

    Raises Unsupported if an array's dtype is none in which the devices compute.
    """
    for x in arrays:
        name = str(x.dtype).removeprefix("torch.")
        if name not in _COMPUTE:
            raise Unsupported(
                f"{operation}: dtype {name}; give {' or '.join(_COMPUTE)}, in which the devices "
                "compute"
            )
    return dtype_of(arrays[0])


def check_layout(x: Any) -> None:
    """Raises the exception of `view` for an array whose memory the library cannot read."""
    if is_torch(x) and x.layout is not torch_or_none().strided:
        raise Unsupported(
            f"ulysses: a tensor on {x.device} with layout {x.layout}; give a strided tensor on "
            "the CPU or a CUDA device"
        )
    if is_torch(x) and x.is_neg():
        raise Unsupported(
            "ulysses: a view that negates its elements when they are read, such as x.conj().imag; "
            "give x.resolve_neg()"
        )
    if isinstance(x, np.ndarray):
        _in_elements(x.strides, x.itemsize)


def view(x: Any) -> View:
    """Returns a view of an array. Copies nothing.

    Args:
        x: a NumPy array, a PyTorch tensor on the CPU or a CUDA device, or an object with __dlpack__
            or __cuda_array_interface__

    Raises:
        InvalidArgument: x is no array, or its strides are not multiples of the element size
        Unsupported: its dtype, layout or device
    """
    if isinstance(x, np.ndarray):
        strides = _in_elements(x.strides, x.itemsize)
        return View(x, x.ctypes.data, _struct.CPU, 0, dtype_of(x), x.shape, strides)
    if is_torch(x):
        check_layout(x)
        device = {"cpu": _struct.CPU, "cuda": _struct.CUDA}.get(x.device.type)
        if device is None:
            raise Unsupported(
                f"ulysses: a tensor on {x.device}; give a tensor on the CPU or a CUDA device"
            )
        return View(x, x.data_ptr(), device, x.device.index or 0, dtype_of(x), x.shape, x.stride())
    if hasattr(x, "__dlpack__"):
        return _from_dlpack(x)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda(x)
    raise InvalidArgument(
        f"ulysses: {type(x).__name__} is not an array; give a NumPy array, a PyTorch tensor or an "
        "object with __dlpack__"
    )


def _in_elements(strides: Sequence[int], size: int) -> list[int]:
    """Converts strides in bytes to strides in elements of `size` bytes."""
    if any(s % size for s in strides):
        raise InvalidArgument(
            f"ulysses: an array with strides of {tuple(strides)} bytes and elements of {size} "
            "bytes; copy it first"
        )
    return [s // size for s in strides]


_TYPESTR = {
    "<f4": _struct.F32,
    "<f2": _struct.F16,
    "<i4": _struct.I32,
    "<i8": _struct.I64,
    "|u1": _struct.U8,
}


def _from_cuda(x: Any) -> View:
    """Returns a view of an object with __cuda_array_interface__.

    The interface does not name the GPU, so the view names the current one. The library refuses
    memory of another GPU.
    """
    a = x.__cuda_array_interface__
    dtype, strides = _TYPESTR.get(a["typestr"]), a.get("strides")
    if dtype is None:
        raise Unsupported(
            f"ulysses: __cuda_array_interface__ of type {a['typestr']}; give one of "
            f"{', '.join(_TYPESTR)}"
        )
    if strides is None:
        strides = dense_strides(a["shape"])
    else:
        strides = _in_elements(strides, int(a["typestr"][2:]))
    return View(x, a["data"][0], _struct.CUDA, current_gpu(), dtype, a["shape"], strides)


def _from_dlpack(x: Any) -> View:
    capsule = x.__dlpack__()
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    t = _Managed.from_address(get(capsule, b"dltensor")).tensor
    shape = [t.shape[i] for i in range(t.ndim)]
    strides = [t.strides[i] for i in range(t.ndim)] if t.strides else dense_strides(shape)
    # The capsule is not consumed, so it frees the tensor when the view is deleted.
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
    """Returns the row-major strides of a shape, in elements."""
    strides, n = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        strides[i], n = n, n * max(1, shape[i])
    return strides


def dense(x: Any) -> Any:
    """Returns x, or a row-major copy if x is not row-major."""
    return x.contiguous() if is_torch(x) else np.ascontiguousarray(numpy_of(x))


def numpy_of(x: Any) -> np.ndarray:
    """Returns an array of NumPy or of another library as one of NumPy, without a copy if possible.

    Arrays of another library may have only __dlpack__, from which np.asarray makes an object.
    """
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return np.from_dlpack(x)
    return np.asarray(x)


def compact(x: Any) -> Any:
    """Returns x, or a copy of a tensor that is a part of its memory, which pickle would write."""
    if is_torch(x) and x.layout is torch_or_none().strided:
        return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x
    return x


def without_zero_strides(x: Any) -> Any:
    """Returns x, or a row-major copy if the library would refuse its strides.

    The library refuses zero strides (such as the gradient of sum() has), negative strides, and
    a last axis that is not dense.
    """
    v = x if isinstance(x, View) else view(x)
    refused = any(s <= 0 and n > 1 for n, s in zip(v.shape, v.strides))
    if not refused and (v.shape[-1:] in ((), (0,), (1,)) or v.strides[-1] == 1):
        return x
    return dense(x)


def empty(like: Any, shape: Sequence[int], dtype: Any = None) -> Any:
    """Returns an uninitialized array of the library and device of `like`.

    dtype is a type number of _struct; None = the dtype of `like`.
    """
    if is_torch(like):
        torch = torch_or_none()
        return torch.empty(
            tuple(shape),
            dtype=like.dtype if dtype is None else getattr(torch, NAMES[dtype]),
            device=like.device,
        )
    _host_only(like)
    return np.empty(tuple(shape), dtype=numpy_of(like).dtype if dtype is None else NAMES[dtype])


def _host_only(like: Any) -> None:
    if not isinstance(like, np.ndarray) and view(like).device != _struct.CPU:
        raise Unsupported(
            f"ulysses: {type(like).__name__} on a GPU: results on a GPU are PyTorch tensors; "
            "convert it with torch.as_tensor"
        )


def block(like: Any, size: int) -> Any:
    """Returns `size` uninitialized bytes on the device of `like`.

    The memory is aligned to 64 bytes on the CPU, and to 256 bytes on CUDA, by PyTorch's allocator.
    """
    if is_torch(like):
        return torch_or_none().empty(size, dtype=torch_or_none().uint8, device=like.device)
    _host_only(like)
    whole = np.empty(size + 64, np.uint8)
    lo = -whole.ctypes.data % 64
    return whole[lo : lo + size]


def stream_of(x: Any) -> int | None:
    """Returns PyTorch's current stream on the device of a CUDA tensor; None for other arrays."""
    if is_torch(x) and x.is_cuda:
        return torch_or_none().cuda.current_stream(x.device).cuda_stream
    return None


def current_gpu() -> int:
    """Returns the index of PyTorch's current GPU in this thread; 0 without PyTorch."""
    torch = torch_or_none()
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
