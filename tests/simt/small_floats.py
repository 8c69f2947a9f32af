"""The twins of `kernels.cuda.instructions.small_floats`, by what the format says of its codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kernels.cuda.four_bit_floats import DOUBLED, taken_up
from kernels.cuda.instructions.small_floats import (
    RAISED_SCALE,
    WIDEN_FLOAT_BYTES,
    WIDEN_FLOATS,
    scale_of_exponent,
)
from kernels.reference.quantized_kv import from_float8
from tests.simt.memory import CheckedArray
from tests.simt.small_integers import widen_bytes


def _bits_of_codes(dtype: str) -> list[int]:
    """Return the 16-bit floats of the 16 codes by their bits; minus zero has its sign."""
    values = DOUBLED.astype(np.float32) / 2
    values[8] = -0.0
    return _bits_of(dtype, values)


def _bits_of_bytes(dtype: str) -> list[int]:
    """Return the same of the 256 codes of eight bits, over what scales are raised by."""
    values = from_float8(np.arange(256, dtype=np.uint8))
    values[[0x7F, 0xFF]] = 480, -480
    return _bits_of(dtype, values / RAISED_SCALE[dtype])


def _bits_of(dtype: str, values: np.ndarray) -> list[int]:
    if dtype == "float16":
        return [int(bits) for bits in values.astype(np.float16).view(np.uint16)]
    return [int(bits) >> 16 for bits in values.astype(np.float32).view(np.uint32)]


def _widen(table: list[int], pairs: CheckedArray, i: Any, word: Any) -> None:
    (codes,) = taken_up(np.array([int(word)], np.uint32)).tolist()
    for j in range(4):
        pairs[i, j] = table[codes >> 4 * j & 15] | table[codes >> 4 * j + 16 & 15] << 16


def _scale(byte: Any) -> np.float32:
    exponent = int(byte)
    assert exponent < 256
    if exponent in (0, 255):
        return np.float32(0 if exponent == 0 else np.inf)
    return np.ldexp(np.float32(1), exponent - 127)


SMALL_FLOAT_TWINS: dict[Any, Any] = {
    scale_of_exponent: _scale,
    **{widen: partial(_widen, _bits_of_codes(dtype)) for dtype, widen in WIDEN_FLOATS.items()},
    **{
        widen: partial(widen_bytes, _bits_of_bytes(dtype))
        for dtype, widen in WIDEN_FLOAT_BYTES.items()
    },
}
