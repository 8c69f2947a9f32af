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
ZEROS = QuantizedRowsVariant("Q4_Z_G64", "bfloat16")
ZERO_BYTES = QuantizedRowsVariant("Q8_Z_G128", "float16")
SOURCES = {
    variant: Source(quantized_rows, "make_quantized_rows", variant)
    for variant in (BYTES, MINIMA, ZEROS, ZERO_BYTES)
}


@pytest.mark.parametrize(
    "variant",
    [
        BYTES,
        QuantizedRowsVariant("Q4_Z_G128", "float16"),
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
        (BYTES, "scale_at += i // 2 * 4", "pass"),
        (MINIMA, "load_word(packed, at + i * 4)", "load_word(packed, at)"),
        (MINIMA, "span * span_bytes + 8", "span * span_bytes"),
        (MINIMA, "scale = high_half(scale_words[span])", "pass"),
        (MINIMA, "minimum = high_half(beside_words[span])", "pass"),
        (BYTES, "row // PANEL_ROWS * num_lines", "num_lines"),
        (BYTES, "row = int64(rows[t])", "row = t"),
        (BYTES, "store_vector(out, place + 8 * quad, pairs, 0)",
         "store_vector(out, place, pairs, 0)"),
        (ZEROS, "group % 2 * 16 + 4 * i", "4 * i"),
        (ZEROS, "group % 2 * 16 + 4 * i", "group % 2 * 16"),
        (ZEROS, "(group if is_bytes else group // 2) * 4", "0"),
        (ZEROS, "-(float32(zero) * scale)", "float32(zero) * scale"),
        (ZEROS, "first_tile // span_tiles * span_bytes", "first_tile * span_bytes"),
        (ZERO_BYTES, "uint32(24 - 8 * i)", "uint32(0)"),
        (ZERO_BYTES, "at = span_at + span * span_bytes + zeros_at",
         "at = span_at + span * span_bytes"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("variant", "condition", "count"),
    [
        (BYTES, "first_tile + tile < num_tiles", 2),
        (ZEROS, "first_tile + span * span_tiles < num_tiles", 1),
    ],
)
def test_what_lies_behind_the_last_tile_is_not_touched(variant, condition, count):
    """Of a span nothing comes but out-of-bounds reads: its tiles are not written."""
    case, text = draw_cases(variant)[1], SOURCES[variant].text
    assert text.count(condition) == count
    broken = text.replace(condition, "True")
    with pytest.raises(Fault):
        simulate(case, kernels=SOURCES[variant].with_replaced(text, broken))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: QuantizedRowsVariant("Q2_K", "bfloat16"), "weights must be one of Q8_0"),
        (lambda: QuantizedRowsVariant("Q4_0", "float32"), "dtype must be one of bfloat16"),
        (lambda: MINIMA.grid(4, 48), "num_inputs must be a multiple of 32, got 48"),
    ],
)  # fmt: skip
def test_rows_the_kernel_is_not_written_for_are_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
