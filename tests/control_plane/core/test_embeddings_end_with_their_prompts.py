"""Requests that end with their prompts: through chunks, preemption, failures and lost epochs."""

from __future__ import annotations

from array import array
from collections import deque

import pytest

from control_plane.core.batch import RowEmbedding, RowFailure, StepResult
from control_plane.core.embedding import NOTHING_GENERATED, Embedding, Pooling
from control_plane.core.errors import ContextLengthError, RequestNeverFitsError
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.limits import RequestLimits
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from planes.errors import SchedulerError

LAST, MEAN = Pooling.LAST, Pooling.MEAN


class Plane:
    """A scheduler, and a plane of which the hidden state of a token is its position, and 1."""

    def __init__(self, num_blocks=64, *, prefix_cache=True, **limits):
        self.kv = KVCacheManager(num_blocks, 4, prefix_cache=prefix_cache)
        limits = {"embedding_size": 2, "max_embeddings": 64, **limits}
        self.scheduler = Scheduler(SchedulerConfig(**limits), self.kv)
        self.in_flight = deque()
        self.asked = []
        self.swapped = 0

    def ask(self, request_id, prompt, pooling=LAST, *, priority=0):
        embedding = Embedding(pooling)
        request = Request(
            request_id, list(prompt), NOTHING_GENERATED,
            uses_cache=pooling is LAST, priority=priority, embedding=embedding,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def generate(self, request_id, prompt, max_tokens=4, *, priority=0):
        params = GenerationParams(max_tokens=max_tokens, seed=1)
        request = Request(request_id, list(prompt), params, priority=priority)
        self.scheduler.add_request(request)
        return request

    def send(self):
        self.in_flight.append(self.scheduler.schedule())
        batch = self.in_flight[-1].batch
        self.swapped += len(batch.swap_in)
        return batch

    def result(self, failures=()):
        output = self.in_flight.popleft()
        batch, entries = output.batch, []
        ids = output.decode_request_ids + output.prefill_request_ids
        for row, is_sum in batch.embeddings:
            first, count = batch.positions[row], batch.query_lens[row]
            self.asked.append((ids[row], first, count, is_sum))
            places = range(first, first + count) if is_sum else [first + count - 1]
            if row not in {failure.row for failure in failures}:
                entries.append(RowEmbedding(row, array("d", [sum(places), len(places)])))
        return StepResult(
            batch.step_id,
            [5] * len(batch.sampled_rows),
            row_failures=tuple(failures),
            embeddings=tuple(entries),
        )

    def commit(self, failures=()):
        return self.scheduler.commit(self.result(failures))

    def run(self):
        events = []
        while self.scheduler.has_pending_work():
            self.send()
            events += self.commit()
        self.kv.check_invariants()
        assert self.kv.get_memory_stats().used_blocks == 0
        return events


def pooled(request):
    assert request.state is RequestState.COMPLETED
    assert request.embedding.num_tokens == len(request.input_tokens)
    return list(request.embedding.pooled)


def test_a_request_ends_with_its_prompt_and_nothing_is_sampled():
    plane = Plane()
    last, mean = plane.ask(1, range(10)), plane.ask(2, range(20, 27), MEAN)
    batch = plane.send()
    assert list(batch.sampled_rows) == []
    events = plane.commit()
    assert [(event.request_id, event.state, event.finish_reason) for event in events] == [
        (1, RequestState.COMPLETED, FinishReason.STOP),
        (2, RequestState.COMPLETED, FinishReason.STOP),
    ]
    assert pooled(last) == [9, 1]
    assert pooled(mean) == [3, 1]
    assert not plane.scheduler.has_pending_work()
    assert plane.kv.get_memory_stats().used_blocks == 0
    assert [change.state for change in last.history] == [
        RequestState.PENDING, RequestState.PREFILL, RequestState.COMPLETED,
    ]  # fmt: skip


def test_chunks_add_up_and_only_the_last_one_gives_what_is_last():
    plane = Plane(max_total_tokens=5)
    last, mean = plane.ask(1, range(12)), plane.ask(2, range(20, 28), MEAN)
    plane.run()
    assert pooled(last) == [11, 1]
    assert pooled(mean) == [3.5, 1]
    assert plane.asked == [
        (1, 10, 2, False), (2, 0, 3, True), (2, 3, 5, True),
    ]  # fmt: skip


def test_steps_are_sent_ahead_of_the_results_of_chunks():
    plane = Plane(max_total_tokens=5)
    mean = plane.ask(1, range(12), MEAN)
    for _ in range(3):
        plane.send()
    assert plane.scheduler.schedule() is None
    assert plane.commit() == plane.commit() == []
    assert len(plane.commit()) == 1
    assert pooled(mean) == [5.5, 1]


def test_a_mean_is_computed_whole_where_the_last_token_finds_what_is_cached():
    plane = Plane()
    plane.generate(1, range(12))
    plane.run()
    last, mean = plane.ask(2, range(12)), plane.ask(3, range(12), MEAN)
    plane.run()
    assert (last.cached_tokens, mean.cached_tokens) == (8, 0)
    assert plane.asked == [(2, 8, 4, False), (3, 0, 12, True)]
    assert pooled(mean) == [5.5, 1]


def test_what_an_embedding_has_left_is_found_by_others():
    plane = Plane()
    plane.ask(1, range(12))
    plane.run()
    found = plane.generate(2, range(12))
    plane.run()
    assert found.cached_tokens == 8


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_one_that_gave_way_in_the_middle_of_its_sum_gives_the_same(num_host_blocks):
    plane = Plane(8, max_total_tokens=3, num_host_blocks=num_host_blocks)
    first = plane.generate(1, range(4), max_tokens=24)
    plane.send()
    plane.commit()
    mean = plane.ask(2, range(20), MEAN, priority=1)
    plane.run()
    assert plane.scheduler.get_stats().num_preemptions > 0
    assert (plane.swapped > 0) == (num_host_blocks > 0)
    assert len(first.output_tokens) == 24
    assert pooled(mean) == [9.5, 1]


def test_a_lost_epoch_begins_the_sum_anew():
    plane = Plane(max_total_tokens=8)
    mean, last = plane.ask(1, range(30), MEAN), plane.ask(2, range(50, 60))
    for _ in range(2):
        plane.send()
    plane.commit()
    plane.in_flight.clear()
    plane.scheduler.lose_epoch(7)
    plane.run()
    assert pooled(mean) == [14.5, 1]
    assert pooled(last) == [9, 1]


def test_a_failed_row_fails_its_request_alone():
    plane = Plane()
    bad, good = plane.ask(1, range(10), MEAN), plane.ask(2, range(20, 30))
    plane.send()
    plane.commit([RowFailure(0, "no numbers")])
    assert (bad.state, bad.error) == (RequestState.FAILED, "no numbers")
    assert pooled(good) == [9, 1]
    assert not plane.scheduler.has_pending_work()


def test_one_that_is_cancelled_under_way_frees_what_it_holds():
    plane = Plane(max_total_tokens=5)
    mean = plane.ask(1, range(12), MEAN)
    plane.send()
    plane.send()
    plane.scheduler.cancel(1)
    plane.commit()
    assert plane.kv.get_memory_stats().used_blocks > 0
    plane.commit()
    assert mean.state is RequestState.CANCELLED
    assert plane.kv.get_memory_stats().used_blocks == 0


def test_what_comes_of_one_that_was_cancelled_with_its_last_row_sent_ends_nothing():
    plane = Plane()
    request = plane.ask(1, range(12))
    plane.send()
    plane.scheduler.cancel(1)
    assert plane.commit() == []
    assert request.state is RequestState.CANCELLED


def test_one_that_borrowed_the_blocks_of_a_failed_row_is_computed_anew():
    plane = Plane()
    plane.generate(1, range(12))
    request = plane.ask(2, range(12))
    plane.send()
    assert request.cached_tokens == 8
    events = plane.commit([RowFailure(0, "no numbers")])
    assert [event.request_id for event in events] == [1]
    assert request.state is RequestState.PENDING
    plane.run()
    assert plane.asked[-1] == (2, 0, 12, False)
    assert pooled(request) == [11, 1]


def test_no_more_rows_give_hidden_states_than_a_result_has_room_for():
    plane = Plane(max_embeddings=2)
    for number in range(5):
        plane.ask(number, [number, 1, 2])
    plane.generate(9, range(7))
    sizes = []
    while plane.scheduler.has_pending_work():
        sizes.append(len(plane.send().embeddings))
        plane.commit()
    assert sizes[:3] == [2, 2, 1]


def test_a_result_without_what_was_asked_for_is_no_result_of_the_step():
    for values in ([], [RowEmbedding(0, array("d", [1.0]))]):
        plane = Plane()
        plane.ask(1, range(10))
        batch = plane.send()
        with pytest.raises(SchedulerError, match="wants 2 hidden states of rows"):
            plane.scheduler.commit(StepResult(batch.step_id, [], embeddings=tuple(values)))


def test_it_moves_to_another_scheduler_and_begins_anew_there():
    plane, other = Plane(max_total_tokens=8), Plane(max_total_tokens=8)
    mean = plane.ask(1, range(30), MEAN)
    plane.send()
    plane.commit()
    plane.scheduler.lose_epoch()
    [moved] = plane.scheduler.withdraw()
    assert other.scheduler.adopt(moved) == 1
    other.run()
    assert pooled(mean) == [14.5, 1]


def test_a_prompt_may_be_as_long_as_the_model_takes_and_no_longer():
    limits = RequestLimits(max_model_len=16, block_size=4, num_blocks=4)
    limits.check(16, 0)
    with pytest.raises(ContextLengthError, match=r"17 tokens, max_model_len \(16\) .* at most 16$"):
        limits.check(17, 0)
    with pytest.raises(RequestNeverFitsError):
        RequestLimits(max_model_len=32, block_size=4, num_blocks=4).check(17, 0)
    plane = Plane(4, max_model_len=16)
    assert pooled_after_run(plane, plane.ask(1, range(16), MEAN)) == [7.5, 1]


def pooled_after_run(plane, request):
    plane.run()
    return pooled(request)


def test_a_gap_in_a_sum_is_a_fault():
    embedding = Embedding(MEAN)
    embedding.take(0, 3, array("d", [1.0]))
    with pytest.raises(SchedulerError, match="has 3 tokens, the next row begins with token 4"):
        embedding.take(4, 1, array("d", [1.0]))
