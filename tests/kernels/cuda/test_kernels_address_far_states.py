"""States behind the first 2³² elements are found: those of sequences lie that far apart."""

from __future__ import annotations

import pytest

from bench.gpu.case import Case
from bench.gpu.cases import delta_net, gated_convolution, mamba2
from bench.gpu.cases.state_rows import Row
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.gated_convolution import GatedConvolutionVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from tests.kernels.cuda.far_memory import RUNS, faults, spread

pytestmark = RUNS
ROWS = Row(3, False, 2, 0), Row(1, True, 1, 0)
"""One that goes on from a far state, and one that begins one."""


def far_states(case: Case) -> Case:
    return spread(case, "states", "state_stride")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("size", "is_normed"), [(64, True), (64, False), (128, True), (128, False)]
)
def test_the_delta_rule_and_its_convolution_find_their_states(size, is_normed, run):
    """Blocks of threads have whole heads, whose norm is in them, or some columns of a head."""
    variant = DeltaRuleVariant("bfloat16", size, size, 4, is_normed)
    case = delta_net.layer_case(variant, ROWS, 0, heads=(1, 2))

    assert faults(far_states(case), run) == []


def test_a_gated_convolution_finds_its_inputs(run):
    case = gated_convolution.draw_case(GatedConvolutionVariant("bfloat16", 3), ROWS, 64, seed=0)

    assert faults(far_states(case), run) == []


def test_what_a_scan_is_given_finds_its_inputs(run):
    variant = Mamba2InputsVariant("bfloat16", 4)

    assert faults(far_states(mamba2.inputs_case(variant, ROWS, (8, 32, 32), 0)), run) == []


def test_a_scan_finds_its_states(run):
    case = mamba2.scan_case(SelectiveScanVariant(64, 128), ROWS, 1, 0)

    assert faults(far_states(case), run) == []
