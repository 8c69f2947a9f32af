"""A device that can be given the next step while it works is given it, and nobody can tell."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compute_plane.executor.decode_run import DecodeRun, PreparedStep
from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    LaunchedStep,
)
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    StepBatch,
    StepHeader,
    StepReply,
    StepTimings,
)
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.work import Work
from tests.compute_plane.executor.driven_device import PENALISED, TEXT, Driven, decode, prompts
from tests.compute_plane.executor.pipelined_executors import (
    TIMEOUT_S,
    DelayedExecutor,
)
from tests.compute_plane.executor.slot_batches import LIMITS, alone, start, step


def test_a_step_is_launched_before_the_one_before_it_is_read(driven: Driven):
    driven.send(prompts(0, 1))
    driven.send(decode(4, 1, 0))
    first, second = driven.launched(), driven.launched()
    assert not first.is_over
    assert driven.answers.empty()
    assert first.batch.input_sources is None
    assert second.batch.input_sources is not None
    assert second.batch.input_sources.tolist() == [1, 0]
    first.run()
    assert driven.tokens() == alone(TEXT, 1) * 2
    # In the block that the step before was writing it continues that one.
    driven.send(decode(5, 1, 0))
    third = driven.launched()
    assert third.batch.input_sources is not None
    assert third.batch.input_sources.tolist() == [0, 1]
    second.run()
    third.run()
    assert [driven.tokens() for _ in range(2)] == [[token] * 2 for token in alone(TEXT, 3)[1:]]


def test_no_step_is_prepared_before_all_but_the_last_are_answered():
    """Samples of two steps ahead of it would be missing where histories are read."""
    slots = SlotTable(LIMITS)
    slots.count_ahead(slots.prepare(prompts(0)))
    slots.count_ahead(slots.prepare(decode(4, 0)))
    with pytest.raises(RuntimeError, match="while 2 are not answered; at most 1"):
        slots.prepare(decode(5, 0))


def test_a_step_whose_tokens_are_known_by_then_names_no_samples(driven: Driven):
    driven.begin(0)
    driven.send(decode(4, 0))
    last = driven.launched()
    assert last.batch.input_sources is None
    assert last.batch.input_tokens.tolist() == alone(TEXT, 1)
    last.run()


def test_no_more_than_two_steps_are_under_way(driven: Driven):
    driven.send(prompts(0))
    for position in (4, 5, 6):
        driven.send(decode(position, 0))
    steps = [driven.launched(), driven.launched()]
    for _ in range(2):
        steps[-2].run()
        steps.append(driven.launched())
        assert len(driven.executor.steps) == len(steps)
    for under_way in steps[-2:]:
        under_way.run()
    assert [driven.tokens()[0] for _ in range(4)] == alone(TEXT, 4)


def test_a_run_of_steps_goes_on_while_the_last_one_is_under_way(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
):
    follow, waited_for = DecodeRun.follow, list[bool]()

    def noted(self: DecodeRun, *given: Any) -> PreparedStep:
        waited_for.append(given[-1] is not None)
        return follow(self, *given)

    monkeypatch.setattr(DecodeRun, "follow", noted)
    driven.begin(0)
    driven.send(decode(4, 0))
    driven.send(decode(5, 0))
    driven.launched().run()
    last = driven.launched()
    driven.tokens()
    driven.send(decode(6, 0))
    driven.launched()
    last.run()
    assert waited_for == [True, True]


def needing_the_host() -> dict[str, StepBatch]:
    return {
        "a token given behind the sample": step([(0, 4, 2)], tokens=[[65]]),
        "log-probabilities of the sample": step([(0, 4, 1)], prompt_logprobs=[0]),
        "a sample for a slot that awaits one": step([(0, 4, 1)], sampled=[0], sampled_slots=[1]),
        "digests": step([(0, 4, 1)], digest_blocks=[0]),
    }


@pytest.mark.parametrize("name", needing_the_host())
def test_what_needs_a_token_on_the_host_waits_for_it(driven: Driven, name: str):
    # Slots 0 and 1 have one table, as two samples of a request.
    starts = [start(slot, TEXT, range(8)) for slot in (0, 1)]
    driven.send(step([(0, 0, 4)], starts=starts, sampled=[0, 0], sampled_slots=[0, 1]))
    first = driven.launched()
    driven.send(needing_the_host()[name])
    first.run()
    driven.tokens()
    second = driven.launched()
    assert second.batch.input_sources is None
    assert second.batch.input_tokens[0] == alone(TEXT, 1)[0]
    second.run()
    assert driven.reply().result is not None


def test_penalties_do_not_wait_their_history_ends_with_the_sample_under_way(driven: Driven):
    driven.begin(0, 1, sampling=PENALISED)
    driven.send(decode(4, 0, 1))
    driven.send(decode(5, 0, 1))
    first, second = driven.launched(), driven.launched()
    for row in second.batch.sampling:
        assert row.penalties is not None
        assert row.penalties.history.tolist() == [*TEXT, *alone(TEXT, 1), 0]
    assert second.batch.input_sources is not None
    assert second.batch.input_sources.tolist() == [0, 1]
    first.run()
    second.run()


def test_the_device_does_not_idle_before_a_step_launched_in_time():
    """All on one thread, with a clock that ticks once a look."""
    executor = DelayedExecutor(num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)
    sessions, replies = SessionLedger(), list[StepReply]()
    ticks = itertools.count(1_000_000, 1_000_000)
    pipeline = StepPipeline(
        executor, SlotTable(LIMITS), sessions, lambda _: None, lambda: next(ticks)
    )
    session = sessions.open("test", take_over=False).session
    batches = [prompts(0), decode(4, 0), decode(5, 0), decode(6, 0)]
    for step_id, batch in enumerate(batches, 1):
        if step_id == 4:
            pipeline.finish_all()
        header = StepHeader(session, sessions.epoch, step_id, 0)
        pipeline.take(Work(header, batch, replies.append, 0))  # type: ignore[arg-type]
    pipeline.finish_all()
    # Begun, launched at  1, 2 │ 3, 4 │ 6, 7 │ 10, 11   done at  5 │ 8 │ 9 │ 12
    assert [reply.timings for reply in replies] == [
        StepTimings(queue_us=1000, execute_us=4000, idle_us=0),
        StepTimings(queue_us=5000, execute_us=3000, idle_us=0),
        StepTimings(queue_us=8000, execute_us=1000, idle_us=0),
        StepTimings(queue_us=10000, execute_us=2000, idle_us=2000),
    ]


def test_a_device_idles_where_it_is_over_with_a_step_before_the_next_one_has_been_launched():
    """Steps of a millisecond, of which each takes 1.4 to launch, answered while others wait."""

    class Told:
        """A step that says itself when the device had it and was over with it."""

        def __init__(self, step: LaunchedStep) -> None:
            self.step, self.begun_ns, self.ended_ns = step, now_ns, now_ns + 1_000_000

        def wait(self) -> None:
            self.step.wait()

        def answer(self) -> ExecutionOutput:
            return self.step.answer()

    class Slow(DelayedExecutor):
        def launch(self, batch: ExecutionBatch) -> Told:  # type: ignore[override]
            nonlocal now_ns
            now_ns += 1_400_000
            return Told(super().launch(batch))

    now_ns = 0
    executor = Slow(num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)
    sessions, replies = SessionLedger(), list[StepReply]()
    pipeline = StepPipeline(executor, SlotTable(LIMITS), sessions, lambda _: None, lambda: now_ns)
    session = sessions.open("test", take_over=False).session
    for step_id, batch in enumerate([prompts(0), decode(4, 0), decode(5, 0), decode(6, 0)], 1):
        header = StepHeader(session, sessions.epoch, step_id, 0)
        pipeline.take(Work(header, batch, replies.append, 0))  # type: ignore[arg-type]
    pipeline.finish_all()
    timings = [reply.timings for reply in replies]
    assert [timing.execute_us for timing in timings if timing] == [1000] * 4
    assert [timing.idle_us for timing in timings if timing] == [0, 400, 400, 400]


def test_a_step_took_until_it_was_done_not_until_somebody_had_time_to_answer_it():
    executor = DelayedExecutor(
        num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, is_driven_by_hand=True
    )
    sessions, replies = SessionLedger(), list[StepReply]()
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    now_ns = 1_000_000
    pipeline = StepPipeline(executor, SlotTable(LIMITS), sessions, calls.put, lambda: now_ns)
    pipeline.start()
    session = sessions.open("test", take_over=False).session
    header = StepHeader(session, sessions.epoch, 1, 0)
    pipeline.take(Work(header, prompts(0), replies.append, 0))  # type: ignore[arg-type]
    pipeline.rest()
    now_ns = 5_000_000
    executor.steps[0].run()
    answer = calls.get(timeout=TIMEOUT_S)
    now_ns = 9_000_000
    answer()
    assert [reply.timings for reply in replies] == [StepTimings(1000, 4000, 0)]
    pipeline.close()


def test_word_of_a_step_that_was_answered_meanwhile_ends_no_other_step():
    executor = DelayedExecutor(num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)
    sessions, replies = SessionLedger(), list[StepReply]()
    calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    pipeline = StepPipeline(executor, SlotTable(LIMITS), sessions, calls.put)
    pipeline.start()
    session = sessions.open("test", take_over=False).session
    for step_id, batch in enumerate([prompts(0), decode(4, 0)], 1):
        pipeline.finish_all()
        header = StepHeader(session, sessions.epoch, step_id, 0)
        pipeline.take(Work(header, batch, replies.append, 0))  # type: ignore[arg-type]
        pipeline.rest()
    calls.get(timeout=TIMEOUT_S)()
    assert len(replies) == len(pipeline.unanswered()) == 1
    executor.steps[1].run()
    calls.get(timeout=TIMEOUT_S)()
    assert len(replies) == 2
    pipeline.close()


def test_a_new_session_knows_no_slot_of_the_one_whose_step_is_under_way(driven: Driven):
    driven.begin(0)
    driven.send(decode(4, 0))
    under_way = driven.launched()
    driven.open()
    driven.send(decode(5, 0))  # which would be the old session's next step
    under_way.run()
    assert driven.tokens() == alone(TEXT, 2)[1:]
    refusal = driven.reply().refusal
    assert refusal is not None
    assert refusal.field == "slots[0]"


def test_answers_are_the_same_for_one_under_way_as_for_two(driven: Driven):
    tokens = [driven.begin(0)]
    for position in range(4, 12):
        driven.send(decode(position, 0))
        driven.launched().run()
        tokens.append(driven.tokens())
    assert np.concatenate(tokens).tolist() == alone(TEXT, 9)
