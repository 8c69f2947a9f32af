"""What layers that keep states have in place of attention, or beside it, as it will lie there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from compute_plane.cuda.planned_matrix import Placed, PlannedMatrix, projection_of, values_of
from compute_plane.cuda.weights import DeviceConvolution, DeviceDeltaNet, DeviceMamba2
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model import delta_net_layout, layout, mamba2_layout, short_convolution_layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.tensor import TensorFormat

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.matrices import Projection
    from compute_plane.model.recurrence import Recurrence
    from compute_plane.model.tensor import TensorSource

Joined: TypeAlias = Callable[..., tuple[PlannedMatrix, ...]]
"""Plans matrices of tensors that read the same input: as few as their formats allow."""


class PlansVectors(Protocol):
    """Plans one vector of several tensors."""

    def __call__(self, *names: str, target: TensorFormat = ...) -> PlannedMatrix:
        """Plan that of the tensors of these names; in a step's dtype unless `target` is given."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """As in `DeviceRecurrence`, but for the convolution: [C, K] as one vector, of K taps each."""

    inputs: tuple[PlannedMatrix, ...]
    o: tuple[PlannedMatrix, ...]
    convolution: PlannedMatrix
    kernel_size: int

    @property
    def matrices(self) -> tuple[PlannedMatrix, ...]:
        """Everything that rows are multiplied with."""
        return (*self.inputs, *self.o)

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    def shared_at(self, placed: Placed) -> tuple[Projection, Projection, Tensor]:
        """Return inputs, o and the convolution where they lie."""
        taps = values_of(placed(self.convolution)).view(-1, self.kernel_size)
        inputs, o = (projection_of(placed, some) for some in (self.inputs, self.o))
        return inputs, o, taps.t().contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class PlannedDeltaNet(_Planned):
    """As in `DeviceDeltaNet`."""

    rates: PlannedMatrix
    time_bias: PlannedMatrix
    norm: PlannedMatrix

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix, in float32."""
        return self.convolution, self.rates, self.time_bias, self.norm

    def at(self, placed: Placed) -> DeviceDeltaNet:
        """Return it where it lies."""
        rates, time_bias, norm = (
            values_of(placed(one)).view(-1) for one in (self.rates, self.time_bias, self.norm)
        )
        return DeviceDeltaNet(*self.shared_at(placed), rates, time_bias, norm)


@dataclass(frozen=True, slots=True, eq=False)
class PlannedConvolution(_Planned):
    """As in `DeviceConvolution`."""

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix, in float32."""
        return (self.convolution,)

    def at(self, placed: Placed) -> DeviceConvolution:
        """Return it where it lies."""
        return DeviceConvolution(*self.shared_at(placed))


@dataclass(frozen=True, slots=True, eq=False)
class PlannedMamba2(_Planned):
    """As in `DeviceMamba2`."""

    bias: PlannedMatrix
    rates: PlannedMatrix
    time_bias: PlannedMatrix
    skips: PlannedMatrix
    norm: PlannedMatrix | None

    @property
    def _vectors(self) -> tuple[PlannedMatrix, ...]:
        return self.bias, self.rates, self.time_bias, self.skips

    @property
    def vectors(self) -> tuple[PlannedMatrix, ...]:
        """Everything that is no matrix, in float32."""
        norms = () if self.norm is None else (self.norm,)
        return (self.convolution, *self._vectors, *norms)

    def at(self, placed: Placed) -> DeviceMamba2:
        """Return it where it lies."""
        bias, rates, time_bias, skips = (values_of(placed(one)).view(-1) for one in self._vectors)
        norm = None if self.norm is None else values_of(placed(self.norm)).view(-1)
        return DeviceMamba2(*self.shared_at(placed), bias, rates, time_bias, skips, norm)


PlannedRecurrence: TypeAlias = PlannedDeltaNet | PlannedConvolution | PlannedMamba2


def plan_recurrence(
    of: Recurrence, source: TensorSource, layer: int, joined: Joined, vector: PlansVectors
) -> PlannedRecurrence:
    """Plan what a layer has. Raises DeviceUnavailableError for a kind that is not written."""

    def name(role: str, part: str = layout.WEIGHT) -> str:
        return layout.layer_tensor(layer, role, part)

    def matrices(*roles: str) -> tuple[PlannedMatrix, ...]:
        return joined(*(source.tensor(name(role)) for role in roles))

    def floats(role: str, part: str = layout.WEIGHT) -> PlannedMatrix:
        return vector(name(role, part), target=TensorFormat.F32)

    def taps(role: str) -> PlannedMatrix:
        stored = source.tensor(name(role))
        return PlannedMatrix((replace(stored, shape=(stored.num_elements,)),), TensorFormat.F32)

    if isinstance(of, DeltaNet):
        own = delta_net_layout
        return PlannedDeltaNet(
            inputs=matrices(own.IN_QKV, own.IN_Z, own.IN_B, own.IN_A),
            o=matrices(own.OUT),
            convolution=taps(own.CONVOLUTION),
            kernel_size=of.kernel_size,
            rates=floats(own.MIXER, own.RATES),
            time_bias=floats(own.MIXER, own.TIME_BIAS),
            norm=floats(own.NORM),
        )
    if isinstance(of, ShortConvolution):
        return PlannedConvolution(
            inputs=matrices(short_convolution_layout.INPUTS),
            o=matrices(short_convolution_layout.OUT),
            convolution=taps(short_convolution_layout.CONVOLUTION),
            kernel_size=of.kernel_size,
        )
    if isinstance(of, Mamba2):
        mamba2 = mamba2_layout
        return PlannedMamba2(
            inputs=matrices(mamba2.IN_XBC, mamba2.IN_Z, mamba2.IN_D),
            o=matrices(mamba2.OUT),
            convolution=taps(mamba2.CONVOLUTION),
            kernel_size=of.kernel_size,
            bias=floats(mamba2.CONVOLUTION, layout.BIAS),
            rates=floats(mamba2.MIXER, mamba2.RATES),
            time_bias=floats(mamba2.MIXER, mamba2.TIME_BIAS),
            skips=floats(mamba2.MIXER, mamba2.SKIPS),
            norm=floats(mamba2.NORM) if of.has_norm else None,
        )
    raise DeviceUnavailableError(
        f"executor: it does not run models whose layers have {type(of).__name__} in place of "
        "attention (--executor cpu does)",
        field="executor",
    )
