"""The twins of `instructions.eight_bits` and `placed_bytes`, by the same placing of bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kernels.cuda.instructions.eight_bits import (
    BYTES_AT_ONCE,
    PLACINGS,
    SIGNS,
    STORE_CODES,
    WIDEN_FLOAT8,
)
from kernels.cuda.instructions.placed_bytes import (
    FIRST_COLUMN,
    NEXT_COLUMN,
    PLACE_COLUMN,
    PLACE_WORDS,
)
from kernels.cuda.instructions.placed_bytes import PLACINGS as PLACES
from kernels.reference.quantized_kv import to_float8
from tests.simt.memory import CheckedArray
from tests.simt.small_integers import multiply_add, widen_bytes


def _table(dtype: str) -> list[int]:
    """Return what becomes of each of the 256 bytes."""
    placing = PLACINGS[dtype]
    upper = np.arange(256) << 8
    raised = upper & SIGNS | upper >> placing.shift & placing.mask
    return multiply_add(dtype, raised, placing.power, 0x8000)


def _store_codes(dtype: str, target: CheckedArray, element: Any, values: Any, i: Any) -> None:
    row: np.ndarray = values.read_row(i, BYTES_AT_ONCE)
    codes: Sequence[Any]
    if dtype == "float8":
        codes = to_float8(np.where(np.isnan(row), np.float32(0), row))
    else:
        codes = np.rint(np.where(np.isnan(row), np.float32(0), row)).astype(np.int8)
    target.write_words(element, np.asarray(codes).view(np.uint32))


def _placed(dtypes: tuple[str, str]) -> list[int]:
    """Return the half that each of the 256 bytes is placed in."""
    placing, codes = PLACES[dtypes], np.arange(256)
    signed = codes | (codes >> 7) * 0xFF00
    return [int(x) for x in signed << placing.shift & placing.mask ^ placing.turned]


def _place_column(table: Sequence[int], a: Any, b: Any, selector: Any) -> np.uint32:
    column, odd = divmod(int(selector) - FIRST_COLUMN, NEXT_COLUMN)
    assert (odd, column // 4) == (0, 0), f"{int(selector):#x} is no column of bytes"
    low, high = (table[int(word) >> 8 * column & 255] for word in (a, b))
    return np.uint32(low | high << 16)


EIGHT_BIT_TWINS: dict[Any, Any] = {
    **{WIDEN_FLOAT8[dtype]: partial(widen_bytes, _table(dtype)) for dtype in PLACINGS},
    **{twin: partial(widen_bytes, _placed(dtypes)) for dtypes, twin in PLACE_WORDS.items()},
    **{twin: partial(_place_column, _placed(dtypes)) for dtypes, twin in PLACE_COLUMN.items()},
    **{STORE_CODES[dtype]: partial(_store_codes, dtype) for dtype in STORE_CODES},
}
