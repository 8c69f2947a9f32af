"""The twins of `kernels.cuda.instructions.small_integers`, by the same magic numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kernels.cuda.instructions.small_integers import (
    FIFTEEN_SIXTEENTHS,
    MAGIC,
    NIBBLE_OFFSETS,
    READY_BYTES,
    READY_NIBBLES,
    SIXTEENTH,
    WIDE_OFFSETS,
    WIDEN_BYTES,
    WIDEN_BYTES_LESS,
    WIDEN_NIBBLES,
    WIDEN_NIBBLES_LESS,
    WIDEN_WIDE,
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


def _nibble_table(dtype: str, zero: int) -> list[list[int]]:
    """Return what becomes of each of the 16 nibbles: by where it is, at an even place or not."""
    magic, nibbles = MAGIC[dtype], np.arange(16)
    taken_off = magic.negative(magic.worth + zero)
    table = multiply_add(dtype, nibbles | magic.bits, magic.one, taken_off)
    if dtype == "bfloat16":
        return [table, table]
    (sixteenth,) = multiply_add(dtype, np.array([taken_off]), magic.one, FIFTEEN_SIXTEENTHS)
    return [table, multiply_add(dtype, nibbles << 4 | magic.bits, SIXTEENTH, sixteenth)]


def _byte_table(dtype: str) -> list[int]:
    """Return what becomes of each of the 256 bytes."""
    magic, stored = MAGIC[dtype], np.arange(256)
    low, sign = stored & 0x7F | magic.bits, stored & 0x80 | magic.bits
    return multiply_add(dtype, sign, magic.minus_one, low)


def _widen_nibbles(table: Sequence[Sequence[int]], pairs: CheckedArray, i: Any, word: Any) -> None:
    bits = int(word)
    for j in range(4):
        of_place = table[j % 2]
        pairs[i, j] = of_place[bits >> 4 * j & 15] | of_place[bits >> 4 * j + 16 & 15] << 16


def _widen_nibbles_less(
    tables: Mapping[int, Sequence[Sequence[int]]], pairs: CheckedArray, i: Any, word: Any, zero: Any
) -> None:
    _widen_nibbles(tables[int(zero)], pairs, i, word)


def _widen_bytes_less(
    dtype: str,
    table: Sequence[int],
    pairs: CheckedArray,
    i: Any,
    first: Any,
    second: Any,
    zero: Any,
) -> None:
    widen_bytes(table, pairs, i, first, second)
    halves = pairs.read_row(i, 4).view(np.uint16)
    taken_off = np.uint32([zero]).view(np.uint16)
    less = multiply_add(dtype, halves, MAGIC[dtype].one, np.tile(taken_off, 4))
    pairs.write_row(i, np.array(less, np.uint16).view(np.uint32))


def _fives(own: int, rest: int) -> tuple[int, int, int, int]:
    return own & 31, own >> 5 & 31, own >> 10 & 31, rest & 15 | own >> 15 << 4


def _sixes(own: int, rest: int) -> tuple[int, int, int, int]:
    return own & 63, own >> 6 & 63, rest & 63, own >> 12 | (rest >> 6 & 3) << 4


def _wide_table(dtype: str, bits: int, offset: int) -> list[int]:
    """Return what becomes of each integer of so many bits."""
    magic = MAGIC[dtype]
    taken_off = magic.negative(magic.worth + offset)
    return multiply_add(dtype, np.arange(2**bits) | magic.bits, magic.one, taken_off)


def _widen_wide(
    bits: int, table: Sequence[int], pairs: CheckedArray, i: Any, own: Any, rest: Any
) -> None:
    take_apart = _fives if bits == 5 else _sixes
    halves = [
        take_apart(int(own) >> shift & 0xFFFF, int(rest) >> shift & 0xFFFF) for shift in (0, 16)
    ]
    for j in range(4):
        pairs[i, j] = table[halves[0][j]] | table[halves[1][j]] << 16


def _ready(count: int, table: Sequence[int], zeros: CheckedArray, i: Any, word: Any) -> None:
    """Write what becomes of four integers in a word, each one of `count`."""
    width = count.bit_length() - 1
    for j in range(4):
        zeros[i, j] = table[int(word) >> width * j & count - 1] * 0x10001


def widen_bytes(table: Sequence[int], pairs: CheckedArray, i: Any, first: Any, second: Any) -> None:
    """Write what becomes of the bytes of two words, by the instruction's table."""
    words = []
    for j in range(4):
        bits = int((first, second)[j // 2]) >> 8 * (j % 2)
        words.append(table[bits & 255] | table[bits >> 16 & 255] << 16)
    pairs.write_row(i, words)


def _ready_nibbles(dtype: str) -> list[int]:
    """Return −(magic + z) for each of the 16 zero points."""
    magic = MAGIC[dtype]
    return [magic.negative(magic.worth + zero) for zero in range(16)]


def _ready_bytes(dtype: str) -> list[int]:
    """Return −z for each of the 256 bytes."""
    magic, stored = MAGIC[dtype], np.arange(256)
    low, sign = stored & 0x7F | magic.bits, stored & 0x80 | magic.bits
    return multiply_add(dtype, low, magic.minus_one, sign)


def _twins_of(dtype: str) -> dict[Any, Any]:
    by_zero = {
        ready * 0x10001: _nibble_table(dtype, zero)
        for zero, ready in enumerate(_ready_nibbles(dtype))
    }
    return {
        **{
            WIDEN_NIBBLES[dtype, offset]: partial(_widen_nibbles, _nibble_table(dtype, offset))
            for offset in NIBBLE_OFFSETS
        },
        **{
            WIDEN_WIDE[dtype, bits, offset]: partial(
                _widen_wide, bits, _wide_table(dtype, bits, offset)
            )
            for bits, offsets in WIDE_OFFSETS.items()
            for offset in offsets
        },
        WIDEN_NIBBLES_LESS[dtype]: partial(_widen_nibbles_less, by_zero),
        WIDEN_BYTES[dtype]: partial(widen_bytes, _byte_table(dtype)),
        WIDEN_BYTES_LESS[dtype]: partial(_widen_bytes_less, dtype, _byte_table(dtype)),
        READY_NIBBLES[dtype]: partial(_ready, 16, _ready_nibbles(dtype)),
        READY_BYTES[dtype]: partial(_ready, 256, _ready_bytes(dtype)),
    }


SMALL_INTEGER_TWINS: dict[Any, Any] = {
    name: twin for dtype in MAGIC for name, twin in _twins_of(dtype).items()
}
