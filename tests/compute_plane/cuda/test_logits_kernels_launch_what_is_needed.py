"""Samples go through the launches that some of them needs, and to the reference's tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.logits_kernels import LogitsKernels
from compute_plane.cuda.operands import DrawNeeds, SamplingColumns
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.sampling_columns import needs_of
from compute_plane.executor.interface import SamplingRow
from kernels.reference.sampling import inverse
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher

GREEDY = SamplingRow(0.0, 0.5, 0, 0, 3, top_k=2)
DRAWN = SamplingRow(0.8, 1.0, 5, 0, 3, min_p=0.01)
CUT = SamplingRow(1.1, 0.9, 6, 0, 3)
FEW = SamplingRow(1.1, 1.0, 7, 0, 3, top_k=3)
VOCAB = 300

FIRST, WEIGHTS, SHORTLIST, LAST = (
    "largest_logits_t256", "sampling_weights_t256", "sampling_shortlist_t256", "sampling_t256",
)  # fmt: skip


def kernels(*, runs: bool) -> tuple[LogitsKernels, SimulatedLauncher]:
    launcher = SimulatedLauncher(runs=runs)
    made = LogitsKernels(launcher)
    launcher.prepare(made.variants)
    return made, launcher


def columns_of(rows: list[SamplingRow]) -> SamplingColumns:
    def column(dtype: torch.dtype, values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    return SamplingColumns(
        logits_rows=column(torch.int32, list(range(len(rows)))),
        inverse_temperatures=column(
            torch.float64, [inverse(row.temperature) if row.temperature else 0.0 for row in rows]
        ),
        top_ks=column(torch.int32, [row.top_k for row in rows]),
        top_ps=column(torch.float64, [row.top_p for row in rows]),
        min_ps=column(torch.float64, [row.min_p for row in rows]),
        seeds=column(torch.int64, [row.seed for row in rows]),
        sample_indexes=column(torch.int32, [row.sample_index for row in rows]),
        positions=column(torch.int64, [row.position for row in rows]),
        needs=needs_of(rows),
    )


@pytest.mark.parametrize(
    ("rows", "launched"),
    [
        ([GREEDY], [FIRST, LAST]),
        ([GREEDY, DRAWN], [FIRST, WEIGHTS, LAST]),
        ([GREEDY, CUT], [FIRST, WEIGHTS, SHORTLIST, LAST]),
        ([FEW], [FIRST, WEIGHTS, SHORTLIST, LAST]),
    ],
)
def test_what_no_sample_needs_is_not_launched(rows: list[SamplingRow], launched: list[str]) -> None:
    random = np.random.default_rng(4)
    logits = torch.from_numpy(random.standard_normal((len(rows), VOCAB), dtype=np.float32) * 3)
    made, launcher = kernels(runs=True)
    found = []
    for operations in (made, ReferenceOperations()):
        tokens, is_finite = (torch.full((len(rows),), -7, dtype=torch.int32) for _ in range(2))
        operations.sample(tokens, is_finite, logits, columns_of(rows))
        found.append((tokens.tolist(), is_finite.tolist()))

    assert [name for name, _ in launcher.launched] == launched
    assert found[0] == found[1]


def test_needs_are_those_of_all_samples_together() -> None:
    assert needs_of([]) == needs_of([GREEDY, GREEDY]) == DrawNeeds(draws=False, cuts=False)
    assert needs_of([DRAWN, GREEDY]) == DrawNeeds(draws=True, cuts=False)
    assert needs_of([GREEDY, CUT]) == needs_of([FEW]) == DrawNeeds(draws=True, cuts=True)


@pytest.mark.parametrize(
    ("row", "needs"), [(DRAWN, DrawNeeds(False, False)), (FEW, DrawNeeds(True, False))]
)
def test_the_reference_notices_needs_that_are_too_small(row: SamplingRow, needs: DrawNeeds) -> None:
    columns = replace(columns_of([row]), needs=needs)
    out = torch.empty(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="need more"):
        ReferenceOperations().sample(out, out, torch.zeros((1, VOCAB)), columns)


@pytest.mark.parametrize(
    ("num_samples", "splits"), [(1, 126), (8, 126), (16, 63), (32, 32), (256, 32)]
)
def test_few_rows_are_divided_among_all_multiprocessors(num_samples: int, splits: int) -> None:
    made, launcher = kernels(runs=False)
    columns = columns_of([CUT] * num_samples)
    out = torch.empty(num_samples, dtype=torch.int32)
    # One row is enough for grids: nothing is read.
    made.sample(out, out, torch.empty((1, 128_256)), columns)

    *split, (_, last) = launcher.launched
    assert [grid for _, grid in split] == [(splits, num_samples, 1)] * 3
    assert last == (num_samples, 1, 1)
