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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.expert_tiles import row_of_pair, tile_of_block
from kernels.cuda.instructions.conversions import FULL_WARP, PAIR_CONVERSIONS, word_to_float32
from kernels.cuda.instructions.early_launch import (
    fetch_ahead,
    let_next_begin,
    wait_for_previous,
)
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_floats import (
    RAISED_SCALE,
    WIDEN_FLOAT_BYTES,
    WIDEN_FLOATS,
    scale_of_exponent,
)
from kernels.cuda.instructions.small_integers import (
    READY_BYTES,
    READY_NIBBLES,
    WIDEN_BYTES,
    WIDEN_BYTES_LESS,
    WIDEN_NIBBLES,
    WIDEN_NIBBLES_LESS,
)
from kernels.cuda.instructions.tiles import MULTIPLY_TILES
from kernels.cuda.instructions.vectors import (
    load_constant_pair,
    load_constant_vector,
    load_constant_word,
    load_vector,
)
from kernels.cuda.quantized_formats import (
    FORMATS,
    LINE_BYTES,
    PANEL_ROWS,
    TILE_INPUTS,
    VECTOR_BYTES,
)
from kernels.cuda.quantized_strands import WARPS
from kernels.cuda.quantized_sums import make_add_strands
from kernels.cuda.variant import Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.quantized_matmul import QuantizedMatmulVariant

BIAS_BYTES = 2
ONES = {"bfloat16": 0x3F803F80, "float16": 0x3C003C00}  # two ones in a word


