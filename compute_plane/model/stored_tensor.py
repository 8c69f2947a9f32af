"""One tensor of a safetensors file: where its bytes lie, and what they are."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.model.tensor import TensorFormat, UInt8Array

FLOATS: Final = {"F32": TensorFormat.F32, "F16": TensorFormat.F16, "BF16": TensorFormat.BF16}
"""What weights may be stored as."""
ARRAY_TYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype("u1"),
    "U8": np.dtype("u1"),
}
"""By the file's name of a type; a bfloat16 is its bits, and so is a float8."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """Where a tensor lies: `offset` from the start of its file.

    `name`: the file's own. `dtype`: one of `ARRAY_TYPES`.
    """

    name: str
    path: Path
    buffer: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    def bytes(self) -> UInt8Array:
        """Return the raw data, a view of the mapped file."""
        return np.frombuffer(self.buffer, np.uint8, self.num_bytes, self.offset)

    def array(self) -> npt.NDArray[Any]:
        """Return the data as an array of its shape, a view of the mapped file."""
        values: npt.NDArray[Any] = self.bytes().view(ARRAY_TYPES[self.dtype])
        return values.reshape(self.shape)
