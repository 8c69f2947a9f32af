"""A head of D elements on the lanes of a warp, and reads and writes of a few neighbours at once.

A lane has runs of one, two or four neighbours, as many as D is a multiple of 32 of; a warp's runs
are neighbours, too:

    D = 192      │ 0, 1 │ 2, 3 │ … │ 62, 63 │ 64, 65 │ …      3 runs of 2
    lane            0      1           31        0

Values are float32 in registers, a row of a local array [runs, length] a run, whatever they are in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from numba import cuda, uint32

from kernels.cuda.instructions.conversions import (
    CONVERSIONS,
    PAIR_CONVERSIONS,
    float32_to_word,
    word_to_float32,
)
from kernels.cuda.instructions.vectors import LOAD_WORDS, STORE_WORDS
from kernels.cuda.variant import DeviceFunction, Local, Pointer, Scalar

LANES: Final = 32
LENGTHS: Final = (4, 2, 1)


@dataclass(frozen=True, slots=True)
class HeadLanes:
    """What a lane has of a head of `size` elements, a multiple of 32: `runs` of `length`."""

    size: int

    @property
    def length(self) -> int:
        """Neighbours of a run."""
        return next(length for length in LENGTHS if self.size % (LANES * length) == 0)

    @property
    def runs(self) -> int:
        """Runs of a lane."""
        return self.size // (LANES * self.length)


def make_load_run(dtype: str, length: int) -> DeviceFunction:
    """Return load(values, i, source, element): values[i, :] = the run at `source[element]`.

    That is at a multiple of the run's length.
    """
    to_float32, _ = CONVERSIONS[dtype]
    is_wide = dtype == "float32"
    num_words = length if is_wide else length // 2

    @cuda.jit(device=True, inline="always")
    def load_one(values: Local, i: Scalar, source: Pointer, element: Scalar) -> None:
        values[i, 0] = to_float32(source[element])

    if length == 1:
        return load_one
    load_words = LOAD_WORDS[num_words]

    @cuda.jit(device=True, inline="always")
    def load_floats(values: Local, i: Scalar, source: Pointer, element: Scalar) -> None:
        words = cuda.local.array((1, 4), uint32)
        load_words(words, 0, source, element)
        for n in range(num_words):
            values[i, n] = word_to_float32(words[0, n])

    if is_wide:
        return load_floats
    pair = PAIR_CONVERSIONS[dtype]
    low, high = pair.low, pair.high

    @cuda.jit(device=True, inline="always")
    def load_halves(values: Local, i: Scalar, source: Pointer, element: Scalar) -> None:
        words = cuda.local.array((1, 4), uint32)
        load_words(words, 0, source, element)
        for n in range(num_words):
            values[i, 2 * n] = low(words[0, n])
            values[i, 2 * n + 1] = high(words[0, n])

    return load_halves


def make_store_run(dtype: str, length: int) -> DeviceFunction:
    """Return store(target, element, values, i): the run at `target[element]` = values[i, :].

    Each rounded to nearest, ties to even.
    """
    _, from_float32 = CONVERSIONS[dtype]
    is_wide = dtype == "float32"
    num_words = length if is_wide else length // 2

    @cuda.jit(device=True, inline="always")
    def store_one(target: Pointer, element: Scalar, values: Local, i: Scalar) -> None:
        target[element] = from_float32(values[i, 0])

    if length == 1:
        return store_one
    store_words = STORE_WORDS[num_words]

    @cuda.jit(device=True, inline="always")
    def store_floats(target: Pointer, element: Scalar, values: Local, i: Scalar) -> None:
        words = cuda.local.array((1, 4), uint32)
        for n in range(num_words):
            words[0, n] = float32_to_word(values[i, n])
        store_words(target, element, words, 0)

    if is_wide:
        return store_floats
    pack = PAIR_CONVERSIONS[dtype].pack

    @cuda.jit(device=True, inline="always")
    def store_halves(target: Pointer, element: Scalar, values: Local, i: Scalar) -> None:
        words = cuda.local.array((1, 4), uint32)
        for n in range(num_words):
            words[0, n] = pack(values[i, 2 * n], values[i, 2 * n + 1])
        store_words(target, element, words, 0)

    return store_halves
