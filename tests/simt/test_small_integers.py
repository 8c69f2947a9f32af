"""Integers of four and eight bits become 16-bit floats exactly, by magic numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, uint32

from kernels.cuda.instructions.small_integers import WIDEN_BYTES, WIDEN_NIBBLES
from tests.simt import launch, tensor

WIDEN = {"bfloat16": tensor.widen_bfloat16, "float16": tensor.widen_float16}


def run(kernel, words: np.ndarray, dtype: str) -> np.ndarray:
    """Return the floats that a kernel makes of its words: [words, pair, half]."""
    out = np.zeros(4 * len(words), np.uint32)
    launch(kernel, (1, 1, 1), len(words), (out, words))
    return WIDEN[dtype](out.view(np.uint16)).reshape(len(words), 4, 2)


@pytest.mark.parametrize(("dtype", "offset"), WIDEN_NIBBLES)
def test_every_nibble_at_every_place_is_itself_less_the_offset(dtype, offset):
    widen_nibbles = WIDEN_NIBBLES[dtype, offset]

    def widens(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        widen_nibbles(pairs, 0, words[cuda.threadIdx.x])
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    nibbles = (np.arange(32)[:, None] + 5 * np.arange(8)) % 16  # [word, place]: all at all places
    words = (nibbles << (4 * np.arange(8))).sum(axis=1).astype(np.uint32)

    found = run(widens, words, dtype)

    expected = nibbles.reshape(-1, 2, 4).transpose(0, 2, 1) - offset  # bits 4·j and 4·j + 16
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", WIDEN_BYTES)
def test_every_signed_byte_is_itself(dtype):
    widen_bytes = WIDEN_BYTES[dtype]

    def widens(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        first = words[cuda.threadIdx.x]
        widen_bytes(pairs, 0, first, first ^ uint32(0xFFFFFFFF))
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    stored = np.arange(256, dtype=np.uint8).view(np.int8)

    found = run(widens, stored.view(np.uint32), dtype)

    first = stored.reshape(-1, 4)
    for half, values in enumerate((first, ~first)):
        np.testing.assert_array_equal(found[:, 2 * half], values[:, [0, 2]])
        np.testing.assert_array_equal(found[:, 2 * half + 1], values[:, [1, 3]])
