"""Attention of a layer, or what it has in its place, as it will lie on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from compute_plane.cuda.planned_matrix import (
    Placed,
    PlannedMatrix,
    projection_of,
    values_of,
)
from compute_plane.cuda.weights import DeviceAttention, DeviceDeltaNet
from compute_plane.model import delta_net_layout, layout
from compute_plane.model.tensor import RawTensor, TensorFormat

if TYPE_CHECKING:
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.tensor import TensorSource

Joined: TypeAlias = Callable[..., tuple[PlannedMatrix, ...]]
"""Plans matrices of tensors that read the same input: as few as their formats allow."""


class PlansVectors(Protocol):
    """Plans one vector of several tensors."""

    def __call__(self, *names: str, target: TensorFormat = ...) -> PlannedMatrix:
        """Plan that of the tensors of these names; in a step's dtype unless `target` is given."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlannedAttention:
    """As in `DeviceAttention`."""

    qkv: tuple[PlannedMatrix, ...]
    o: tuple[PlannedMatrix, ...]
    qkv_bias: PlannedMatrix | None = None
    head_norms: tuple[PlannedMatrix, PlannedMatrix] | None = None
    o_bias: PlannedMatrix | None = None
    sinks: PlannedMatrix | None = None
    gate: tuple[PlannedMatrix, ...] = ()

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix."""
        alone = self.qkv_bias, self.o_bias, self.sinks
        return (*(one for one in alone if one is not None), *(self.head_norms or ()))

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.qkv, *self.gate, *self.o)

    def at(self, placed: Placed) -> DeviceAttention:
        """Return it where it lies."""
        norms = self.head_norms
        return DeviceAttention(
            qkv=projection_of(placed, self.qkv),
            o=projection_of(placed, self.o),
            qkv_bias=vector_of(placed, self.qkv_bias),
            head_norms=None if norms is None else pair_of(placed, norms),
            o_bias=vector_of(placed, self.o_bias),
            sinks=vector_of(placed, self.sinks),
            gate=projection_of(placed, self.gate) if self.gate else None,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PlannedDeltaNet:
    """As in `DeviceDeltaNet`, but for the convolution: [C, K] as one vector."""

    inputs: tuple[PlannedMatrix, ...]
    o: tuple[PlannedMatrix, ...]
    convolution: PlannedMatrix
    rates: PlannedMatrix
    time_bias: PlannedMatrix
    norm: PlannedMatrix
    kernel_size: int

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix, in float32."""
        return self.convolution, self.rates, self.time_bias, self.norm

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.inputs, *self.o)

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    def at(self, placed: Placed) -> DeviceDeltaNet:
        """Return it where it lies."""
        taps = values_of(placed(self.convolution)).view(-1, self.kernel_size)
        rates, time_bias, norm = (
            values_of(placed(one)).view(-1) for one in (self.rates, self.time_bias, self.norm)
        )
        return DeviceDeltaNet(
            inputs=projection_of(placed, self.inputs),
            o=projection_of(placed, self.o),
            convolution=taps.t().contiguous(),
            rates=rates,
            time_bias=time_bias,
            norm=norm,
        )


PlannedMixer: TypeAlias = PlannedAttention | PlannedDeltaNet


def plan_mixer(
    spec: ModelSpec,
    source: TensorSource,
    layer: int,
    joined: Joined,
    vector: PlansVectors,
    norm: Callable[[str], PlannedMatrix],
) -> PlannedMixer:
    """Plan what a layer has. `norm`: plans the weights of a norm, by the tensor's name."""
    if spec.delta_net_of(layer) is not None:
        return _plan_delta_net(spec, source, layer, joined, vector)

    def tensor(role: str) -> RawTensor:
        return source.tensor(layout.layer_tensor(layer, role))

    biases, sinks = layout.qkv_biases(spec, layer), layout.sinks(spec, layer)
    o_bias, norms = layout.output_bias(spec, layer), layout.head_norms(spec, layer)
    return PlannedAttention(
        qkv=joined(*map(tensor, (layout.QUERY, layout.KEY, layout.VALUE))),
        o=joined(tensor(layout.OUTPUT)),
        qkv_bias=vector(*biases) if biases else None,
        head_norms=(norm(norms[0]), norm(norms[1])) if norms else None,
        o_bias=vector(*o_bias) if o_bias else None,
        sinks=vector(*sinks, target=TensorFormat.F32) if sinks else None,
        gate=joined(tensor(layout.QUERY_GATE)) if spec.gates_attention else (),
    )


def _plan_delta_net(
    spec: ModelSpec, source: TensorSource, layer: int, joined: Joined, vector: PlansVectors
) -> PlannedDeltaNet:
    assert spec.delta_net is not None

    def name(role: str, part: str = layout.WEIGHT) -> str:
        return layout.layer_tensor(layer, role, part)

    def floats(*names: str) -> PlannedMatrix:
        return vector(*names, target=TensorFormat.F32)

    taps = source.tensor(name(delta_net_layout.CONVOLUTION))
    roles = (
        delta_net_layout.IN_QKV,
        delta_net_layout.IN_Z,
        delta_net_layout.IN_B,
        delta_net_layout.IN_A,
    )
    return PlannedDeltaNet(
        inputs=joined(*(source.tensor(name(role)) for role in roles)),
        o=joined(source.tensor(name(delta_net_layout.OUT))),
        convolution=PlannedMatrix((replace(taps, shape=(taps.num_elements,)),), TensorFormat.F32),
        rates=floats(name(delta_net_layout.MIXER, delta_net_layout.RATES)),
        time_bias=floats(name(delta_net_layout.MIXER, delta_net_layout.TIME_BIAS)),
        norm=floats(name(delta_net_layout.NORM)),
        kernel_size=spec.delta_net.kernel_size,
    )


def vector_of(placed: Placed, planned: PlannedMatrix | None) -> Tensor | None:
    """Return a vector where it lies, if there is one."""
    return None if planned is None else values_of(placed(planned)).view(-1)


def pair_of(placed: Placed, planned: tuple[PlannedMatrix, PlannedMatrix]) -> tuple[Tensor, Tensor]:
    """Return two vectors where they lie."""
    one, other = (values_of(placed(part)).view(-1) for part in planned)
    return one, other
