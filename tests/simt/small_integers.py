"""The twins of `kernels.cuda.instructions.small_integers`, by the same magic numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kernels.cuda.instructions.small_integers import (
    MAGIC,
    NIBBLE_OFFSETS,
    WIDEN_BYTES,
    WIDEN_NIBBLES,
)
from tests.simt import tensor
from tests.simt.memory import CheckedArray

_WIDEN: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "bfloat16": tensor.widen_bfloat16,
    "float16": tensor.widen_float16,
}


def multiply_add(dtype: str, a: np.ndarray, b: Any, c: Any) -> list[int]:
    """Return a · b + c, 16-bit floats by their bits. Refuses a result that is not exact."""
    x, y, z = (_WIDEN[dtype](np.asarray(v, np.uint16)).astype(np.float64) for v in (a, b, c))
    exact = (x * y + z).astype(np.float32)
    stored = exact.astype(np.float16).view(np.uint16)
    if dtype == "bfloat16":
        stored = (exact.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    assert np.array_equal(_WIDEN[dtype](stored), x * y + z)
    return [int(bits) for bits in stored]


def _nibble_table(dtype: str, offset: int) -> list[int]:
    """Return what becomes of each of the 16 nibbles."""
    magic = MAGIC[dtype]
    raised = np.arange(16) & 0xF | magic.bits
    return multiply_add(dtype, raised, magic.one, magic.negative(magic.worth + offset))


def _byte_table(dtype: str) -> list[int]:
    """Return what becomes of each of the 256 bytes."""
    magic, stored = MAGIC[dtype], np.arange(256)
    low, sign = stored & 0x7F | magic.bits, stored & 0x80 | magic.bits
    return multiply_add(dtype, sign, magic.minus_one, low)


def _widen_nibbles(table: Sequence[int], pairs: CheckedArray, i: Any, word: Any) -> None:
    bits = int(word)
    for j in range(4):
        pairs[i, j] = table[bits >> 4 * j & 15] | table[bits >> 4 * j + 16 & 15] << 16


def widen_bytes(table: Sequence[int], pairs: CheckedArray, i: Any, first: Any, second: Any) -> None:
    """Write what becomes of the bytes of two words, by the instruction's table."""
    words = []
    for j in range(4):
        bits = int((first, second)[j // 2]) >> 8 * (j % 2)
        words.append(table[bits & 255] | table[bits >> 16 & 255] << 16)
    pairs.write_row(i, words)


SMALL_INTEGER_TWINS: dict[Any, Any] = {
    **{
        WIDEN_NIBBLES[dtype, offset]: partial(_widen_nibbles, _nibble_table(dtype, offset))
        for dtype in MAGIC
        for offset in NIBBLE_OFFSETS
    },
    **{WIDEN_BYTES[dtype]: partial(widen_bytes, _byte_table(dtype)) for dtype in MAGIC},
}