def make_quantized_matmul(variant: QuantizedMatmulVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    fmt = FORMATS[variant.weights]
    num_vectors, tile_bytes, span_bytes = fmt.num_vectors, fmt.tile_bytes, fmt.span_bytes
    span_tiles, span_inputs = fmt.span_tiles, fmt.span
    has_minimum, has_zeros, is_bytes = fmt.has_minimum, fmt.has_zeros, fmt.bits == 8
    group_bytes, zeros_at = fmt.group_bytes, fmt.zeros_at
    columns, (ring, input_ring) = variant.columns, variant.rings
    of_experts, panel_outputs = variant.of_experts, variant.panel_outputs
    biased = variant.biased
    round_spans = variant.round_spans
    round_tiles = round_spans * span_tiles
    column_tiles = columns // 8
    num_totals = 2 * column_tiles
    ring_vectors, ring_inputs = ring * num_vectors, input_ring * column_tiles
    add_strands = make_add_strands(variant)
    ones = ONES[variant.dtype]
    multiply_tiles = MULTIPLY_TILES[variant.dtype]
    has_exponents, has_wide_scales = fmt.scale == "exponent", fmt.scale == "float32"
    is_float, dtype = fmt.is_float, variant.dtype
    widen_nibbles = WIDEN_FLOATS[dtype] if is_float else WIDEN_NIBBLES[dtype, fmt.offset]
    widen_nibbles_less = WIDEN_NIBBLES_LESS[variant.dtype]
    widen_bytes = WIDEN_FLOAT_BYTES[dtype] if is_float else WIDEN_BYTES[dtype]
    raised_scale = RAISED_SCALE[dtype]
    widen_bytes_less = WIDEN_BYTES_LESS[variant.dtype]
    make_ready = READY_BYTES[variant.dtype] if is_bytes else READY_NIBBLES[variant.dtype]
    load_scales = load_constant_word if has_exponents else load_constant_pair
    if has_minimum or has_wide_scales:
        load_scales = load_constant_vector
    low, high = PAIR_CONVERSIONS["float16"].low, PAIR_CONVERSIONS["float16"].high

    @cuda.jit(device=True, inline="always")
    def ask_for_weights(
        weights: Local, tile: Scalar, packed: Pointer, at: Scalar, lane: Scalar
    ) -> None:
        """Start reading a tile of the round, at byte `at` of W, into its slot of the ring."""
        for v in range(num_vectors):
            place = at + v * VECTOR_BYTES + lane * 16
            load_constant_vector(weights, tile % ring * num_vectors + v, packed, place)

    @cuda.jit(device=True, inline="always")
    def ask_for_zeros(
        zero_words: Local, slot: Scalar, packed: Pointer, at: Scalar, group: Scalar
    ) -> None:
        """Start reading the zero points of the span at byte `at` for the lane's group."""
        place = at + zeros_at + (group if is_bytes else group // 2) * 4
        load_constant_word(zero_words, slot, packed, place)

    @cuda.jit(device=True, inline="always")
    def ask_for_inputs(
        inputs: Local, tile: Scalar, x: Pointer, inputs_at: Local, ahead: Scalar, is_wanted: Scalar
    ) -> None:
        """Start reading x for the tile `ahead` of the round's first; zeros if it is not wanted."""
        first = tile % input_ring * column_tiles
        if is_wanted:
            for c in range(column_tiles):
                load_vector(inputs, first + c, x, inputs_at[c] + ahead * TILE_INPUTS)
        else:
            for i in range(first, first + column_tiles):
                for j in range(4):
                    inputs[i, j] = uint32(0)

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

        # The warp's tiles, whole spans of them. A warp behind the last panel has none.
        num_spans = num_inputs // span_inputs
        strand_spans = (num_spans + strands - 1) >> strand_bits
        first_span = (warp & (strands - 1)) * strand_spans
        tiles_left = int32(min(strand_spans, num_spans - first_span) * span_tiles)
        if panel * panel_outputs >= num_outputs:
            tiles_left = int32(0)

        # total[t * column_tiles + c]: y of row tile t of W and row tile c of x, as a C fragment;
        # sums[…]: of the span that is being multiplied, before it is scaled.
        total = cuda.local.array((num_totals, 4), float32)
        sums = cuda.local.array((num_totals, 4), float32)
        for i in range(num_totals):
            for j in range(4):
                total[i, j] = float32(0)

        # The rings. A slot behind the last tile keeps what it had, which its zeros of x make
        # harmless. Rows behind the last one of x repeat it: what becomes of them is not written.
        weights = cuda.local.array((ring_vectors, 4), uint32)
        inputs = cuda.local.array((ring_inputs, 4), uint32)
        scale_words = cuda.local.array((round_spans, 4), uint32)
        zero_words = cuda.local.array((round_spans, 4), uint32)
        inputs_at = cuda.local.array(column_tiles, int64)
        for c in range(column_tiles):
            row = min(first_row + 8 * c + group, end_row - 1)
            if of_experts:
                row = row_of_pair(order, row, share)
            inputs_at[c] = row * num_inputs + first_span * span_inputs + 8 * quad
        weight_bytes = num_spans * span_tiles * tile_bytes
        num_lines = (weight_bytes + num_spans * span_bytes + LINE_BYTES - 1) // LINE_BYTES
        if of_experts:
            panel += expert * ((num_outputs + panel_outputs - 1) // panel_outputs)
        panel_at = panel * num_lines * LINE_BYTES
        tile_at = panel_at + first_span * span_tiles * tile_bytes
        scales_at = panel_at + weight_bytes + first_span * span_bytes

        if biased and lane == 2 and tiles_left > 0:
            is_whole = of_experts or (panel + 1) * panel_outputs <= num_outputs
            if is_whole and warp & (strands - 1) == 0:
                fetch_ahead(biases, panel * PANEL_ROWS, BIAS_BYTES * PANEL_ROWS)
        if not of_experts:
            # Weights wait for nobody: the warp has its first round fetched, each kind by one lane.
            if lane == 0 and tiles_left > 0:
                fetch_ahead(packed, tile_at, min(tiles_left, ring) * tile_bytes)
            if lane == 1 and tiles_left > 0:
                spans = min(tiles_left // span_tiles, round_spans)
                fetch_ahead(packed, scales_at, spans * span_bytes)
            wait_for_previous()

        for tile in range(ring):
            if tile < tiles_left:
                ask_for_weights(weights, tile, packed, tile_at + tile * tile_bytes, lane)
        for span in range(round_spans):
            for j in range(4):
                scale_words[span, j] = uint32(0)
            zero_words[span, 0] = uint32(0)
            if span * span_tiles < tiles_left:
                at = scales_at + span * span_bytes
                load_scales(scale_words, span, packed, at + group * group_bytes)
                if has_zeros:
                    ask_for_zeros(zero_words, span, packed, at, group)
        for tile in range(input_ring):
            ask_for_inputs(inputs, tile, x, inputs_at, tile, tile < tiles_left)

        pairs = cuda.local.array((2, 4), uint32)
        zeros = cuda.local.array((1, 4), uint32)
        input_sums = cuda.local.array((column_tiles, 4), float32)
        scales = cuda.local.array(4, float32)
        minima = cuda.local.array(4, float32)
        while tiles_left > 0:
            if tiles_left <= round_tiles:
                # Most of the strand has been asked for: what comes next may have the memory.
                let_next_begin()
            for span in range(round_spans):
                next_span = span + round_spans
                for j in range(4):
                    for i in range(num_totals):
                        sums[i, j] = float32(0)
                    for c in range(column_tiles):
                        input_sums[c, j] = float32(0)
                if has_zeros:
                    word = zero_words[span, 0]
                    if not is_bytes:
                        word = word >> uint32(group % 2 * 16)
                    make_ready(zeros, 0, word)
                    if next_span * span_tiles < tiles_left:
                        at = scales_at + next_span * span_bytes
                        ask_for_zeros(zero_words, span, packed, at, group)
                for tile_of_span in range(span_tiles):
                    tile = span * span_tiles + tile_of_span
                    first_weights = tile % ring * num_vectors
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
                            if is_bytes:
                                v = first_weights + t
                                first, second = weights[v, 2 * h], weights[v, 2 * h + 1]
                                if has_zeros:
                                    widen_bytes_less(pairs, h, first, second, zeros[0, 2 * t + h])
                                else:
                                    widen_bytes(pairs, h, first, second)
                            else:
                                word = weights[first_weights, 2 * t + h]
                                if has_zeros:
                                    widen_nibbles_less(pairs, h, word, zeros[0, 2 * t + h])
                                else:
                                    widen_nibbles(pairs, h, word)
                        for c in range(column_tiles):
                            for step in range(2):
                                i, j = first_input + c, 2 * step
                                a = (pairs[0, j], pairs[1, j], pairs[0, j + 1], pairs[1, j + 1])
                                b = (inputs[i, j], inputs[i, j + 1])
                                multiply_tiles(sums, t * column_tiles + c, a, b)

                    # The slots are free: ask for what they get next.
                    ahead = tile + ring
                    if ahead < tiles_left:
                        at = tile_at + ahead * tile_bytes
                        ask_for_weights(weights, tile, packed, at, lane)
                    ahead = tile + input_ring
                    ask_for_inputs(inputs, tile, x, inputs_at, ahead, ahead < tiles_left)

                for i in range(4 if has_exponents else 0):
                    byte = scale_words[span, 0] >> uint32(8 * i) & uint32(255)
                    scales[i] = scale_of_exponent(byte)
                for i in range(4 if has_wide_scales else 0):
                    scales[i] = word_to_float32(scale_words[span, i]) * raised_scale
                for half in range(0 if is_float else 2):
                    word = scale_words[span, half]
                    scales[2 * half], scales[2 * half + 1] = low(word), high(word)
                    if has_minimum:
                        word = scale_words[span, 2 + half]
                        minima[2 * half], minima[2 * half + 1] = low(word), high(word)
                for t in range(2):
                    for c in range(column_tiles):
                        i = t * column_tiles + c
                        for j in range(4):
                            row = 2 * t + j // 2
                            total[i, j] = multiply_add(scales[row], sums[i, j], total[i, j])
                            if has_minimum:
                                total[i, j] = multiply_add(
                                    minima[row], input_sums[c, j], total[i, j]
                                )
                if next_span * span_tiles < tiles_left:
                    at = scales_at + next_span * span_bytes + group * group_bytes
                    load_scales(scale_words, span, packed, at)
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
        `num_rows` M, `num_outputs` N, `num_inputs` K, a multiple of the span. `biases`: of W's
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
