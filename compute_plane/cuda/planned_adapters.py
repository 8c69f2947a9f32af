"""Adapters as they will lie on the device: a pair for each projection that one changes.

Outputs of a projection may have an order of their own, and so may the inputs of the one behind it:
gates and what they gate lie in turns, and in the order that the MLP's last matrix has its columns
stored in (`planned_feedforward`). Rows of `up` and columns of `down` are placed likewise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from compute_plane.cuda.adapters import DeviceAdapters, DevicePair
from compute_plane.cuda.planned_feedforward import PlannedMlp
from compute_plane.cuda.planned_mixers import PlannedAttention
from compute_plane.cuda.weights import DTYPES, DeviceAttention, DeviceMlp
from compute_plane.model.errors import UnsupportedModelError
from kernels.cuda.quantized_formats import GATE_TURN

if TYPE_CHECKING:
    from compute_plane.cuda.matrices import Projection
    from compute_plane.cuda.planned_layer import PlannedLayer
    from compute_plane.cuda.planned_matrix import PlannedMatrix
    from compute_plane.cuda.weight_plan import WeightPlan
    from compute_plane.cuda.weights import DeviceLayer
    from compute_plane.model.adapter import Adapter, LowRankPair
    from compute_plane.model.tensor import Float32Array, IntArray, RawTensor

Place: TypeAlias = Literal["qkv", "o", "gate_up", "down"]
"""Where in a layer a projection is."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedChange:
    """What adapters change at one place of a layer.

    `matrices`: there, side by side. `input_order`: which of the model's inputs each is, None: as in
    the model. `pairs`: of each adapter, those of the tensors of all matrices.
    """

    layer: int
    place: Place
    matrices: tuple[PlannedMatrix, ...]
    input_order: IntArray | None
    pairs: tuple[tuple[LowRankPair | None, ...], ...]

    @property
    def tensors(self) -> list[RawTensor]:
        """The tensors of all matrices."""
        return [tensor for matrix in self.matrices for tensor in matrix.tensors]

    @property
    def num_numbers(self) -> int:
        """Numbers of all adapters' pairs on the device."""
        width: int = self.matrices[0].num_inputs + sum(one.num_outputs for one in self.matrices)
        return width * sum(pair.rank for own in self.pairs for pair in own if pair is not None)

    def joined(self, adapter: int) -> tuple[Float32Array, Float32Array] | None:
        """Return an adapter's `down` and `up` as they will lie; None: it changes nothing here."""
        pairs = self.pairs[adapter]
        downs = [pair.down for pair in pairs if pair is not None]
        if not downs:
            return None
        down = np.concatenate(downs)
        sizes = [tensor.shape[0] for tensor in self.tensors]
        up = np.zeros((sum(sizes), len(down)), dtype=np.float32)
        row = column = 0
        for pair, size in zip(pairs, sizes, strict=True):
            if pair is not None:
                up[row : row + size, column : column + pair.rank] = pair.up
                column += pair.rank
            row += size
        return down if self.input_order is None else down[:, self.input_order], up[self._order()]

    def _order(self) -> IntArray:
        """Return which of the tensors' rows, one tensor behind the other, each output is."""
        orders, first = [], 0
        for matrix in self.matrices:
            own = []
            for tensor in matrix.tensors:
                size = tensor.shape[0]
                rows = np.arange(size) if matrix.row_order is None else matrix.row_order
                own.append(first + rows)
                first += size
            if matrix.in_turns:
                own = [np.stack([rows.reshape(-1, GATE_TURN) for rows in own], axis=1).reshape(-1)]
            orders += own
        return np.concatenate(orders)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAdapters:
    """All that the adapters of a model change. `dtype`: of a step. `path`: of the model."""

    adapters: tuple[Adapter, ...]
    changes: tuple[PlannedChange, ...]
    dtype: torch.dtype
    path: Path

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        item_bytes: int = self.dtype.itemsize
        return item_bytes * sum(change.num_numbers for change in self.changes)

    def at(self, layers: Sequence[DeviceLayer], device: torch.device) -> DeviceAdapters:
        """Copy them to a device, to a model's layers there.

        Raises UnsupportedModelError for what is too large for the step's dtype.
        """
        pairs = {
            _projection_at(layers[change.layer], change.place): [
                self._placed(change, number, device) for number in range(len(self.adapters))
            ]
            for change in self.changes
        }
        return DeviceAdapters(pairs, len(self.adapters))

    def _placed(
        self, change: PlannedChange, number: int, device: torch.device
    ) -> DevicePair | None:
        joined = change.joined(number)
        if joined is None:
            return None
        down, up = (torch.from_numpy(one).to(self.dtype) for one in joined)
        if not (down.isfinite().all() and up.isfinite().all()):
            raise UnsupportedModelError(
                self.path,
                f"adapter {self.adapters[number].name}: numbers for "
                f"{change.tensors[0].name} are not finite in {self.dtype}",
            )
        return DevicePair(down.to(device), up.to(device))


