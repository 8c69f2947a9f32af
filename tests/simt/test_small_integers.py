"""Integers of four to eight bits become 16-bit floats exactly, by magic numbers."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32

from kernels.cuda.instructions.small_integers import (
    READY_BYTES,
    READY_NIBBLES,
    WIDEN_BYTES,
    WIDEN_BYTES_LESS,
    WIDEN_NIBBLES,
    WIDEN_NIBBLES_LESS,
    WIDEN_WIDE,
)
from kernels.cuda.instructions.whole_scales import RAISED_BY, raised_byte
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


@pytest.mark.parametrize("dtype", WIDEN_NIBBLES_LESS)
def test_every_nibble_is_itself_less_any_zero_point(dtype):
    ready, widen_less = READY_NIBBLES[dtype], WIDEN_NIBBLES_LESS[dtype]

    def widens(out, words):
        zeros = cuda.local.array((1, 4), uint32)
        pairs = cuda.local.array((1, 4), uint32)
        word = words[cuda.threadIdx.x]
        ready(zeros, 0, word >> uint32(4))  # the next place's nibble; there are more than four
        for j in range(4):
            widen_less(pairs, 0, word, zeros[0, j])
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    every_two = np.stack([np.arange(256) % 16, np.arange(256) // 16], axis=-1)
    places = np.tile(every_two, 4)  # [word, place]
    words = (places << (4 * np.arange(8))).sum(axis=1).astype(np.uint32)

    found = run(widens, words, dtype)

    for j in range(4):
        expected = places[:, [j, j + 4]] - places[:, [j + 1]]
        np.testing.assert_array_equal(found[:, j], expected)


@pytest.mark.parametrize("dtype", WIDEN_BYTES_LESS)
def test_every_signed_byte_is_itself_less_a_zero_point(dtype):
    ready, widen_less = READY_BYTES[dtype], WIDEN_BYTES_LESS[dtype]

    def widens(out, words):
        zeros = cuda.local.array((1, 4), uint32)
        pairs = cuda.local.array((1, 4), uint32)
        word = words[cuda.threadIdx.x]
        ready(zeros, 0, word)
        for j in range(4):
            widen_less(pairs, 0, word, ~word, zeros[0, j])
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    rows = np.arange(256)[:, None] * [1, 3, 5, 7] + [0, 128, 255, 17]  # every byte at each place
    stored = rows.astype(np.uint8).view(np.int8)

    found = run(widens, stored.reshape(-1).view(np.uint32), dtype)

    wide = stored.astype(np.int32)
    for j, both in enumerate(([0, 2], [1, 3], [0, 2], [1, 3])):
        values = wide if j < 2 else ~wide
        np.testing.assert_array_equal(found[:, j], values[:, both] - wide[:, [j]])
    assert found.min() < -200
    assert found.max() > 200


@pytest.mark.parametrize(("dtype", "bits", "offset"), WIDEN_WIDE)
def test_every_integer_of_five_or_six_bits_is_itself_less_the_offset(dtype, bits, offset):
    widen = WIDEN_WIDE[dtype, bits, offset]

    def widens(out, words):
        pairs = cuda.local.array((1, 4), uint32)
        first = 2 * cuda.threadIdx.x
        widen(pairs, 0, words[first], words[first + 1])
        for j in range(4):
            out[4 * cuda.threadIdx.x + j] = pairs[0, j]

    rng, count = np.random.default_rng(bits), 64
    q = (np.arange(count)[:, None, None] + rng.integers(0, 64, (4, 2))) % 2**bits  # [·, j, half]
    last = q[:, 3]
    if bits == 5:
        own = q[:, 0] | q[:, 1] << 5 | q[:, 2] << 10 | last >> 4 << 15
        rest = last & 15 | rng.integers(0, 1 << 12, last.shape) << 4  # the other rows'
    else:
        own = q[:, 0] | q[:, 1] << 6 | (last & 15) << 12
        rest = q[:, 2] | last >> 4 << 6 | rng.integers(0, 256, last.shape) << 8
    halves = np.stack([own, rest], axis=1).astype(np.uint16)
    out = np.zeros(4 * count, np.uint32)

    launch(widens, (1, 1, 1), count, (out, halves.view(np.uint32).reshape(-1)))

    found = WIDEN[dtype](out.view(np.uint16)).reshape(count, 4, 2)
    np.testing.assert_array_equal(found, q - offset)


def test_every_byte_of_a_word_is_raised():
    def raises(out, words):
        for i in range(4):
            out[4 * cuda.threadIdx.x + i] = raised_byte(words[cuda.threadIdx.x], i) - float32(
                RAISED_BY
            )

    stored = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, np.float32)

    launch(raises, (1, 1, 1), 64, (out, stored.view(np.uint32)))

    np.testing.assert_array_equal(out, stored)
