"""The kernels through which tokens go in layers with Mamba-2.

    inputs │ x, b, c, z, d │ ─→ mamba2_inputs ─→ c, b, x, Δ, α ─→ selective_scan ─→ y ─→ out
                                   ↑ ↓                               ↑ ↓        gated_row_norm
                                   └─────────── states ──────────────┘

Scratch comes from torch's allocator at every call; in a captured graph it is the graph's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import LayerMamba2, StateRows
    from compute_plane.model.mamba2 import Mamba2
    from kernels.cuda.variant import Variant


class Mamba2Kernels:
    """Those of one model; the same for all layers. `dtype`: of a step, by name.

    Raises UnsupportedVariantError for sizes that the kernels are not written for.
    """

    def __init__(self, launcher: Launcher, sizes: Mamba2, dtype: str) -> None:
        self._launcher = launcher
        self._sizes = sizes
        self._inputs = Mamba2InputsVariant(dtype, sizes.kernel_size)
        self._scan = SelectiveScanVariant(sizes.head_dim, sizes.state_size)
        self._norm = GatedRowNormVariant(
            dtype, sizes.inner_size // sizes.num_groups, is_normed=sizes.has_norm
        )
        self._inputs.grid(1, *self._heads)  # refuses the sizes that it does not take

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [self._inputs, self._scan, self._norm]

    @property
    def _heads(self) -> tuple[int, int, int]:
        """H, P, and the elements of b of all groups."""
        sizes = self._sizes
        return sizes.num_heads, sizes.head_dim, sizes.num_groups * sizes.state_size

    def run(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerMamba2,
    ) -> None:
        """Queue a layer's launches, as in `DeviceOperations.mamba2`."""
        sizes, (num_tokens, stride) = self._sizes, inputs.shape

        def floats(width: int) -> Tensor:
            return torch.empty((num_tokens, width), dtype=torch.float32, device=inputs.device)

        convolved, steps = floats(sizes.channels), floats(2 * sizes.num_heads)
        layer_start = layer * sizes.state_floats
        self._launcher.launch(
            self._inputs,
            self._inputs.grid(num_tokens, *self._heads),
            convolved,
            steps,
            inputs,
            stride,
            own.convolution,
            own.bias,
            own.rates,
            own.time_bias,
            rows.token_rows,
            rows.rows,
            states,
            states.shape[1],
            layer_start,
            sizes.num_heads,
            sizes.inner_size,
            sizes.num_groups * sizes.state_size,
        )
        heads = floats(sizes.inner_size)
        self._launcher.launch(
            self._scan,
            self._scan.grid(len(rows.rows), sizes.num_heads, sizes.num_groups),
            heads,
            convolved,
            steps,
            own.skips,
            rows.rows,
            states,
            states.shape[1],
            layer_start + (sizes.kernel_size - 1) * sizes.channels,
            sizes.num_heads,
        )
        self._launcher.launch(
            self._norm,
            self._norm.grid(num_tokens, sizes.num_groups),
            out,
            heads,
            inputs.view(-1)[sizes.channels :],
            stride,
            own.skips if own.norm is None else own.norm,
            sizes.norm_eps,
            rows.token_rows,
            rows.rows,
        )
