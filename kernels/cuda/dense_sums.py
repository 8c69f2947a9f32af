"""The end of `dense_matmul`: what the strands of a panel have summed becomes y.

Every warp lays down its sums [pair of rows of x, row of W], and of normalised rows the sums of
their squares; behind a barrier threads that are neighbours in y add them up, in the order of the
strands, multiply with the row's factor, add biases, gate, add to the residual stream, round and
write:

    shared      warp 0 │ warp 1 │ …          a warp: 4 or 8 pairs, `pair_pitch` floats each
    thread i    adds the i-th output of a panel, then of the next panel of the block: a row of x and
                one of its outputs
    gates       lie 16 floats before what they gate
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.activation import GATES
from kernels.cuda.expert_tiles import row_of_pair, tile_of_block
from kernels.cuda.instructions.conversions import CONVERSIONS, FULL_WARP, reciprocal_root
from kernels.cuda.instructions.exact_float32 import add_float32, multiply_float32
from kernels.cuda.quantized_strands import WARPS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.dense_matmul import DenseMatmulVariant


def make_add_strands(variant: DenseMatmulVariant) -> DeviceFunction:
    """Return the device function, for all threads of a block, with parameters bound."""
    of_experts, normalises = variant.of_experts, variant.normalises
    gates, adds = variant.gates, variant.writes == "added"
    gated, biased = GATES[variant.activation], variant.biased
    columns, tiles = variant.columns, variant.panel_tiles
    panel_outputs, column_tiles = variant.panel_outputs, columns // 8
    # Where the sums of a pair of rows of x lie, in floats. The lanes of a warp hit different banks:
    # they write rows 2·quad, so a pair begins 8 banks behind where the one before began; they read
    # 32 outputs of a row, or 16 of two, which lie side by side then (the gates of both first).
    row_step, tile_step = (32, 16) if panel_outputs == 32 else (16, 32)
    pair_pitch = 2 * variant.panel_rows + 8
    warp_sums = columns // 2 * pair_pitch
    block_sums = WARPS * warp_sums
    block_squares = WARPS * columns if normalises else 1
    panel_items = columns * panel_outputs
    to_float32, from_float32 = CONVERSIONS[variant.out_dtype]

    @cuda.jit(device=True, inline="always")
    def add_strands(
        out: Pointer,
        total: Local,
        squares: Local,
        expert_tiles: Pointer,
        order: Pointer,
        group: Scalar,
        quad: Scalar,
        first_row: Scalar,
        end_row: Scalar,
        first_panel: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strands: Scalar,
        out_width: Scalar,
        eps: Scalar,
        biases: Pointer,
    ) -> None:
        """Write the block's rows of y, from `first_row` and `first_panel` on.

        `total`: each lane's sums as C fragments, `squares`: those of its k's of row `group` of each
        tile of x. The others: as in `make_dense_matmul`.
        """
        # The strands' sums: laid down [warp, row of x, row of W], then added in the order of the
        # strands by threads that are neighbours in y.
        strand_sums = cuda.shared.array(block_sums, float32)
        strand_squares = cuda.shared.array(block_squares, float32)
        warp = cuda.threadIdx.x >> 5  # anew, so that no register keeps it through the loop
        first_sum = int32(warp * warp_sums + quad * pair_pitch + group)
        for c in range(column_tiles):
            for t in range(tiles):
                for j in range(4):
                    at = first_sum + 4 * c * pair_pitch + j % 2 * row_step
                    at += tile_step * t + 8 * (j // 2)
                    strand_sums[uint32(at)] = total[t * column_tiles + c, j]
            if normalises:
                # A row's squares, of all quads: the same in each of them.
                row_squares = squares[c]
                row_squares = add_float32(
                    row_squares, cuda.shfl_xor_sync(FULL_WARP, row_squares, 1)
                )
                row_squares = add_float32(
                    row_squares, cuda.shfl_xor_sync(FULL_WARP, row_squares, 2)
                )
                if quad == 0:
                    strand_squares[uint32(warp * columns + 8 * c + group)] = row_squares
        cuda.syncthreads()
        # Thread i takes the i-th output of a panel, then the i-th of the next panel of the block.
        first_bias = int64(0)
        if of_experts:
            expert, first_row, end_row = tile_of_block(expert_tiles)  # anew, too
            if biased:
                first_bias = expert * (2 * num_outputs if gates else num_outputs)
        for first_item in range(0, panel_items, 32 * WARPS):
            item = int32(first_item + cuda.threadIdx.x)
            column = item // panel_outputs
            row = first_row + column
            out_row = row
            if of_experts:
                out_row = row_of_pair(order, min(row, end_row - 1), 1)
            output = first_panel * panel_outputs + item % panel_outputs
            sum_at = column // 2 * pair_pitch + column % 2 * row_step + item % panel_outputs
            sum_at = int32(sum_at)
            square_at = column
            panel = int32(0)
            while panel < WARPS and item < panel_items:
                value = strand_sums[uint32(sum_at)]
                if gates:
                    other = strand_sums[uint32(sum_at + tile_step)]
                if normalises:
                    square = strand_squares[uint32(square_at)]
                for _ in range(strands - 1):
                    sum_at = int32(sum_at + warp_sums)
                    square_at = int32(square_at + columns)
                    value = add_float32(value, strand_sums[uint32(sum_at)])
                    if gates:
                        other = add_float32(other, strand_sums[uint32(sum_at + tile_step)])
                    if normalises:
                        square = add_float32(square, strand_squares[uint32(square_at)])
                sum_at = int32(sum_at + warp_sums)
                square_at = int32(square_at + columns)
                if normalises:
                    factor = reciprocal_root(square / float32(num_inputs) + eps)
                    value = multiply_float32(value, factor)
                    if gates:
                        other = multiply_float32(other, factor)
                if biased and output < num_outputs:
                    bias_at = first_bias + output
                    value = add_float32(value, to_float32(biases[bias_at]))
                    if gates:
                        bias = biases[bias_at + num_outputs]
                        other = add_float32(other, to_float32(bias))
                if gates:
                    value = gated(value, other)
                if row < end_row and output < num_outputs:
                    at = out_row * out_width + output
                    if adds:
                        value = add_float32(to_float32(out[at]), value)
                    out[at] = from_float32(value)
                output += panel_outputs
                panel = int32(panel + strands)

    return add_strands