def plan_adapters(plan: WeightPlan, adapters: Sequence[Adapter]) -> PlannedAdapters:
    """Plan the adapters of a model whose weights are planned.

    Raises UnsupportedModelError for tensors that they cannot change, and for other shapes.
    """
    path = plan.embedding.tensors[0].path
    known, changes = set[str](), []
    for number, layer in enumerate(plan.layers):
        for place, matrices, input_order in _places(layer):
            tensors = [tensor for matrix in matrices for tensor in matrix.tensors]
            known.update(tensor.name for tensor in tensors)
            pairs = tuple(
                tuple(_pair_of(adapter, tensor) for tensor in tensors) for adapter in adapters
            )
            change = PlannedChange(number, place, matrices, input_order, pairs)
            if change.num_numbers:
                changes.append(change)
    for adapter in adapters:
        unknown = sorted(adapter.pairs.keys() - known)
        if unknown:
            raise UnsupportedModelError(
                path,
                f"adapter {adapter.name}: the executor cuda lets adapters change matrices of "
                f"attention and of MLPs without experts, got {unknown[0]}",
            )
    return PlannedAdapters(tuple(adapters), tuple(changes), DTYPES[plan.dtype], path)


def _pair_of(adapter: Adapter, tensor: RawTensor) -> LowRankPair | None:
    pair = adapter.pairs.get(tensor.name)
    if pair is None:
        return None
    found, shape = (len(pair.up), pair.down.shape[1]), tensor.shape
    if found != shape or pair.up.shape[1] != pair.rank:
        raise UnsupportedModelError(
            tensor.path,
            f"adapter {adapter.name}: {tensor.name} is {list(shape)}, got "
            f"{list(pair.up.shape)} · {list(pair.down.shape)}",
        )
    return pair


def _places(
    layer: PlannedLayer,
) -> Iterator[tuple[Place, tuple[PlannedMatrix, ...], IntArray | None]]:
    """Yield what adapters may change in a layer, each with the order of its inputs."""
    mixer, part = layer.mixer, layer.feedforward
    if isinstance(mixer, PlannedAttention):
        yield "qkv", mixer.qkv, None
        yield "o", mixer.o, None  # rows are put in the order of its columns by the product
    if isinstance(part, PlannedMlp):
        yield "gate_up", part.gate_up, None
        yield "down", part.down, part.gate_up[0].row_order


def _projection_at(layer: DeviceLayer, place: Place) -> Projection:
    mixer, part = layer.mixer, layer.feedforward
    if place in ("qkv", "o"):
        assert isinstance(mixer, DeviceAttention)
        return mixer.qkv if place == "qkv" else mixer.o
    assert isinstance(part, DeviceMlp)
    return part.gate_up if place == "gate_up" else part.down
