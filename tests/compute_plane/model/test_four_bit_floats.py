"""MXFP4 rows: decoded as the gguf package does, turned into Q4_F without a loss."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as GgmlType

from compute_plane.model import mxfp4
from compute_plane.model.errors import ModelFileError
from compute_plane.model.quantize import are_finite, convert_rows
from compute_plane.model.tensor import TensorFormat

PATH = Path("m.gguf")


def drawn(low: int, high: int, rows: int = 5, groups: int = 3) -> np.ndarray:
    """Return rows of blocks of any codes, with scales from `low` to below `high`."""
    random = np.random.default_rng(low)
    blocks = random.integers(0, 256, (rows, groups, mxfp4.BLOCK_BYTES), np.uint8)
    blocks[..., 0] = random.integers(low, high, (rows, groups))
    return blocks.reshape(rows, -1)


def decoded(rows: np.ndarray, stored: TensorFormat) -> np.ndarray:
    found = convert_rows(rows, stored, TensorFormat.F32, path=PATH, name="t")
    return found.view(np.float32)


def test_every_code_and_scale_is_what_the_gguf_package_says() -> None:
    rows = drawn(2, 252, rows=200)
    expected = gguf.quants.dequantize(rows, GgmlType.MXFP4)
    np.testing.assert_array_equal(decoded(rows, TensorFormat.MXFP4), expected)


def test_q4_f_has_the_same_weights_where_scales_are_float16() -> None:
    rows = drawn(128 - 24, 128 + 12, rows=50)
    made = convert_rows(rows, TensorFormat.MXFP4, TensorFormat.Q4_F, path=PATH, name="t")
    expected = decoded(rows, TensorFormat.MXFP4)
    np.testing.assert_array_equal(decoded(made, TensorFormat.Q4_F), expected)


def test_scales_beyond_float16_are_found_and_below_it_are_zeros() -> None:
    large = drawn(128 + 16, 128 + 17)
    made = convert_rows(large, TensorFormat.MXFP4, TensorFormat.Q4_F, path=PATH, name="t")
    assert not are_finite(made, TensorFormat.Q4_F)
    small = drawn(80, 81)
    made = convert_rows(small, TensorFormat.MXFP4, TensorFormat.Q4_F, path=PATH, name="t")
    assert not decoded(made, TensorFormat.Q4_F).any()


def test_a_scale_of_255_is_no_number() -> None:
    rows = drawn(120, 130)
    rows[3, mxfp4.BLOCK_BYTES] = mxfp4.NOT_A_NUMBER
    with pytest.raises(ModelFileError, match="t holds nan at row 3, column 32"):
        decoded(rows, TensorFormat.MXFP4)


def test_codes_and_scales_that_lie_apart_become_blocks() -> None:
    random = np.random.default_rng(1)
    codes = random.integers(0, 256, (4, 2, 16), np.uint8)
    scales = random.integers(120, 130, (4, 2)).astype(np.uint8)
    found = decoded(mxfp4.blocks_of(codes, scales), TensorFormat.MXFP4).reshape(4, 2, 32)
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(4, 2, 32)
    expected = mxfp4.CODES[nibbles] / 2 * np.exp2(scales[..., None].astype(float) - 127)
    np.testing.assert_array_equal(found, expected)
