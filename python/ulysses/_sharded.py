"""Descriptions of arrays that ranks shard and send as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .layout import Layout
from .tensors import is_torch


@dataclass
class Sharded:
    """Describes a whole array, of PyTorch (torch) or NumPy, that is sharded along axis `dim`."""

    torch: bool
    dtype: str
    shape: tuple[int, ...]
    dim: int

    @classmethod
    def like(cls, a: Any, shape: tuple[int, ...], dim: int) -> Sharded:
        """Describes an array of the library and dtype of a."""
        return cls(is_torch(a), str(a.dtype).removeprefix("torch."), shape, dim)

    def extent(self, layout: Layout, rank: int) -> tuple[tuple[int, ...], int]:
        """Returns the shape of a rank's shard, and its size in bytes."""
        rows = layout.rows(self.shape[self.dim], rank)
        shape = self.shape[: self.dim] + (rows,) + self.shape[self.dim + 1 :]
        return shape, int(np.prod(shape, dtype=np.int64)) * self._itemsize()

    def array(self, shape: tuple[int, ...], data: bytearray) -> Any:
        """Returns the array of a shape whose elements are the bytes in data, without a copy."""
        if self.torch:
            import torch

            dtype = getattr(torch, self.dtype)
            return (
                torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            ).reshape(shape)
        return np.frombuffer(data, self.dtype).reshape(shape)

    def _itemsize(self) -> int:
        if self.torch:
            import torch

            return getattr(torch, self.dtype).itemsize
        return np.dtype(self.dtype).itemsize


def bytes_of(a: Any) -> bytes:
    """Returns the elements of an array as row-major bytes."""
    if is_torch(a):
        import torch

        flat = a.contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes() if a.numel() else b""
    return np.ascontiguousarray(a).tobytes()


def padded(a: Any, dim: int, more: int, value: int) -> Any:
    """Returns a with `more` elements of `value` appended along axis dim."""
    if not more:
        return a
    shape = list(a.shape)
    shape[dim] = more
    if is_torch(a):
        import torch

        return torch.cat([a, a.new_full(shape, value)], dim)
    return np.concatenate([a, np.full(shape, value, a.dtype)], dim)
