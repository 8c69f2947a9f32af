"""Bytes of the KV pool become 16-bit floats exactly, and float32 the nearest byte."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.cuda.instructions.eight_bits import BYTES_AT_ONCE, STORE_CODES, WIDEN_FLOAT8
from kernels.reference.quantized_kv import from_float8, to_float8
from tests.simt import launch, tensor

CODES = np.arange(256, dtype=np.uint8)
NUMBERS = CODES[CODES & 0x7F != 0x7F]  # the others are NaN, which is never written


@pytest.mark.parametrize(
    ("dtype", "to_float32"),
    [("bfloat16", tensor.widen_bfloat16), ("float16", tensor.widen_float16)],
)
def test_every_float8_is_itself(dtype, to_float32):
    widen_float8 = WIDEN_FLOAT8[dtype]

    def widens(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        first = words[cuda.threadIdx.x]
        widen_float8(pairs, 0, first, first ^ uint32(0x80808080))
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    out = np.zeros(256, np.uint32)
    launch(widens, (1, 1, 1), 64, (out, CODES.view(np.uint32)))

    found = to_float32(out.view(np.uint16)).reshape(64, 4, 2)
    expected = from_float8(CODES).reshape(64, 4)
    is_number = ~np.isnan(expected)
    for half, sign in enumerate((1, -1)):
        for j, places in enumerate(([0, 2], [1, 3])):
            np.testing.assert_array_equal(
                found[:, 2 * half + j][is_number[:, places]],
                sign * expected[:, places][is_number[:, places]],
            )


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
