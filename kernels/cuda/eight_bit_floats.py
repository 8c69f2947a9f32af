"""The eight-bit floats of FP8 as whoever packs them wants them: what codes stand for, and back.

A code is a float8 as keys and values of eight bits are (`kernels.reference.quantized_kv`, E4M3),
s eeee mmm. It stands in its word as a signed byte of Q8_0 does, for three bitwise instructions make
a pair of 16-bit floats of it (`instructions.small_floats`): there is nothing to be gained by
another place, as there is for four bits (`four_bit_floats`).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.cuda.errors import UnsupportedVariantError
from kernels.reference.quantized_kv import from_float8, to_float8

Array = npt.NDArray[Any]
UInt8Array = npt.NDArray[np.uint8]

VALUES: Final = from_float8(np.arange(256, dtype=np.uint8))
"""What codes stand for, float32."""
FINITE: Final = np.flatnonzero(np.isfinite(VALUES)).astype(np.uint8)
"""The codes of numbers. Kernels take the two others, which are none, for ± 480."""


def codes_of(values: Array) -> UInt8Array:
    """Return the codes of numbers. Raises UnsupportedVariantError for what is no float8."""
    numbers = np.clip(values, -448, 448).astype(np.float32)
    codes = to_float8(np.nan_to_num(numbers))
    wrong = VALUES[codes] != values
    if wrong.any():
        given = float(values[wrong][0])
        raise UnsupportedVariantError("quants", "a float of eight bits", given)
    return codes
