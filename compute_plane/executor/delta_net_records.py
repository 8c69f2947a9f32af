"""The records of a layer with states in place of keys and values: Gated DeltaNet.

rows q, k, v, z and gates b, a of a piece ─→ delta_net ─→ rows for the product behind it
                                              │ ↑
                                              states of the piece's sequences
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from compute_plane.executor.step_table import StepTable
from compute_plane.memory.state_pool import StatePool, sizes_of
from kernels.cpu.catalogue import delta_net
from kernels.cpu.delta_net_sizes import delta_net_scratch_bytes
from kernels.cpu.operands import DeltaNet as Words
from kernels.cpu.operation import StepWord

if TYPE_CHECKING:
    from compute_plane.executor.packed_layers import PackedDeltaNet
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.model.delta_net import DeltaNet

FLOAT_BYTES: Final = 4


class DeltaNetRecords:
    """Adds records to a table; methods return their addresses.

    `states`: of the layers from `first_layer` on. `max_rows`: tokens of a piece. `rows`, `out`:
    addresses of float32 [T, rows_width] (q, k, v before the convolution, then z) and
    [T, out_width]. `gates`: address of float32 [T, 2·Hv] (b, then a).
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        of: DeltaNet,
        states: StatePool,
        *,
        first_layer: int,
        max_rows: int,
        rows: int,
        out: int,
    ) -> None:
        self._table, self._of, self._states = table, of, states
        self._rows, self._out = rows, out
        self._first_layer = first_layer
        layers = sorted(layer for layer in of.layers if layer >= first_layer)
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        gates = arena.take(FLOAT_BYTES * max_rows * 2 * of.num_value_heads)
        self.gates = gates.ctypes.data
        self.rows_width = of.channels + of.value_size
        self.out_width = of.value_size
        self.scratch_bytes = delta_net_scratch_bytes(*sizes_of(of))

    def run(self, index: int, layer: PackedDeltaNet, epsilon: int) -> int:
        """Let a piece's tokens go through the states. `epsilon`: the bits of the norm's."""
        of = self._of
        number = self._numbers[self._first_layer + index]
        return self._table.add(
            delta_net,
            StepWord.STATE_CHUNKS,
            {
                Words.ROWS: self._rows,
                Words.ROWS_STRIDE: self.rows_width,
                Words.GATES: self.gates,
                Words.OUT: self._out,
                Words.CONVOLUTION: layer.convolution,
                Words.RATES: layer.rates,
                Words.TIME_BIAS: layer.time_bias,
                Words.NORM: layer.norm,
                Words.EPSILON: epsilon,
                Words.NUM_KEY_HEADS: of.num_key_heads,
                Words.NUM_VALUE_HEADS: of.num_value_heads,
                Words.KEY_DIM: of.key_dim,
                Words.VALUE_DIM: of.value_dim,
                Words.KERNEL_SIZE: of.kernel_size,
                Words.STATES: self._states.layer_address(number),
                Words.STATE_BYTES: self._states.state_bytes,
                Words.ARE_TILED: int(of.value_heads_tiled),
            },
        )
