"""The kernels through which tokens go in layers with Gated DeltaNet.

    inputs │ q, k, v, z, b, a │ ─→ short_convolution ─→ q, k, v, β, α ─→ delta_rule ─→ out
                                      ↑                                   ↑ ↓
                                      └──────────── states ───────────────┘

Where a step's long rows are few, `delta_rule` gives their heads to blocks of threads by parts, and
`gated_norm` follows; otherwise it normalises and gates what comes out itself. The bits are the
same. Scratch comes from torch's allocator at every call; in a captured graph it is the graph's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cuda.delta_rule import DeltaRuleVariant, divides_heads, takes_whole_heads
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.short_convolution import ShortConvolutionVariant
from kernels.cuda.variant import require_multiple

if TYPE_CHECKING:
    from compute_plane.cuda.launchers import Launcher
    from compute_plane.cuda.operands import LayerDeltaNet, StateRows
    from compute_plane.model.delta_net import DeltaNet
    from kernels.cuda.variant import Variant


class DeltaNetKernels:
    """Those of one model; the same for all layers. `dtype`: of a step, by name.

    Raises UnsupportedVariantError for sizes that the kernels are not written for.
    """

    def __init__(self, launcher: Launcher, sizes: DeltaNet, dtype: str) -> None:
        self._launcher = launcher
        self._sizes = sizes
        heads, width = (sizes.key_dim, sizes.value_dim), sizes.kernel_size
        # Rows of `inputs` are whole vectors, of which b and a are the last part.
        require_multiple("num_value_heads", VECTOR_LENGTHS[dtype] // 2, sizes.num_value_heads)
        self._convolution = ShortConvolutionVariant(dtype, *heads, width)
        # By whether blocks have whole heads.
        ways = (False, True) if takes_whole_heads(*heads) else (False,)
        self._rules = {way: DeltaRuleVariant(dtype, *heads, width, way) for way in ways}
        self._norm = GatedNormVariant(dtype, sizes.value_dim)

    @property
    def variants(self) -> list[Variant]:
        """Every kernel that may be launched."""
        return [self._convolution, *self._rules.values(), self._norm]

    def run(
        self,
        out: Tensor,
        states: Tensor,
        layer: int,
        inputs: Tensor,
        rows: StateRows,
        own: LayerDeltaNet,
    ) -> None:
        """Queue a layer's launches, as in `DeviceOperations.delta_net`."""
        sizes, num_tokens = self._sizes, len(inputs)
        key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads

        def floats(width: int) -> Tensor:
            return torch.empty((num_tokens, width), dtype=torch.float32, device=inputs.device)

        convolved, factors = floats(sizes.channels), floats(2 * value_heads)
        stride = inputs.shape[1]
        every = inputs.view(-1)
        z, gates = every[sizes.channels :], every[sizes.channels + sizes.value_size :]
        places = states, states.shape[1], layer * sizes.state_floats
        self._launcher.launch(
            self._convolution,
            self._convolution.grid(num_tokens, key_heads, value_heads),
            convolved,
            factors,
            inputs,
            stride,
            own.convolution,
            gates,
            stride,
            own.rates,
            own.time_bias,
            rows.token_rows,
            rows.rows,
            *places,
            key_heads,
            value_heads,
        )
        divides = divides_heads(rows.num_long, value_heads, self._launcher.num_multiprocessors)
        rule = self._rules.get(not divides, self._rules[False])
        heads = out if rule.normalises else floats(sizes.value_size)
        self._launcher.launch(
            rule,
            rule.grid(len(rows.rows), key_heads, value_heads),
            heads,
            convolved,
            factors,
            inputs,
            stride,
            rows.rows,
            *places,
            key_heads,
            value_heads,
            int(sizes.value_heads_tiled),
            own.norm,
            own.eps,
        )
        if not rule.normalises:
            grid = self._norm.grid(num_tokens, value_heads)
            self._launcher.launch(
                self._norm, grid, out, heads, z, stride, own.norm, own.eps, value_heads
            )
