"""Scales of heads on their way into a pool of eight bits; a head lies on neighbouring threads.

The threads of a head, a power of two of them and at most a warp, agree on its largest magnitude by
shuffles; that over the largest code is its scale. A head with an infinity or a NaN has none: NaN.
The operations are the specification's (`kernels.reference.quantized_kv`), each rounded by itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from numba import cuda, float32, int32, uint32

from kernels.cuda.instructions.conversions import FULL_WARP, float32_to_word, word_to_float32
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.instructions.exact_float32 import divide_float32
from kernels.cuda.variant import DeviceFunction, Local, Scalar
from kernels.reference.quantized_kv import LARGEST

if TYPE_CHECKING:
    from kernels.cuda.rope_write_kv import RopeWriteKvVariant

MAGNITUDE = uint32(0x7FFF_FFFF)  # of a float32's bits
INFINITY = 0x7F80_0000
NOT_A_NUMBER = float32(math.nan)


def make_scale_head(variant: RopeWriteKvVariant) -> DeviceFunction:
    """Return scale_head(values, is_mine), the scale of a head.

    It divides a thread's pair of vectors by that. Every thread of the block calls it; what is not
    `is_mine` has no say.
    """
    length = VECTOR_LENGTHS[variant.dtype]
    limit = float32(LARGEST[variant.kv_dtype or "int8"])
    steps = variant.head_threads.bit_length() - 1

    @cuda.jit(device=True, inline="always")
    def scale_head(values: Local, is_mine: Scalar) -> Scalar:
        # Magnitudes are in the order of their bits, infinities and NaN the largest.
        largest = int32(0)
        if is_mine:
            for i in range(length):
                for j in range(2):
                    largest = max(largest, int32(float32_to_word(values[j, i]) & MAGNITUDE))
        for step in range(steps):
            largest = max(largest, cuda.shfl_xor_sync(FULL_WARP, largest, 1 << step))
        magnitude = word_to_float32(uint32(largest))
        scale = divide_float32(magnitude, limit) if largest < INFINITY else NOT_A_NUMBER
        inverse = divide_float32(limit, magnitude if largest > 0 else float32(1))
        for i in range(length):
            for j in range(2):
                values[j, i] *= inverse
        return scale

    return scale_head
