"""Quantised weights keep every bit in panels of 16 columns."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.int8_packing import INT8_FORMATS, packed_int8_bytes, unpack_int8_rows
from tests.kernels.cpu.operation_calls import packed_weights, random_blocks

FORMATS = list(INT8_FORMATS)


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (1, 64), (17, 96), (2048, 576)])
def test_what_is_packed_can_be_unpacked_bit_for_bit(label: str, n: int, k: int) -> None:
    blocks = random_blocks(label, n, k, np.random.default_rng(n))
    packed = packed_weights(label, blocks, k)
    assert (unpack_int8_rows(label, packed, n, k) == blocks).all()


@pytest.mark.parametrize("label", FORMATS)
def test_the_last_panel_is_filled_up_with_zero_bytes(label: str) -> None:
    blocks = random_blocks(label, 19, 64, np.random.default_rng(0))
    packed = packed_weights(label, blocks, 64)
    assert len(packed) == packed_int8_bytes(label, 32, 64)
    assert (unpack_int8_rows(label, packed, 32, 64)[19:] == 0).all()


@pytest.mark.parametrize("label", FORMATS)
def test_a_weight_stands_where_the_drawing_says(label: str) -> None:
    fmt = INT8_FORMATS[label]
    n, k, column, depth = 32, 96, 21, 32 + 18
    blocks = np.zeros((n, k // 32 * fmt.block_bytes), np.uint8)
    header = fmt.block_bytes - (16 if fmt.is_nibbles else 32)
    within = depth % 32
    byte = fmt.block_bytes + header + (within % 16 if fmt.is_nibbles else within)
    blocks[column, byte] = (0xB << 4 if within >= 16 else 0xB) if fmt.is_nibbles else 0xB
    packed = packed_weights(label, blocks, k)
    panel, lane = divmod(column, 16)
    tile = (panel * (k // 32) + depth // 32) * fmt.tile_bytes
    vector, rest = divmod(within % 16 if fmt.is_nibbles else within, 4)
    place = tile + 64 * vector + 4 * lane + rest
    assert packed[place] == blocks[column, byte]
    assert np.count_nonzero(packed) == 1


def test_rows_that_are_a_view_of_a_larger_array_are_packed_alike() -> None:
    blocks = random_blocks("Q4_1", 40, 64, np.random.default_rng(3))
    wide = np.zeros((80, blocks.shape[1] + 6), np.uint8)
    wide[::2, 3:-3] = blocks
    assert (packed_weights("Q4_1", wide[::2, 3:-3], 64) == packed_weights("Q4_1", blocks, 64)).all()
