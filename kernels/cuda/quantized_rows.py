"""Rows of a quantised matrix, unpacked: out[t, k] = W[rows[t], k].

It serves two: token embedding from a table that stays quantised, with the tokens' ids as rows; and
products of many rows of x, which want W in x's type, with all rows in order.

W is as `quantized_layout` draws it. A thread takes the eight neighbouring k's of a row that a lane
of `quantized_matmul` has of it: a word of four bits or two of eight, or of five and six bits a word
and its part of the rest, and writes them as one vector of 16 bytes, or as two halves where they are
those of two runs. With `quad` of the row's tile, and `slot` of the block's 32 rows of `rows`:

    thread   0      1      2      3     │ 4      5     …  │ …
             slot 0, quads 0 … 3        │ slot 1, …       │ slot 31, quad 3
    tiles    TILES one behind the other, from blockIdx.y · TILES on; they are 4, 2 or 1 spans

so the four threads of a row write 64 bytes of it a tile, 256 in all. Where rows are in order, the
block has a panel: warp i reads the i-th word of each lane of the tile, all four warps the same 512
bytes, of which memory is asked once. Where rows are tokens, the four threads of a row use a quarter
of the 64 bytes that memory gives for them a tile of four bits, and a few of the 32 that it gives
for a scale: about as much is read as is written.

The weights are widened as in the product, multiplied in float32 and rounded once. A zero point is
taken off as a minimum is added, −z · d, which float32 holds: so it is the product (q − z) · d that
is rounded. Scales of shared formats, d · s, and their minima are float32, too.

Limits. Memory: 2 bytes written for 0.5 to 1.1 read, where rows are in order. A thread has TILES
loads under way; a block of 128 threads needs few registers, so a multiprocessor holds as many as it
may.

The ladder:
  v1  a scale for every tile.
  v2  this: one for every span. Compiled and simulated; not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from numba import cuda, float32, int32, int64, uint32

from kernels.cuda.instructions.conversions import PAIR_CONVERSIONS, word_to_float32
from kernels.cuda.instructions.emit import Intrinsic
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_floats import (
    RAISED_SCALE,
    WIDEN_FLOAT_BYTES,
    WIDEN_FLOATS,
    scale_of_exponent,
)
from kernels.cuda.instructions.small_integers import WIDEN_BYTES, WIDEN_NIBBLES, WIDEN_WIDE
from kernels.cuda.instructions.vectors import (
    STORE_WORDS,
    load_constant_pair,
    load_word,
    store_vector,
)
from kernels.cuda.k_quant_layout import RAISED
from kernels.cuda.quantized_formats import (
    FORMATS,
    LINE_BYTES,
    PANEL_ROWS,
    TILE_INPUTS,
    VECTOR_BYTES,
)
from kernels.cuda.quantized_matmul import DTYPES
from kernels.cuda.variant import Expectation, Pointer, Scalar, require_one_of

ROWS: Final = 32
"""Rows of a block."""
TILES: Final = 4
"""Tiles of a thread."""


@dataclass(frozen=True, slots=True)
class QuantizedRowsVariant:
    """The compile-time parameters: `weights` names the format, `dtype` is that of the output.

    Raises UnsupportedVariantError for what the kernel is not written for.
    """

    weights: str
    dtype: str

    def __post_init__(self) -> None:
        require_one_of("weights", FORMATS, self.weights)
        require_one_of("dtype", DTYPES, self.dtype)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        return f"quantized_rows_{self.weights.lower()}_{self.dtype}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 4 * ROWS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return ("uint16*", "uint8*", "int32*", "int64", "int64")

    @property
    def expectation(self) -> Expectation:
        """Few registers: the memory is to be kept busy by many threads."""
        store = "STG" if FORMATS[self.weights].runs == 2 else "STG.128"
        return Expectation(64, (store, "FFMA", "LOP3"))

    def grid(self, num_rows: int, num_inputs: int) -> tuple[int, int, int]:
        """Return the launch grid for so many rows of W [N, K].

        Raises UnsupportedVariantError.
        """
        FORMATS[self.weights].panel_bytes(num_inputs)  # refuses what is no whole spans
        return (-(-num_rows // ROWS), -(-num_inputs // (TILE_INPUTS * TILES)), 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        return make_quantized_rows(self)


def variants(*, every: bool) -> list[QuantizedRowsVariant]:
    """Return one of the variants, or every one there is."""
    if every:
        return [QuantizedRowsVariant(weights, dtype) for weights in FORMATS for dtype in DTYPES]
    spread = (
        ("Q4_Z_G64", "bfloat16"),
        ("FP8", "float16"),
        ("Q5_K", "bfloat16"),
        ("Q6_K", "float16"),
    )
    return [QuantizedRowsVariant(weights, dtype) for weights, dtype in spread]


def make_quantized_rows(variant: QuantizedRowsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    fmt = FORMATS[variant.weights]
    tile_bytes, span_bytes, group_bytes = fmt.tile_bytes, fmt.span_bytes, fmt.group_bytes
    span_tiles, zeros_at = fmt.span_tiles, fmt.zeros_at
    num_spans = TILES // span_tiles
    unit_tiles = fmt.unit // TILE_INPUTS
    unit_bytes, shared_group_bytes = fmt.unit_bytes, fmt.shared_group_bytes
    shared_bytes, shares, runs = fmt.shared_bytes, fmt.shares, fmt.runs
    rest_words, rest_bits = fmt.rest_words, 4 * fmt.rest_words  # a row's bits of a half of the rest
    rows_of_word = 4 // max(1, rest_words)
    has_minimum, has_zeros, is_bytes = fmt.has_minimum, fmt.has_zeros, fmt.bits == 8
    has_exponents, has_wide_scales = fmt.scale == "exponent", fmt.scale == "float32"
    has_own_minimum = has_minimum and not shares
    is_float, dtype = fmt.is_float, variant.dtype
    widen_nibbles: Intrinsic = WIDEN_NIBBLES.get((dtype, fmt.offset))
    if is_float:
        widen_nibbles = WIDEN_FLOATS[dtype]
    widen_wide: Intrinsic = WIDEN_WIDE.get((dtype, fmt.bits, fmt.offset))
    widen_bytes = WIDEN_FLOAT_BYTES[dtype] if is_float else WIDEN_BYTES[dtype]
    raised_scale = RAISED_SCALE[dtype]
    half = PAIR_CONVERSIONS["float16"]
    low_half, high_half = half.low, half.high
    element = PAIR_CONVERSIONS[variant.dtype]
    low, high, pack = element.low, element.high, element.pack
    store_half_vector = STORE_WORDS[2]

    def quantized_rows(
        out: Pointer, packed: Pointer, rows: Pointer, num_rows: Scalar, num_inputs: Scalar
    ) -> None:
        """Unpack `TILES` tiles of 32 of the rows.

        `out`: [T, K]. `packed`: W [N, K]. `rows`: [T], each in 0 to N − 1. `num_rows` T,
        `num_inputs` K, a multiple of the unit.
        """
        quad = cuda.threadIdx.x % 4
        t = int64(cuda.blockIdx.x) * ROWS + cuda.threadIdx.x // 4
        num_tiles = num_inputs // TILE_INPUTS
        first_tile = int64(cuda.blockIdx.y) * TILES
        if t < num_rows:
            row = int64(rows[t])
            i = row % PANEL_ROWS // 8
            group = row % 8
            weight_bytes = num_tiles * tile_bytes
            units_bytes = num_tiles // unit_tiles * unit_bytes
            num_lines = (weight_bytes + units_bytes + LINE_BYTES - 1) // LINE_BYTES
            panel_at = row // PANEL_ROWS * num_lines * LINE_BYTES
            tile_at = panel_at + first_tile * tile_bytes + (4 * group + quad) * 16
            span_at = panel_at + weight_bytes + first_tile // span_tiles * span_bytes
            scale_at = span_at + group * group_bytes
            if has_wide_scales:
                scale_at += i * 4
            elif not has_exponents and not shares:
                scale_at += i // 2 * 4
            shared_scale, shared_minimum = float32(0), float32(0)
            if shares:
                # All tiles of a thread are of one unit, and K is whole units.
                at = panel_at + weight_bytes + num_tiles // span_tiles * span_bytes
                at += first_tile // unit_tiles * shared_bytes
                at += group * shared_group_bytes + i // 2 * 4
                word = load_word(packed, at)
                shared_scale = low_half(word)
                if i % 2 == 1:
                    shared_scale = high_half(word)
                if has_minimum:
                    word = load_word(packed, at + 8)
                    shared_minimum = low_half(word)
                    if i % 2 == 1:
                        shared_minimum = high_half(word)
            words = cuda.local.array((TILES, 4), uint32)
            scale_words = cuda.local.array(num_spans, uint32)
            beside_words = cuda.local.array(num_spans, uint32)  # minima or zero points
            for span in range(num_spans):
                scale_words[span] = uint32(0)
                beside_words[span] = uint32(0)
                for tile in range(span * span_tiles, (span + 1) * span_tiles):
                    if first_tile + tile < num_tiles:
                        at = tile_at + tile * tile_bytes
                        if is_bytes:
                            place = at + i // 2 * VECTOR_BYTES + i % 2 * 8
                            load_constant_pair(words, tile, packed, place)
                        else:
                            words[tile, 0] = load_word(packed, at + i * 4)
                        if rest_words > 0:
                            at = tile_at + tile * tile_bytes - (4 * group + quad) * 16
                            at += VECTOR_BYTES + (4 * group + quad) * rest_words * 4
                            place = uint32(i % rows_of_word * rest_bits)
                            words[tile, 1] = load_word(packed, at + i // rows_of_word * 4) >> place
                if first_tile + span * span_tiles < num_tiles:
                    scale_words[span] = load_word(packed, scale_at + span * span_bytes)
                    if shares:
                        # Of minima, or of the second run.
                        beside_words[span] = load_word(packed, scale_at + span * span_bytes + 4)
                    elif has_minimum:
                        beside_words[span] = load_word(packed, scale_at + span * span_bytes + 8)
                    elif has_zeros:
                        at = span_at + span * span_bytes + zeros_at
                        place = at + (group if is_bytes else group // 2) * 4
                        beside_words[span] = load_word(packed, place)

            pairs = cuda.local.array((2, 4), uint32)
            for span in range(num_spans):
                second_scale = float32(0)
                if shares:
                    whole = int32(scale_words[span] >> uint32(8 * i) & uint32(255))
                    beside = int32(beside_words[span] >> uint32(8 * i) & uint32(255))
                    if runs == 2:
                        scale = float32(whole - RAISED) * shared_scale
                        second_scale = float32(beside - RAISED) * shared_scale
                    else:
                        scale = float32(whole) * shared_scale
                elif has_exponents:
                    byte = scale_words[span] >> uint32(8 * i) & uint32(255)
                    scale = scale_of_exponent(byte)
                elif has_wide_scales:
                    scale = word_to_float32(scale_words[span]) * raised_scale
                else:
                    scale = low_half(scale_words[span])
                    if i % 2 == 1:
                        scale = high_half(scale_words[span])
                minimum = float32(0)
                if shares and has_minimum:
                    minimum = float32(beside) * shared_minimum
                elif has_own_minimum:
                    minimum = low_half(beside_words[span])
                    if i % 2 == 1:
                        minimum = high_half(beside_words[span])
                elif has_zeros:
                    if is_bytes:
                        zero = int32(beside_words[span] << uint32(24 - 8 * i)) >> 24
                    else:
                        place = uint32(group % 2 * 16 + 4 * i)
                        zero = int32(beside_words[span] >> place & uint32(15))
                    minimum = -(float32(zero) * scale)
                for tile in range(span * span_tiles, (span + 1) * span_tiles):
                    if first_tile + tile < num_tiles:
                        if is_bytes:
                            widen_bytes(pairs, 0, words[tile, 0], words[tile, 1])
                        elif rest_words > 0:
                            widen_wide(pairs, 0, words[tile, 0], words[tile, 1])
                        else:
                            widen_nibbles(pairs, 0, words[tile, 0])
                        for j in range(4):
                            of_run = scale
                            if runs == 2 and j >= 2:
                                of_run = second_scale
                            pairs[0, j] = pack(
                                multiply_add(of_run, low(pairs[0, j]), minimum),
                                multiply_add(of_run, high(pairs[0, j]), minimum),
                            )
                        place = t * num_inputs + (first_tile + tile) * TILE_INPUTS
                        if runs == 2:
                            pairs[1, 0], pairs[1, 1] = pairs[0, 2], pairs[0, 3]
                            store_half_vector(out, place + 4 * quad, pairs, 0)
                            store_half_vector(out, place + TILE_INPUTS // 2 + 4 * quad, pairs, 1)
                        else:
                            store_vector(out, place + 8 * quad, pairs, 0)

    return quantized_rows
