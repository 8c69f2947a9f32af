"""The end of `quantized_matmul`: what the strands of a panel have summed becomes y.

Every warp lays down its sums [row of x, row of W]; behind a barrier threads that are neighbours in
y add them up, in the order of the strands, add biases, gate what is to be gated, round and write:

    shared      warp 0 │ warp 1 │ …          a warp: 8, 16 or 32 rows of x, `ROW_PITCH` floats each
    warp w      adds row w of each tile of 8 rows of x, panel by panel: lane l the l-th output, over
                the warps that have strands of the panel
    gates       are the first 16 floats of a row, what they gate the second 16; lanes 16 … 31
                do as 0 … 15, and write nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32, uint64

from kernels.cuda.activation import GATES
from kernels.cuda.expert_tiles import row_of_pair, tile_of_block
from kernels.cuda.instructions.conversions import CONVERSIONS
from kernels.cuda.instructions.exact_float32 import add_float32
from kernels.cuda.quantized_formats import PANEL_ROWS
from kernels.cuda.quantized_strands import WARPS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.quantized_matmul import QuantizedMatmulVariant

# Floats from one row of x to the next in the shared sums of a warp: 4 more than the 32 rows of W,
# so that the lanes of a warp, which write rows 2·quad of x, hit different banks.
ROW_PITCH = PANEL_ROWS + 4


def make_add_strands(variant: QuantizedMatmulVariant) -> DeviceFunction:
    """Return the device function, for all threads of a block, with parameters bound."""
    of_experts, gates = variant.of_experts, variant.gates
    gated, biased = GATES[variant.activation], variant.biased
    panel_outputs, column_tiles = variant.panel_outputs, variant.columns // 8
    rows_of_output = PANEL_ROWS // panel_outputs
    warp_sums = variant.columns * ROW_PITCH
    block_sums = WARPS * warp_sums
    to_float32, from_float32 = CONVERSIONS[variant.out_dtype]
    # Places are unsigned. Wide ones are one register, and what is beside it in the instructions:
    # at 8 rows that is what saves a variant from spilling, at 16 rows it makes one spill.
    to_place = uint64 if variant.columns == 8 else uint32

    @cuda.jit(device=True, inline="always")
    def add_strands(
        out: Pointer,
        total: Local,
        tiles: Pointer,
        order: Pointer,
        lane: Scalar,
        first_row: Scalar,
        end_row: Scalar,
        first_panel: Scalar,
        num_outputs: Scalar,
        strands: Scalar,
        out_width: Scalar,
        biases: Pointer,
    ) -> None:
        """Write the block's rows of y, from `first_row` and `first_panel` on.

        `total`: each lane's sums as C fragments. The others: as in `make_quantized_matmul`.
        """
        strand_sums = cuda.shared.array(block_sums, float32)
        warp = cuda.threadIdx.x >> 5  # anew, so that no register keeps it through the loop
        first_sum = to_place(warp * warp_sums + 2 * (lane % 4) * ROW_PITCH + lane // 4)
        for c in range(column_tiles):
            for t in range(2):
                for j in range(4):
                    behind = (8 * c + j % 2) * ROW_PITCH + 16 * t + 8 * (j // 2)
                    at = to_place(first_sum + to_place(behind))
                    strand_sums[at] = total[t * column_tiles + c, j]
        cuda.syncthreads()
        place, outputs_of_lane = lane % panel_outputs, num_outputs
        if gates and lane >= panel_outputs:
            outputs_of_lane = int64(0)
        first_bias = int64(0)
        if of_experts:
            expert, first_row, end_row = tile_of_block(tiles)  # anew, too
            if biased:
                first_bias = expert * num_outputs * rows_of_output
        for c in range(column_tiles):
            row = first_row + 8 * c + warp
            out_row = row
            if of_experts:
                out_row = row_of_pair(order, min(row, end_row - 1), 1)
            output = first_panel * panel_outputs + place
            at = int32((8 * c + warp) * ROW_PITCH + place)
            at_end = int32(at + WARPS * warp_sums)
            while at < at_end:
                value = strand_sums[uint32(at)]
                if gates:
                    other = strand_sums[uint32(at + panel_outputs)]
                next_panel = int32(at + warp_sums * strands)
                at = int32(at + warp_sums)
                while at < next_panel:
                    value += strand_sums[uint32(at)]
                    if gates:
                        other += strand_sums[uint32(at + panel_outputs)]
                    at = int32(at + warp_sums)
                if biased and output < num_outputs:
                    bias_at = first_bias + output
                    if gates:
                        # Of W's row: 16 of a gate, and 16 that it gates, in turns.
                        bias_at += output - place
                        bias = biases[bias_at + panel_outputs]
                        other = add_float32(other, to_float32(bias))
                    value = add_float32(value, to_float32(biases[bias_at]))
                if gates:
                    value = gated(value, other)
                if row < end_row and output < outputs_of_lane:
                    out[out_row * out_width + output] = from_float32(value)
                output += panel_outputs

    return add_strands
