"""The sampling kernels choose the very tokens of the specification, thread by thread."""

from __future__ import annotations

import pytest

from bench.gpu.cases.sampling import EVERYTHING, SETTINGS, draw_case
from bench.gpu.numerics import check_case
from kernels.cuda import (
    largest_logits,
    row_splits,
    sampling,
    sampling_shortlist,
    sampling_weights,
    weight_search,
)
from kernels.cuda.sampling import SamplingVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

# Two warps see all that eight do, and are simulated faster; one warp has a split to itself.
VARIANT, ONE_WARP = SamplingVariant(threads=64), SamplingVariant(threads=32)

# Every setting once, every row at least once.
SPREAD = [(setting, (setting * 5 + setting // 8) % 8) for setting in range(len(SETTINGS))]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "vocab", "rounds", "pairs"),
    [
        (ONE_WARP, 45, 1, SPREAD),
        (ONE_WARP, 300, 1, [(2, 0), (0, 1), (5, 0), (6, 7)]),  # three splits, the last one ragged
        (VARIANT, 380, 1, [(4, 2), (12, 1), (1, 5)]),  # two splits, of two strips and of one
        (ONE_WARP, 400, 3, [(11, 5), (0, 3), (3, 6)]),  # one of three strips, and one of one
        (ONE_WARP, 384, 3, [(0, 0), (4, 2), (6, 7)]),  # whole strips, as many vocabularies are
    ],
)
def test_the_tokens_are_those_of_the_specification(variant, vocab, rounds, pairs):
    assert check_case(draw_case(variant, vocab, pairs, rounds=rounds), simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("variant", "vocab", "rounds"),
    [(VARIANT, 1, 1), (VARIANT, 45, 1), (ONE_WARP, 513, 1), (ONE_WARP, 513, 2), (VARIANT, 2100, 2)],
)
def test_every_setting_on_every_kind_of_row(variant, vocab, rounds, seed):
    pairs = EVERYTHING if vocab < 100 else EVERYTHING[seed::3]

    case = draw_case(variant, vocab, pairs, rounds=rounds, seed=seed)

    assert check_case(case, simulate).faults == ()


@pytest.mark.slow
def test_more_splits_than_a_warp_has_lanes():
    case = draw_case(ONE_WARP, 4500, [(0, 0), (4, 2), (2, 1), (6, 0)])

    assert check_case(case, simulate).faults == ()


def test_few_samples_fill_the_device_and_many_have_splits_for_every_lane():
    first = SamplingVariant().largest

    def splits(num_samples: int, vocab: int) -> int:
        share = first.plan_share(num_samples, vocab, num_multiprocessors=132)
        assert share % (first.threads // 32) == 0
        return row_splits.num_splits(vocab, share)

    assert splits(1, 128_256) == splits(8, 128_256) == 126  # a strip a warp
    assert [splits(n, 128_256) for n in (16, 32)] == [63, 32]  # all blocks at once
    assert [splits(n, 128_256) for n in (64, 256)] == [32, 32]
    assert splits(33, 33 * 8 * 128) == 33  # two strips a warp would leave lanes without a split
    assert splits(256, 32_000) == 32
    assert splits(3, 1) == 1


KERNEL = Source(sampling, "make_sampling", VARIANT)
WEIGHTS = Source(sampling_weights, "make_sampling_weights", VARIANT.weights)
SEARCH = Source(sampling, "make_sampling", VARIANT, library=weight_search)

# top-k and top-p on rows with equals, so that the search is at work.
HARD = [(4, 2), (6, 3), (11, 5)]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("source", "line"),
    [(source, line) for source in (KERNEL, WEIGHTS, SEARCH) for line in source.synchronisations()],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_a_deleted_barrier_is_noticed(source, line):
    case = draw_case(VARIANT, 70, HARD)

    with pytest.raises(Race):
        simulate(case, kernels=source.without(line), seed=1)


BREAKAGES = [
    (sampling, "many[i] >= cut", "many[i] > cut", [(3, 3)] * 4),
    (sampling, "before + sum_up_to_lane", "sum_up_to_lane", [(1, 0), (1, 6)]),
    (largest_logits, "numbers[i] > largest", "numbers[i] >= largest", [(0, 3)]),
    (sampling_weights, "first + 32 * i < vocab and", "", [(1, 0), (2, 3)]),
    (sampling_shortlist, "elif number >= low", "elif number > low", HARD),
    (weight_search, "keys[i] >> shift == prefix", "True", HARD),
    (row_splits, "begin += cuda.popc(which)", "pass", HARD),
]  # fmt: skip
MORE_BREAKAGES = [
    (sampling, "int32(best != NOT_FINITE)", "1", [(1, 4)]),
    (sampling, "weight_key(weight, v) < cut", "weight == 0", [(3, 3), (3, 0)]),
    (largest_logits, "is_finite = is_finite and", "is_finite =", [(1, 4)]),
    (largest_logits, "int32(min(end, vocab // STRIP))", "end", [(0, i) for i in range(8)]),
    (sampling_weights, "weight >= least", "weight > 0", [(5, 0), (5, 2)]),
    (sampling_shortlist, "if number > high:", "if number >= high:", HARD),
    (sampling_shortlist, "if weight >= least:", "if weight > 0:", [(12, 0)] * 6),
    (weight_search, "while count > 1", "while count > 20", [(3, 3)] * 4),
    (weight_search, "last = 63 - cuda", "last = 62 - cuda", HARD),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for module, old, _, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        assert source_of(module).text.count(old) == 1, old


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("module", "old", "new", "pairs"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
)
def test_broken_arithmetic_chooses_a_wrong_token(module, old, new, pairs):
    case = draw_case(ONE_WARP, 150, pairs)

    try:
        outputs = simulate(case, kernels=source_of(module).with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


def source_of(module) -> Source:
    """The source of a kernel, or of a library of one."""
    kernels = {
        sampling: ("make_sampling", ONE_WARP),
        largest_logits: ("make_largest_logits", ONE_WARP.largest),
        sampling_weights: ("make_sampling_weights", ONE_WARP.weights),
        sampling_shortlist: ("make_sampling_shortlist", ONE_WARP.shortlist),
    }
    if module in kernels:
        return Source(module, *kernels[module], library=module)
    user = sampling if module is weight_search else sampling_shortlist
    return Source(user, *kernels[user], library=module)
