"""What tensor-core instructions compute over a warp: the lanes' operands to the lanes' results.

Fragments as drawn in `kernels.cuda.instructions.tiles`. Products are summed in float32 by NumPy, in
an order of its own; the machine's is not specified either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tests.simt.threads import WarpFunction

LANES = np.arange(32)
GROUP, QUAD = LANES // 4, LANES % 4


def widen_bfloat16(bits: np.ndarray) -> np.ndarray:
    """Return bfloat16 bits as float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def widen_float16(bits: np.ndarray) -> np.ndarray:
    """Return float16 bits as float32, exactly."""
    return bits.view(np.float16).astype(np.float32)


def gather_tile(words: Sequence[Any]) -> np.ndarray:
    """Return the 8 × 8 tile [row, column] of 16-bit elements of which each lane gives a word."""
    return np.array(words, np.uint32).view(np.uint16).reshape(8, 8)


def scatter_tile(tile: np.ndarray) -> np.ndarray:
    """Return each lane's word of an 8 × 8 tile of 16-bit elements."""
    return np.ascontiguousarray(tile).view(np.uint32).reshape(32)


def product(widen: Any) -> WarpFunction:
    """Return what `multiply_tiles` computes: per lane (c, a, b) to the new c."""

    def multiply(operands: list[Any]) -> list[Any]:
        c, a, b = (np.array([operand[i] for operand in operands]) for i in range(3))
        a, b = a.astype(np.uint32), b.astype(np.uint32)
        left = np.empty((16, 16), np.float32)
        for quarter in range(4):
            rows, columns = 8 * (quarter % 2), 8 * (quarter // 2)
            left[rows : rows + 8, columns : columns + 8] = widen(gather_tile(a[:, quarter]))
        right = np.empty((16, 8), np.float32)
        for half in range(2):
            right[8 * half : 8 * half + 8] = widen(gather_tile(b[:, half])).T
        with np.errstate(invalid="ignore", over="ignore"):
            result = left @ right
            sums = np.empty((32, 4), np.float32)
            for half in range(2):
                rows = GROUP + 8 * half
                sums[:, 2 * half] = c[:, 2 * half] + result[rows, 2 * QUAD]
                sums[:, 2 * half + 1] = c[:, 2 * half + 1] + result[rows, 2 * QUAD + 1]
        return list(sums)

    return multiply


def load_tiles(operands: list[Any]) -> list[Any]:
    """Per lane one row of four words, to the lane's word of each of four tiles."""
    return _distribute(operands, transposed=False)


def load_transposed_tiles(operands: list[Any]) -> list[Any]:
    """The same of the transposed tiles."""
    return _distribute(operands, transposed=True)


def transpose_tile(operands: list[Any]) -> list[Any]:
    """Per lane a word of a tile, to its word of the transposed tile."""
    return list(scatter_tile(gather_tile(operands).T))


def _distribute(rows: list[Any], *, transposed: bool) -> list[Any]:
    words = np.empty((32, 4), np.uint32)
    for tile in range(4):
        values = np.array(rows[8 * tile : 8 * tile + 8], np.uint32).view(np.uint16)
        words[:, tile] = scatter_tile(values.T if transposed else values)
    return list(words)
