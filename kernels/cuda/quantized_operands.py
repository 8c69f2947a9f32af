"""What a lane of `quantized_matmul` asks memory for, and what it makes of it: operands and scales.

Everything waits in registers until it is multiplied (`quantized_matmul_tensor` draws the rings):

    weights   a tile's words      → `widen`: pairs of 16-bit floats of a row, the A operand
    inputs    vectors of x           the B operand as they are
    numbers   words of a span     → `make_scales`: float32, for the sums of the span
    shared    words of a unit     → `take_shared`: float32, for the scales of its spans
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from numba import cuda, float32, uint32

from kernels.cuda.instructions.conversions import PAIR_CONVERSIONS, word_to_float32
from kernels.cuda.instructions.emit import Intrinsic
from kernels.cuda.instructions.exact_float32 import multiply_add
from kernels.cuda.instructions.small_floats import (
    RAISED_SCALE,
    WIDEN_FLOAT_BYTES,
    WIDEN_FLOATS,
    scale_of_exponent,
)
from kernels.cuda.instructions.small_integers import (
    WIDEN_BYTES,
    WIDEN_BYTES_LESS,
    WIDEN_NIBBLES,
    WIDEN_NIBBLES_LESS,
    WIDEN_WIDE,
)
from kernels.cuda.instructions.vectors import (
    LOAD_WORDS,
    load_constant_pair,
    load_constant_vector,
    load_constant_word,
    load_vector,
)
from kernels.cuda.instructions.whole_scales import RAISED_BY, raised_byte
from kernels.cuda.k_quant_layout import RAISED
from kernels.cuda.quantized_formats import FORMATS, TILE_INPUTS, VECTOR_BYTES, WeightFormat
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

if TYPE_CHECKING:
    from kernels.cuda.quantized_matmul import QuantizedMatmulVariant

Asking: TypeAlias = tuple[DeviceFunction, DeviceFunction, DeviceFunction]


def loads_of_numbers(fmt: WeightFormat) -> tuple[Intrinsic, Intrinsic]:
    """Return what loads the words of a span that four rows have, and those of a unit."""
    load_scales = load_constant_word if fmt.scale == "exponent" else load_constant_pair
    if fmt.scale == "float32" or (fmt.has_minimum and not fmt.shares):
        load_scales = load_constant_vector
    return load_scales, load_constant_vector if fmt.has_minimum else load_constant_pair


def make_asking(variant: QuantizedMatmulVariant) -> Asking:
    """Return the device functions that ask for a tile of W, for zero points, and for x."""
    fmt = FORMATS[variant.weights]
    num_vectors, tile_rows, rest_words = fmt.num_vectors, variant.tile_rows, fmt.rest_words
    zeros_at, is_bytes, runs = fmt.zeros_at, fmt.bits == 8, fmt.runs
    (ring, input_ring), column_tiles = variant.rings, variant.columns // 8
    load_rest = load_constant_pair if rest_words == 2 else load_constant_word
    load_half_vector = LOAD_WORDS[2]

    @cuda.jit(device=True, inline="always")
    def ask_for_weights(
        weights: Local, tile: Scalar, packed: Pointer, at: Scalar, lane: Scalar
    ) -> None:
        """Start reading a tile of the round, at byte `at` of W, into its slot of the ring."""
        for v in range(num_vectors):
            place = at + v * VECTOR_BYTES + lane * 16
            load_constant_vector(weights, tile % ring * tile_rows + v, packed, place)
        if rest_words:
            place = at + VECTOR_BYTES + lane * (4 * rest_words)
            load_rest(weights, tile % ring * tile_rows + 1, packed, place)

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
        first = tile % input_ring * column_tiles * runs
        if is_wanted:
            for c in range(column_tiles):
                at = inputs_at[c] + ahead * TILE_INPUTS
                if runs == 2:
                    load_half_vector(inputs, first + 2 * c, x, at)
                    load_half_vector(inputs, first + 2 * c + 1, x, at + TILE_INPUTS // 2)
                else:
                    load_vector(inputs, first + c, x, at)
        else:
            for i in range(first, first + column_tiles * runs):
                for j in range(4):
                    inputs[i, j] = uint32(0)

    return ask_for_weights, ask_for_zeros, ask_for_inputs


def make_widen(fmt: WeightFormat, dtype: str) -> DeviceFunction:
    """Return the device function that makes 16-bit floats of a row of a tile."""
    has_zeros, is_bytes, rest_words = fmt.has_zeros, fmt.bits == 8, fmt.rest_words
    is_float = fmt.is_float
    widen_nibbles: Intrinsic = WIDEN_NIBBLES.get((dtype, fmt.offset))
    if is_float:
        widen_nibbles = WIDEN_FLOATS[dtype]
    widen_nibbles_less = WIDEN_NIBBLES_LESS[dtype]
    widen_bytes = WIDEN_FLOAT_BYTES[dtype] if is_float else WIDEN_BYTES[dtype]
    widen_bytes_less = WIDEN_BYTES_LESS[dtype]
    widen_wide: Intrinsic = WIDEN_WIDE.get((dtype, fmt.bits, fmt.offset))

    @cuda.jit(device=True, inline="always")
    def widen(
        pairs: Local, h: Scalar, weights: Local, first_weights: Scalar, t: Scalar, zeros: Local
    ) -> None:
        """Write pairs[h, j]: of the lane's row 2·t + h, the k's 2·j and 2·j + 1.

        `weights`: the ring, the tile's words from row `first_weights` on. `zeros`: made ready.
        """
        if is_bytes:
            v = first_weights + t
            first, second = weights[v, 2 * h], weights[v, 2 * h + 1]
            if has_zeros:
                widen_bytes_less(pairs, h, first, second, zeros[0, 2 * t + h])
            else:
                widen_bytes(pairs, h, first, second)
        else:
            word = weights[first_weights, 2 * t + h]
            if rest_words == 2:
                rest = weights[first_weights + 1, t] >> uint32(8 * h)
                widen_wide(pairs, h, word, rest)
            elif rest_words == 1:
                rest = weights[first_weights + 1, 0] >> uint32(8 * t + 4 * h)
                widen_wide(pairs, h, word, rest)
            elif has_zeros:
                widen_nibbles_less(pairs, h, word, zeros[0, 2 * t + h])
            else:
                widen_nibbles(pairs, h, word)

    return widen


def make_scaling(fmt: WeightFormat, dtype: str) -> tuple[DeviceFunction, DeviceFunction]:
    """Return the device functions that make numbers of a unit, and of a span, float32."""
    has_minimum, is_float, runs, shares = fmt.has_minimum, fmt.is_float, fmt.runs, fmt.shares
    has_exponents, has_wide_scales = fmt.scale == "exponent", fmt.scale == "float32"
    raised_scale = RAISED_SCALE[dtype]
    # What the sum of a magic number and a scale, or a minimum, has too much.
    scale_excess = float32(-RAISED_BY - (RAISED if runs == 2 else 0))
    minimum_excess = float32(-RAISED_BY)
    low, high = PAIR_CONVERSIONS["float16"].low, PAIR_CONVERSIONS["float16"].high

    @cuda.jit(device=True, inline="always")
    def take_shared(shared_scales: Local, shared_minima: Local, shared_words: Local) -> None:
        """Write what the spans of a unit share, of the lane's four rows; nothing of others."""
        for half in range(2 if shares else 0):
            word = shared_words[0, half]
            shared_scales[2 * half], shared_scales[2 * half + 1] = low(word), high(word)
            if has_minimum:
                word = shared_words[0, 2 + half]
                shared_minima[2 * half], shared_minima[2 * half + 1] = low(word), high(word)

    @cuda.jit(device=True, inline="always")
    def make_scales(
        scales: Local,
        minima: Local,
        scale_words: Local,
        slot: Scalar,
        shared_scales: Local,
        shared_minima: Local,
    ) -> None:
        """Write the scales of the lane's four rows, run by run, and their minima."""
        for i in range(4 if has_exponents else 0):
            byte = scale_words[slot, 0] >> uint32(8 * i) & uint32(255)
            scales[i] = scale_of_exponent(byte)
        for i in range(4 if has_wide_scales else 0):
            scales[i] = word_to_float32(scale_words[slot, i]) * raised_scale
        for i in range(4 if shares else 0):
            excess = shared_scales[i] * scale_excess
            for run in range(runs):
                raised = raised_byte(scale_words[slot, run], i)
                scales[4 * run + i] = multiply_add(raised, shared_scales[i], excess)
            if has_minimum:
                excess = shared_minima[i] * minimum_excess
                raised = raised_byte(scale_words[slot, 1], i)
                minima[i] = multiply_add(raised, shared_minima[i], excess)
        for half in range(0 if is_float or shares else 2):
            word = scale_words[slot, half]
            scales[2 * half], scales[2 * half + 1] = low(word), high(word)
            if has_minimum:
                word = scale_words[slot, 2 + half]
                minima[2 * half], minima[2 * half + 1] = low(word), high(word)

    return take_shared, make_scales
