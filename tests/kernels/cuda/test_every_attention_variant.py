"""Every variant of decode and prefill attention, in the simulator; and what is no variant."""

from __future__ import annotations

import pytest

from bench.gpu.cases import attention_decode, attention_prefill
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import BLOCK_SIZES, DTYPES, every_group
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_kv import POOL_DTYPES, QUANTIZED_DTYPES
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")


def draw_decode(variant, window=None):
    """A row of two chunks, an empty one, one that ends within a block."""
    lengths = (65 if window is None else 40 + 64, 0, variant.block_size - 1)
    splits = 1 + variant.group % 3
    return attention_decode.draw_case(
        variant, lengths, num_kv_heads=1, seed=variant.group, splits=splits, window=window
    )


def draw_prefill(variant, window=None):
    """A row over two tiles and more, one without queries, two tokens over three tiles of keys."""
    rows = ((variant.tile_tokens + 1, variant.tile_tokens + 40), (0, 20), (2, 69))
    return attention_prefill.draw_case(
        variant, rows, num_kv_heads=1, seed=variant.group, window=window
    )


DRAWERS = [
    pytest.param(DecodeVariant, draw_decode, id="decode"),
    pytest.param(PrefillVariant, draw_prefill, id="prefill"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draw"), DRAWERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize(("head_size", "group"), every_group())
def test_every_variant_equals_the_specification(kind, draw, dtype, head_size, group, block_size):
    case = draw(kind(dtype, head_size, group, block_size))

    assert case.faults(simulate(case, seed=group)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draw"), DRAWERS)
@pytest.mark.parametrize("kv_dtype", QUANTIZED_DTYPES)
@pytest.mark.parametrize(("head_size", "group"), every_group())
def test_every_group_equals_the_specification_in_eight_bits(kind, draw, kv_dtype, head_size, group):
    # The model's dtype and the block size take turns.
    dtype = ("bfloat16", "float16")[(group + head_size // 32) % 2]
    case = draw(kind(dtype, head_size, group, BLOCK_SIZES[group // 2 % 2], kv_dtype))

    assert case.faults(simulate(case, seed=group)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "draw"), DRAWERS)
@pytest.mark.parametrize(("dtype", "kv_dtype"), POOL_DTYPES)
@pytest.mark.parametrize(("head_size", "group"), every_group())
def test_every_group_equals_the_specification_with_a_window(
    kind, draw, dtype, kv_dtype, head_size, group
):
    block_size = BLOCK_SIZES[(group + head_size // 32) % 2]
    case = draw(kind(dtype, head_size, group, block_size, kv_dtype, True), window=37 + group)

    assert case.faults(simulate(case, seed=group)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8", 64, 1, 16), "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        (("float32", 80, 1, 16), "head_size must be one of 64, 96, 128, 256, got 80"),
        (("float32", 64, 0, 16), "group must be between 1 and 16, got 0"),
        (("float32", 64, 17, 16), "group must be between 1 and 16, got 17"),
        (("bfloat16", 256, 9, 16), "group must be between 1 and 8, got 9"),
        (("float32", 64, 1, 8), "block_size must be one of 16, 32, got 8"),
        (("float16", 64, 1, 16, "int4"), "kv_dtype must be one of int8, float8, got 'int4'"),
        (("float32", 64, 1, 16, "int8"), "kv_dtype must be the model's own, since that is no 16-b"),
    ],
)
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
def test_a_shape_no_kernel_is_written_for_is_refused_by_name(kind, arguments, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        kind(*arguments)
