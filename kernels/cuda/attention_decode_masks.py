"""How decode attention on tensor cores leaves tokens out: behind the row, before a window.

Their scores become -∞, so their weights are exactly 0. But 0 · NaN is NaN: in a pool of 16 bits
their values become zeros, in one of 8 bits, where bytes are harmless, their scales do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from numba import cuda, float32, int32

from kernels.cuda.attention_decode_pool import DecodePool
from kernels.cuda.variant import DeviceFunction, Local, Scalar

MINUS_INFINITY = float32(-math.inf)


@dataclass(frozen=True, slots=True)
class DecodeMasks:
    """Device functions, of a tile's scores, factors and values, and where the lane is in it.

    hide_from(scores, key_factors, value_factors, values, number, quad_row, quad)
        leave out tokens from `number` of the tile on
    hide_before(the same)
        leave out tokens before it
    """

    hide_from: DeviceFunction
    hide_before: DeviceFunction


def make_decode_masks(pool: DecodePool, head_tiles: int) -> DecodeMasks:
    """Return the functions for one kind of pool and so many tiles of heads."""
    clear_values, clear_first_values = pool.clear_values, pool.clear_first_values

    @cuda.jit(device=True, inline="always")
    def hide(scores: Local, key_factors: Local, value_factors: Local, half: Scalar) -> None:
        """Leave out this lane's token in a half of the tile, whatever its scales are."""
        key_factors[half] = float32(1)
        value_factors[half] = float32(0)
        for n in range(head_tiles):
            scores[n, 2 * half] = MINUS_INFINITY
            scores[n, 2 * half + 1] = MINUS_INFINITY

    @cuda.jit(device=True, inline="always")
    def hide_from(
        scores: Local, key_factors: Local, value_factors: Local, values: Local,
        num_valid: Scalar, quad_row: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        valid_of_lane = int32(num_valid - quad_row)
        for half in range(2):
            if valid_of_lane <= int32(8 * half):
                hide(scores, key_factors, value_factors, half)
        clear_values(values, num_valid, quad)

    @cuda.jit(device=True, inline="always")
    def hide_before(
        scores: Local, key_factors: Local, value_factors: Local, values: Local,
        num_before: Scalar, quad_row: Scalar, quad: Scalar,
    ) -> None:  # fmt: skip
        before_of_lane = int32(num_before - quad_row)
        for half in range(2):
            if before_of_lane > int32(8 * half):
                hide(scores, key_factors, value_factors, half)
        clear_first_values(values, num_before, quad)

    return DecodeMasks(hide_from, hide_before)
