"""Attention of heads with sinks, by the kernels' own source, thread by thread."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.case import to_float64
from bench.gpu.cases import attention_decode as decode_cases
from bench.gpu.cases import attention_prefill as prefill_cases
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.errors import UnsupportedVariantError
from tests.kernels.cuda.simulation import simulate

pytestmark = pytest.mark.usefixtures("short_chunks")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "seq_lens", "splits", "window"),
    [
        (DecodeVariant("bfloat16", 64, 8, 16, has_sinks=True), (67, 0, 1), 1, None),
        (DecodeVariant("bfloat16", 64, 3, 16, None, True, True), (150, 3), 2, 100),
        (DecodeVariant("float32", 64, 5, 16, has_sinks=True), (0, 65), 2, None),
        (DecodeVariant("float16", 64, 12, 32, "int8", has_sinks=True), (133,), 2, None),
        (DecodeVariant("float32", 64, 2, 32, None, True, True), (40,), 1, 7),
        (DecodeVariant("bfloat16", 64, 16, 16, "float8", True, True), (70, 1), 1, 20),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_decode_attention_with_sinks_equals_the_specification(variant, seq_lens, splits, window):
    case = decode_cases.draw_case(variant, seq_lens, splits=splits, num_kv_heads=2, window=window)
    assert case.faults(simulate(case)) == []


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "window"),
    [
        (PrefillVariant("bfloat16", 64, 8, 16, None, True, True), 20),
        (PrefillVariant("float32", 64, 3, 16, has_sinks=True), None),
        (PrefillVariant("float16", 64, 2, 32, "int8", has_sinks=True), None),
        (PrefillVariant("float32", 64, 2, 16, None, True, True), 9),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_prefill_attention_with_sinks_equals_the_specification(variant, window):
    case = prefill_cases.draw_case(variant, ((2, 40), (11, 11)), num_kv_heads=2, window=window)
    assert case.faults(simulate(case)) == []


@pytest.mark.wide
def test_a_sink_far_above_all_scores_leaves_nothing_and_one_far_below_changes_no_bit():
    """The third head's is 90 and the fifth's -200; that of a row of no token gives zeros."""
    variant = DecodeVariant("bfloat16", 64, 5, 16, has_sinks=True)
    case = decode_cases.draw_case(variant, (67, 0), num_kv_heads=1, splits=2)
    written = simulate(case)
    assert case.faults(written) == []
    found = written["out"]
    plain = DecodeVariant("bfloat16", 64, 5, 16)
    without = simulate(decode_cases.draw_case(plain, (67, 0), num_kv_heads=1, splits=2))["out"]
    assert np.abs(to_float64("bfloat16", found[0, 2])).max() < 1e-35
    np.testing.assert_array_equal(found[0, 4], without[0, 4])
    assert (found[0, 0] != without[0, 0]).any()
    assert not found[1].any()


def test_sinks_are_for_the_heads_of_the_models_that_have_them():
    with pytest.raises(UnsupportedVariantError, match="head_size"):
        DecodeVariant("bfloat16", 128, 4, 16, has_sinks=True)
