"""Log-probabilities and adjusted logits have the bits of the specification; capped ones nearly."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.case import Case, Launch
from bench.gpu.cases import draw_cases
from bench.gpu.cases.logits import draw_adjust_case, draw_cap_case, draw_logprobs_case
from bench.gpu.numerics import check_case
from kernels.cuda import (
    adjust_logits,
    block_reductions,
    cap_logits,
    logprob_sums,
    logprobs,
    row_splits,
)
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.cap_logits import CapLogitsVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

# Two warps see all that eight do, and are simulated faster; one warp has a split to itself.
LOGPROBS, ONE_WARP = LogprobsVariant(threads=64), LogprobsVariant(threads=32)
ADJUST = AdjustLogitsVariant(threads=64)
CAP = CapLogitsVariant()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "vocab", "rounds"), [(LOGPROBS, 7, 1), (LOGPROBS, 380, 1), (ONE_WARP, 400, 3)]
)
def test_log_probabilities_are_those_of_the_specification(variant, vocab, rounds):
    assert check_case(draw_logprobs_case(variant, vocab, rounds=rounds), simulate).faults == ()


@pytest.mark.slow
def test_candidates_for_the_likeliest_are_few_where_there_are_many_splits():
    case = draw_logprobs_case(ONE_WARP, 20 * row_splits.STRIP)

    outputs = simulate(case)

    assert case.faults(outputs) == []
    lengths = outputs["totals"][:, logprob_sums.LISTED]
    assert 20 <= lengths[1] <= 100  # 20 were asked for, of 2560
    assert lengths[5] == 0  # none


@pytest.mark.parametrize("vocab", [40, 150])
def test_adjusted_logits_are_those_of_the_specification(vocab):
    assert check_case(draw_adjust_case(ADJUST, vocab), simulate).faults == ()


@pytest.mark.parametrize("case", draw_cases(CAP), ids=lambda case: case.name)
def test_capped_logits_are_right_to_a_few_units_in_the_last_place(case):
    assert check_case(case, simulate).faults == ()


@pytest.mark.parametrize("cap", [30.0, 0.5, 50.0])
def test_a_cap_is_reached_but_not_passed_and_small_logits_stay_what_they_are(cap):
    logits = np.float32([3e38, -3e38, 1e4 * cap, -1e4 * cap, 1e-38, -1e-38, 1e-5 * cap, 0.0])
    launch = Launch(CAP, CAP.grid(len(logits)), ("logits", len(logits), cap))
    found = simulate(Case("", {"logits": logits.copy()}, (launch,), {}, ("logits",)))["logits"]

    np.testing.assert_array_equal(found[:4], np.float32([cap, -cap, cap, -cap]))
    np.testing.assert_allclose(found[4:], logits[4:], rtol=1e-6)


def test_numbers_on_both_sides_of_where_the_cap_goes_another_way_are_in_order():
    logits = np.linspace(0.9999, 1.0001, 401).astype(np.float32) * 30
    launch = Launch(CAP, CAP.grid(len(logits)), ("logits", len(logits), 30.0))
    found = simulate(Case("", {"logits": logits}, (launch,), {}, ("logits",)))["logits"]

    assert np.diff(found).min() >= -4e-6  # two units in the last place
    np.testing.assert_allclose(found, 30 * np.tanh(logits.astype(np.float64) / 30), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shape", [(5, 1001), (1, 4097), (33, 300)])
def test_more_logits_are_capped(shape, seed):
    assert check_case(draw_cap_case(CAP, *shape, seed), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [25, 700, 2000])
def test_larger_vocabularies_and_all_threads(vocab, seed):
    for case in (
        draw_logprobs_case(LogprobsVariant(), vocab, seed=seed),
        draw_logprobs_case(ONE_WARP, 3 * vocab, seed=seed),
        draw_adjust_case(AdjustLogitsVariant(), vocab, seed=seed),
    ):
        assert check_case(case, simulate).faults == ()


LOGPROBS_SOURCE = Source(logprobs, "make_logprobs", LOGPROBS)
SUMS_SOURCE = Source(logprob_sums, "make_logprob_sums", ONE_WARP.sums)
REDUCTIONS = Source(logprobs, "make_logprobs", LOGPROBS, library=block_reductions)
SPLITS = Source(logprob_sums, "make_logprob_sums", ONE_WARP.sums, library=row_splits)
ADJUST_SOURCE = Source(adjust_logits, "make_adjust_logits", ADJUST)
CAP_SOURCE = Source(cap_logits, "make_cap_logits", CAP)
CAP_ARITHMETIC = Source(cap_logits, "make_cap_logits", CAP, library=cap_logits)


@pytest.mark.parametrize("line", ADJUST_SOURCE.synchronisations())
def test_a_deleted_barrier_is_noticed(line):
    with pytest.raises(Race, match="argument"):
        simulate(draw_adjust_case(ADJUST, 150), kernels=ADJUST_SOURCE.without(line))


@pytest.mark.parametrize("line", REDUCTIONS.synchronisations()[:2])  # the third is of sums
def test_a_deleted_barrier_of_the_agreement_is_noticed(line):
    with pytest.raises(Race, match="shared memory"):
        simulate(draw_logprobs_case(LOGPROBS, 60), kernels=REDUCTIONS.without(line))


BREAKAGES = [
    (LOGPROBS_SOURCE, "many[j] < best", "many[j] <= best"),
    (SUMS_SOURCE, "key >= lowest", "key > lowest"),
    (SPLITS, "rank == n - 1", "rank == n - 2"),
    (ADJUST_SOURCE, "if logit < 0", "if logit < 1"),
    (ADJUST_SOURCE, "taken[i] & OUTPUT_MASK", "taken[i]"),
    (ADJUST_SOURCE, "float32(math.inf)", "float32(0)"),
    (CAP_SOURCE, "if first + LENGTH <= num_elements", "if first < num_elements"),
    (CAP_SOURCE, "range(first, num_elements)", "range(first + 1, num_elements)"),
    (CAP_ARITHMETIC, "NEAR = float32(1)", "NEAR = float32(0)"),
    (CAP_ARITHMETIC, "NEAR = float32(1)", "NEAR = float32(2)"),
    (CAP_ARITHMETIC, "value + (x - x)", "value"),
    (CAP_ARITHMETIC, "far if x > 0 else -far", "far"),
    (CAP_ARITHMETIC, "float32(420)", "float32(421)"),
]  # fmt: skip
MORE_BREAKAGES = [
    (LOGPROBS_SOURCE, "top_logprobs[first + i] = float32(add_float64(shifted, -log_total))",
     "top_logprobs[first + i] = float32(shifted)"),
    (LOGPROBS_SOURCE, "first = sample * MAX_LOGPROBS", "first = sample * 19"),
    (SUMS_SOURCE, "weight if v < vocab else int64(0)", "weight"),
    (SPLITS, "> own:", ">= own:"),
    (ADJUST_SOURCE, "if begin + i * threads < num_prompt", "if begin <= num_prompt"),
    (ADJUST_SOURCE, "add_float32(logit, bias_values[i])", "bias_values[i]"),
    (ADJUST_SOURCE, "own + tokens[i], 0)", "own + tokens[i], 1)"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for source, old, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        assert source.text.count(old) == 1, old


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("source", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
)
def test_broken_arithmetic_gives_other_bits(source, old, new):
    if source in (CAP_SOURCE, CAP_ARITHMETIC):
        case = draw_cases(CAP)[0]
    elif source is ADJUST_SOURCE:
        case = draw_adjust_case(ADJUST, 150)
    elif source is LOGPROBS_SOURCE:
        case = draw_logprobs_case(LOGPROBS, 60)
    else:
        case = draw_logprobs_case(ONE_WARP, 600)  # five splits

    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    "variant", [SamplingVariant, LogprobsVariant, AdjustLogitsVariant, LargestLogitsVariant]
)
@pytest.mark.parametrize("threads", [0, 48, 2048])
def test_a_number_of_threads_no_kernel_is_written_for_is_refused(variant, threads):
    with pytest.raises(UnsupportedVariantError, match="multiple of 32 up to 1024"):
        variant(threads=threads)
