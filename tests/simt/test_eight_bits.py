"""Bytes of the KV pool become 16-bit floats exactly, and float32 the nearest byte.

What becomes of bytes is asked twice: of the twins, and of what the compiler makes of instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.cuda.build import compile_ptx
from kernels.cuda.instructions.eight_bits import BYTES_AT_ONCE, STORE_CODES, WIDEN_FLOAT8
from kernels.cuda.instructions.placed_bytes import (
    FIRST_COLUMN,
    MINUS_OFFSET,
    NEXT_COLUMN,
    PLACE_COLUMN,
    PLACE_WORDS,
    PLACINGS,
)
from kernels.cuda.instructions.small_floats import RAISED_SCALE, WIDEN_FLOAT_BYTES
from kernels.cuda.variant import Expectation
from kernels.reference.quantized_kv import from_float8, to_float8
from tests import ptx
from tests.simt import launch, tensor

CODES = np.arange(256, dtype=np.uint8)
NUMBERS = CODES[CODES & 0x7F != 0x7F]  # the others are NaN, which is never written


@dataclass(frozen=True)
class OfWords:
    """A kernel of 64 threads that makes words of words."""

    function: Callable[..., None]
    name: str = "of_words"
    threads: int = 64
    arguments: tuple[str, ...] = ("uint32*", "uint32*")
    expectation: Expectation = Expectation(registers=255)  # noqa: RUF009 - it is frozen

    def kernel(self):
        return self.function


@pytest.fixture(params=["twins", "compiled"])
def words_of(request):
    """What runs a kernel(out, words) on all 256 codes, four a word, and returns `out` [256]."""

    def run(kernel):
        out = np.zeros(256, np.uint32)
        if request.param == "twins":
            launch(kernel, (1, 1, 1), 64, (out, CODES.view(np.uint32)))
        else:
            ptx.launch(compile_ptx(OfWords(kernel)), (1, 1, 1), [out, CODES.view(np.uint32)])
        return out

    return run


@pytest.mark.parametrize(
    ("dtype", "to_float32"),
    [("bfloat16", tensor.widen_bfloat16), ("float16", tensor.widen_float16)],
)
@pytest.mark.parametrize("instructions", [WIDEN_FLOAT8, WIDEN_FLOAT_BYTES], ids=["kv", "weights"])
def test_every_float8_is_itself(dtype, to_float32, words_of, instructions):
    """One of weights, but for what its scale is raised by."""
    widen_float8 = instructions[dtype]
    raised = RAISED_SCALE[dtype] if instructions is WIDEN_FLOAT_BYTES else 1

    def widens(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        first = words[cuda.threadIdx.x]
        widen_float8(pairs, 0, first, first ^ uint32(0x80808080))
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    found = to_float32(words_of(widens).view(np.uint16)).reshape(64, 4, 2) * raised
    expected = from_float8(CODES).reshape(64, 4)
    is_number = ~np.isnan(expected)
    for half, sign in enumerate((1, -1)):
        for j, places in enumerate(([0, 2], [1, 3])):
            np.testing.assert_array_equal(
                found[:, 2 * half + j][is_number[:, places]],
                sign * expected[:, places][is_number[:, places]],
            )


TO_FLOAT32 = {"bfloat16": tensor.widen_bfloat16, "float16": tensor.widen_float16}
NUMBER_OF = {"int8": CODES.view(np.int8).astype(np.float32), "float8": from_float8(CODES)}


def expected_of(dtypes):
    """Return what the 256 codes are when placed: (number + offset) · unit, as float64."""
    placing = PLACINGS[dtypes]
    return (NUMBER_OF[dtypes[0]].astype(np.float64) + placing.offset) * placing.unit


def assert_placed(dtypes, words, codes):
    """Compare the halves of `words` with `codes`, but for codes that are no number."""
    found = TO_FLOAT32[dtypes[1]](np.ascontiguousarray(words).view(np.uint16))
    expected = expected_of(dtypes)[np.ravel(codes)]
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(found.astype(np.float64)[is_number], expected[is_number])


@pytest.mark.parametrize("dtypes", PLACINGS, ids="-".join)
def test_every_byte_is_placed_as_its_number_and_the_offset(dtypes, words_of):
    place_words = PLACE_WORDS[dtypes]

    def places(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        first = words[cuda.threadIdx.x]
        place_words(pairs, 0, first, first ^ uint32(0x80808080))
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    codes = CODES.reshape(64, 4)[:, [0, 2, 1, 3]]
    assert_placed(dtypes, words_of(places), np.hstack([codes, codes ^ 0x80]))


@pytest.mark.parametrize("dtypes", PLACINGS, ids="-".join)
def test_a_column_of_two_words_is_placed_in_a_word(dtypes, words_of):
    place_column = PLACE_COLUMN[dtypes]

    def places(out, words):
        first = words[cuda.threadIdx.x]
        second = first ^ uint32(0x80808080)
        for j in range(4):
            placed = place_column(first, second, FIRST_COLUMN + j * NEXT_COLUMN)
            out[4 * cuda.threadIdx.x + j] = placed

    assert_placed(dtypes, words_of(places), np.stack([CODES, CODES ^ 0x80], axis=1))


@pytest.mark.parametrize("dtypes", PLACINGS, ids="-".join)
def test_the_offset_is_the_same_for_both_floats(dtypes):
    placing = PLACINGS[dtypes]
    if placing.offset:
        (half, _) = TO_FLOAT32[dtypes[1]](np.array([MINUS_OFFSET], np.uint32).view(np.uint16))
        assert half == -placing.offset * placing.unit


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [("float8", from_float8(NUMBERS)), ("int8", np.arange(-127, 128, dtype=np.float32))],
)
def test_codes_are_stored_eight_at_a_time(dtype, numbers):
    store_codes = STORE_CODES[dtype]

    def stores(out, rows):
        values = cuda.local.array((1, BYTES_AT_ONCE), float32)
        first = BYTES_AT_ONCE * cuda.threadIdx.x
        for i in range(BYTES_AT_ONCE):
            values[0, i] = rows[first + i]
        store_codes(out, first, values, 0)

    rows = np.resize(numbers, 256)
    out = np.zeros(256, np.uint8)
    launch(stores, (1, 1, 1), 32, (out, rows))

    expected = to_float8(rows) if dtype == "float8" else rows.astype(np.int8).view(np.uint8)
    np.testing.assert_array_equal(out, expected)
