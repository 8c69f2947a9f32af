"""Log-probabilities of prompts, through chunks, preemption and lost epochs."""

from __future__ import annotations

import pytest

from control_plane.core.batch import PromptLogprobs, StepResult, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from planes.errors import SchedulerError

TOKEN = 5


class Plane:
    """A scheduler, and results that say of each asked token its position and who asked."""

    def __init__(self, num_blocks=64, **limits):
        kv = KVCacheManager(num_blocks, 4, prefix_cache=True)
        self.scheduler = Scheduler(SchedulerConfig(**limits), kv)
        self.in_flight = []
        self.asked = []

    def ask(self, request_id, prompt, *, n=1, max_tokens=4, wants=2, uses_cache=False):
        request = Request(
            request_id,
            list(prompt),
            GenerationParams(max_tokens=max_tokens, seed=1, n=n, num_prompt_logprobs=wants),
            uses_cache=uses_cache,
        )
        self.scheduler.add_request(request)
        return request

    def send(self):
        self.in_flight.append(self.scheduler.schedule())
        return self.in_flight[-1]

    def result(self, output):
        batch = output.batch
        ids = output.decode_request_ids + output.prefill_request_ids
        entries = []
        for row, count in batch.prompt_logprobs:
            self.asked.append((ids[row], batch.positions[row], batch.query_lens[row], count))
            first = batch.positions[row] + 1
            # As a plane does: of every token known behind those of the row.
            given = tuple(
                TokenLogprobs(-float(position))
                for position in range(first, first + batch.query_lens[row])
            )
            entries.append(PromptLogprobs(row, first, given))
        sampled = [TOKEN] * len(batch.sampled_rows)
        return StepResult(batch.step_id, sampled, prompt_logprobs=tuple(entries))

    def commit(self):
        return self.scheduler.commit(self.result(self.in_flight.pop(0)))

    def run(self):
        while self.scheduler.has_pending_work():
            self.send()
            self.commit()


def positions(request):
    return [-entry.logprob for entry in request.prompt_logprobs]


def test_a_prompt_in_chunks_gives_one_entry_for_each_token_but_the_first():
    plane = Plane(max_total_tokens=5)
    request = plane.ask(1, range(1, 13))
    plane.run()
    assert positions(request) == list(range(1, 12))
    assert plane.asked == [(1, 0, 5, 2), (1, 5, 5, 2), (1, 10, 2, 2)]


def test_a_prompt_of_one_token_has_none_and_nothing_is_asked():
    plane = Plane()
    request = plane.ask(1, [7])
    plane.run()
    assert (positions(request), plane.asked) == ([], [])


def test_several_samples_have_their_prompt_in_common():
    plane = Plane(max_total_tokens=8)
    request = plane.ask(1, range(1, 11), n=3, wants=0)
    plane.run()
    assert positions(request) == list(range(1, 10))
    assert [asked[3] for asked in plane.asked] == [0, 0]


def test_nothing_is_asked_again_of_a_prompt_whose_entries_are_known():
    plane = Plane(num_blocks=8, memory_threshold=1.0)
    first = plane.ask(1, range(1, 10), max_tokens=20)
    second = plane.ask(2, range(21, 30), max_tokens=20)
    plane.run()
    assert plane.scheduler.get_stats().num_preemptions > 0
    assert positions(first) == positions(second) == list(range(1, 9))
    assert len(plane.asked) == 2


def test_a_prompt_computed_anew_after_a_lost_epoch_has_each_entry_once():
    plane = Plane(max_total_tokens=4)
    request = plane.ask(1, range(1, 13))
    plane.send()
    plane.commit()
    plane.send()
    plane.in_flight.clear()
    plane.scheduler.lose_epoch()
    assert positions(request) == [1, 2, 3, 4]
    plane.run()
    assert positions(request) == list(range(1, 12))


def test_tokens_known_behind_the_prompt_have_no_entries():
    plane = Plane()
    request = Request(
        1,
        list(range(1, 6)),
        GenerationParams(max_tokens=6, seed=1, num_prompt_logprobs=0),
        output_tokens=[TOKEN, TOKEN],
    )
    plane.scheduler.add_request(request)
    plane.run()
    assert positions(request) == [1, 2, 3, 4]
    assert request.output_tokens == [TOKEN] * 6


@pytest.mark.parametrize("row", [1, -1])
def test_a_result_for_a_row_that_is_not_there_is_refused(row):
    plane = Plane()
    plane.ask(1, range(1, 6))
    output = plane.send()
    wrong = StepResult(output.batch.step_id, [TOKEN], prompt_logprobs=(PromptLogprobs(row, 1, ()),))
    with pytest.raises(SchedulerError, match=f"log-probabilities of row {row}"):
        plane.scheduler.commit(wrong)
