"""The records of layers with states in place of keys and values.

rows of a piece ─→ delta_net, gated_convolution, or mamba2 ─→ rows for the product behind it
                            │ ↑
                            states of the piece's sequences

Beside the rows there are what Gated DeltaNet's gates are made of, or Mamba-2's time steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from compute_plane.cpu.packed_recurrences import PackedConvolution, PackedDeltaNet
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from kernels.cpu.catalogue import delta_net, gated_convolution, mamba2_inputs, mamba2_scan
from kernels.cpu.delta_net_sizes import delta_net_scratch_bytes
from kernels.cpu.mamba2_sizes import SCRATCH_BYTES
from kernels.cpu.operation import StepWord
from kernels.cpu.state_operands import DeltaNet as DeltaNetWords
from kernels.cpu.state_operands import GatedConvolution
from kernels.cpu.state_operands import Mamba2 as Mamba2Words

if TYPE_CHECKING:
    from compute_plane.cpu.packed_layers import PackedMatrix
    from compute_plane.cpu.packed_recurrences import PackedMamba2, PackedRecurrence
    from compute_plane.cpu.product_records import ProductRecords
    from compute_plane.cpu.step_table import StepTable
    from compute_plane.memory.huge_pages import HugePageArena
    from compute_plane.memory.state_pool import StatePool
    from compute_plane.model.recurrence import Recurrence

FLOAT_BYTES: Final = 4


class RecurrenceRecords:
    """Adds records to a table; methods return their addresses.

    `states`: of the layers from `first_layer` on. `max_rows`: tokens of a piece. `rows`, `out`:
    addresses of float32 [T, rows_width] and [T, of.out_size]: of Gated DeltaNet q, k, v before the
    convolution, then z; of a gated convolution b, c, x; of Mamba-2 x, b, c before the convolution,
    then z. `scratch_bytes`: what a worker needs.
    """

    def __init__(
        self,
        table: StepTable,
        arena: HugePageArena,
        of: Recurrence,
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
        self.rows_width = rows_width(of)
        self.scratch_bytes = beside = 0
        if isinstance(of, DeltaNet):
            beside = 2 * of.num_value_heads
            self.scratch_bytes = delta_net_scratch_bytes(
                of.num_key_heads, of.num_value_heads, of.key_dim, of.value_dim, of.kernel_size
            )
        elif isinstance(of, Mamba2):
            beside, self.scratch_bytes = of.num_heads, SCRATCH_BYTES
        self._beside = arena.take(FLOAT_BYTES * max_rows * beside).ctypes.data

    def run(
        self,
        index: int,
        layer: PackedRecurrence,
        products: ProductRecords,
        epsilon: int,
    ) -> list[int]:
        """Make the rows of a piece of what was normalised, and let them go through the states.

        `epsilon`: the bits of the norm's behind the states, if there is one.
        """
        records = products.beside_each_other(layer.rows, self._rows, self.rows_width)
        if isinstance(layer, PackedConvolution):
            return [*records, self._convolution(index, layer)]
        if isinstance(layer, PackedDeltaNet):
            beside = self._product_beside(layer.gates, products)
            return [*records, *beside, self._delta_net(index, layer, epsilon)]
        beside = self._product_beside(layer.steps, products)
        return [*records, *beside, *self._mamba2(index, layer)]

    def _product_beside(self, matrix: PackedMatrix, products: ProductRecords) -> list[int]:
        return products.product(matrix, self._beside, matrix.n)

    def _delta_net(self, index: int, layer: PackedDeltaNet, epsilon: int) -> int:
        of, words = self._of, DeltaNetWords
        assert isinstance(of, DeltaNet)
        return self._table.add(
            delta_net,
            StepWord.STATE_CHUNKS,
            {
                words.ROWS: self._rows,
                words.ROWS_STRIDE: self.rows_width,
                words.GATES: self._beside,
                words.OUT: self._out,
                words.CONVOLUTION: layer.convolution,
                words.RATES: layer.rates,
                words.TIME_BIAS: layer.time_bias,
                words.NORM: layer.norm,
                words.EPSILON: epsilon,
                words.NUM_KEY_HEADS: of.num_key_heads,
                words.NUM_VALUE_HEADS: of.num_value_heads,
                words.KEY_DIM: of.key_dim,
                words.VALUE_DIM: of.value_dim,
                words.KERNEL_SIZE: of.kernel_size,
                words.STATES: self._state_address(index),
                words.STATE_BYTES: self._states.state_bytes,
                words.ARE_TILED: int(of.value_heads_tiled),
            },
        )

    def _mamba2(self, index: int, layer: PackedMamba2) -> list[int]:
        of, words = self._of, Mamba2Words
        assert isinstance(of, Mamba2)
        operands: dict[int, int] = {
            words.ROWS: self._rows,
            words.ROWS_STRIDE: self.rows_width,
            words.STEPS: self._beside,
            words.OUT: self._out,
            words.CONVOLUTION: layer.convolution,
            words.BIAS: layer.bias,
            words.RATES: layer.rates,
            words.TIME_BIAS: layer.time_bias,
            words.SKIPS: layer.skips,
            words.NUM_HEADS: of.num_heads,
            words.HEAD_DIM: of.head_dim,
            words.STATE_SIZE: of.state_size,
            words.KERNEL_SIZE: of.kernel_size,
            words.STATES: self._state_address(index),
            words.STATE_BYTES: self._states.state_bytes,
            words.NUM_GROUPS: of.num_groups,
        }
        return [
            self._table.add(operation, StepWord.STATE_CHUNKS, operands)
            for operation in (mamba2_inputs, mamba2_scan)
        ]

    def _convolution(self, index: int, layer: PackedConvolution) -> int:
        of, words = self._of, GatedConvolution
        return self._table.add(
            gated_convolution,
            StepWord.STATE_CHUNKS,
            {
                words.ROWS: self._rows,
                words.ROWS_STRIDE: self.rows_width,
                words.OUT: self._out,
                words.WEIGHTS: layer.convolution,
                words.CHANNELS: of.channels,
                words.KERNEL_SIZE: of.kernel_size,
                words.STATES: self._state_address(index),
                words.STATE_BYTES: self._states.state_bytes,
            },
        )

    def _state_address(self, index: int) -> int:
        return self._states.layer_address(self._numbers[self._first_layer + index])


def rows_width(of: Recurrence) -> int:
    """Return how many elements a token's row has, without what lies beside it."""
    if isinstance(of, DeltaNet):
        return of.num_inputs - 2 * of.num_value_heads
    return of.num_inputs - of.num_heads if isinstance(of, Mamba2) else of.num_inputs
