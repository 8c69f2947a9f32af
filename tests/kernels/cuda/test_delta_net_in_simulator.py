"""Gated DeltaNet, thread by thread: convolution, delta rule, norm and gate; rows that are cut."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from bench.gpu.case import Case, Launch
from bench.gpu.cases import draw_cases
from bench.gpu.cases.delta_net import layer_case
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import check_case
from kernels.cuda import (
    delta_rule,
    delta_rule_columns,
    delta_rule_stages,
    gate_attended,
    gated_norm,
    recurrent_states,
    short_convolution,
    step_sizes,
)
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.delta_rule import DeltaRuleVariant, divides_heads, takes_whole_heads
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.head_lanes import HeadLanes
from kernels.cuda.recurrent_states import layer_floats
from kernels.cuda.short_convolution import ShortConvolutionVariant
from kernels.cuda.step_sizes import decay, sigmoid
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race, TooEarly, launch

SHORT_ONES = (gate_attended, gated_norm, short_convolution)
NORMED = DeltaRuleVariant("bfloat16", 32, 32, 4, True)
DIVIDED = DeltaRuleVariant("float32", 32, 96, 4, False)
TWO_PIECES = DeltaRuleVariant("bfloat16", 64, 32, 4, True)
FEW_COLUMNS = DeltaRuleVariant("bfloat16", 256, 32, 4, True)
MANY_ROWS = DeltaRuleVariant("float16", 160, 32, 2, True)
CONVOLUTION = ShortConvolutionVariant("bfloat16", 32, 64, 4)
NORM = GatedNormVariant("float16", 96)
GATE = GateAttendedVariant("bfloat16")
FEW_HEADS = (1, 2)


def small_case(variant: DeltaRuleVariant, *, later: int = 1, are_tiled: bool = False) -> Case:
    """One token, a new row, one of two stages and a bit; few heads unless they are tiled.

    `later`: tokens of the second stage and the third.
    """
    rows = (
        Row(3, False, 1, 0),
        Row(1, True, 1, 1),
        Row(4, False, 0, 0),
        Row(0, False, variant.stage_tokens, later),
    )
    heads = (2, 4) if are_tiled else FEW_HEADS
    return layer_case(variant, rows, 0, heads=heads, are_tiled=are_tiled)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        CONVOLUTION,
        ShortConvolutionVariant("float32", 96, 32, 2),
        ShortConvolutionVariant("float16", 64, 192, 8),
        NORM,
        GatedNormVariant("bfloat16", 128),
        GatedNormVariant("float32", 256),
        GATE,
        GateAttendedVariant("float32"),
        NORMED,
    ],
    ids=lambda variant: variant.name,
)
def test_a_kernel_is_right_and_rows_may_be_cut(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [variant for module in SHORT_ONES for variant in module.variants(every=True)],
    ids=lambda variant: variant.name,
)
def test_every_short_kernel_is_right(variant):
    for case in draw_cases(variant, seed=1):
        assert check_case(case, simulate).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "are_tiled"),
    [(NORMED, False), (DIVIDED, False), (NORMED, True), (MANY_ROWS, False)],
    ids=["whole heads", "divided heads", "tiled heads", "many rows"],
)
def test_tokens_in_two_steps_have_the_bits_that_they_have_in_one(variant, are_tiled):
    case = small_case(variant, are_tiled=are_tiled)
    outputs = simulate(case)
    assert case.faults(outputs) == []
    in_two, _ = case.part
    for name, array in simulate(in_two, seed=1).items():
        np.testing.assert_array_equal(outputs[name], array)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_divided_heads_have_the_bits_of_whole_ones(dtype):
    whole, divided = (DeltaRuleVariant(dtype, 32, 128, 4, way) for way in (True, False))
    assert (whole.columns, divided.columns) == (128, 64)
    found, expected = (
        simulate(small_case(variant), seed=seed) for seed, variant in enumerate((divided, whole))
    )
    for name in ("out", "states"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_heads_are_divided_where_few_rows_are_long():
    assert [divides_heads(rows, 32, 132) for rows in (0, 1, 2, 3)] == [False, True, True, False]
    sizes = ((128, 128), (128, 160), (32, 128), (160, 64), (160, 96), (256, 256))
    assert [takes_whole_heads(*one) for one in sizes] == [True, False, True, True, False, False]


@pytest.mark.parametrize("size", range(32, 257, 32))
def test_lanes_have_all_elements_of_a_head_once(size):
    lanes = HeadLanes(size)
    first = (32 * np.arange(lanes.runs)[:, None] + np.arange(32)) * lanes.length
    elements = first[..., None] + np.arange(lanes.length)
    np.testing.assert_array_equal(np.sort(elements, axis=None), np.arange(size))


def test_states_are_copied_one_after_the_other_by_a_launch_each():
    """A chain, a copy back, one state to two: what `copy_blocks` may not do in one launch."""
    variant = CopyBlocksVariant()
    words = layer_floats(1, 1, 32, 32, 2)
    states = np.random.default_rng(0).standard_normal((5, words)).astype(np.float32)
    pairs = np.array([[0, 1], [1, 2], [3, 0], [2, 4], [2, 3]], np.int32)
    expected = states.copy()
    for source, destination in pairs:
        expected[destination] = expected[source]
    words_of = states.view(np.uint32)
    arrays = {"states": words_of, **{f"pair {i}": pair[None] for i, pair in enumerate(pairs)}}
    grid = variant.grid(1, words)
    launches = tuple(
        Launch(variant, grid, ("states", "states", f"pair {i}", words)) for i in range(len(pairs))
    )
    outputs = simulate(Case("chain", arrays, launches, {}, ("states",)))
    np.testing.assert_array_equal(outputs["states"].view(np.float32), expected)


def test_decays_near_one_are_right_to_half_a_unit_and_others_to_a_few():
    random = np.random.default_rng(0)
    times = np.concatenate([random.uniform(-30, 30, 250), [-200.0, -88.0, 0.0, -0.0, 88.0, 200.0]])
    times = times.astype(np.float32)
    rates = -np.exp(random.uniform(-7, 3, len(times))).astype(np.float32)

    def kernel(decays, factors, times, rates):
        i = cuda.blockIdx.x * 32 + cuda.threadIdx.x
        decays[i] = decay(times[i], rates[i])
        factors[i] = sigmoid(times[i])

    decays, factors = np.empty((2, len(times)), np.float32)
    launch(kernel, (len(times) // 32, 1, 1), 32, [decays, factors, times, rates], written=(0, 1))

    exact_times = np.logaddexp(0.0, times.astype(np.float64)) * rates
    exact = np.exp(exact_times)
    unit = np.float64(np.finfo(np.float32).eps) / 2  # of numbers below 1
    allowed = (0.51 + 10 * np.abs(exact_times)) * unit * exact + 2e-38
    assert (np.abs(decays - exact) <= allowed).all()
    assert ((decays >= 0) & (decays <= 1)).all()
    of_times = 1 / (1 + np.exp(-times.astype(np.float64)))
    np.testing.assert_allclose(factors, of_times, rtol=3e-6, atol=1e-38)


# --- broken on purpose ----------------------------------------------------------------------------

NORMED_SOURCE = Source(delta_rule, "make_delta_rule", NORMED)
DIVIDED_SOURCE = Source(delta_rule, "make_delta_rule", DIVIDED)
COLUMNS = Source(delta_rule, "make_delta_rule", NORMED, library=delta_rule_columns)
STAGES = Source(delta_rule, "make_delta_rule", NORMED, library=delta_rule_stages)
STATES = Source(delta_rule, "make_delta_rule", NORMED, library=recurrent_states)
CONVOLUTION_SOURCE = Source(
    short_convolution, "make_short_convolution", CONVOLUTION, library=short_convolution
)
STEP_SIZES = Source(short_convolution, "make_short_convolution", CONVOLUTION, library=step_sizes)
NORM_SOURCE = Source(gated_norm, "make_gated_norm", NORM, library=gated_norm)
PIECES = Source(delta_rule, "make_delta_rule", TWO_PIECES, library=delta_rule_columns)
FEW_COLUMNS_STATES = Source(delta_rule, "make_delta_rule", FEW_COLUMNS, library=recurrent_states)
GATE_SOURCE = Source(gate_attended, "make_gate_attended", GATE)


@pytest.mark.wide
def test_no_barrier_commit_or_wait_of_the_delta_rule_can_be_left_out():
    case = small_case(NORMED, later=NORMED.stage_tokens + 1)
    assert case.faults(simulate(case, kernels=NORMED_SOURCE.unbroken())) == []
    broken = [
        (source, line) for source in (NORMED_SOURCE, STAGES) for line in source.synchronisations()
    ]
    assert len(broken) == 5  # wait for the launch ahead, for copies; barriers; the commit
    for source, line in broken:
        with pytest.raises((Race, TooEarly)):
            simulate(case, kernels=source.without(line))


@pytest.mark.spread(1)
@pytest.mark.parametrize("which", range(2))
def test_no_barrier_of_the_delta_rule_can_be_left_out(which):
    case = small_case(NORMED)
    lines = NORMED_SOURCE.text.splitlines()
    barriers = [i for i, line in enumerate(lines) if line.strip() == "cuda.syncthreads()"]
    with pytest.raises(Race, match="shared memory"):
        simulate(case, kernels=NORMED_SOURCE.without(barriers[which]))


def convolution_case() -> Case:
    return draw_cases(CONVOLUTION)[0]


def normed_case() -> Case:
    return small_case(NORMED)


def tiled_case() -> Case:
    return small_case(NORMED, are_tiled=True)


def divided_case() -> Case:
    return small_case(DIVIDED)


def pieces_case() -> Case:
    return layer_case(TWO_PIECES, (Row(3, False, 2, 0),), 0, heads=FEW_HEADS)


def columns_case() -> Case:
    """A row has more channels than its blocks have threads for."""
    return layer_case(FEW_COLUMNS, (Row(3, False, 1, 0),), 0, heads=(2, 2))


def norm_case() -> Case:
    return draw_cases(NORM)[0]


def gate_case() -> Case:
    return draw_cases(GATE)[0]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("make", "source", "old", "new"),
    [
        (normed_case, COLUMNS, "range(quad_bits, 5)", "range(quad_bits, 4)"),
        (normed_case, STATES, "(source + before) * channels", "source * channels"),
        (normed_case, NORMED_SOURCE, "int32(stage_floats - stage), convolved",
         "int32(0), convolved"),
        (divided_case, DIVIDED_SOURCE, "if left <= stage_tokens:", "if False:"),
        (convolution_case, CONVOLUTION_SOURCE, "(source + before) * channels", "source * channels"),
        (convolution_case, STEP_SIZES, "multiply_add(n, -LN2_HIGH, x)", "x"),
        (normed_case, COLUMNS, "multiply_add(-alpha, sums[c]", "multiply_add(-beta, sums[c]"),
        (normed_case, COLUMNS, "multiply_float32(alpha, memory[row, c])", "memory[row, c]"),
        (normed_case, COLUMNS, "range(quad_bits, 3)", "range(quad_bits, 2)"),
        (normed_case, COLUMNS, "((lane >> 3) & 2)", "((lane >> 2) & 2)"),
        (normed_case, COLUMNS, "lane & shared_bits == 0", "True"),
        (pieces_case, PIECES, "piece_rows * (row // run)", "run * (row // run)"),
        (pieces_case, PIECES, "own + piece_rows * piece", "own"),
        (tiled_case, STAGES, "channel += int32(num_key_heads * key_size - key_size)", "pass"),
        (normed_case, STAGES, "VECTOR * (vector - 2 * key_vectors)", "VECTOR * vector"),
        (normed_case, STAGES, "int32(2 * (token + which) + number)", "int32(token + which)"),
        (normed_case, STAGES, "int64(token + which) * stride", "int64(token) * stride"),
        (normed_case, STATES, "elif is_new:", "elif False:"),
        (columns_case, FEW_COLUMNS_STATES, "channel += int32(VECTOR * num_threads)",
         "channel += int32(4096)"),
        (normed_case, NORMED_SOURCE, "if count <= 0:\n            return", "pass"),
        (normed_case, NORMED_SOURCE, "if is_new:\n            clear(memory)",
         "if False:\n            clear(memory)"),
        (normed_case, NORMED_SOURCE, "int32(stage_gates - gate), projections",
         "int32(0), projections"),
        (normed_case, NORMED_SOURCE, "which * columns + column", "column"),
        (normed_case, NORMED_SOURCE, "int32(gate + which * value_size)", "gate"),
        (normed_case, NORMED_SOURCE, "which += int32(warps)", "which += int32(2 * warps)"),
        (normed_case, NORMED_SOURCE, "of_head + share", "of_head + 999 * share"),
        (tiled_case, NORMED_SOURCE, "member * num_key_heads + key_head",
         "key_head * num_key_heads + member"),
        (divided_case, DIVIDED_SOURCE, "multiply_add_wide(int32(token + which), row_size, place)",
         "place"),
        (divided_case, DIVIDED_SOURCE, "of_head + int32(part * columns + own_columns * warp)",
         "of_head + int32(own_columns * warp)"),
        (convolution_case, CONVOLUTION_SOURCE, "place >= 0 and place < count", "True"),
        (convolution_case, CONVOLUTION_SOURCE, "elif is_new:", "elif False:"),
        (convolution_case, CONVOLUTION_SOURCE, "element + (tap - before) * stride", "element"),
        (convolution_case, CONVOLUTION_SOURCE, "tap * channels + channel + at", "channel + at"),
        (convolution_case, CONVOLUTION_SOURCE, "query_scale if head < num_key_heads",
         "query_scale if head < 0"),
        (convolution_case, CONVOLUTION_SOURCE, "* (value_size - key_size)", "* 0"),
        (convolution_case, CONVOLUTION_SOURCE, "warp_sum(squares)", "squares"),
        (convolution_case, CONVOLUTION_SOURCE, "gates[gate + num_value_heads]", "gates[gate]"),
        (convolution_case, CONVOLUTION_SOURCE, "(lane - width) * channels", "lane * 99 * channels"),
        (convolution_case, STEP_SIZES, "float32(0) if x < LEAST", "x if x < LEAST"),
        (convolution_case, STEP_SIZES, "multiply_float32(abs(x), -LOG2_E)", "x"),
        (norm_case, NORM_SOURCE, "warp_sum(squares), inverse_size", "squares, inverse_size"),
        (norm_case, NORM_SOURCE, "token * stride + head", "token * num_value_heads + head"),
        (norm_case, NORM_SOURCE, "silu(own_gates[i, n])", "own_gates[i, n]"),
        (norm_case, NORM_SOURCE, "load_float(weights, i, weight, at)",
         "load_float(weights, i, weight, lane)"),
        (gate_case, GATE_SOURCE, "token * gates_stride", "token * num_features"),
        (gate_case, GATE_SOURCE, "feature < num_features", "True"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_kernel_of_delta_nets_is_noticed(make, source, old, new):
    case = make()
    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShortConvolutionVariant("int8", 32, 32, 4), "dtype must be one of float32"),
        (lambda: ShortConvolutionVariant("float32", 48, 32, 4), "key_size must be a multiple"),
        (lambda: ShortConvolutionVariant("float32", 32, 32, 1), "width must be between 2 and 8"),
        (lambda: DeltaRuleVariant("float32", 32, 288, 4, False), "value_size must be a multiple"),
        (lambda: DeltaRuleVariant("float32", 256, 128, 4, True), "normalises must be one of False"),
        (lambda: GatedNormVariant("float32", 16), "value_size must be a multiple of 32 up to 256"),
        (lambda: GatedNormVariant("float64", 32), "dtype must be one of float32"),
        (lambda: GATE.grid(1, 12), "num_features must be a multiple of 8, got 12"),
    ],
)  # fmt: skip
def test_a_layer_no_kernel_is_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
