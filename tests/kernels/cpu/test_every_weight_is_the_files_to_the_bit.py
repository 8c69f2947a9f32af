"""A row with a 1 among zeros gets a weight of each column: to the bit, however small its scales.

What a weight is, the file's definition says in float32; products keep to it, as d · s and dmin · n
are exact. Of float16, numbers below the smallest normal one are numbers like others.
"""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.int8_packing import INT8_FORMATS
from kernels.cpu.int8_pair_product import PAIR_ROWS
from kernels.cpu.int8_products import AMX_ROWS
from tests.kernels.cpu.operation_calls import (
    SCALES_AT,
    Float32Array,
    Int8Rows,
    UInt8Array,
    decoded_weights,
    packed_weights,
    product,
    random_blocks,
)
from tests.kernels.cpu.test_int8_products import FORMATS

K = 256
SMALL = np.array([1, 2, 3, 0x03FF, 0x0400], "<u2")
"""Float16: the smallest, the largest that is subnormal, the smallest that is not."""
SCALES = np.concatenate((SMALL, SMALL | 0x8000, np.array([0, 0x8000, 0x3C00, 0x7BFF], "<u2")))
N = len(SCALES) ** 2


def blocks_with_every_pair_of_scales(label: str) -> UInt8Array:
    """Return rows of blocks, uint8 [N, bytes], a d and an m of SCALES to each."""
    fmt = INT8_FORMATS[label]
    rows = random_blocks(label, N, K, np.random.default_rng(1))
    blocks = rows.reshape(N, -1, fmt.block_bytes)
    column = np.arange(N)
    choices = (column % len(SCALES), column // len(SCALES))
    for at, choice in zip(SCALES_AT.get(label, (0,)), choices, strict=False):
        blocks[:, :, at : at + 2] = SCALES[choice, None].view(np.uint8)[:, None]
    return rows


@pytest.mark.parametrize("count", [1, 4, AMX_ROWS, PAIR_ROWS])
@pytest.mark.parametrize("label", FORMATS)
def test_a_weight_of_any_scale_is_the_files(label: str, count: int) -> None:
    """By each way that rows go by their number."""
    blocks = blocks_with_every_pair_of_scales(label)
    packed = packed_weights(label, blocks, K)
    expected = decoded_weights(label, blocks).T.astype(np.float32)
    picks = np.eye(K, dtype=np.int8)
    for first in (*range(0, K - count, count if count > 1 else 17), K - count):
        rows = Int8Rows.of(picks[first : first + count], np.ones((count, K // 32), np.float32))
        found: Float32Array = np.empty((count, N), np.float32)
        product(label, packed, rows, count, N, found)
        np.testing.assert_array_equal(found, expected[first : first + count])
