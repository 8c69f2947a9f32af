"""The matrices of adapters in the form in which kernels read them, in one region.

`down` runs in bfloat16, or in float32 where the model does; `up` reads what that gives, float32,
and is float32 itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compute_plane.memory.huge_pages import huge_page_array
from compute_plane.memory.sizing import available_memory_bytes, check_weights_fit
from compute_plane.model.quantize import round_to_bf16
from kernels.cpu.float_packing import pack_float_rows, packed_float_bytes
from planes.errors import ConfigError

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import MatrixPart
    from compute_plane.model.adapter import Adapter, LowRankPair
    from compute_plane.model.tensor import Float32Array

UInt8Array = npt.NDArray[np.uint8]

UP_FORMAT: Final = "F32"
ALIGNMENT: Final = 64


class PackedPair(NamedTuple):
    """Addresses of `down`, in the adapters' format, and of `up`, and what is between them."""

    down: int
    up: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapters:
    """`pairs`: of each adapter, by the names of the tensors they change.

    `memory`: the region all addresses lie in; they are good as long as it lives. `down_format`:
    BF16 or F32. `parts`: of which tensors each of the model's packed matrices is, by its address.
    """

    memory: UInt8Array
    down_format: str
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


def pack_adapters(
    adapters: Sequence[Adapter], parts: Mapping[int, Sequence[MatrixPart]], dtype: str
) -> PackedAdapters:
    """Pack adapters for a model, of which `parts` says what its packed matrices are.

    `dtype`: as configured. Raises ConfigError for a tensor that runs in another order than its
    own, the family's MemoryError if there is no memory.
    """
    label = "F32" if dtype == "float32" else "BF16"
    there = {part.name for some in parts.values() for part in some}
    for adapter in adapters:
        for name in adapter.pairs:
            if name not in there:
                raise ConfigError(
                    f"lora: {adapter.name} changes {name}, which this model has in an order of its "
                    "own (act-order)",
                    field="lora",
                )
    sizes = [
        size
        for adapter in adapters
        for pair in adapter.pairs.values()
        for size in _packed_bytes(label, pair)
    ]
    places = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    check_weights_fit(places[-1], available_memory_bytes())
    memory = huge_page_array(places[-1], purpose="the adapters")
    base, at = memory.ctypes.data, 0
    packed: list[dict[str, PackedPair]] = []
    for adapter in adapters:
        packed.append({})
        for name, pair in adapter.pairs.items():
            down, up = (memory[places[at + i] : places[at + i] + sizes[at + i]] for i in (0, 1))
            _pack(label, pair.down, down)
            _pack(UP_FORMAT, pair.up, up)
            packed[-1][name] = PackedPair(base + places[at], base + places[at + 1], pair.rank)
            at += 2
    return PackedAdapters(memory, label, tuple(packed), parts)


def _packed_bytes(label: str, pair: LowRankPair) -> tuple[int, int]:
    return (
        packed_float_bytes(label, *pair.down.shape),
        packed_float_bytes(UP_FORMAT, *pair.up.shape),
    )


def _pack(label: str, matrix: Float32Array, out: UInt8Array) -> None:
    stored = matrix if label == "F32" else round_to_bf16(matrix)
    rows = np.ascontiguousarray(stored).view(np.uint8).reshape(len(matrix), -1)
    pack_float_rows(label, rows, matrix.shape[1], out)
