"""The kernels through which tokens go in layers with states, and those of attention's gates.

Gated DeltaNet         `delta_net_kernels`
gated convolutions     one launch, which writes the states that it reads
Mamba-2                `mamba2_kernels`
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compute_plane.cuda.delta_net_kernels import DeltaNetKernels
from compute_plane.cuda.mamba2_kernels import Mamba2Kernels
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.short_convolution import ShortConvolution
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gated_convolution import GatedConvolutionVariant

if TYPE_CHECKING:
    from torch import Tensor

    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import (
        LayerConvolution,
        LayerDeltaNet,
        LayerMamba2,
        StateRows,
    )
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant


class RecurrenceKernels:
    """The part of `KernelOperations` for models with states or gates of attention.

    `dtype`: of a step, by name. Raises UnsupportedVariantError for sizes that the kernels are not
    written for.
    """

    def __init__(self, launcher: Launcher, spec: ModelSpec, dtype: str) -> None:
        self._launcher = launcher
        self._gate: GateAttendedVariant | None = None
        self._delta_net: DeltaNetKernels | None = None
        self._convolution: ConvolutionKernels | None = None
        self._mamba2: Mamba2Kernels | None = None
        if spec.gates_attention:
            self._gate = GateAttendedVariant(dtype)
            self._gate.grid(1, spec.query_size)  # refuses the sizes that it does not take
        if isinstance(spec.recurrence, DeltaNet):
            self._delta_net = DeltaNetKernels(launcher, spec.recurrence, dtype)
        elif isinstance(spec.recurrence, ShortConvolution):
            self._convolution = ConvolutionKernels(launcher, spec.recurrence, dtype)
        elif isinstance(spec.recurrence, Mamba2):
            self._mamba2 = Mamba2Kernels(launcher, spec.recurrence, dtype)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        gates = [] if self._gate is None else [self._gate]
        kinds = self._delta_net, self._convolution, self._mamba2
        return [*gates, *(variant for one in kinds if one is not None for variant in one.variants)]

    def gate_attended(self, attended: Tensor, gates: Tensor) -> None:
        """Gate what attention gave, in place."""
        assert self._gate is not None
        num_tokens, num_features = attended.shape
        grid = self._gate.grid(num_tokens, num_features)
        self._launcher.launch(self._gate, grid, attended, gates, num_features, num_features)

    def delta_net(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerDeltaNet,
    ) -> None:
        """Bring the tokens of rows through their states."""
        assert self._delta_net is not None
        self._delta_net.run(out, states, layer, inputs, rows, own)

    def gated_convolution(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerConvolution,
    ) -> None:
        """Bring the tokens of rows through their states."""
        assert self._convolution is not None
        self._convolution.run(out, states, layer, inputs, rows, own)

    def mamba2(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerMamba2,
    ) -> None:
        """Bring the tokens of rows through their states."""
        assert self._mamba2 is not None
        self._mamba2.run(out, states, layer, inputs, rows, own)


class ConvolutionKernels:
    """Those of a model with gated convolutions; the same for all layers."""

    def __init__(self, launcher: Launcher, sizes: ShortConvolution, dtype: str) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._convolution = GatedConvolutionVariant(dtype, sizes.kernel_size)
        self._convolution.grid(1, sizes.channels)  # refuses the sizes that it does not take

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [self._convolution]

    def run(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerConvolution,
    ) -> None:
        """Queue a layer's launch, as in `DeviceOperations.gated_convolution`."""
        channels = self._sizes.channels
        self._launcher.launch(
            self._convolution,
            self._convolution.grid(len(inputs), channels),
            out,
            inputs,
            inputs.shape[1],
            own.weight,
            rows.token_rows,
            rows.rows,
            states,
            states.shape[1],
            layer * self._sizes.state_floats,
            channels,
        )
