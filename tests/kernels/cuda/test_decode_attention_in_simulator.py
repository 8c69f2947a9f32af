"""The decode attention kernel's own source, run thread by thread against the specification."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.cases.attention_decode import draw_case
from kernels.cuda.attention_decode import BLOCK_SIZES, DTYPES, HEAD_SIZES, MAX_GROUP, DecodeVariant
from kernels.cuda.errors import UnsupportedVariantError
from tests.kernels.cuda.simulation import simulate


@pytest.mark.parametrize(
    ("variant", "seq_lens"),
    [
        (DecodeVariant("float32", 64, 3, 16), (1, 17, 0, 47)),
        (DecodeVariant("float32", 128, 1, 32), (32, 33)),
        (DecodeVariant("float32", 96, 5, 16), (16, 31)),
        (DecodeVariant("float16", 96, 2, 32), (5, 64)),
        (DecodeVariant("bfloat16", 64, 16, 16), (18,)),
        (DecodeVariant("bfloat16", 128, 4, 16), (2, 15)),
    ],
    ids=lambda value: getattr(value, "name", None) or "-".join(map(str, value)),
)
def test_decode_attention_equals_the_specification(variant, seq_lens):
    case = draw_case(variant, seq_lens)

    assert case.faults(simulate(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("group", range(1, MAX_GROUP + 1))
def test_every_variant_equals_the_specification(dtype, head_size, group, block_size):
    variant = DecodeVariant(dtype, head_size, group, block_size)
    lengths = (4 * block_size + 1, 0, block_size - 1)
    case = draw_case(variant, lengths, num_kv_heads=1, seed=group)

    assert case.faults(simulate(case, seed=group)) == []


def test_a_rows_bits_do_not_depend_on_its_neighbours_or_the_order_of_threads():
    variant = DecodeVariant("float32", 64, 2, 16)
    case = draw_case(variant, (40, 3, 21), alone=0)
    assert case.part is not None
    alone, select = case.part

    together = select(simulate(case, seed=1))

    np.testing.assert_array_equal(simulate(alone, seed=2)["out"], together["out"])


def test_nan_that_a_row_owns_reaches_its_output_and_no_other():
    variant = DecodeVariant("float32", 64, 2, 16)
    case = draw_case(variant, (4, 4), num_kv_heads=1)
    tables = case.arrays["block_tables"]
    case.arrays["pool"][tables[1, 0], 1, 0, 0, 3] = np.nan  # the last key of row 1

    out = simulate(case)["out"]

    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int8", 64, 1, 16), "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        (("float32", 80, 1, 16), "head_size must be one of 64, 96, 128, got 80"),
        (("float32", 64, 0, 16), "group must be between 1 and 16, got 0"),
        (("float32", 64, 17, 16), "group must be between 1 and 16, got 17"),
        (("float32", 64, 1, 8), "block_size must be one of 16, 32, got 8"),
    ],
)
def test_a_shape_the_kernel_is_not_written_for_is_refused_by_name(arguments, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        DecodeVariant(*arguments)
