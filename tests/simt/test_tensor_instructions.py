"""The simulator's tensor cores, wide accesses and asynchronous copies do what the PTX ISA says."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint16, uint32

from kernels.cuda.instructions.async_copies import (
    commit_copies,
    copy_async,
    wait_for_copies,
    wait_for_copies_but_one,
)
from kernels.cuda.instructions.conversions import PAIR_CONVERSIONS
from kernels.cuda.instructions.tiles import (
    LOWER_HALVES,
    UPPER_HALVES,
    choose_bytes,
    load_tiles,
    load_transposed_tiles,
    multiply_float16_tiles,
    transpose_tile,
)
from kernels.cuda.instructions.vectors import (
    load_constant_pair,
    load_constant_vector,
    load_vector,
    load_word,
    store_vector,
    store_word,
)
from tests.simt import Misaligned, OutOfBounds, Race, launch

ONE_BLOCK = (1, 1, 1)
PAIR = PAIR_CONVERSIONS["float16"]
pack, low, high = PAIR.pack, PAIR.low, PAIR.high


def half_bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).view(np.uint16)


def multiplies(out, left, right):
    """out [16, 8] = left [16, 16] · right [16, 8]; right is given turned on its side, [8, 16]."""
    lane = cuda.threadIdx.x
    group, quad = lane // 4, lane % 4
    sums = cuda.local.array((1, 4), float32)
    for i in range(4):
        sums[0, i] = float32(0)
    a = (
        load_word(left, group * 16 + 2 * quad),
        load_word(left, (group + 8) * 16 + 2 * quad),
        load_word(left, group * 16 + 2 * quad + 8),
        load_word(left, (group + 8) * 16 + 2 * quad + 8),
    )
    b = (load_word(right, group * 16 + 2 * quad), load_word(right, group * 16 + 2 * quad + 8))
    multiply_float16_tiles(sums, 0, a, b)
    multiply_float16_tiles(sums, 0, a, b)
    for i in range(4):
        out[(group + 8 * (i // 2)) * 8 + 2 * quad + i % 2] = sums[0, i]


def test_a_product_of_tiles_is_added_to_the_sums():
    rng = np.random.default_rng(0)
    left, right = rng.integers(-4, 5, (16, 16)), rng.integers(-4, 5, (16, 8))
    out = np.zeros(128, np.float32)

    launch(multiplies, ONE_BLOCK, 32, (out, half_bits(left), half_bits(right.T)))

    np.testing.assert_array_equal(out.reshape(16, 8), 2 * (left @ right))


def loads_tiles(plain, turned, source):
    """Four 8 × 8 tiles below each other, as fragments: [tile, lane] words."""
    tiles = cuda.shared.array(256, uint16, alignment=16)
    words = cuda.local.array((2, 4), uint32)
    lane = cuda.threadIdx.x
    load_constant_vector(words, 0, source, lane * 8)
    store_vector(tiles, lane * 8, words, 0)
    cuda.syncthreads()
    load_tiles(words, 0, tiles, lane * 8)
    load_transposed_tiles(words, 1, tiles, lane * 8)
    for t in range(4):
        plain[t * 32 + lane] = words[0, t]
        turned[t * 32 + lane] = transpose_tile(words[1, t])


def test_tiles_reach_registers_row_by_row_and_transposed():
    source = np.arange(256, dtype=np.uint16)
    plain, turned = np.zeros(128, np.uint32), np.zeros(128, np.uint32)

    launch(loads_tiles, ONE_BLOCK, 32, (plain, turned, source), written=(0, 1))

    # A row of 8 elements is the words of four lanes in order.
    np.testing.assert_array_equal(plain, source.view(np.uint32))
    np.testing.assert_array_equal(turned, source.view(np.uint32))


def packs(out, words):
    a, b = words[0], words[1]
    out[0] = choose_bytes(a, b, LOWER_HALVES)
    out[1] = choose_bytes(a, b, UPPER_HALVES)
    out[2] = pack(low(a), high(b))


def test_bytes_and_halves_are_chosen_by_place():
    out = np.zeros(3, np.uint32)

    launch(packs, ONE_BLOCK, 1, (out, np.array([0x3C00_4000, 0x4200_4400], np.uint32)))

    assert [hex(word) for word in out] == ["0x44004000", "0x42003c00", "0x42004000"]


def reads_a_vector(out, source, element):
    words = cuda.local.array((1, 4), uint32)
    load_vector(words, 0, source, element)
    for i in range(4):
        out[i] = words[0, i]


@pytest.mark.parametrize(
    ("element", "fault"), [(4, Misaligned), (24, OutOfBounds), (-8, OutOfBounds)]
)
def test_a_wide_access_must_be_aligned_and_inside(element, fault):
    arguments = (np.zeros(4, np.uint32), np.zeros(24, np.uint16), element)

    launch(reads_a_vector, ONE_BLOCK, 1, (*arguments[:2], 16))
    with pytest.raises(fault):
        launch(reads_a_vector, ONE_BLOCK, 1, arguments)


def reads_a_pair(out, source, element):
    words = cuda.local.array((2, 4), uint32)
    words[1, 2] = uint32(9)
    load_constant_pair(words, 1, source, element)
    for i in range(3):
        out[i] = words[1, i]


def test_half_a_vector_is_two_words_and_leaves_the_others():
    out, source = np.zeros(3, np.uint32), np.arange(24, dtype=np.uint16)

    launch(reads_a_pair, ONE_BLOCK, 1, (out, source, 4))

    assert out.tolist() == [0x0005_0004, 0x0007_0006, 9]
    with pytest.raises(Misaligned):
        launch(reads_a_pair, ONE_BLOCK, 1, (out, source, 2))


def stores_to_unaligned_shared_memory(out, word):
    tile = cuda.shared.array(8, uint16)
    store_word(tile, 0, uint32(word))
    out[0] = load_word(tile, 0)


def test_shared_memory_is_only_as_aligned_as_it_was_asked_to_be():
    with pytest.raises(Misaligned, match="aligned to 2 bytes"):
        launch(stores_to_unaligned_shared_memory, ONE_BLOCK, 1, (np.zeros(1, np.uint32), 7))


def make_copier(*, commits: bool = True, waits: bool = True, barrier: bool = True, early=False):
    """Two tiles by asynchronous copies, each of 16 bytes a thread; sums of the neighbour's."""

    def copies(out, source):
        tiles = cuda.shared.array((2, 512), uint16, alignment=16)
        thread = cuda.threadIdx.x
        copy_async(tiles, thread * 8, source, thread * 8, True)
        if commits:
            commit_copies()
        copy_async(tiles, 512 + thread * 8, source, 1024 + thread * 8, thread < 32)
        commit_copies()
        if waits:
            wait_for_copies_but_one()
        if barrier:
            cuda.syncthreads()
        neighbour = (thread + 33) % 64
        out[thread] = int32(tiles[0, neighbour * 8 + 7])
        if early:
            out[thread] = int32(tiles[1, thread * 8])
        wait_for_copies()
        out[thread] += int32(tiles[1, thread * 8])

    return copies


def test_copies_land_and_those_not_wanted_are_zeros():
    out = np.zeros(64, np.int32)
    source = np.arange(1024 + 256, dtype=np.uint16)

    launch(make_copier(), ONE_BLOCK, 64, (out, source))

    thread = np.arange(64)
    second = np.where(thread < 32, 1024 + thread * 8, 0)
    np.testing.assert_array_equal(out, (thread + 33) % 64 * 8 + 7 + second)


@pytest.mark.parametrize(
    "broken",
    [{"commits": False}, {"waits": False}, {"barrier": False}, {"early": True}],
    ids=lambda broken: next(iter(broken)),
)
def test_a_copy_that_is_not_waited_for_is_a_race(broken):
    source = np.arange(1024 + 256, dtype=np.uint16)

    for seed in range(3):
        with pytest.raises(Race):
            launch(
                make_copier(**broken), ONE_BLOCK, 64, (np.zeros(64, np.int32), source), seed=seed
            )
