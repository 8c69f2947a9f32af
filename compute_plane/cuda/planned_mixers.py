"""Attention of a layer, or what it has in its place, as it will lie on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from compute_plane.cuda.planned_latents import PlannedLatents, plan_latents
from compute_plane.cuda.planned_matrix import (
    Placed,
    PlannedMatrix,
    projection_of,
    values_of,
)
from compute_plane.cuda.planned_recurrences import PlannedRecurrence, plan_recurrence
from compute_plane.cuda.weights import DeviceAttention
from compute_plane.model import layout
from compute_plane.model.tensor import RawTensor, TensorFormat

if TYPE_CHECKING:
    from collections.abc import Callable

    from compute_plane.cuda.planned_recurrences import Joined, PlansVectors
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import TensorSource


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAttention:
    """As in `DeviceAttention`."""

    qkv: tuple[PlannedMatrix, ...]
    o: tuple[PlannedMatrix, ...]
    qkv_bias: PlannedMatrix | None = None
    head_norms: tuple[PlannedMatrix, ...] = ()
    o_bias: PlannedMatrix | None = None
    sinks: PlannedMatrix | None = None
    gate: tuple[PlannedMatrix, ...] = ()

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix."""
        alone = self.qkv_bias, self.o_bias, self.sinks
        return (*(one for one in alone if one is not None), *self.head_norms)

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.qkv, *self.gate, *self.o)

    def at(self, placed: Placed) -> DeviceAttention:
        """Return it where it lies."""
        norms = [vector_of(placed, norm) for norm in self.head_norms]
        of_queries, of_keys = (*norms, None, None)[:2]
        return DeviceAttention(
            qkv=projection_of(placed, self.qkv),
            o=projection_of(placed, self.o),
            qkv_bias=vector_of(placed, self.qkv_bias),
            head_norms=None if of_queries is None else (of_queries, of_keys),
            o_bias=vector_of(placed, self.o_bias),
            sinks=vector_of(placed, self.sinks),
            gate=projection_of(placed, self.gate) if self.gate else None,
        )


PlannedMixer: TypeAlias = PlannedAttention | PlannedLatents | PlannedRecurrence


def plan_mixer(
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    joined: Joined,
    vector: PlansVectors,
    norm: Callable[[str], PlannedMatrix],
) -> PlannedMixer:
    """Plan what a layer has. `norm`: plans the weights of a norm, by the tensor's name."""
    recurrence = spec.recurrence_of(layer)
    if recurrence is not None and not spec.attends(layer):
        return plan_recurrence(recurrence, source, layer, joined, vector)

    def tensor(role: str) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role))

    if spec.latents is not None:
        return plan_latents(spec, layer, tensor, joined, vector)
    biases, sinks = layout.qkv_biases(spec, layer), layout.sinks(spec, layer)
    o_bias, norms = layout.output_bias(spec, layer), layout.head_norms(spec, layer)
    has_keys = spec.kv_source_of(layer) == layer
    roles = (layout.QUERY, layout.KEY, layout.VALUE) if has_keys else (layout.QUERY,)
    return PlannedAttention(
        qkv=joined(*map(tensor, roles)),
        o=joined(tensor(layout.OUTPUT)),
        qkv_bias=vector(*biases) if biases else None,
        head_norms=tuple(map(norm, norms)),
        o_bias=vector(*o_bias) if o_bias else None,
        sinks=vector(*sinks, target=TensorFormat.F32) if sinks else None,
        gate=joined(tensor(layout.QUERY_GATE)) if spec.gates_attention else (),
    )


def vector_of(placed: Placed, planned: PlannedMatrix | None) -> Tensor | None:
    """Return a vector where it lies, if there is one."""
    return None if planned is None else values_of(placed(planned)).view(-1)


def pair_of(placed: Placed, planned: tuple[PlannedMatrix, PlannedMatrix]) -> tuple[Tensor, Tensor]:
    """Return two vectors where they lie."""
    one, other = (values_of(placed(part)).view(-1) for part in planned)
    return one, other
