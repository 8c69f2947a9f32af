"""Rows of a quantised matrix, unpacked: out[t, k] = W[rows[t], k].

It serves two: token embedding from a table that stays quantised, with the tokens' ids as rows; and
products of many rows of x, which want W in x's type, with all rows in order.

W is as `quantized_layout` draws it. A thread takes the eight neighbouring k's of a row that a lane
of `quantized_matmul` has of it: a word of four bits or two of eight, and writes them as one vector
of 16 bytes. With `quad` of the row's tile, and `slot` of the block's 32 rows of `rows`:

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
is rounded.

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
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_floats import (
    RAISED_SCALE,
    WIDEN_FLOAT_BYTES,
    WIDEN_FLOATS,
    scale_of_exponent,
)
from kernels.cuda.instructions.small_integers import WIDEN_BYTES, WIDEN_NIBBLES
from kernels.cuda.instructions.vectors import load_constant_pair, load_word, store_vector
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
        return Expectation(64, ("STG.128", "FFMA", "LOP3"))

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
    return [QuantizedRowsVariant("Q4_Z_G64", "bfloat16"), QuantizedRowsVariant("FP8", "float16")]


def make_quantized_rows(variant: QuantizedRowsVariant) -> Callable[..., None]:
    """Return the kernel with its compile-time parameters bound."""
    fmt = FORMATS[variant.weights]
    tile_bytes, span_bytes, group_bytes = fmt.tile_bytes, fmt.span_bytes, fmt.group_bytes
    span_tiles, zeros_at = fmt.span_tiles, fmt.zeros_at
    num_spans = TILES // span_tiles
    has_minimum, has_zeros, is_bytes = fmt.has_minimum, fmt.has_zeros, fmt.bits == 8
    has_exponents, has_wide_scales = fmt.scale == "exponent", fmt.scale == "float32"
    is_float, dtype = fmt.is_float, variant.dtype
    widen_nibbles = WIDEN_FLOATS[dtype] if is_float else WIDEN_NIBBLES[dtype, fmt.offset]
    widen_bytes = WIDEN_FLOAT_BYTES[dtype] if is_float else WIDEN_BYTES[dtype]
    raised_scale = RAISED_SCALE[dtype]
    half = PAIR_CONVERSIONS["float16"]
    low_half, high_half = half.low, half.high
    element = PAIR_CONVERSIONS[variant.dtype]
    low, high, pack = element.low, element.high, element.pack

    def quantized_rows(
        out: Pointer, packed: Pointer, rows: Pointer, num_rows: Scalar, num_inputs: Scalar
    ) -> None:
        """Unpack `TILES` tiles of 32 of the rows.

        `out`: [T, K]. `packed`: W [N, K]. `rows`: [T], each in 0 to N − 1. `num_rows` T,
        `num_inputs` K, a multiple of the span.
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
            spans_bytes = num_tiles // span_tiles * span_bytes
            num_lines = (weight_bytes + spans_bytes + LINE_BYTES - 1) // LINE_BYTES
            panel_at = row // PANEL_ROWS * num_lines * LINE_BYTES
            tile_at = panel_at + first_tile * tile_bytes + (4 * group + quad) * 16
            span_at = panel_at + weight_bytes + first_tile // span_tiles * span_bytes
            scale_at = span_at + group * group_bytes
            if has_wide_scales:
                scale_at += i * 4
            elif not has_exponents:
                scale_at += i // 2 * 4
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
                if first_tile + span * span_tiles < num_tiles:
                    scale_words[span] = load_word(packed, scale_at + span * span_bytes)
                    if has_minimum:
                        beside_words[span] = load_word(packed, scale_at + span * span_bytes + 8)
                    elif has_zeros:
                        at = span_at + span * span_bytes + zeros_at
                        place = at + (group if is_bytes else group // 2) * 4
                        beside_words[span] = load_word(packed, place)

            pairs = cuda.local.array((1, 4), uint32)
            for span in range(num_spans):
                if has_exponents:
                    byte = scale_words[span] >> uint32(8 * i) & uint32(255)
                    scale = scale_of_exponent(byte)
                elif has_wide_scales:
                    scale = word_to_float32(scale_words[span]) * raised_scale
                else:
                    scale = low_half(scale_words[span])
                    if i % 2 == 1:
                        scale = high_half(scale_words[span])
                minimum = float32(0)
                if has_minimum:
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
                        else:
                            widen_nibbles(pairs, 0, words[tile, 0])
                        for j in range(4):
                            pairs[0, j] = pack(
                                multiply_add(scale, low(pairs[0, j]), minimum),
                                multiply_add(scale, high(pairs[0, j]), minimum),
                            )
                        place = t * num_inputs + (first_tile + tile) * TILE_INPUTS + 8 * quad
                        store_vector(out, place, pairs, 0)

    return quantized_rows
