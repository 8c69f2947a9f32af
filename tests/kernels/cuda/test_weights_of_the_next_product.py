"""Norm and gate have the beginnings of the next product's weights fetched, and nothing else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench.gpu.case import Case, Launch
from bench.gpu.cases import draw_cases
from bench.gpu.cases.row_operations import NEXT_CHUNKS, NEXT_INPUTS
from compute_plane.cuda import next_product
from compute_plane.cuda.next_product import NextProduct
from kernels.cuda import fetched_weights, rms_norm
from kernels.cuda.fetched_weights import FETCHED_BYTES, LINE_BYTES, NOTHING, FetchPlan, plan_fetch
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.rms_norm import RmsNormVariant
from tests.kernels.cuda.compiled import run_compiled, text_of
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import OutOfBounds, Race
from tests.simt.memory import CheckedArray

NORM, PARTS = RmsNormVariant("bfloat16", 64), RmsNormVariant("float16", 72, num_parts=4)
NORMED = RmsNormVariant("bfloat16", 64, norms_added=True, has_float32_weights=True)
SILU = GateMulVariant("bfloat16")


def fetches(case: Case, monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """Return what will count how often bytes are fetched, by the size of the array they are of."""
    counts: dict[int, np.ndarray] = {}
    assert len({array.size for array in case.arrays.values()}) >= len(case.arrays) - 3
    fetch = CheckedArray.fetch

    def noted(array: CheckedArray, element, num_bytes) -> None:
        fetch(array, element, num_bytes)
        count = counts.setdefault(array._flat.size, np.zeros(array._flat.nbytes, np.int64))
        first = array._flat.itemsize * int(element)
        count[first : first + int(num_bytes)] += 1

    monkeypatch.setattr(CheckedArray, "fetch", noted)
    return counts


def with_fetch(variant, fetched: FetchPlan):
    """Return the variant's case with another fetch in its launch."""
    (case,) = draw_cases(variant)
    (launch,) = case.launches
    features = (launch.arguments[2],) if variant is SILU else ()
    num_rows = len(case.arrays["out"])
    arguments = (*launch.arguments[:-3], *fetched.arguments)
    grid = variant.grid(num_rows, *features, fetched)
    return dataclasses.replace(case, launches=(Launch(variant, grid, arguments),), part=None)


@pytest.mark.parametrize("variant", [NORM, PARTS, NORMED, SILU], ids=lambda variant: variant.name)
@pytest.mark.parametrize(
    "fetched",
    [FetchPlan(NEXT_CHUNKS, NEXT_INPUTS, 48), FetchPlan(2, 3 * NEXT_INPUTS, 144), NOTHING],
)
def test_every_chunk_is_fetched_once_and_only_its_beginning(variant, fetched, monkeypatch):
    monkeypatch.setattr(fetched_weights, "FETCHING_BLOCKS", 3)
    case = with_fetch(variant, fetched)
    num_rows = len(case.arrays["out"])
    assert fetched.num_columns(num_rows) * num_rows * variant.threads < NEXT_CHUNKS
    counts = fetches(case, monkeypatch)

    assert case.faults(simulate(case)) == []

    if variant is not SILU:  # each row's block has all of the norm's weights fetched
        own = counts.pop(case.arrays["weight"].size)
        times = (1 + variant.norms_added) * len(case.arrays["out"])  # both, of the same size
        assert (own[: case.arrays["weight"].nbytes] == times).all()
    if not fetched.num_chunks:
        assert not counts
        return
    (found,) = counts.values()
    expected = np.zeros_like(found)
    for chunk in range(fetched.num_chunks):
        first = 2 * chunk * fetched.chunk_pitch
        expected[first : first + fetched.num_bytes] = 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("variant", [NORM, SILU], ids=lambda variant: variant.name)
def test_a_chunk_too_many_is_noticed_in_source_and_in_compiled_text(variant):
    beyond = with_fetch(variant, FetchPlan(NEXT_CHUNKS + 1, NEXT_INPUTS, 48))
    with pytest.raises(OutOfBounds):
        simulate(beyond)
    with pytest.raises(Exception, match="argument"):
        run_compiled(beyond)


def test_a_norms_blocks_that_fetch_have_no_rows():
    (case,) = draw_cases(NORM)
    source = Source(rms_norm, "make_rms_norm", NORM)
    broken = source.with_replaced(
        "if cuda.blockIdx.y > 0:\n            return", "if False:\n            return"
    )
    with pytest.raises(Race):
        simulate(case, kernels=broken)


@pytest.mark.parametrize("variant", [NORM, PARTS, NORMED, SILU], ids=lambda variant: variant.name)
def test_what_is_fetched_is_asked_for_before_the_launch_ahead_has_ended(variant):
    text = text_of(variant)
    assert 0 < text.rindex("prefetch.L2") < text.index("griddepcontrol.wait")


@pytest.mark.parametrize(
    ("num_chunks", "length", "expected"),
    [
        (28672, 4096, FetchPlan(28672, 4096, 256)),
        (6144, 4096, FetchPlan(6144, 4096, 1280)),
        (4 * 4096, 3584, FetchPlan(4 * 4096, 3584, 512)),
        (128256, 4096, FetchPlan(FETCHED_BYTES // LINE_BYTES, 4096, LINE_BYTES)),
        (96, 72, FetchPlan(96, 72, 144)),  # all of it
        (96, 36, NOTHING),  # chunks that begin where no fetch does
        (0, 64, NOTHING),
    ],
)
def test_what_is_fetched_is_as_much_as_can_be_read_meanwhile(num_chunks, length, expected):
    assert plan_fetch(num_chunks, length, 2) == expected


def test_blocks_that_fetch_are_about_one_a_multiprocessor_and_none_without_work():
    assert NOTHING.num_columns(64) == 0
    plan = plan_fetch(28672, 4096, 2)
    assert [plan.num_columns(rows) for rows in (17, 32, 64, 256)] == [8, 4, 2, 1]
    assert plan_fetch(601, 72, 2).num_columns(3) == 7
    assert NORM.grid(3) == (3, 1, 1)
    assert NORM.grid(0) == (0, 1, 1)
    assert RmsNormVariant("bfloat16", 4096).grid(32, plan) == (32, 5, 1)
    assert SILU.grid(64, 14336, plan_fetch(16384, 3584, 2)) == (64, 16, 1)


def test_a_product_of_many_rows_or_of_scattered_weights_has_nothing_fetched():
    weight = torch.zeros(40, 64, dtype=torch.bfloat16)
    assert NextProduct(weight, 2).fetch_plan(64) == plan_fetch(80, 32, 2)
    assert NextProduct(weight).fetch_plan(next_product.MOST_ROWS + 1) == NOTHING
    assert NextProduct(weight.t()).fetch_plan(64) == NOTHING
    assert NextProduct(weight.view(-1)[4:-60].view(39, 64)).fetch_plan(64) == NOTHING
