"""The kernel of `dense_matmul`: a warp's strand of a panel, the sum of the strands, what follows.

In a warp, W is the A operand of the tensor cores and x the B operand, as in
`quantized_matmul_tensor`: one or two tiles of 16 rows of W against `columns` / 8 tiles of 8 rows of
x. With `group` = lane // 4 and `quad` = lane % 4 a lane has, of the rows `group` and `group` + 8 of
each tile of W and of a row of x, the same eight neighbouring k's, one vector of 16 bytes each:

    k             0 … 7    8 … 15   16 … 23  24 … 31        8 · 64 bytes, each a run of its own:
    row group     quad 0   quad 1   quad 2   quad 3         what a warp reads with one instruction
    row group+8   quad 0   quad 1   quad 2   quad 3

    A, tile t, step s   a0  row 2·t, word 2·s       a2  row 2·t, word 2·s + 1      of the vectors
                        a1  row 2·t + 1, …          a3  row 2·t + 1, …
    B, step s           b0  word 2·s                b1  word 2·s + 1
    C                   c0, c1  y of row 2·t and two rows of x   c2, c3  y of row 2·t + 1

The order of k within a step is free as long as both have the same, so W is read as model files
store it, row by row, and needs no shared memory and no instruction to put it in order.

The ring: tiles of W, x and the norm's weights are asked for a round ahead, and wait in registers. A
tile is multiplied, then its registers are filled with the one a round later. All of it is unrolled,
so that every slot is a register. What becomes of the sums is in `dense_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.dense_sums import make_add_strands
from kernels.cuda.expert_tiles import row_of_pair, tile_of_block
from kernels.cuda.instructions.conversions import (
    FULL_WARP,
    PAIR_CONVERSIONS,
)
from kernels.cuda.instructions.early_launch import (
    fetch_ahead,
    let_next_begin,
    wait_for_previous,
)
from kernels.cuda.instructions.exact_float32 import multiply_add, multiply_float32
from kernels.cuda.instructions.tiles import MULTIPLY_TILES
from kernels.cuda.instructions.vectors import (
    load_constant_vector,
    load_streamed_vector,
    load_vector,
)
from kernels.cuda.quantized_formats import TILE_INPUTS
from kernels.cuda.quantized_strands import WARPS
from kernels.cuda.variant import Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.dense_matmul import DenseMatmulVariant

TILE_ROWS = 16
TILE_BYTES = 2 * TILE_INPUTS  # of a row


def make_dense_matmul(variant: DenseMatmulVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    columns, tiles, ring = variant.columns, variant.panel_tiles, variant.ring
    of_experts = variant.of_experts
    normalises, gates = variant.normalises, variant.gates
    column_tiles = columns // 8
    panel_rows, panel_outputs = TILE_ROWS * tiles, variant.panel_outputs
    num_totals, num_vectors = tiles * column_tiles, 2 * tiles
    weight_slots, input_slots = ring * num_vectors, ring * column_tiles
    multiply_tiles = MULTIPLY_TILES[variant.dtype]
    pairs = PAIR_CONVERSIONS[variant.dtype]
    pack, low, high = pairs.pack, pairs.low, pairs.high
    add_strands = make_add_strands(variant)

    @cuda.jit(device=True, inline="always")
    def ask(slots: Local, first: Scalar, weights: Pointer, at: Local, ahead: Scalar) -> None:
        """Start reading the weights of the tile `ahead` into the slots from `first` on."""
        for v in range(num_vectors):
            load_streamed_vector(slots, first + v, weights, at[v] + ahead * TILE_INPUTS)

    @cuda.jit(device=True, inline="always")
    def ask_for_inputs(slots: Local, first: Scalar, x: Pointer, at: Local, ahead: Scalar) -> None:
        """Do so with x, which is no constant where the launch has begun before x was written."""
        for c in range(column_tiles):
            load_vector(slots, first + c, x, at[c] + ahead * TILE_INPUTS)

    @cuda.jit(device=True, inline="always")
    def clear(slots: Local, first: Scalar, count: Scalar) -> None:
        """Write zeros into slots."""
        for v in range(first, first + count):
            for j in range(4):
                slots[v, j] = uint32(0)

    @cuda.jit(device=True, inline="always")
    def multiply(
        out: Pointer,
        x: Pointer,
        weights: Pointer,
        norm_weight: Pointer,
        expert_tiles: Pointer,
        order: Pointer,
        share: Scalar,
        num_rows: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        eps: Scalar,
        biases: Pointer,
    ) -> None:
        """Do what the kernels below say; `expert_tiles`, `order`, `share`: of experts only."""
        lane = cuda.threadIdx.x & 31  # not a remainder: that of a negative would be thought of
        group = lane // 4
        quad = lane % 4
        # From lane 0 to all: so the compiler knows that a warp does not part over it.
        warp = cuda.shfl_sync(FULL_WARP, cuda.threadIdx.x >> 5, 0)
        strands = int32(1 << strand_bits)
        first_panel = int64(cuda.blockIdx.y) * (WARPS >> strand_bits)
        first_output = (first_panel + (warp >> strand_bits)) * panel_outputs
        first_row, end_row = int64(cuda.blockIdx.x) * columns, num_rows
        if of_experts:
            # Which rows and whose weights is what the launch ahead has to say.
            wait_for_previous()
            expert, first_row, end_row = tile_of_block(expert_tiles)
            if first_row == end_row:
                return

        # The warp's tiles. A warp behind the last panel has none.
        num_tiles = num_inputs // TILE_INPUTS
        strand_tiles = (num_tiles + strands - 1) >> strand_bits
        first_tile = (warp & (strands - 1)) * strand_tiles
        tiles_left = int32(min(strand_tiles, num_tiles - first_tile))
        if first_output >= num_outputs:
            tiles_left = int32(0)

        first_input = first_tile * TILE_INPUTS
        if not of_experts:
            # Weights wait for nobody: a lane has the first round of one row fetched.
            if lane < panel_rows and tiles_left > 0:
                row = min(first_output + (lane % TILE_ROWS if gates else lane), num_outputs - 1)
                if gates:
                    row += lane // TILE_ROWS * num_outputs
                ring_bytes = min(tiles_left, ring) * TILE_BYTES
                fetch_ahead(weights, row * num_inputs + first_input, ring_bytes)
            wait_for_previous()

        total = cuda.local.array((num_totals, 4), float32)
        squares = cuda.local.array(column_tiles, float32)
        for i in range(num_totals):
            for j in range(4):
                total[i, j] = float32(0)
        for c in range(column_tiles):
            squares[c] = float32(0)

        # Where the lane's vectors of the strand's first tile are. Rows behind the last one of W or
        # x repeat it: what becomes of them is not written.
        weights_at = cuda.local.array(num_vectors, int64)
        inputs_at = cuda.local.array(column_tiles, int64)
        norm_at = cuda.local.array(1, int64)
        first_input += 8 * quad
        norm_at[0] = first_input
        for v in range(num_vectors):
            # Tile v // 2 begins 16 rows after the one before, or, of a gate and its values, N.
            row = first_output + 8 * (v % 2) + group
            if not gates:
                row += TILE_ROWS * (v // 2)
            row = min(row, num_outputs - 1)
            if gates:
                row += v // 2 * num_outputs
            if of_experts:
                row += expert * (2 * num_outputs if gates else num_outputs)
            weights_at[v] = row * num_inputs + first_input
        for c in range(column_tiles):
            row = min(first_row + 8 * c + group, end_row - 1)
            if of_experts:
                row = row_of_pair(order, row, share)
            inputs_at[c] = row * num_inputs + first_input

        # A slot without a tile holds zeros at first, later what it had, which zeros of x make
        # harmless: weights are finite.
        weight_ring = cuda.local.array((weight_slots, 4), uint32)
        input_ring = cuda.local.array((input_slots, 4), uint32)
        norm_ring = cuda.local.array((ring, 4), uint32)
        for tile in range(ring):
            if tile < tiles_left:
                ask(weight_ring, tile * num_vectors, weights, weights_at, tile)
                ask_for_inputs(input_ring, tile * column_tiles, x, inputs_at, tile)
                if normalises:
                    load_constant_vector(
                        norm_ring, tile, norm_weight, norm_at[0] + tile * TILE_INPUTS
                    )
            else:
                clear(weight_ring, tile * num_vectors, num_vectors)
                clear(input_ring, tile * column_tiles, column_tiles)
                if normalises:
                    clear(norm_ring, tile, 1)

        scaled = cuda.local.array(4, uint32)
        while tiles_left > 0:
            if tiles_left <= ring:
                # All of the strand has been asked for: what comes next may have the memory.
                let_next_begin()
            for tile in range(ring):
                for c in range(column_tiles):
                    i = tile * column_tiles + c
                    for j in range(4):
                        word = input_ring[i, j]
                        if normalises:
                            # Squared as it is, multiplied with the norm's weight; the factor of the
                            # row comes at the end.
                            first, second = low(word), high(word)
                            squares[c] = multiply_add(first, first, squares[c])
                            squares[c] = multiply_add(second, second, squares[c])
                            by = norm_ring[tile, j]
                            first = multiply_float32(first, low(by))
                            second = multiply_float32(second, high(by))
                            word = pack(first, second)
                        scaled[j] = word
                    for t in range(tiles):
                        v = tile * num_vectors + 2 * t
                        for step in range(2):
                            j = 2 * step
                            a = (
                                weight_ring[v, j],
                                weight_ring[v + 1, j],
                                weight_ring[v, j + 1],
                                weight_ring[v + 1, j + 1],
                            )
                            b = (scaled[j], scaled[j + 1])
                            multiply_tiles(total, t * column_tiles + c, a, b)

                # The slots are free: ask for what they get next.
                ahead = tile + ring
                if ahead < tiles_left:
                    ask(weight_ring, tile * num_vectors, weights, weights_at, ahead)
                    ask_for_inputs(input_ring, tile * column_tiles, x, inputs_at, ahead)
                    if normalises:
                        load_constant_vector(
                            norm_ring, tile, norm_weight, norm_at[0] + ahead * TILE_INPUTS
                        )
                else:
                    clear(input_ring, tile * column_tiles, column_tiles)
            tiles_left = int32(tiles_left - ring)
            for v in range(num_vectors):
                weights_at[v] += ring * TILE_INPUTS
            for c in range(column_tiles):
                inputs_at[c] += ring * TILE_INPUTS
            norm_at[0] += ring * TILE_INPUTS

        add_strands(
            out, total, squares, expert_tiles, order, group, quad, first_row, end_row, first_panel,
            num_outputs, num_inputs, strands, out_width, eps, biases,
        )  # fmt: skip

    def dense_matmul(
        out: Pointer,
        x: Pointer,
        weights: Pointer,
        norm_weight: Pointer,
        num_rows: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        eps: Scalar,
        biases: Pointer,
    ) -> None:
        """Multiply `columns` rows of x, from blockIdx.x, with the panels of blockIdx.y.

        `out`: [M, N], `out_width` elements from row to row; read, too, where it is added to. `x`:
        [M, K]. `weights`: [N, K], or [2·N, K] where they gate. `norm_weight`: [K], `eps`: not
        touched where nothing is normalised. `num_rows` M, `num_outputs` N, `num_inputs` K, a
        multiple of 32. `biases`: of W's rows; not touched where there are none.
        """
        multiply(
            out, x, weights, norm_weight, x, x, 1, num_rows, num_outputs, num_inputs, strand_bits,
            out_width, eps, biases,
        )  # fmt: skip

    def dense_matmul_of_experts(
        out: Pointer,
        x: Pointer,
        weights: Pointer,
        expert_tiles: Pointer,
        order: Pointer,
        share: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        biases: Pointer,
    ) -> None:
        """Multiply the pairs of tile blockIdx.x with the panels of blockIdx.y of their expert.

        `out`: [T·C, N], `out_width` elements from row to row. `x`: [T·C / share, K]. `weights`: as
        above, those of all experts one behind the other, and so are `biases`. `expert_tiles`,
        `order` as in `kernels.cuda.expert_tiles`, of `columns` pairs.
        """
        multiply(
            out, x, weights, x, expert_tiles, order, share, 0, num_outputs, num_inputs, strand_bits,
            out_width, 0, biases,
        )  # fmt: skip

    return dense_matmul_of_experts if of_experts else dense_matmul
