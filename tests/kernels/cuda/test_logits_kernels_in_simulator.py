"""Log-probabilities and adjusted logits have the very bits of the specification."""

from __future__ import annotations

import pytest

from bench.gpu.cases.logits import draw_adjust_case, draw_logprobs_case
from bench.gpu.numerics import check_case
from kernels.cuda import adjust_logits, logprobs
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.logprobs import LogprobsVariant
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

# Two warps see all that sixteen do, and are simulated faster.
LOGPROBS = LogprobsVariant(threads=64)
ADJUST = AdjustLogitsVariant(threads=64)


@pytest.mark.parametrize("vocab", [7, 150])
def test_log_probabilities_are_those_of_the_specification(vocab):
    assert check_case(draw_logprobs_case(LOGPROBS, vocab), simulate).faults == ()


@pytest.mark.parametrize("vocab", [40, 150])
def test_adjusted_logits_are_those_of_the_specification(vocab):
    assert check_case(draw_adjust_case(ADJUST, vocab), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [25, 700, 2000])
def test_larger_vocabularies_and_all_threads(vocab, seed):
    for case in (
        draw_logprobs_case(LogprobsVariant(), vocab, seed=seed),
        draw_adjust_case(AdjustLogitsVariant(), vocab, seed=seed),
    ):
        assert check_case(case, simulate).faults == ()


LOGPROBS_SOURCE = Source(logprobs, "make_logprobs", LOGPROBS)
ADJUST_SOURCE = Source(adjust_logits, "make_adjust_logits", ADJUST)


@pytest.mark.parametrize("line", ADJUST_SOURCE.synchronisations())
def test_a_deleted_barrier_is_noticed(line):
    with pytest.raises(Race, match="argument"):
        simulate(draw_adjust_case(ADJUST, 150), kernels=ADJUST_SOURCE.without(line))


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (LOGPROBS_SOURCE, "key < best", "key <= best"),
        (LOGPROBS_SOURCE, "add_float64(shifted, -log_total)", "shifted"),
        (LOGPROBS_SOURCE, "first = sample * MAX_LOGPROBS", "first = sample * 19"),
        (ADJUST_SOURCE, "if logit < 0", "if logit < 1"),
        (ADJUST_SOURCE, "count & OUTPUT_MASK", "count"),
        (ADJUST_SOURCE, "if i < num_prompt", "if i <= num_prompt"),
        (ADJUST_SOURCE, "add_float32(logit, bias_values[i])", "bias_values[i]"),
        (ADJUST_SOURCE, "count > 0 and abs(logit) <= LARGEST_FINITE", "count > 0"),
    ],
)
def test_broken_arithmetic_gives_other_bits(source, old, new):
    if source is LOGPROBS_SOURCE:
        case = draw_logprobs_case(LOGPROBS, 60)
    else:
        case = draw_adjust_case(ADJUST, 150)

    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize("variant", [SamplingVariant, LogprobsVariant, AdjustLogitsVariant])
@pytest.mark.parametrize("threads", [0, 48, 2048])
def test_a_number_of_threads_no_kernel_is_written_for_is_refused(variant, threads):
    with pytest.raises(UnsupportedVariantError, match="multiple of 32 up to 1024"):
        variant(threads=threads)
