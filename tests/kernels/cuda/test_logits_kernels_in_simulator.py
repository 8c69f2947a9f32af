"""Log-probabilities and adjusted logits have the very bits of the specification."""

from __future__ import annotations

import pytest

from bench.gpu.cases.logits import draw_adjust_case, draw_logprobs_case
from bench.gpu.numerics import check_case
from kernels.cuda import adjust_logits, block_reductions, logprob_sums, logprobs, row_splits
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

# Two warps see all that eight do, and are simulated faster; one warp has a split to itself.
LOGPROBS, ONE_WARP = LogprobsVariant(threads=64), LogprobsVariant(threads=32)
ADJUST = AdjustLogitsVariant(threads=64)


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


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("source", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
)
def test_broken_arithmetic_gives_other_bits(source, old, new):
    if source is ADJUST_SOURCE:
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
