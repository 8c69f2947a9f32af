"""Named arrays that lie in one buffer of bytes, so that all of them are one copy.

    buffer   │ token_ids      │ positions      │ … │ history         │
               0                4·T, rounded up to 16

The layout is made of names, dtypes and shapes; the same layout gives NumPy views of a host buffer,
to fill in, and tensors of the device's buffer, to compute with. Kernels read 16 bytes at a time, so
every array begins at a multiple of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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


@dataclass(frozen=True, slots=True)
class Field:
    """One array of a layout: where it begins, and what it is."""

    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class Layout:
    """Arrays one behind the other, in the order given.

    `arrays`: name → dtype and shape. Raises KeyError for a dtype that tensors do not have.
    """

    def __init__(self, arrays: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> None:
        self.fields: dict[str, Field] = {}
        end = 0
        for name, (dtype, shape) in arrays.items():
            field = Field(end, np.dtype(dtype), shape)
            TORCH_TYPES[field.dtype]  # known
            self.fields[name] = field
            end += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT
        self.num_bytes = end

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Layout:
        """Return the layout that holds these arrays."""
        return cls({name: (array.dtype, array.shape) for name, array in arrays.items()})

    def fill(self, buffer: Tensor, arrays: Mapping[str, Array]) -> None:
        """Copy arrays into a host buffer of bytes; each must have its field's shape."""
        target: Array = buffer.numpy()
        for name, field in self.fields.items():
            if arrays[name].shape != field.shape:
                raise ValueError(f"{name} must be {field.shape}, got {arrays[name].shape}")
            flat = target[field.offset : field.offset + field.num_bytes].view(field.dtype)
            flat[:] = arrays[name].reshape(-1)

    def arrays(self, buffer: Tensor) -> dict[str, Array]:
        """Return the arrays in a host buffer, as copies."""
        source: Array = buffer.numpy()
        return {
            name: source[field.offset : field.offset + field.num_bytes]
            .view(field.dtype)
            .reshape(field.shape)
            .copy()
            for name, field in self.fields.items()
        }

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the arrays in a buffer of bytes as tensors of its memory."""
        return {
            name: buffer[field.offset : field.offset + field.num_bytes]
            .view(TORCH_TYPES[field.dtype])
            .view(field.shape)
            for name, field in self.fields.items()
        }
