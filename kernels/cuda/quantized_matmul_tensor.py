"""The kernel of `quantized_matmul`: a warp's strand of a panel.

In a warp, W is the A operand of the tensor cores and x the B operand: two tiles of 16 rows of W
against `columns` / 8 tiles of 8 rows of x, so that a widened weight serves all of them. A lane has,
of four rows i of W, eight neighbouring k's, and of a row of x the same eight, one vector:

    A, row tile t, step s   a0  row 2·t,     k's 4·s, 4·s + 1      a2  row 2·t,     k's 4·s + 2, + 3
                            a1  row 2·t + 1, k's 4·s, 4·s + 1      a3  row 2·t + 1, k's 4·s + 2, + 3
    B, step s               b0  word 2·s of the vector             b1  word 2·s + 1
    C                       c0, c1  y of row 2·t and two rows of x  c2, c3  y of row 2·t + 1

The rings. Tiles of W and of x, and the numbers beside a span, are asked for before they are needed
and wait in registers. A *round* is what the loop's body has, the longer of a span and the ring of
tiles. With spans of 4 tiles and rings of 2 for W and x:

    tile of the round   0          1          2          3
    multiplies          slot 0     slot 1     slot 0     slot 1
    then asks for tile  2          3          4          5       (4 and 5: of the next round)
    span                zeros made ready, asked for              sums scaled, scales asked for

All of it is unrolled, so every slot is a register and its number a constant.

Where spans share float16 (`k_quant_layout`), a round is their unit, or the part of it that the ring
has, and what they share is made ready when it begins. A span with two runs has two sums, one for
each step of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.expert_tiles import row_of_pair, tile_of_block
from kernels.cuda.instructions.conversions import FULL_WARP
from kernels.cuda.instructions.early_launch import (
    fetch_ahead,
    let_next_begin,
    wait_for_previous,
)
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_integers import READY_BYTES, READY_NIBBLES
from kernels.cuda.instructions.tiles import MULTIPLY_TILES
from kernels.cuda.quantized_formats import FORMATS, LINE_BYTES, PANEL_ROWS, TILE_INPUTS
from kernels.cuda.quantized_operands import (
    loads_of_numbers,
    make_asking,
    make_scaling,
    make_widen,
)
from kernels.cuda.quantized_strands import WARPS
from kernels.cuda.quantized_sums import make_add_strands
from kernels.cuda.variant import Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.quantized_matmul import QuantizedMatmulVariant

BIAS_BYTES = 2
ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}  # two ones in a word


def make_quantized_matmul(variant: QuantizedMatmulVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    fmt = FORMATS[variant.weights]
    tile_bytes, span_bytes = fmt.tile_bytes, fmt.span_bytes
    span_tiles, unit_tiles = fmt.span_tiles, fmt.unit // TILE_INPUTS
    unit_inputs, unit_bytes = fmt.unit, fmt.unit_bytes
    has_minimum, has_zeros, is_bytes = fmt.has_minimum, fmt.has_zeros, fmt.bits == 8
    group_bytes, runs, shares = fmt.group_bytes, fmt.runs, fmt.shares
    shared_bytes, shared_group_bytes = fmt.shared_bytes, fmt.shared_group_bytes
    tile_rows = variant.tile_rows
    columns, (ring, input_ring) = variant.columns, variant.rings
    of_experts, panel_outputs = variant.of_experts, variant.panel_outputs
    biased = variant.biased
    round_spans, scale_ring = variant.round_spans, variant.scale_ring
    round_tiles = round_spans * span_tiles
    column_tiles = columns // 8
    num_totals = 2 * column_tiles
    num_sums, num_scales = runs * num_totals, runs * 4
    ring_vectors, ring_inputs = ring * tile_rows, input_ring * column_tiles * runs
    add_strands = make_add_strands(variant)
    ones = ONES[variant.dtype]
    multiply_tiles = MULTIPLY_TILES[variant.dtype]
    make_ready = READY_BYTES[variant.dtype] if is_bytes else READY_NIBBLES[variant.dtype]
    load_scales, load_shared = loads_of_numbers(fmt)
    ask_for_weights, ask_for_zeros, ask_for_inputs = make_asking(variant)
    widen = make_widen(fmt, variant.dtype)
    take_shared, make_scales = make_scaling(fmt, variant.dtype)

    @cuda.jit(device=True, inline="always")
    def multiply(
        out: Pointer,
        x: Pointer,
        packed: Pointer,
        tiles: Pointer,
        order: Pointer,
        share: Scalar,
        num_rows: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        biases: Pointer,
    ) -> None:
        """Do what the kernels below say; `tiles`, `order`, `share`: of experts only."""
        lane = cuda.threadIdx.x & 31  # not a remainder: that of a negative would be thought of
        group = lane // 4
        quad = lane % 4
        # From lane 0 to all: so the compiler knows that a warp does not part over it.
        warp = cuda.shfl_sync(FULL_WARP, cuda.threadIdx.x >> 5, 0)
        strands = int32(1 << strand_bits)
        first_panel = int64(cuda.blockIdx.y) * (WARPS >> strand_bits)
        panel = first_panel + (warp >> strand_bits)
        first_row, end_row = int64(cuda.blockIdx.x) * columns, num_rows
        expert = int64(0)
        if of_experts:
            # Which rows and whose weights is what the launch ahead has to say.
            wait_for_previous()
            expert, first_row, end_row = tile_of_block(tiles)
            if first_row == end_row:
                return

        # The warp's tiles, whole units of them. A warp behind the last panel has none.
        num_units = num_inputs // unit_inputs
        strand_units = (num_units + strands - 1) >> strand_bits
        first_unit = (warp & (strands - 1)) * strand_units
        tiles_left = int32(min(strand_units, num_units - first_unit) * unit_tiles)
        if panel * panel_outputs >= num_outputs:
            tiles_left = int32(0)

        # total[t * column_tiles + c]: y of row tile t of W and row tile c of x, as a C fragment;
        # sums[…]: of the span that is being multiplied, before it is scaled, run by run.
        total = cuda.local.array((num_totals, 4), float32)
        sums = cuda.local.array((num_sums, 4), float32)
        for i in range(num_totals):
            for j in range(4):
                total[i, j] = float32(0)

        # The rings. A slot behind the last tile keeps what it had, which its zeros of x make
        # harmless. Rows behind the last one of x repeat it: what becomes of them is not written.
        weights = cuda.local.array((ring_vectors, 4), uint32)
        inputs = cuda.local.array((ring_inputs, 4), uint32)
        scale_words = cuda.local.array((scale_ring, 4), uint32)
        zero_words = cuda.local.array((scale_ring, 4), uint32)
        inputs_at = cuda.local.array(column_tiles, int64)
        for c in range(column_tiles):
            row = min(first_row + 8 * c + group, end_row - 1)
            if of_experts:
                row = row_of_pair(order, row, share)
            inputs_at[c] = row * num_inputs + first_unit * unit_inputs + 8 // runs * quad
        weight_bytes = num_units * unit_tiles * tile_bytes
        num_lines = (weight_bytes + num_units * unit_bytes + LINE_BYTES - 1) // LINE_BYTES
        if of_experts:
            panel += expert * ((num_outputs + panel_outputs - 1) // panel_outputs)
        panel_at = panel * num_lines * LINE_BYTES
        tile_at = panel_at + first_unit * unit_tiles * tile_bytes
        scales_at = panel_at + weight_bytes + first_unit * unit_tiles // span_tiles * span_bytes
        spans_bytes = num_units * unit_tiles // span_tiles * span_bytes
        shared_at = panel_at + weight_bytes + spans_bytes + first_unit * shared_bytes
        shared_at += group * shared_group_bytes

        if biased and lane == 2 and tiles_left > 0:
            is_whole = of_experts or (panel + 1) * panel_outputs <= num_outputs
            if is_whole and warp & (strands - 1) == 0:
                fetch_ahead(biases, panel * PANEL_ROWS, BIAS_BYTES * PANEL_ROWS)
        if not of_experts:
            # Weights wait for nobody: the warp has its first round fetched, each kind by one lane.
            if lane == 0 and tiles_left > 0:
                fetch_ahead(packed, tile_at, min(tiles_left, ring) * tile_bytes)
            if lane == 1 and tiles_left > 0:
                spans = min(tiles_left // span_tiles, scale_ring)
                fetch_ahead(packed, scales_at, spans * span_bytes)
            if shares and lane == 3 and tiles_left > 0:
                fetch_ahead(packed, shared_at - group * shared_group_bytes, shared_bytes)
            wait_for_previous()

        for tile in range(ring):
            if tile < tiles_left:
                ask_for_weights(weights, tile, packed, tile_at + tile * tile_bytes, lane)
        for span in range(scale_ring):
            for j in range(4):
                scale_words[span, j] = uint32(0)
            zero_words[span, 0] = uint32(0)
            if span * span_tiles < tiles_left:
                at = scales_at + span * span_bytes
                load_scales(scale_words, span, packed, at + group * group_bytes)
                if has_zeros:
                    ask_for_zeros(zero_words, span, packed, at, group)
        shared_words = cuda.local.array((1, 4), uint32)
        if shares and tiles_left > 0:
            load_shared(shared_words, 0, packed, shared_at)
        for tile in range(input_ring):
            ask_for_inputs(inputs, tile, x, inputs_at, tile, tile < tiles_left)

        pairs = cuda.local.array((2, 4), uint32)
        zeros = cuda.local.array((1, 4), uint32)
        input_sums = cuda.local.array((column_tiles, 4), float32)
        scales = cuda.local.array(num_scales, float32)
        minima = cuda.local.array(4, float32)
        shared_scales = cuda.local.array(4, float32)
        shared_minima = cuda.local.array(4, float32)
        while tiles_left > 0:
            if tiles_left <= round_tiles:
                # Most of the strand has been asked for: what comes next may have the memory.
                let_next_begin()
            take_shared(shared_scales, shared_minima, shared_words)
            if shares and tiles_left > round_tiles:
                if (tiles_left - round_tiles) % unit_tiles == 0:
                    shared_at += shared_bytes
                load_shared(shared_words, 0, packed, shared_at)
            for span in range(round_spans):
                slot, next_span = span % scale_ring, span + scale_ring
                for j in range(4):
                    for i in range(num_sums):
                        sums[i, j] = float32(0)
                    for c in range(column_tiles):
                        input_sums[c, j] = float32(0)
                if has_zeros:
                    word = zero_words[slot, 0]
                    if not is_bytes:
                        word = word >> uint32(group % 2 * 16)
                    make_ready(zeros, 0, word)
                    if next_span * span_tiles < tiles_left:
                        at = scales_at + next_span * span_bytes
                        ask_for_zeros(zero_words, slot, packed, at, group)
                for tile_of_span in range(span_tiles):
                    tile = span * span_tiles + tile_of_span
                    first_weights = tile % ring * tile_rows
                    first_input = tile % input_ring * column_tiles
                    if has_minimum:
                        # Σ_k of the lane's two rows of x, once for each half of a C fragment.
                        one = uint32(ones)
                        for c in range(column_tiles):
                            for step in range(2):
                                i, j = first_input + c, 2 * step
                                b = (inputs[i, j], inputs[i, j + 1])
                                multiply_tiles(input_sums, c, (one, one, one, one), b)
                    for t in range(2):
                        # pairs[h, j]: of the lane's row 2·t + h, the k's 2·j and 2·j + 1.
                        for h in range(2):
                            widen(pairs, h, weights, first_weights, t, zeros)
                        for c in range(column_tiles):
                            for step in range(2):
                                i, j = first_input + c, 2 * step
                                a = (pairs[0, j], pairs[1, j], pairs[0, j + 1], pairs[1, j + 1])
                                if runs == 2:
                                    i, sum_ = 2 * i + step, step * num_totals + t * column_tiles + c
                                    b = (inputs[i, 0], inputs[i, 1])
                                    multiply_tiles(sums, sum_, a, b)
                                else:
                                    b = (inputs[i, j], inputs[i, j + 1])
                                    multiply_tiles(sums, t * column_tiles + c, a, b)

                    # The slots are free: ask for what they get next.
                    ahead = tile + ring
                    if ahead < tiles_left:
                        at = tile_at + ahead * tile_bytes
                        ask_for_weights(weights, tile, packed, at, lane)
                    ahead = tile + input_ring
                    ask_for_inputs(inputs, tile, x, inputs_at, ahead, ahead < tiles_left)

                make_scales(scales, minima, scale_words, slot, shared_scales, shared_minima)
                for t in range(2):
                    for c in range(column_tiles):
                        i = t * column_tiles + c
                        for j in range(4):
                            row = 2 * t + j // 2
                            total[i, j] = multiply_add(scales[row], sums[i, j], total[i, j])
                            if runs == 2:
                                of_run = sums[num_totals + i, j]
                                total[i, j] = multiply_add(scales[4 + row], of_run, total[i, j])
                            if has_minimum:
                                total[i, j] = multiply_add(
                                    minima[row], input_sums[c, j], total[i, j]
                                )
                if next_span * span_tiles < tiles_left:
                    at = scales_at + next_span * span_bytes + group * group_bytes
                    load_scales(scale_words, slot, packed, at)
            tiles_left = int32(tiles_left - round_tiles)
            tile_at += round_tiles * tile_bytes
            scales_at += round_spans * span_bytes
            for c in range(column_tiles):
                inputs_at[c] += round_tiles * TILE_INPUTS

        add_strands(
            out, total, tiles, order, lane, first_row, end_row, first_panel, num_outputs, strands,
            out_width, biases,
        )  # fmt: skip

    def quantized_matmul(
        out: Pointer,
        x: Pointer,
        packed: Pointer,
        num_rows: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        biases: Pointer,
    ) -> None:
        """Multiply `columns` rows of x, from blockIdx.x, with the panels of blockIdx.y.

        `out`: [M, N], `out_width` elements from row to row. `x`: [M, K]. `packed`: W [N, K] as
        `quantized_layout` draws it, or [2·N, K] where they gate, 16 rows of each in turns.
        `num_rows` M, `num_outputs` N, `num_inputs` K, a multiple of the unit. `biases`: of W's
        rows; not touched where there are none.
        """
        multiply(
            out, x, packed, packed, packed, 1, num_rows, num_outputs, num_inputs, strand_bits,
            out_width, biases,
        )  # fmt: skip

    def quantized_matmul_of_experts(
        out: Pointer,
        x: Pointer,
        packed: Pointer,
        tiles: Pointer,
        order: Pointer,
        share: Scalar,
        num_outputs: Scalar,
        num_inputs: Scalar,
        strand_bits: Scalar,
        out_width: Scalar,
        biases: Pointer,
    ) -> None:
        """Multiply the pairs of tile blockIdx.x with the panels of blockIdx.y of their expert.

        `out`: [T·C, N], `out_width` elements from row to row. `x`: [T·C / share, K]. `packed`: the
        matrices of all experts as above, one behind the other, each of whole panels, and so are
        `biases`. `tiles`, `order` as in `expert_tiles`, of `columns` pairs.
        """
        multiply(
            out, x, packed, tiles, order, share, 0, num_outputs, num_inputs, strand_bits, out_width,
            biases,
        )  # fmt: skip

    return quantized_matmul_of_experts if of_experts else quantized_matmul
