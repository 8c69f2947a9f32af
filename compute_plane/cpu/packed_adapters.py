"""The matrices of adapters in the form in which kernels read them, in one region.

`down` reads the rows that the model's own matrix reads, so it is in a format that takes them: Q8_0
beside quantised matrices, bfloat16 beside others. `up` reads what that gives, float32, and is
bfloat16. Where the model runs in float32, so do both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.packing_jobs import PlannedMatrix, packed_bytes
from compute_plane.memory.huge_pages import huge_page_array
from compute_plane.memory.sizing import available_memory_bytes, check_weights_fit
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cpu.float_packing import FLOAT_TYPES
from planes.errors import ConfigError

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import MatrixPart
    from compute_plane.model.adapter import Adapter
    from compute_plane.model.tensor import Float32Array

UInt8Array = npt.NDArray[np.uint8]

ALIGNMENT = 64


class PackedPair(NamedTuple):
    """Addresses of `down` and `up`, and what is between them."""

    down: int
    up: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapters:
    """`pairs`: of each adapter, by the names of the tensors they change.

    `memory`: the region all addresses lie in; they are good as long as it lives. `parts`: of which
    tensors each of the model's packed matrices is, by its address. `dtype`: as configured.
    """

    memory: UInt8Array
    dtype: str
    pairs: tuple[Mapping[str, PackedPair], ...]
    parts: Mapping[int, Sequence[MatrixPart]]

    @property
    def max_rank(self) -> int:
        """The largest rank; at least 1."""
        return max((pair.rank for pairs in self.pairs for pair in pairs.values()), default=1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the region."""
        return self.memory.nbytes

    @property
    def up_format(self) -> TensorFormat:
        """The format of every `up`."""
        return up_format_of(self.dtype)


def up_format_of(dtype: str) -> TensorFormat:
    """Return the format of `up` where a model runs in a dtype, as configured."""
    return TensorFormat.F32 if dtype == "float32" else TensorFormat.BF16


def down_format_of(label: str, dtype: str) -> TensorFormat:
    """Return the format of `down` beside a matrix that runs in a format, by its label."""
    return up_format_of(dtype) if label in FLOAT_TYPES else TensorFormat.Q8_0


def pack_adapters(
    adapters: Sequence[Adapter], parts: Mapping[int, Sequence[MatrixPart]], dtype: str
) -> PackedAdapters:
    """Pack adapters for a model, of which `parts` says what its packed matrices are.

    `dtype`: as configured. Raises ConfigError for a tensor that runs in another order than its
    own, ModelFileError for weights too large for their format, the family's MemoryError if there
    is no memory.
    """
    labels = {part.name: part.format for some in parts.values() for part in some}
    planned: list[PlannedMatrix] = []
    for adapter in adapters:
        for name, pair in adapter.pairs.items():
            if name not in labels:
                raise ConfigError(
                    f"lora: {adapter.name} changes {name}, which this model has in an order of its "
                    "own (act-order)",
                    field="lora",
                )
            down = _tensor(f"{adapter.name}: {name}", pair.down)
            planned.append(PlannedMatrix([down], down_format_of(labels[name], dtype), None))
            up = _tensor(f"{adapter.name}: {name}", pair.up)
            planned.append(PlannedMatrix([up], up_format_of(dtype), None))
    sizes = [packed_bytes(one.target, *one.tensors[0].shape) for one in planned]
    places = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    check_weights_fit(places[-1], available_memory_bytes())
    memory = huge_page_array(places[-1], purpose="the adapters")
    for one, place, size in zip(planned, places, sizes, strict=False):
        for job in one.jobs(memory[place : place + size]):
            job.run()
    addresses = iter([memory.ctypes.data + place for place in places])
    packed = tuple(
        {
            name: PackedPair(next(addresses), next(addresses), pair.rank)
            for name, pair in adapter.pairs.items()
        }
        for adapter in adapters
    )
    return PackedAdapters(memory, dtype, packed, parts)


def _tensor(name: str, matrix: Float32Array) -> RawTensor:
    stored = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix), -1)
    return RawTensor(name, name, Path("lora"), TensorFormat.F32, matrix.shape, stored)
