"""What layers with states have in place of attention, or beside it, packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedMatrix


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
