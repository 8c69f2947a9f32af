"""Named arrays that lie in one buffer of bytes, so that all of them are one copy.

    buffer   │ token_ids      │ positions      │ … │ history         │
               0                4·T, rounded up to 16

The layout is made of names, dtypes and shapes; the same layout gives NumPy views of a host buffer,
to fill in, and tensors of the device's buffer, to compute with. Kernels read 16 bytes at a time, so
every array begins at a multiple of that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

ALIGNMENT: Final = 16
TORCH_TYPES: Final = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Field(NamedTuple):
    """One array of a layout: where it begins, and what it is; made for every array of a step."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    size: int
    """Elements."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * self.size


class Layout:
    """Arrays one behind the other, in the order given.

    `arrays`: name → dtype and shape.
    """

    def __init__(self, arrays: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> None:
        self.fields: dict[str, Field] = {}
        end = 0
        for name, (dtype, shape) in arrays.items():
            one = Field(end, np.dtype(dtype), shape, math.prod(shape))
            self.fields[name] = one
            end += -(-one.num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Layout:
        """Return the layout that holds these arrays."""
        return cls({name: (array.dtype, array.shape) for name, array in arrays.items()})

    def fill(self, buffer: Tensor, arrays: Mapping[str, Array]) -> None:
        """Copy arrays into a host buffer of bytes; each must have its field's shape."""
        for name, target in self.views(buffer.numpy()).items():
            if arrays[name].shape != target.shape:
                raise ValueError(f"{name} must be {target.shape}, got {arrays[name].shape}")
            target[...] = arrays[name]

    def views(self, memory: Array) -> dict[str, Array]:
        """Return the arrays in bytes of the host, as views of them."""
        return {
            name: np.ndarray(one.shape, one.dtype, memory, one.offset)
            for name, one in self.fields.items()
        }

    def arrays(self, buffer: Tensor) -> dict[str, Array]:
        """Return the arrays in a host buffer, as views of one copy."""
        return self.views(buffer.numpy().copy())

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the arrays in a buffer of bytes as tensors of its memory.

        Raises KeyError for a dtype that tensors do not have.
        """
        whole = len(buffer) // ALIGNMENT * ALIGNMENT
        as_type = {dtype: buffer[:whole].view(kind) for dtype, kind in TORCH_TYPES.items()}
        found = {}
        for name, one in self.fields.items():
            first = one.offset // one.dtype.itemsize
            flat = as_type[one.dtype][first : first + one.size]
            found[name] = flat if len(one.shape) == 1 else flat.view(one.shape)
        return found
