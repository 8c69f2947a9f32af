"""What the compiler made of Gated DeltaNet's kernels, executed: right, cut rows, far states."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.case import Case, Launch
from bench.gpu.cases import draw_cases
from bench.gpu.cases.delta_net import layer_case
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import check_case
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.short_convolution import ShortConvolutionVariant
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.kernels.cuda.simulation import simulate
from tests.ptx import Fault, Race, TooEarly
from tests.simt.memory import Spread

WHOLE, DIVIDED = (DeltaRuleVariant("bfloat16", 128, 128, 4, way) for way in (True, False))
SMALL = DeltaRuleVariant("float16", 96, 64, 3, True)
CONVOLUTION = ShortConvolutionVariant("bfloat16", 128, 128, 4)
FAR = 2**32 + 2**12


def small_case(variant: DeltaRuleVariant, later: int = 1) -> Case:
    """One token, a new row, one of two stages and a bit."""
    rows = (Row(3, False, 1, 0), Row(1, True, 1, 1), Row(0, False, variant.stage_tokens, later))
    return layer_case(variant, rows, 0, heads=(1, 2))


@pytest.mark.wide
def test_a_compiled_layer_is_right_and_rows_may_be_cut():
    assert check_case(small_case(WHOLE), run_compiled).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        DIVIDED,
        SMALL,
        DeltaRuleVariant("bfloat16", 256, 256, 4, False),
        DeltaRuleVariant("float32", 128, 128, 4, True),
        CONVOLUTION,
        GateAttendedVariant("bfloat16"),
        GatedNormVariant("float32", 96),
    ],
    ids=lambda variant: variant.name,
)
def test_a_compiled_kernel_is_right_and_rows_may_be_cut(variant):
    for case in draw_cases(variant):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.wide
def test_compiled_divided_heads_have_the_bits_of_whole_ones():
    found, expected = (run_compiled(small_case(variant)) for variant in (DIVIDED, WHOLE))
    for name in ("out", "states"):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("opcode", "count", "fault"),
    [
        ("bar.sync", 2, Race),
        ("cp.async.wait_group", 1, Fault),
        ("cp.async.commit_group", 2, Fault),
        ("griddepcontrol.wait", 1, TooEarly),
    ],
)
def test_nothing_that_orders_can_be_left_out(opcode, count, fault):
    case = small_case(SMALL, later=SMALL.stage_tokens + 1)
    assert case.faults(run_compiled(case)) == []
    texts = list(without(text_of(SMALL), opcode))
    assert len(texts) == count
    for text in texts:
        with pytest.raises(fault):
            run_compiled(case, texts={SMALL.name: text})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "pattern", "replacement"),
    [
        (SMALL, r"rsqrt\.approx\.ftz", "rcp.approx.ftz"),
        (SMALL, r"selp\.f32 (\s*%f\d+), (%f\d+), (%f\d+)", r"selp.f32 \1, \3, \2"),
        (SMALL, r"neg\.f32", "mov.f32"),
        (SMALL, r"(st\.global\.v4\.u32 .*), \{(.*), (.*), (.*), (.*)\}", r"\1, {\3, \2, \4, \5}"),
    ],
)
def test_a_changed_instruction_is_noticed(variant, pattern, replacement):
    case = small_case(variant)
    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.fixture(
    params=[simulate, pytest.param(run_compiled, marks=pytest.mark.slow)],
    ids=["source", "compiled"],
)
def run(request):
    return request.param


@pytest.mark.wide
def test_states_and_tokens_lie_far_apart(run):
    """Behind the first 2^32 elements: a state, and a token's projections."""
    case = small_case(SMALL)
    far_states, far_tokens = (
        Spread(case.arrays[name], tuple(FAR * i for i in range(len(case.arrays[name]))))
        for name in ("states", "projections")
    )
    near = {case.arrays[name].shape[1] for name in ("states", "projections")}

    def moved(launch: Launch) -> Launch:
        arguments = tuple(FAR if one in near else one for one in launch.arguments)
        assert arguments.count(FAR) == 2
        return dataclasses.replace(launch, arguments=arguments)

    launches = tuple(moved(launch) for launch in case.launches)
    arrays = {**case.arrays, "states": far_states, "projections": far_tokens}
    outputs = dict(run(dataclasses.replace(case, arrays=arrays, launches=launches)))
    outputs["states"] = outputs["states"].values
    assert case.faults(outputs) == []
