"""The rows that products read: normalised, gated or plain, in each format."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kernels.cpu import row_inputs
from kernels.cpu.int8_pair_tile import PAIR_OFFSET, PARTNER_OFFSET
from kernels.cpu.int8_weights import BIAS_BITS
from kernels.cpu.operands import RowFormat, RowInput
from kernels.cpu.operation import Operation, StepWord
from kernels.cpu.row_values import LARGEST_INT8, PAIRS_PRODUCTS
from kernels.reference.clamped_mul import clamped_mul
from kernels.reference.gelu_mul import gelu_mul
from kernels.reference.relu2 import relu2
from kernels.reference.rms_norm import rms_norm
from kernels.reference.silu_mul import silu_mul
from tests.kernels.cpu.operation_calls import (
    Float32Array,
    Int8Rows,
    quantised,
    row_record,
    run,
    step_header,
)

WIDTHS = [1, 5, 31, 32, 33, 64, 100, 576]
UNTOUCHED = -3.5


def rows_of(
    operation: Operation, source: Float32Array, k: int, weight: Float32Array | None = None,
    chunks: int = 1,
) -> Float32Array:  # fmt: skip
    """Return what an operation writes as float32, checking that it writes nothing else."""
    rows = len(source)
    out = np.full(rows * k + 7, UNTOUCHED, np.float32)
    header, _ = step_header(rows)
    run(operation, row_record(source, k, RowFormat.FLOAT32, out, weight), header, range(chunks))
    assert (out[rows * k :] == UNTOUCHED).all()
    return out[: rows * k].reshape(rows, k)


def drawn(rows: int, k: int, seed: int = 0) -> Float32Array:
    return np.random.default_rng(seed + k).standard_normal((rows, k)).astype(np.float32) * 4


@pytest.mark.parametrize("k", WIDTHS)
def test_normed_rows_are_those_of_the_reference(k: int) -> None:
    x, weight = drawn(6, k), drawn(1, k, 1)[0]
    expected = np.empty_like(x)
    rms_norm(x, weight, 1e-5, expected)
    np.testing.assert_allclose(rows_of(row_inputs.normed_rows, x, k, weight), expected, rtol=1e-6)


@pytest.mark.parametrize(("k", "num_groups"), [(96, 3), (256, 8), (512, 2), (64, 1)])
def test_grouped_rows_are_normed_group_by_group(k: int, num_groups: int) -> None:
    x, weight = drawn(5, k), drawn(1, k, 1)[0]
    shape = 5 * num_groups, k // num_groups
    expected = np.empty(shape, np.float32)
    rms_norm(x.reshape(shape), np.ones(shape[1], np.float32), 1e-5, expected)
    out = np.full(5 * k + 7, UNTOUCHED, np.float32)
    record = row_record(x, k, RowFormat.FLOAT32, out, weight)
    record[RowInput.NUM_GROUPS] = num_groups
    run(row_inputs.grouped_rows, record, step_header(5)[0], range(3))
    assert (out[5 * k :] == UNTOUCHED).all()
    found = out[: 5 * k].reshape(5, k).copy()
    np.testing.assert_allclose(found, expected.reshape(5, k) * weight, rtol=1e-6)
    for row_format, into in (
        (RowFormat.INT8, Int8Rows.empty(5, k)), (RowFormat.BF16, np.empty((5, k), np.uint16)),
    ):  # fmt: skip
        record = row_record(x, k, row_format, into, weight)
        record[RowInput.NUM_GROUPS] = num_groups
        run(row_inputs.grouped_rows, record, step_header(5)[0])
        plain = Int8Rows.empty(5, k) if row_format == RowFormat.INT8 else np.empty_like(into)
        run(row_inputs.plain_rows, row_record(found, k, row_format, plain), step_header(5)[0])
        for name in ("values", "scales", "scaled_sums", "sums", "pair_sums", "begins"):
            if row_format == RowFormat.INT8:
                np.testing.assert_array_equal(getattr(into, name), getattr(plain, name), name)
        if row_format == RowFormat.BF16:
            np.testing.assert_array_equal(into, plain)


@pytest.mark.parametrize("k", WIDTHS)
def test_squares_of_what_is_positive_are_those_of_the_reference(k: int) -> None:
    x = drawn(6, k)
    x[:4, 0] = 200.0, -200.0, 0.0, np.nan
    expected = np.empty_like(x)
    relu2(x, expected)
    found = rows_of(row_inputs.relu2_rows, x, k)
    np.testing.assert_array_equal(found, expected)
    assert np.isnan(found[3, 0])


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize(
    ("operation", "reference"),
    [(row_inputs.gated_rows, silu_mul), (row_inputs.gelu_rows, gelu_mul)],
    ids=["silu", "gelu"],
)
def test_gated_rows_are_those_of_the_reference(operation, reference, k: int) -> None:
    x = drawn(6, 2 * k) * 8
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    expected = np.empty((6, k), np.float32)
    reference(x, expected)
    # The exponent of gelu, up to 88, is rounded; where it is so large gelu is next to nothing.
    rtol, atol = (1e-6, 1e-30) if operation is row_inputs.gated_rows else (1e-5, 1e-13)
    np.testing.assert_allclose(rows_of(operation, x, k), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("k", WIDTHS)
def test_clamped_rows_have_the_biases_of_their_expert_and_are_those_of_the_reference(
    k: int,
) -> None:
    x, biases = drawn(6, 2 * k) * 3, drawn(9, 2 * k, 2)
    x[0, 0], x[1, 0], x[2, k] = 200.0, -200.0, -200.0
    runs = np.array([3, 8, 0, 1, 2, 1, 4, 5, 5, 1, 77, 77, 77], np.int32)
    expected = np.empty((6, k), np.float32)
    clamped_mul(x + biases[[8, 2, 2, 2, 2, 5]], expected)
    out = np.full(6 * k + 7, UNTOUCHED, np.float32)
    record = row_record(x, k, RowFormat.FLOAT32, out, biases)
    record[RowInput.RUNS] = runs.ctypes.data
    run(row_inputs.clamped_rows, record, step_header(6)[0], range(4))
    assert (out[6 * k :] == UNTOUCHED).all()
    np.testing.assert_allclose(out[: 6 * k].reshape(6, k), expected, rtol=2e-6, atol=2e-6)


def test_clamped_rows_keep_a_nan_that_a_clamp_would_hide() -> None:
    x, biases = np.ones((1, 64), np.float32), np.zeros((1, 64), np.float32)
    x[0, 3], x[0, 32 + 5], biases[0, 7] = np.nan, np.nan, np.nan
    runs, out = np.array([1, 0, 0, 1], np.int32), np.empty(32, np.float32)
    record = row_record(x, 32, RowFormat.FLOAT32, out, biases)
    record[RowInput.RUNS] = runs.ctypes.data
    run(row_inputs.clamped_rows, record, step_header(1)[0])
    assert np.flatnonzero(np.isnan(out)).tolist() == [3, 5, 7]


def test_gelu_is_that_of_torch_in_float64() -> None:
    import torch

    sizes = np.logspace(-30, 8, 200, dtype=np.float32)
    x = np.concatenate([-sizes[::-1], [0], sizes, np.linspace(-10, 10, 399)]).astype(np.float32)
    actual = rows_of(row_inputs.gelu_rows, np.stack([x, np.ones_like(x)]).reshape(1, -1), len(x))
    theirs = torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate="tanh").numpy()
    np.testing.assert_allclose(actual[0], theirs, rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("k", WIDTHS)
def test_plain_rows_are_the_rows(k: int) -> None:
    x = drawn(5, k)
    assert (rows_of(row_inputs.plain_rows, x, k) == x).all()


@pytest.mark.parametrize("k", WIDTHS)
def test_ordered_rows_have_the_elements_that_the_order_names(k: int) -> None:
    x = drawn(5, k)
    order = np.random.default_rng(k).permutation(k).astype(np.int32)
    places = order.view(np.float32)
    assert (rows_of(row_inputs.ordered_rows, x, k, places) == x[:, order]).all()
    assert (rows_of(row_inputs.ordered_rows, x, k, places, chunks=3) == x[:, order]).all()


def test_ordered_int8_rows_are_those_of_rows_in_that_order() -> None:
    x, order = drawn(5, 96), np.random.default_rng(1).permutation(96).astype(np.int32)
    expected, out = quantised(np.ascontiguousarray(x[:, order])), Int8Rows.empty(5, 96)
    header, _ = step_header(5)
    record = row_record(x, 96, RowFormat.INT8, out, order.view(np.float32))
    run(row_inputs.ordered_rows, record, header, range(2))
    np.testing.assert_array_equal(out.values, expected.values)
    np.testing.assert_array_equal(out.scales, expected.scales)
    np.testing.assert_array_equal(out.sums, expected.sums)


@pytest.mark.parametrize("k", WIDTHS)
def test_bfloat16_rows_are_the_float_rows_rounded_to_nearest_even(k: int) -> None:
    x, weight = drawn(4, k), drawn(1, k, 1)[0]
    exact = rows_of(row_inputs.normed_rows, x, k, weight)
    out = np.full(4 * k + 9, 0x7777, np.uint16)
    header, _ = step_header(4)
    run(row_inputs.normed_rows, row_record(x, k, RowFormat.BF16, out, weight), header)
    bits = exact.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    assert (out[: 4 * k].reshape(4, k) == rounded).all()
    assert (out[4 * k :] == 0x7777).all()


@pytest.mark.parametrize("k", [32, 96, 576])
def test_int8_rows_are_the_float_rows_in_groups_of_32(k: int) -> None:
    x, weight = drawn(9, k), drawn(1, k, 1)[0]
    exact = rows_of(row_inputs.normed_rows, x, k, weight).reshape(9, -1, 32)
    out = Int8Rows.empty(9, k)
    header, _ = step_header(9)
    run(row_inputs.normed_rows, row_record(x, k, RowFormat.INT8, out, weight), header)
    groups = out.values[:9].reshape(9, -1, 32).astype(np.float64)
    absmax = np.abs(exact).max(axis=2)
    step = absmax / LARGEST_INT8
    np.testing.assert_allclose(out.scales[:9], step, rtol=3e-7)
    assert np.abs(groups).max(axis=2).min() == LARGEST_INT8
    assert np.abs(groups * step[..., None] - exact).max() <= 0.501 * step.max()
    halves = out.values[:9].reshape(9, -1, 16)
    assert (out.sums[:9] == halves.sum(axis=2, dtype=np.int16)).all()
    sums = groups.sum(axis=2).astype(np.float32)
    assert (out.scaled_sums[:9] == out.scales[:9] * sums).all()
    assert (out.values[9:] == 77).all()
    assert np.isnan(out.scales[9:]).all()


def test_halves_are_rounded_to_the_even_integer() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = LARGEST_INT8, 0.5, 1.5, -2.5, -3.5
    assert quantised(x).values[0, :5].tolist() == [LARGEST_INT8, 0, 2, -2, -4]


def test_rows_hold_where_sums_of_weights_begin_that_are_stored_8_greater() -> None:
    rows = quantised(drawn(7, 96))
    sums = rows.values[:7].reshape(7, 3, 32).sum(axis=2, dtype=np.int32)
    np.testing.assert_array_equal(rows.begins[:7], BIAS_BITS - 8 * sums)
    assert (rows.begins[7:] == 64321).all()


@pytest.mark.skipif(not PAIRS_PRODUCTS, reason="the set makes no two products of one")
def test_pair_sums_are_what_the_rows_add_to_products_of_pairs() -> None:
    rows = quantised(drawn(7, 96))
    first, partner = np.moveaxis(rows.values[:7].reshape(7, 3, 2, 16).astype(np.int32), 2, 0)
    expected = (first * partner + PAIR_OFFSET * first + PARTNER_OFFSET * partner).sum(axis=2)
    np.testing.assert_array_equal(rows.pair_sums[:7], expected)


def test_groups_of_zeros_and_of_tiny_numbers_become_zeros() -> None:
    x = np.zeros((1, 96), np.float32)
    x[0, 32:64] = 1e-42
    x[0, 64:] = 1e-33
    rows = quantised(x)
    assert (rows.values[0] == 0).all()
    assert (rows.sums[0] == 0).all()
    assert np.isfinite(rows.scales[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_has_the_scale_nan(bad: float) -> None:
    x = drawn(3, 96)
    x[1, 50] = bad
    rows, healthy = quantised(x), quantised(drawn(3, 96))
    assert np.isnan(rows.scales[1, 1])
    assert np.isnan(rows.scaled_sums[1, 1])
    rows.scales[1, 1] = healthy.scales[1, 1]
    assert (rows.scales[:3] == healthy.scales[:3]).all()


@pytest.mark.parametrize(
    "operation", [row_inputs.normed_rows, row_inputs.gated_rows, row_inputs.plain_rows]
)
def test_nan_stays_nan_in_every_float_row(operation: Operation) -> None:
    x = drawn(3, 2 * 48)
    x[1, 20] = np.nan
    out = rows_of(operation, x, 48, np.ones(48, np.float32))
    assert np.isnan(out[1]).any()
    assert np.isfinite(out[[0, 2]]).all()


def test_any_cut_into_chunks_gives_the_same_bits() -> None:
    x, weight = drawn(10, 100), drawn(1, 100, 1)[0]
    whole = rows_of(row_inputs.normed_rows, x, 100, weight)
    for chunks in (3, 7, 20):
        assert (rows_of(row_inputs.normed_rows, x, 100, weight, chunks) == whole).all()


def test_rows_begin_at_the_first_token_of_the_piece() -> None:
    x, k = drawn(9, 64), 64
    out = np.empty((4, k), np.float32)
    header, _ = step_header(4, first=3)
    run(row_inputs.plain_rows, row_record(x, k, RowFormat.FLOAT32, out), header)
    assert (out == x[3:7]).all()


def test_sampled_rows_are_the_normed_rows_of_the_tokens_that_are_named() -> None:
    x, weight, k = drawn(9, 64), drawn(1, 64, 1)[0], 64
    tokens: npt.NDArray[np.int64] = np.array([8, 0, 3, 3], np.int64)
    header, _ = step_header(2, first=5)
    header[StepWord.NUM_OUT_ROWS] = len(tokens)
    header[StepWord.OUT_TOKENS] = tokens.ctypes.data
    out = np.empty((len(tokens), k), np.float32)
    record = row_record(x, k, RowFormat.FLOAT32, out, weight)
    record[RowInput.ROWS_WORD] = StepWord.NUM_OUT_ROWS
    run(row_inputs.sampled_rows, record, header, range(3))
    assert (out == rows_of(row_inputs.normed_rows, x, k, weight)[tokens]).all()


@pytest.mark.parametrize("k", WIDTHS)
def test_gates_and_ups_may_lie_apart(k: int) -> None:
    """Ups are a part of wider rows, of all tokens of a step."""
    gates, ups = drawn(4, k), drawn(9, k + 11, 1)
    expected = np.empty_like(gates)
    gelu_mul(np.concatenate([gates, ups[2:6, 5 : 5 + k]], axis=1), expected)
    out = np.full(4 * k + 7, UNTOUCHED, np.float32)
    record = row_record(gates, k, RowFormat.FLOAT32, out, None)
    record[RowInput.SOURCE_FIRST_WORD] = StepWord.ZERO
    record[RowInput.UPS], record[RowInput.UPS_STRIDE] = ups[:, 5:].ctypes.data, k + 11
    run(row_inputs.gelu_rows_apart, record, step_header(4, first=2)[0], range(3))
    np.testing.assert_allclose(out[: 4 * k].reshape(4, k), expected, rtol=1e-5, atol=1e-6)
    assert (out[4 * k :] == UNTOUCHED).all()
