"""What layers read of a second embedding, as it will lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from compute_plane.cuda.planned_matrix import Placed, PlannedMatrix, projection_of, values_of
from compute_plane.cuda.weights import DeviceLayerInput, DeviceLayerInputs
from compute_plane.model import layer_inputs_layout, layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.planned_recurrences import Joined
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLayerInput:
    """As in `DeviceLayerInput`."""

    gate: tuple[PlannedMatrix, ...]
    output: tuple[PlannedMatrix, ...]
    output_norm: PlannedMatrix

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix."""
        return (self.output_norm,)

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.gate, *self.output)

    def at(self, placed: Placed) -> DeviceLayerInput:
        """Return it where it lies."""
        return DeviceLayerInput(
            projection_of(placed, self.gate),
            projection_of(placed, self.output),
            values_of(placed(self.output_norm)).view(-1),
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlannedLayerInputs:
    """As in `DeviceLayerInputs`."""

    embedding: PlannedMatrix
    projection: tuple[PlannedMatrix, ...]
    norm: PlannedMatrix

    @property
    def everything(self) -> tuple[PlannedMatrix, ...]:
        """All of it."""
        return (self.embedding, *self.projection, self.norm)

    def at(self, placed: Placed) -> DeviceLayerInputs:
        """Return it where it lies."""
        return DeviceLayerInputs(
            placed(self.embedding),
            projection_of(placed, self.projection),
            values_of(placed(self.norm)).view(-1),
        )


def plan_layer_input(
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    joined: Joined,
    norm: Callable[[str], PlannedMatrix],
) -> PlannedLayerInput | None:
    """Plan what a layer makes of its inputs; None: it has none. `norm`: as in `plan_mixer`."""
    if not spec.layer_input_size:
        return None

    def name(role: str) -> str:
        return layout.layer_tensor(layer, role)

    return PlannedLayerInput(
        gate=joined(source.tensor(name(layer_inputs_layout.GATE))),
        output=joined(source.tensor(name(layer_inputs_layout.OUTPUT))),
        output_norm=norm(name(layer_inputs_layout.OUTPUT_NORM)),
    )


def plan_layer_inputs(
    spec: ModelSpec,
    source: TensorSource,
    joined: Joined,
    norm: Callable[[str], PlannedMatrix],
) -> PlannedLayerInputs | None:
    """Plan what the inputs of all layers are made of; None: they have none."""
    if not spec.layer_input_size:
        return None
    (embedding,) = joined(source.tensor(layer_inputs_layout.EMBEDDING))
    return PlannedLayerInputs(
        embedding=embedding,
        projection=joined(source.tensor(layer_inputs_layout.PROJECTION)),
        norm=norm(layer_inputs_layout.PROJECTION_NORM),
    )
