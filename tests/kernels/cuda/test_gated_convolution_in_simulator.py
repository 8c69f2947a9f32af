"""Gated convolutions, thread by thread, and as compiled: ragged rows, states, rows that are cut."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, Launch
from bench.gpu.cases import draw_cases
from bench.gpu.cases.gated_convolution import draw_case
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import check_case
from kernels.cuda import gated_convolution, state_convolution
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.gated_convolution import GatedConvolutionVariant
from tests import ptx
from tests.kernels.cpu.convolution_driver import Convolution
from tests.kernels.cpu.delta_net_driver import Row as CpuRow
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.kernels.cuda.simulation import Source, Sources, simulate
from tests.simt import Fault
from tests.simt.memory import Spread

THREE = GatedConvolutionVariant("bfloat16", 3)
FOUR = GatedConvolutionVariant("float32", 4)
SPREAD = (
    THREE,
    FOUR,
    GatedConvolutionVariant("float16", 8),
    GatedConvolutionVariant("bfloat16", 2),
)
FAR = 2**32 + 2**12


def small_case(variant: GatedConvolutionVariant, channels: int = 32) -> Case:
    """Rows of one token, as many as a state keeps, and one less; a new one; one that is longer."""
    before = variant.width - 1
    rows = (
        Row(3, False, 1, 0),
        Row(2, True, 0, 0),
        Row(5, True, 1, before),
        Row(0, False, before, 3),
        Row(6, False, max(1, before - 1), 0),
    )
    return draw_case(variant, rows, channels, seed=0)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_a_kernel_is_right_and_rows_may_be_cut(variant):
    assert check_case(small_case(variant), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", gated_convolution.variants(every=True), ids=lambda variant: variant.name
)
def test_every_variant_is_right(variant):
    for case in draw_cases(variant, seed=1):
        assert check_case(case, simulate).faults == ()


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_a_compiled_kernel_is_right_and_rows_may_be_cut(variant):
    assert check_case(small_case(variant), run_compiled).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_a_compiled_kernel_is_right_in_blocks_of_threads_side_by_side(variant):
    for case in draw_cases(variant):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.parametrize("run", [simulate, run_compiled], ids=["source", "compiled"])
def test_in_float32_bits_are_those_of_the_processors_kernel(run):
    """What is rounded, and the order of sums, is the same."""
    cpu = Convolution(32, 4, num_states=3)
    cpu.draw_state(1)
    pieces = [CpuRow(5, 0, is_new=True), CpuRow(2, 1)]
    projections = cpu.drawn(7)
    rows = np.array([[0, 5, 0, 1], [5, 2, 1, 0]], np.int32)
    arrays = {
        "out": np.full((7, 32), np.nan, np.float32),
        "projections": projections,
        "weight": np.ascontiguousarray(cpu.weights.T),
        "token_rows": np.repeat(np.arange(2, dtype=np.int32), (5, 2)),
        "rows": rows,
        "states": cpu.states.copy(),
    }
    arguments = (
        "out", "projections", 96, "weight", "token_rows", "rows", "states",
        cpu.states[0].size, 0, 32,
    )  # fmt: skip
    launch = Launch(FOUR, FOUR.grid(7, 32), arguments)
    found = run(Case("bits", arrays, (launch,), {}, ("out", "states")))
    np.testing.assert_array_equal(found["out"], cpu.run(projections, pieces))
    np.testing.assert_array_equal(found["states"], cpu.states)


def test_states_and_tokens_lie_far_apart():
    """Behind the first 2^32 elements: a state, and a token's projections."""
    check_far(simulate)


@pytest.mark.wide
def test_states_and_tokens_of_a_compiled_kernel_lie_far_apart():
    check_far(run_compiled)


