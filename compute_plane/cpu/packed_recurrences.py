"""What layers with states have in place of attention, or beside it, packed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from compute_plane.model import delta_net_layout, layout, mamba2_layout, short_convolution_layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.tensor import TensorFormat

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.cpu.packing_plan import PackingPlan
    from compute_plane.model.recurrence import Recurrence
    from compute_plane.model.tensor import RawTensor


@dataclass(frozen=True, slots=True)
class PackedDeltaNet:
    """What a layer has in place of attention: `kernels.reference.delta_net`.

    `o`: of what it gives. `rows`: columns q, k, v, z, in one matrix or several. `gates`: columns
    b, a. `convolution`: address of float32 [K, C]; `rates`, `time_bias`: of float32 [Hv]; `norm`:
    of float32 [Dv].
    """

    rows: tuple[PackedMatrix, ...]
    gates: PackedMatrix
    convolution: int
    rates: int
    time_bias: int
    norm: int
    o: PackedMatrix

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    @property
    def inputs(self) -> tuple[PackedMatrix, ...]:
        """Those that read what was normalised."""
        return (*self.rows, self.gates)

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return (*self.inputs, self.o)

    def moved(self, by: int) -> PackedDeltaNet:
        """Return it so many bytes further on."""
        return PackedDeltaNet(
            rows=tuple(part.moved(by) for part in self.rows),
            gates=self.gates.moved(by),
            convolution=self.convolution + by,
            rates=self.rates + by,
            time_bias=self.time_bias + by,
            norm=self.norm + by,
            o=self.o.moved(by),
        )


@dataclass(frozen=True, slots=True)
class PackedConvolution:
    """What a layer has in place of attention: `kernels.reference.gated_convolution`.

    `o`: of what it gives. `rows`: columns b, c, x. `convolution`: address of float32 [K, C].
    """

    rows: tuple[PackedMatrix, ...]
    convolution: int
    o: PackedMatrix

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    @property
    def inputs(self) -> tuple[PackedMatrix, ...]:
        """Those that read what was normalised."""
        return self.rows

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return (*self.rows, self.o)

    def moved(self, by: int) -> PackedConvolution:
        """Return it so many bytes further on."""
        return PackedConvolution(
            rows=tuple(part.moved(by) for part in self.rows),
            convolution=self.convolution + by,
            o=self.o.moved(by),
        )


@dataclass(frozen=True, slots=True)
class PackedMamba2:
    """What a layer has in place of attention, or beside it: `kernels.reference.mamba2`.

    `o`: of what it gives. `rows`: columns x, b, c, z, in one matrix or several. `steps`: columns d.
    Addresses of float32: `convolution`, [K, C], `bias`, [C]; `rates`, `time_bias`, `skips`, [H];
    `norm`, [H·P], or None if there is none.
    """

    rows: tuple[PackedMatrix, ...]
    steps: PackedMatrix
    convolution: int
    bias: int
    rates: int
    time_bias: int
    skips: int
    norm: int | None
    o: PackedMatrix

    @property
    def o_bias(self) -> None:
        """There is none."""
        return None

    @property
    def inputs(self) -> tuple[PackedMatrix, ...]:
        """Those that read what was normalised."""
        return (*self.rows, self.steps)

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """All matrices."""
        return (*self.inputs, self.o)

    def moved(self, by: int) -> PackedMamba2:
        """Return it so many bytes further on."""
        return PackedMamba2(
            rows=tuple(part.moved(by) for part in self.rows),
            steps=self.steps.moved(by),
            convolution=self.convolution + by,
            bias=self.bias + by,
            rates=self.rates + by,
            time_bias=self.time_bias + by,
            skips=self.skips + by,
            norm=None if self.norm is None else self.norm + by,
            o=self.o.moved(by),
        )


PackedRecurrence: TypeAlias = PackedDeltaNet | PackedConvolution | PackedMamba2


def plan_recurrence(
    plan: PackingPlan, of: Recurrence, tensor: Callable[..., RawTensor]
) -> PackedRecurrence:
    """Plan what keeps a state. `tensor`: by its role and part."""
    if isinstance(of, DeltaNet):
        return _plan_delta_net(plan, tensor)
    if isinstance(of, Mamba2):
        return _plan_mamba2(plan, of, tensor)
    return _plan_convolution(plan, tensor)


def _plan_delta_net(plan: PackingPlan, tensor: Callable[..., RawTensor]) -> PackedDeltaNet:
    """Plan what a layer has in place of attention. `tensor`: by its role and part."""
    return PackedDeltaNet(
        rows=plan.fused([tensor(delta_net_layout.IN_QKV), tensor(delta_net_layout.IN_Z)]),
        # How much of a state stays is kept as exact as the file has it.
        gates=plan.matrix(
            [tensor(delta_net_layout.IN_B), tensor(delta_net_layout.IN_A)],
            target=TensorFormat.F32,
        ),
        convolution=plan.vector(tensor(delta_net_layout.CONVOLUTION), is_turned=True),
        rates=plan.vector(tensor(delta_net_layout.MIXER, delta_net_layout.RATES)),
        time_bias=plan.vector(tensor(delta_net_layout.MIXER, delta_net_layout.TIME_BIAS)),
        norm=plan.vector(tensor(delta_net_layout.NORM)),
        o=plan.matrix([tensor(delta_net_layout.OUT)]),
    )


def _plan_mamba2(plan: PackingPlan, of: Mamba2, tensor: Callable[..., RawTensor]) -> PackedMamba2:
    """Plan what a layer has in place of attention, or beside it. `tensor`: by its role and part."""

    def vector(part: str) -> int:
        return plan.vector(tensor(mamba2_layout.MIXER, part))

    return PackedMamba2(
        rows=plan.fused([tensor(mamba2_layout.IN_XBC), tensor(mamba2_layout.IN_Z)]),
        # How much of a state stays is kept as exact as the file has it.
        steps=plan.matrix([tensor(mamba2_layout.IN_D)], target=TensorFormat.F32),
        convolution=plan.vector(tensor(mamba2_layout.CONVOLUTION), is_turned=True),
        bias=plan.vector(tensor(mamba2_layout.CONVOLUTION, layout.BIAS)),
        rates=vector(mamba2_layout.RATES),
        time_bias=vector(mamba2_layout.TIME_BIAS),
        skips=vector(mamba2_layout.SKIPS),
        norm=plan.vector(tensor(mamba2_layout.NORM)) if of.has_norm else None,
        o=plan.matrix([tensor(mamba2_layout.OUT)]),
    )


def _plan_convolution(plan: PackingPlan, tensor: Callable[..., RawTensor]) -> PackedConvolution:
    """Plan what a layer has in place of attention. `tensor`: by its role and part."""
    return PackedConvolution(
        rows=plan.fused([tensor(short_convolution_layout.INPUTS)]),
        convolution=plan.vector(tensor(short_convolution_layout.CONVOLUTION), is_turned=True),
        o=plan.matrix([tensor(short_convolution_layout.OUT)]),
    )
