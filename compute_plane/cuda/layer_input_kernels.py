"""The kernels for what layers read of a second embedding (`layer_inputs`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.fetched_weights import NOTHING
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.rms_norm import RmsNormVariant

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.model.spec import ModelSpec
    from kernels.cuda.variant import Variant


class LayerInputKernels:
    """The part of `KernelOperations` for them. `dtype`: of a step.

    Of a model without there are none. Raises UnsupportedVariantError for a shape that they are not
    written for.
    """

    def __init__(self, launcher: Launcher, spec: ModelSpec, dtype: str) -> None:
        self._launcher = launcher
        self._norm: RmsNormVariant | None = None
        self._gate: GateApartVariant | None = None
        size = spec.layer_input_size
        if size:
            self._norm = RmsNormVariant(dtype, size, norms_added=True, scales_sums=True)
            self._gate = GateApartVariant(dtype, spec.activation)
            # Both refuse the sizes that they do not take.
            self._gate.grid(1, size)
            EmbeddingVariant(dtype).grid(1, spec.num_layers * size)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [variant for variant in (self._norm, self._gate) if variant is not None]

    def add_normed_parts(
        self, sums: Tensor, x: Tensor, weight: Tensor, eps: float, factor: float
    ) -> None:
        """Add parts, each a row of a norm that adds; what it normalises nobody reads."""
        assert self._norm is not None
        unread, num_rows = torch.empty_like(x), x.numel() // len(weight)
        grid = self._norm.grid(num_rows, NOTHING)
        self._launcher.launch(
            self._norm, grid, unread, sums, x, weight, weight, eps, factor, unread,
            *NOTHING.arguments,
        )  # fmt: skip

    def gate_apart(self, out: Tensor, gates: Tensor, ups: Tensor, first_column: int) -> None:
        """Gate columns of what lies apart."""
        assert self._gate is not None
        num_tokens, num_features = out.shape
        grid = self._gate.grid(num_tokens, num_features)
        self._launcher.launch(
            self._gate, grid, out, gates, ups, num_features, first_column, ups.stride(0)
        )
