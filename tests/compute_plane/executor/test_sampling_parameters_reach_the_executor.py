"""Sampling parameters travel from a slot's start to the executor, and log-probabilities back."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compute_plane.executor.interface import LogitBias, TopLogprobs
from compute_plane.executor.step import SamplingKey
from planes.errors import ExecutionError

sys.path.insert(0, str(Path(__file__).parent))
from slot_batches import GREEDY, Plane, start, step

BIAS = LogitBias(np.array([3, 5], dtype=np.int32), np.array([1.0, -2.0], dtype=np.float32))
FULL = SamplingKey(
    temperature=0.7, top_p=0.9, seed=5, sample_index=1, top_k=40, min_p=0.1,
    repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=-0.4, logit_bias=BIAS,
    num_logprobs=2,
)  # fmt: skip


def prefilled(sampling: SamplingKey) -> Plane:
    plane = Plane()
    plane.run(step([(0, 0, 3)], starts=[start(0, b"abc", [0, 1, 2], sampling)]))
    return plane


def test_a_sample_is_drawn_by_the_parameters_of_its_slot() -> None:
    (row,) = prefilled(FULL).batches[0].sampling
    assert row[:7] == (0.7, 0.9, 5, 1, 3, 40, 0.1)
    assert (row.logit_bias, row.num_logprobs) == (BIAS, 2)
    assert row.penalties is not None
    assert row.penalties[:3] == (1.2, 0.3, -0.4)


def test_a_plain_sample_has_nothing_but_its_key() -> None:
    (row,) = prefilled(GREEDY).batches[0].sampling
    assert row == (0.0, 1.0, 0, 0, 3, 0, 0.0, None, None, None, None)
    assert row.is_plain


def test_the_history_of_a_sample_is_its_sequence_and_the_prompt_stays_the_prompt() -> None:
    plane = prefilled(FULL)
    (token,) = plane.slots._memory.tokens[plane.slots._numbers.line[0], 3:4].tolist()
    plane.run(step([(0, 3, 1)]))
    penalties = plane.batches[1].sampling[0].penalties
    assert penalties is not None
    assert penalties.history.tolist() == [*b"abc", token]
    assert penalties.num_prompt == 3
    # Built anew after a preemption: what was generated is told, and stays output.
    known = replace(start(0, [*b"abc", token], [4, 5, 6], FULL), num_prompt_tokens=3)
    plane.run(step([(0, 0, 4)], starts=[known]))
    again = plane.batches[2].sampling[0].penalties
    assert again is not None
    assert (again.history.tolist(), again.num_prompt) == ([*b"abc", token], 3)
    assert again.history.flags.c_contiguous


def test_samples_of_one_row_have_the_parameters_and_the_history_of_their_own_slots() -> None:
    plane = Plane()
    starts = [
        start(0, b"abc", [0]),
        start(1, b"abc", [0], FULL),
        start(2, b"abc", [0], replace(FULL, top_k=7)),
    ]
    plane.run(step([(0, 0, 3)], starts=starts, sampled=[0, 0, 0], sampled_slots=[0, 1, 2]))
    rows = plane.batches[0].sampling
    assert [row.top_k for row in rows] == [0, 40, 7]
    assert rows[0].penalties is None
    assert rows[2].penalties is not None
    assert rows[2].penalties.history.tolist() == list(b"abc")


def test_log_probabilities_come_back_for_the_samples_that_asked() -> None:
    plane = Plane()
    starts = [start(0, b"abc", [0]), start(1, b"de", [8], FULL)]
    result = plane.run(step([(0, 0, 3), (1, 0, 2)], starts=starts))
    (entry,) = result.sample_logprobs
    assert entry.sample == 1
    assert entry.top.token_ids.shape == entry.top.logprobs.shape == (1, 2)


def test_log_probabilities_keep_the_numbers_of_the_samples_as_sent() -> None:
    plane = Plane()
    starts = [start(slot, b"abc", [8 * slot], replace(FULL, num_logprobs=slot)) for slot in (0, 1)]
    plane.run(step([(0, 0, 3)], starts=[*starts, start(2, b"abc", [16], FULL)]), {0: "failed"})
    # Row 0 is left out of the step: its slot is poisoned. Row 2 fails in it.
    result = plane.run(step([(0, 3, 1), (1, 0, 3), (2, 0, 3)]), {1: "failed"})
    assert [failure.row for failure in result.row_failures] == [0, 2]
    assert [(e.sample, e.top.token_ids.size) for e in result.sample_logprobs] == [(1, 1)]


def test_the_most_likely_tokens_of_a_prompt_come_with_its_log_probabilities() -> None:
    plane = Plane()
    parts = {"starts": [start(0, b"abcd", [0])], "sampled": []}
    (plain,) = plane.run(step([(0, 0, 4)], prompt_logprobs=[0], **parts)).prompt_logprobs
    (entry,) = plane.run(
        step([(0, 0, 4)], prompt_logprobs=[0], num_prompt_logprobs=3, **parts)
    ).prompt_logprobs
    assert plain.top is None
    assert entry.logprobs.tolist() == plain.logprobs.tolist()
    assert entry.top is not None
    assert entry.top.token_ids.shape == entry.top.logprobs.shape == (3, 3)


@pytest.mark.parametrize("part", ["sample_logprobs", "prompt_top_logprobs", "shape"])
def test_an_answer_without_the_log_probabilities_asked_for_is_refused(part: str) -> None:
    plane = Plane()
    prepared = plane.slots.prepare(
        step(
            [(0, 0, 3)],
            starts=[start(0, b"abc", [0], FULL)],
            prompt_logprobs=[0],
            num_prompt_logprobs=1,
        )
    )
    assert prepared.batch is not None
    output = plane.executor.execute(prepared.batch)
    if part == "shape":
        (top,) = output.prompt_top_logprobs
        wrong = replace(output, prompt_top_logprobs=[TopLogprobs(top.token_ids, top.logprobs[:1])])
    else:
        wrong = replace(output, **{part: ()})
    with pytest.raises(ExecutionError, match="must return"):
        plane.slots.complete(prepared, wrong)


def test_a_start_takes_its_parameters_with_it_when_its_slot_is_released() -> None:
    plane = prefilled(FULL)
    plane.run(step(released=[0]))
    plane.run(step([(0, 0, 3)], starts=[start(0, b"abc", [0])]))
    assert plane.batches[1].sampling[0].is_plain
