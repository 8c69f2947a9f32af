"""What the compiler made of Mamba-2's kernels, executed: right, rows cut; changes are noticed."""

from __future__ import annotations

import pytest

from bench.gpu.case import Case
from bench.gpu.cases import draw_cases
from bench.gpu.cases.mamba2 import inputs_case, of_width, scan_case
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import check_case
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.ptx import Fault, Race, TooEarly

INPUTS = Mamba2InputsVariant("bfloat16", 4)
SCAN = SelectiveScanVariant(64, 128)
NORM = GatedRowNormVariant("bfloat16", 8192)
PLAIN = GatedRowNormVariant("bfloat16", 3072, is_normed=False)


def small_inputs() -> Case:
    return inputs_case(INPUTS, of_width(INPUTS.width), (8, 32, 32), 0)


def small_scan(later: int = 1) -> Case:
    rows = (Row(3, False, 1, 0), Row(1, True, 1, 1), Row(0, False, SCAN.stage_tokens, later))
    return scan_case(SCAN, rows, 1, 0)


def scan_of_groups() -> Case:
    """Heads of 80, which are five blocks each, in two groups."""
    variant = SelectiveScanVariant(80, 128)
    return scan_case(variant, (Row(3, False, 1, 0), Row(1, True, 2, 0)), 4, 0, num_groups=2)


@pytest.mark.wide
@pytest.mark.parametrize(
    "make",
    [
        small_inputs,
        small_scan,
        scan_of_groups,
        *(lambda which=which: draw_cases(NORM)[which] for which in (0, 1)),
        lambda: draw_cases(PLAIN)[0],
    ],
)
def test_a_compiled_kernel_is_right_and_rows_may_be_cut(make) -> None:
    assert check_case(make(), run_compiled).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        INPUTS,
        Mamba2InputsVariant("float32", 4),
        Mamba2InputsVariant("float16", 8),
        SCAN,
        SelectiveScanVariant(96, 160),
        SelectiveScanVariant(64, 256),
        GatedRowNormVariant("float32", 3072),
        GatedRowNormVariant("float16", 96),
    ],
    ids=lambda variant: variant.name,
)
def test_a_compiled_kernel_is_right_in_blocks_of_threads_side_by_side(variant) -> None:
    for case in draw_cases(variant):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("opcode", "count", "fault"),
    [
        ("bar.sync", 1, Race),
        ("cp.async.wait_group", 1, Fault),
        ("cp.async.commit_group", 2, Fault),
        ("griddepcontrol.wait", 1, TooEarly),
    ],
)
def test_nothing_that_orders_the_scan_can_be_left_out(opcode, count, fault) -> None:
    case = small_scan(later=SCAN.stage_tokens + 1)
    assert case.faults(run_compiled(case)) == []
    texts = list(without(text_of(SCAN), opcode))
    assert len(texts) == count
    for text in texts:
        with pytest.raises(fault):
            run_compiled(case, texts={SCAN.name: text})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "make", "pattern", "replacement"),
    [
        (SCAN, small_scan, r"selp\.f32 (\s*%f\d+), (%f\d+), (%f\d+)", r"selp.f32 \1, \3, \2"),
        (SCAN, small_scan, r"(fma\.rn\.f32 %f\d+, (%f\d+), )%f\d+", r"\1\2"),
        (INPUTS, small_inputs, r"(fma\.rn\.f32 %f\d+, (%f\d+), )%f\d+", r"\1\2"),
        (INPUTS, small_inputs, r"(st\.global\.v4\.\w+ .*), \{(.*), (.*), (.*), (.*)\}",
         r"\1, {\3, \2, \4, \5}"),
        (NORM, lambda: draw_cases(NORM)[0], r"rsqrt\.approx\.ftz", "rcp.approx.ftz"),
    ],
)  # fmt: skip
def test_a_changed_instruction_is_noticed(variant, make, pattern, replacement) -> None:
    case = make()
    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except Fault:
        return
    assert case.faults(outputs)
