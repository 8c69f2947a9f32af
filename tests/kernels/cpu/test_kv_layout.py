from __future__ import annotations

import numpy as np
import pytest

from kernels.cpu.kv_layout import (
    VALUE_BYTES,
    KvLayout,
    decode_blocks,
    encode_blocks,
    from_bfloat16,
    to_bfloat16,
)
from planes.errors import ConfigError

SHAPES = [(64, 16), (2, 1), (40, 24), (80, 8)]


def values(layout: KvLayout) -> np.ndarray:
    shape = (3, layout.num_layers, 2, layout.num_kv_heads, layout.block_size, layout.head_dim)
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_float32_blocks_give_back_what_was_put_in(head_dim: int, block_size: int) -> None:
    layout = KvLayout("float32", 2, 3, block_size, head_dim)
    x = values(layout)
    np.testing.assert_array_equal(decode_blocks(layout, encode_blocks(layout, x)), x)


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_bfloat16_blocks_give_back_what_was_put_in_rounded(head_dim: int, block_size: int) -> None:
    layout = KvLayout("bfloat16", 2, 3, block_size, head_dim)
    x = values(layout)
    rounded = from_bfloat16(to_bfloat16(x))
    np.testing.assert_array_equal(decode_blocks(layout, encode_blocks(layout, x)), rounded)


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_int8_blocks_are_off_by_half_a_step_of_their_token(head_dim: int, block_size: int) -> None:
    layout = KvLayout("int8", 2, 3, block_size, head_dim)
    x = values(layout)
    off = np.abs(decode_blocks(layout, encode_blocks(layout, x)) - x)
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (off <= step * 0.501).all()


@pytest.mark.parametrize(("head_dim", "block_size"), SHAPES)
def test_float8_blocks_are_off_by_half_a_step_of_each_number(
    head_dim: int, block_size: int
) -> None:
    layout = KvLayout("float8", 2, 3, block_size, head_dim)
    x = values(layout)
    off = np.abs(decode_blocks(layout, encode_blocks(layout, x)) - x)
    smallest = np.abs(x).max(axis=-1, keepdims=True) / 448 * 2.0**-9
    assert (off <= 0.501 * np.maximum(np.abs(x) / 8, smallest)).all()


def test_a_block_takes_the_documented_bytes() -> None:
    sizes = {dtype: KvLayout(dtype, 30, 3, 16, 64).block_bytes // (30 * 3) for dtype in VALUE_BYTES}
    assert sizes == {"float32": 8192, "bfloat16": 4096, "int8": 2048 + 128, "float8": 2048 + 128}
    assert KvLayout("bfloat16", 1, 1, 24, 64).block_bytes == 2 * 4096
    assert KvLayout("bfloat16", 1, 1, 1, 80).block_bytes == 5120


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("kv_cache_dtype", ("float16", 1, 1, 16, 64)),
        ("block_size", ("int8", 1, 1, 0, 64)),
        ("block_size", ("int8", 1, 1, 1025, 64)),
        ("head_dim", ("int8", 1, 1, 16, 63)),
    ],
)
def test_what_cannot_be_laid_out_is_refused(field: str, arguments: tuple) -> None:
    with pytest.raises(ConfigError) as refusal:
        KvLayout(*arguments)
    assert refusal.value.field == field