def check_far(run) -> None:
    case = small_case(FOUR)
    names = ("states", "projections")
    far = {
        name: Spread(case.arrays[name], tuple(FAR * i for i in range(len(case.arrays[name]))))
        for name in names
    }
    near = {case.arrays[name].shape[1] for name in names}
    (launch,) = case.launches
    arguments = tuple(FAR if one in near else one for one in launch.arguments)
    assert arguments.count(FAR) == 2
    moved = dataclasses.replace(launch, arguments=arguments)
    outputs = run(
        dataclasses.replace(case, arrays={**case.arrays, **far}, launches=(moved,), part=None)
    )
    assert case.faults({**outputs, "states": outputs["states"].values}) == []


# --- broken on purpose ----------------------------------------------------------------------------

SOURCE = Sources(
    *(
        Source(gated_convolution, "make_gated_convolution", THREE, library=library)
        for library in (gated_convolution, state_convolution)
    )
)


def two_blocks() -> Case:
    """Channels take one block of threads and a vector."""
    return draw_case(THREE, (Row(6, False, 2, 0),), 8 * (THREE.threads + 1), seed=0)


def one_block() -> Case:
    return small_case(THREE)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("make", "old", "new"),
    [
        (one_block, "(begins or place >= before)", "True"),
        (one_block, "if count > before:", "if False:"),
        (one_block, "taps[i + pieces, n]", "taps[i, n]"),
        (one_block, "elif is_new:", "elif False:"),
        (one_block, "place < count and ", ""),
        (one_block, "is_here and channel < channels", "is_here"),
        (one_block, "min(int32(count), int32(before))", "int32(1)"),
        (one_block, "min(int32(count), int32(before))", "int32(before)"),
        (one_block, "(token + (tap - before)) * stride", "token * stride"),
        (one_block, "(token + count + (tap - before))", "(token + count - before)"),
        (one_block, "row + 2 * int64(channels)", "row + int64(channels)"),
        (one_block, "load_vector(gates, 0, projections, row + channels)",
         "load_vector(gates, 0, projections, row)"),
        (one_block, "int64(state) * state_stride + layer_start", "int64(state) * state_stride"),
        (one_block, "target + which * int64(channels)", "target"),
        (one_block, "row = (token + which) * stride", "row = token * stride"),
        (one_block, "taps[i + n // VECTOR, n % VECTOR] = product", "taps[i, n % VECTOR] = product"),
        (two_blocks, "cuda.blockIdx.y * threads * length", "0"),
        (two_blocks, "min(int32(span), int32(channels - channel))", "int32(span)"),
        (two_blocks, "wait_for_previous()\n\n", "\n"),
        (two_blocks, "wait_for_previous()\n\n",
         "if is_used:\n            wait_for_previous()\n\n"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_kernel_is_noticed(make, old, new):
    case = make()
    try:
        outputs = simulate(case, kernels=SOURCE.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.wide
def test_the_wait_of_the_compiled_kernel_can_not_be_left_out():
    (text,) = without(text_of(THREE), "griddepcontrol.wait")
    with pytest.raises(ptx.TooEarly):
        run_compiled(small_case(THREE), texts={THREE.name: text})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"(fma\.rn\.f32 %f\d+, (%f\d+), )%f\d+", r"\1\2"),
        (r"(st\.global\.v4\.\w+ .*), \{(.*), (.*), (.*), (.*)\}", r"\1, {\3, \2, \4, \5}"),
    ],
)
def test_a_changed_instruction_is_noticed(pattern, replacement):
    case = small_case(THREE)
    try:
        outputs = run_compiled(case, texts=replaced(THREE, pattern, replacement))
    except ptx.Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GatedConvolutionVariant("int8", 3), "dtype must be one of float32"),
        (lambda: GatedConvolutionVariant("float32", 1), "width must be between 2 and 8"),
        (lambda: GatedConvolutionVariant("float32", 9), "width must be between 2 and 8"),
        (lambda: THREE.grid(1, 36), "num_channels must be a multiple of 8, got 36"),
    ],
)
def test_a_convolution_no_kernel_is_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
