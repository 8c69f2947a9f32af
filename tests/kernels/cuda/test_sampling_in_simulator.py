"""The sampling kernel chooses the very tokens of the specification, thread by thread."""

from __future__ import annotations

import pytest

from bench.gpu.cases.sampling import EVERYTHING, SETTINGS, draw_case
from bench.gpu.numerics import check_case
from kernels.cuda import block_reductions, sampling, weight_search
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

VARIANT = SamplingVariant(threads=64)  # two warps see all that sixteen do, and are simulated faster

# Every setting once, every row at least once.
SPREAD = [(setting, (setting * 5 + setting // 8) % 8) for setting in range(len(SETTINGS))]


@pytest.mark.parametrize("vocab", [45, 1100])
def test_the_tokens_are_those_of_the_specification(vocab):
    pairs = SPREAD if vocab < 100 else [(2, 0), (4, 2), (6, 1)]

    assert check_case(draw_case(VARIANT, vocab, pairs), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("vocab", [1, 45, 513, 2100])
def test_every_setting_on_every_kind_of_row(vocab, seed):
    case = draw_case(VARIANT, vocab, EVERYTHING, seed=seed)

    assert check_case(case, simulate).faults == ()


KERNEL = Source(sampling, "make_sampling", VARIANT)
SEARCH = Source(sampling, "make_sampling", VARIANT, library=weight_search)
REDUCTIONS = Source(sampling, "make_sampling", VARIANT, library=block_reductions)

# top-k and top-p on rows with equals, so that the search and its ties are at work.
HARD = [(4, 2), (6, 3), (11, 5)]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        (source, line)
        for source in (KERNEL, SEARCH, REDUCTIONS)
        for line in source.synchronisations()
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_a_deleted_barrier_is_noticed(source, line):
    case = draw_case(VARIANT, 70, HARD)

    with pytest.raises(Race, match="shared memory"):
        simulate(case, kernels=source.without(line), seed=1)


@pytest.mark.parametrize(
    ("source", "old", "new"),
    [
        (KERNEL, "int32(bad == 0)", "1"),
        (KERNEL, "lane >= 1 << step", "lane > 1 << step"),
        (KERNEL, "after += running", "pass"),
        (SEARCH, "seen + cuda.popc(tied & lower_lanes) >= ties", "False"),
        (SEARCH, "weight < threshold or", "weight < 0 or"),
        (SEARCH, "takes_part = weight >> shift == prefix", "takes_part = True"),
        (SEARCH, "likely > threshold", "likely < threshold"),
        (SEARCH, "fewest = middle + 1", "fewest = most"),
        (SEARCH, "lowest > threshold or", "lowest < threshold or"),
    ],
)
def test_broken_arithmetic_chooses_a_wrong_token(source, old, new):
    case = draw_case(VARIANT, 45, [*HARD, (2, 2), (5, 1), (3, 3), (1, 0), (1, 4), (5, 0), (10, 7)])

    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)
