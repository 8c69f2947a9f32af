"""Rows of quantised matrices, unpacked thread by thread against the specification, and broken."""

from __future__ import annotations

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.numerics import check_case
from kernels.cuda import quantized_rows
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault

BYTES = QuantizedRowsVariant("Q8_0", "float16")
MINIMA = QuantizedRowsVariant("Q4_1", "bfloat16")
SOURCES = {
    variant: Source(quantized_rows, "make_quantized_rows", variant) for variant in (BYTES, MINIMA)
}


@pytest.mark.parametrize(
    "variant",
    [
        BYTES,
        QuantizedRowsVariant("Q4_0", "bfloat16"),
        *(
            pytest.param(variant, marks=pytest.mark.slow)
            for variant in quantized_rows.variants(every=True)
        ),
    ],
    ids=lambda variant: variant.name,
)
def test_rows_in_order_and_scattered_ones_are_right(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


@pytest.mark.parametrize(
    ("variant", "old", "new"),
    [
        (MINIMA, "if t < num_rows", "if True"),
        (BYTES, "i // 2 * VECTOR_BYTES", "0"),
        (BYTES, "i % 2 * 8", "0"),
        (BYTES, "group * group_bytes + i // 2 * 4", "group * group_bytes"),
        (MINIMA, "lane_at + i * 4", "lane_at"),
        (MINIMA, "scale_at + 8", "scale_at"),
        (MINIMA, "scale = high_half(scale_words[tile])", "pass"),
        (MINIMA, "minimum = high_half(minimum_words[tile])", "pass"),
        (BYTES, "row // PANEL_ROWS * num_tiles", "num_tiles"),
        (BYTES, "row = int64(rows[t])", "row = t"),
        (BYTES, "* GROUP + 8 * quad", "* GROUP"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_a_broken_unpacking_is_noticed(variant, old, new):
    case = draw_cases(variant)[1]
    source = SOURCES[variant]
    assert case.faults(simulate(case, kernels=source.unbroken())) == []
    broken = source.with_replaced(old, new)
    try:
        outputs = simulate(case, kernels=broken)
    except Fault:
        return
    assert case.faults(outputs)


def test_a_tile_behind_the_last_is_not_touched():
    case = draw_cases(BYTES)[1]
    text = SOURCES[BYTES].text
    condition = "first_tile + tile < num_tiles"
    assert text.count(condition) == 2
    broken = text.replace(condition, "True")
    with pytest.raises(Fault):
        simulate(case, kernels=SOURCES[BYTES].with_replaced(text, broken))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizedRowsVariant("Q5_0", "bfloat16"), "weights must be one of Q8_0"),
        (lambda: QuantizedRowsVariant("Q4_0", "float32"), "dtype must be one of bfloat16"),
        (lambda: MINIMA.grid(4, 48), "num_inputs must be a multiple of 32, got 48"),
    ],
)  # fmt: skip
def test_rows_the_kernel_is_not_written_for_are_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
