"""Sectors of global memory and wavefronts of shared memory, for patterns one can count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.meter import Meter

LANES = np.arange(64)


def count(note, address, size, lanes=LANES):
    meter = Meter()
    getattr(meter, note)(0, lanes, np.asarray(address), size)
    return meter.traffic[0]


@pytest.mark.parametrize(
    ("address", "size", "units", "least"),
    [
        (LANES * 4, 4, 8, 8),  # 128 bytes a warp
        (LANES * 16, 16, 32, 32),
        (LANES * 4 + 16, 4, 10, 8),  # one sector more, as neither end is whole
        (LANES * 64, 4, 64, 8),
        (LANES * 0, 4, 2, 2),
        (LANES // 4 * 4096 + LANES % 4 * 16, 16, 32, 32),  # two whole sectors of each row
        (LANES // 2 * 4096 + LANES % 2 * 8, 8, 32, 16),  # half of each
    ],
)
def test_sectors_of_a_warps_access(address, size, units, least):
    traffic = count("note_global", address, size)

    assert (traffic.warps, traffic.units, traffic.least) == (2, units, least)
    assert traffic.num_bytes == 64 * size


@pytest.mark.parametrize(
    ("address", "size", "units", "least"),
    [
        (LANES * 4, 4, 2, 2),
        (LANES * 0, 4, 2, 2),  # one word for all
        (LANES * 8, 4, 4, 2),  # every other bank
        (LANES * 128, 4, 64, 2),
        (LANES * 8, 8, 4, 4),
        (LANES * 16, 16, 8, 8),
        (LANES % 8 * 128 + LANES // 8 * 16, 16, 64, 8),  # eight rows below each other
        (LANES % 8 * 144 + LANES // 8 * 16, 16, 8, 8),  # the same with padded rows
        (LANES * 2, 2, 2, 2),
    ],
)
def test_wavefronts_of_a_warps_access(address, size, units, least):
    traffic = count("note_shared", address, size)

    assert (traffic.warps, traffic.units, traffic.least) == (2, units, least)


def test_lanes_that_take_no_part_cost_nothing():
    traffic = count("note_shared", np.array([0, 128]), 4, lanes=np.array([3, 40]))

    assert (traffic.warps, traffic.units, traffic.least, traffic.num_bytes) == (2, 2, 2, 8)
