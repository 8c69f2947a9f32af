"""Quantised weights keep every bit in panels of 16 columns, where the drawing says."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.int8_packing import (
    INT8_FORMATS,
    Int8Format,
    int8_panel_bytes,
    packed_int8_bytes,
)
from tests.kernels.cpu.operation_calls import (
    UInt8Array,
    decoded_weights,
    packed_weights,
    random_blocks,
    whole_blocks,
)
from tests.kernels.cpu.packed_values import values_in_panels

FORMATS = list(INT8_FORMATS)


def scale_bits(fmt: Int8Format) -> int:
    """Bits of scales for 32 weights of a column."""
    return {
        "OWN": 16, "OWN_WITH_MINIMUM": 32,
        "SHARED": 18, "SHARED_SIX_BITS": 8, "SHARED_WITH_MINIMUM": 16,
    }[fmt.scales.name]  # fmt: skip


@pytest.mark.parametrize("label", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(16, 32), (1, 64), (17, 96), (2048, 576)])
def test_what_is_packed_has_the_value_of_the_file_for_every_weight(
    label: str, n: int, k: int
) -> None:
    k = whole_blocks(label, k)
    blocks = random_blocks(label, n, k, np.random.default_rng(n))
    packed = packed_weights(label, blocks, k)
    np.testing.assert_array_equal(
        values_in_panels(label, packed, n, k), decoded_weights(label, blocks)
    )


@pytest.mark.parametrize("label", FORMATS)
def test_no_more_bits_are_packed_than_the_file_has_but_for_what_fills_a_panel(label: str) -> None:
    fmt, k = INT8_FORMATS[label], 2048
    of_group = 32 * (fmt.low_bits + fmt.high_bits) + scale_bits(fmt)
    assert int8_panel_bytes(label, k) == -(-(k // 32 * 16 * of_group) // 8 // 32) * 32
    assert fmt.block_bytes * 8 * 32 == of_group * fmt.block_elements


@pytest.mark.parametrize("label", FORMATS)
def test_a_panel_of_shared_scales_begins_a_cache_line(label: str) -> None:
    fmt = INT8_FORMATS[label]
    for blocks in (1, 2, 3):
        assert int8_panel_bytes(label, blocks * 256) % (64 if fmt.is_shared else 32) == 0


@pytest.mark.spread(3)
@pytest.mark.parametrize("label", FORMATS)
def test_every_bit_of_a_row_stands_at_one_place_of_its_own(label: str) -> None:
    fmt, column = INT8_FORMATS[label], 21
    k = fmt.block_elements
    places: set[int] = set()
    for bit in range(8 * fmt.block_bytes):
        blocks: UInt8Array = np.zeros((32, fmt.block_bytes), np.uint8)
        blocks[column, bit // 8] = 1 << bit % 8
        found = np.flatnonzero(np.unpackbits(packed_weights(label, blocks, k), bitorder="little"))
        assert len(found) == 1
        places.add(int(found[0]))
    assert len(places) == 8 * fmt.block_bytes


@pytest.mark.parametrize("label", FORMATS)
def test_the_last_panel_is_filled_up_with_zero_bytes(label: str) -> None:
    k = whole_blocks(label, 64)
    blocks = random_blocks(label, 19, k, np.random.default_rng(0))
    packed = packed_weights(label, blocks, k)
    assert len(packed) == packed_int8_bytes(label, 32, k)
    filled = np.concatenate((blocks, np.zeros((13, blocks.shape[1]), np.uint8)))
    assert (packed == packed_weights(label, filled, k)).all()


@pytest.mark.parametrize("label", FORMATS)
def test_rows_that_are_a_view_of_a_larger_array_are_packed_alike(label: str) -> None:
    k = whole_blocks(label, 64)
    blocks = random_blocks(label, 40, k, np.random.default_rng(3))
    wide = np.zeros((80, 2 * blocks.shape[1] + 6), np.uint8)
    for view in (wide[::2, 3 : blocks.shape[1] + 3], wide[::2, 3:-3:2]):
        view[:] = blocks
        assert (packed_weights(label, view, k) == packed_weights(label, blocks, k)).all()
