"""A device that can be given the next step while it works is given it, and nobody can tell."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from compute_plane.errors import (
    BatchFailed,
    DeviceLostError,
    InvalidBatch,
    PlaneBroken,
    StaleSession,
    StepGap,
)
from compute_plane.executor.decode_run import DecodeRun, PreparedStep
from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    RowFailureReason,
    SamplingKey,
    StepBatch,
    StepHeader,
    StepReply,
    StepTimings,
    TableCopy,
)
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.work import Work
from tests.compute_plane.executor.pipelined_executors import (
    TIMEOUT_S,
    DelayedExecutor,
    DelayedStep,
)
from tests.compute_plane.executor.slot_batches import GREEDY, LIMITS, alone, start, step

TEXT = b"text"
PENALISED = SamplingKey(0.0, 1.0, 0, 0, presence_penalty=1.0)


class Driven:
    """A device thread over an executor that the test drives by hand."""

    def __init__(self) -> None:
        self.executor = DelayedExecutor(
            num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size, is_driven_by_hand=True
        )
        self.sessions = SessionLedger()
        self.broken = threading.Event()
        self.slots = SlotTable(LIMITS)
        self.device = DeviceThread(self.executor, self.slots, self.sessions, self.broken.set)
        self.answers: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.device.start()
        self.num_seen = 0
        self.open()

    def open(self) -> None:
        self.session = self.sessions.open("test", take_over=True).session
        self.last_step = 0

    def send(self, batch: StepBatch, step_id: int | None = None) -> None:
        self.last_step = self.last_step + 1 if step_id is None else step_id
        header = StepHeader(self.session, self.sessions.epoch, self.last_step, 0)
        self.device.submit(header, batch, self.answers.put)

    def launched(self) -> DelayedStep:
        """The next step that is launched."""
        assert self.executor.launches.acquire(timeout=TIMEOUT_S)
        self.num_seen += 1
        return self.executor.steps[self.num_seen - 1]

    def reply(self) -> StepReply:
        answer = self.answers.get(timeout=TIMEOUT_S)
        assert isinstance(answer, StepReply)
        return answer

    def tokens(self) -> list[int]:
        """Of the next reply, in which nothing fails."""
        result = self.reply().result
        assert result is not None
        assert not result.row_failures
        tokens: list[int] = result.sampled_token_ids.tolist()
        return tokens

    def begin(self, *slots: int, sampling: SamplingKey = GREEDY) -> list[int]:
        """Start slots with the text and run that; their first tokens."""
        self.send(prompts(*slots, sampling=sampling))
        self.launched().run()
        return self.tokens()


def prompts(*slots: int, sampling: SamplingKey = GREEDY) -> StepBatch:
    """Rows that compute the text in some slots; slot s has the blocks from 8s on."""
    starts = [start(slot, TEXT, range(8 * slot, 8 * slot + 8), sampling) for slot in slots]
    return step([(slot, 0, len(TEXT)) for slot in slots], starts=starts)


def decode(position: int, *slots: int) -> StepBatch:
    return step([(slot, position, 1) for slot in slots])


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven()
    yield made
    made.executor.is_driven_by_hand = False
    for launched in made.executor.steps:
        launched.run()
    assert made.device.stop(TIMEOUT_S)


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


def test_a_row_that_fails_fails_its_row_of_the_step_already_launched(driven: Driven):
    driven.begin(0, 1, 2)
    driven.send(decode(4, 0, 1, 2))
    driven.send(decode(5, 2, 1, 0))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    second.failed_rows = {1: "not finite either"}
    second.run()
    replies = [driven.reply().result, driven.reply().result]
    seen = [
        [(failure.row, failure.reason) for failure in reply.row_failures]
        for reply in replies
        if reply is not None
    ]
    assert seen == [[(1, RowFailureReason.NOT_FINITE)], [(1, RowFailureReason.POISONED)]]
    assert replies[1] is not None
    assert replies[1].sampled_token_ids[[0, 2]].tolist() == [alone(TEXT, 3)[-1]] * 2
    driven.send(decode(6, 0, 1, 2))
    last = driven.launched()
    assert last.batch.seq_lens.tolist() == [7, 7]
    last.run()
    assert [failure.row for failure in driven.reply().result.row_failures] == [1]  # type: ignore[union-attr]


def test_a_row_that_failed_is_not_taken_along_by_the_run_it_was_in(driven: Driven):
    driven.begin(0, 1)
    for position in (4, 5):
        driven.send(decode(position, 0, 1))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    driven.reply()
    driven.send(decode(6, 0, 1))
    third = driven.launched()
    second.run()
    third.run()
    for _ in range(2):
        result = driven.reply().result
        assert result is not None
        assert [(failure.row, failure.reason) for failure in result.row_failures] == [
            (1, RowFailureReason.POISONED)
        ]
    assert third.batch.seq_lens.tolist() == [7]


def test_samples_for_a_slot_that_failed_need_no_room_in_it(driven: Driven):
    driven.begin(0)
    longest = LIMITS.context_length
    driven.send(step([(1, 0, longest)], starts=[start(1, b"a" * longest, range(8, 18))]))
    full = driven.launched()
    full.failed_rows = {0: "not finite"}
    full.run()
    driven.reply()
    for position, tokens in ((4, []), (5, [65]), (6, [65])):
        batch = step([(0, position, 1)], tokens=[tokens], sampled=[0], sampled_slots=[1])
        driven.send(batch)
        driven.launched().run()
        assert driven.reply().result is not None


def test_the_next_part_of_a_prompt_that_failed_has_no_log_probabilities(driven: Driven):
    first_part = step(
        [(0, 0, 4)], starts=[start(0, b"prompted", range(8))], sampled=[], prompt_logprobs=[0]
    )
    driven.send(first_part)
    driven.send(step([(0, 4, 4)], sampled=[], prompt_logprobs=[0]))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {0: "not finite"}
    first.run()
    second.run()
    driven.reply()
    result = driven.reply().result
    assert result is not None
    assert [failure.reason for failure in result.row_failures] == [RowFailureReason.POISONED]
    assert not result.prompt_logprobs


def test_a_slot_started_again_outlives_the_late_failure_of_its_former_life(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0, 1))
    again = start(1, b"again", range(16, 24))
    driven.send(step([(0, 5, 1), (1, 0, 5)], starts=[again]))
    first, second = driven.launched(), driven.launched()
    first.failed_rows = {1: "not finite"}
    first.run()
    second.run()
    assert [failure.row for failure in driven.reply().result.row_failures] == [1]  # type: ignore[union-attr]
    assert driven.tokens() == [alone(TEXT, 3)[-1], *alone(b"again", 1)]


def test_a_step_that_fails_as_a_whole_takes_its_slots_of_the_next_step_along(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    driven.send(step([(0, 5, 1), (1, 4, 1)]))
    first, second = driven.launched(), driven.launched()
    first.failure = RuntimeError("the device is ill")
    first.run()
    second.run()
    refusal = driven.reply()
    assert isinstance(refusal.refusal, BatchFailed)
    assert (refusal.header.step_id, refusal.expected_step) == (2, 3)
    result = driven.reply().result
    assert result is not None
    assert [(failure.row, failure.reason) for failure in result.row_failures] == [
        (0, RowFailureReason.POISONED)
    ]
    assert result.sampled_token_ids[1] == alone(TEXT, 2)[-1]


def test_a_slot_in_the_memory_of_a_released_one_outlives_the_failure_of_its_release(
    driven: Driven,
):
    """The failing step copies a block of the slot that it releases."""
    driven.begin(0, 1)
    copies = [TableCopy(0, 1, 1, 40)]
    driven.send(step([(1, 4, 1)], copies=copies, released=[0]))
    driven.send(prompts(2))
    first, second = driven.launched(), driven.launched()
    first.failure = RuntimeError("the device is ill")
    first.run()
    second.run()
    assert isinstance(driven.reply().refusal, BatchFailed)
    assert driven.tokens() == alone(TEXT, 1)


def test_a_sample_for_another_slot_waits_for_the_token_its_row_computes(driven: Driven):
    """The history of the other slot ends with a token of its own, whatever the row's is."""
    starts = [start(0, TEXT, range(8)), start(1, b"text!", range(8), PENALISED)]
    driven.send(step([(0, 0, 4)], starts=starts))
    first = driven.launched()
    driven.send(step([(0, 4, 1)], sampled=[0], sampled_slots=[1]))
    first.run()
    driven.tokens()
    second = driven.launched()
    assert second.batch.input_sources is None
    (row,) = second.batch.sampling
    assert row.penalties is not None
    assert row.penalties.history.tolist() == list(b"text!")
    second.run()


def refused_batches() -> dict[str, StepBatch]:
    return {
        "positions[0]": decode(9, 0),
        "slots[1]": step([(0, 4, 1), (5, 0, 1)]),
        "copies[0].source_block": step([(0, 4, 1)], copies=[TableCopy(0, 0, 7, 9)]),
    }


@pytest.mark.parametrize("field", refused_batches())
def test_a_refusal_is_answered_after_the_step_under_way(driven: Driven, field: str):
    driven.send(prompts(0))
    driven.send(refused_batches()[field])
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 1)
    reply = driven.reply()
    assert isinstance(reply.refusal, InvalidBatch)
    assert (reply.refusal.field, reply.expected_step) == (field, 3)
    driven.send(decode(4, 0))
    driven.launched().run()
    assert driven.tokens() == alone(TEXT, 2)[1:]


def test_a_launch_that_fails_is_answered_after_the_step_under_way(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0, 1))
    first = driven.launched()
    driven.executor.launch_failure = RuntimeError("no more memory")
    driven.send(decode(5, 0))
    first.run()
    assert driven.tokens() == alone(TEXT, 2)[1:] * 2
    assert isinstance(driven.reply().refusal, BatchFailed)
    driven.send(decode(5, 0, 1))
    driven.launched().run()
    result = driven.reply().result
    assert result is not None
    assert [failure.row for failure in result.row_failures] == [0]
    assert result.sampled_token_ids[1] == alone(TEXT, 3)[-1]


def test_a_batch_without_rows_is_answered_after_the_step_under_way(driven: Driven):
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    driven.send(step(released=[1]))
    driven.launched().run()
    assert [driven.reply().header.step_id for _ in range(2)] == [2, 3]


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


def test_a_take_over_lets_both_steps_under_way_end_first(driven: Driven):
    driven.send(prompts(0))
    driven.send(decode(4, 0))
    first, second = driven.launched(), driven.launched()
    late = StepHeader(driven.session, driven.sessions.epoch, 3, 0)
    driven.open()
    # As many steps as are under way by then are not steps of the new session.
    driven.send(decode(5, 0), step_id=2)
    driven.device.submit(late, decode(5, 0), driven.answers.put)
    driven.send(prompts(0), step_id=1)
    first.run()
    second.run()
    third = driven.launched()
    third.run()
    assert [driven.tokens()[0] for _ in range(2)] == alone(TEXT, 2)
    assert isinstance(driven.reply().refusal, StepGap)
    assert isinstance(driven.reply().refusal, StaleSession)
    last = driven.reply()
    assert (last.header.session, last.header.step_id) == (driven.session, 1)
    assert driven.sessions.state.last_step == 1


def test_a_batch_sent_again_is_answered_once_more_when_it_has_run(driven: Driven):
    """As after a stream that broke: what is under way comes again, oldest first."""
    driven.send(prompts(0))
    driven.send(decode(4, 0))
    first, second = driven.launched(), driven.launched()
    driven.send(prompts(0), step_id=1)
    driven.send(decode(4, 0), step_id=2)
    driven.send(decode(9, 0), step_id=7)
    first.run()
    second.run()
    replies = [driven.reply() for _ in range(5)]
    assert [reply.header.step_id for reply in replies] == [1, 2, 1, 2, 7]
    assert replies[0] is replies[2]
    assert replies[1] is replies[3]
    assert isinstance(replies[4].refusal, StepGap)
    assert len(driven.executor.steps) == 2


def test_stopping_answers_both_steps_under_way(driven: Driven):
    driven.send(prompts(0))
    driven.send(decode(4, 0))
    first, second = driven.launched(), driven.launched()
    stopped: queue.SimpleQueue[bool] = queue.SimpleQueue()
    stopping = threading.Thread(target=lambda: stopped.put(driven.device.stop(TIMEOUT_S)))
    stopping.start()
    first.run()
    second.run()
    assert stopped.get(timeout=TIMEOUT_S)
    stopping.join()
    assert [driven.tokens()[0] for _ in range(2)] == alone(TEXT, 2)


def test_a_fault_of_the_plane_is_the_answer_to_everything_under_way(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
):
    driven.send(prompts(0))
    driven.send(decode(4, 0))
    first, second = driven.launched(), driven.launched()

    def fail(*_: object) -> None:
        raise LookupError("a fault of the plane's own")

    monkeypatch.setattr(driven.sessions, "record", fail)
    first.run()
    assert driven.broken.wait(TIMEOUT_S)
    assert [type(driven.answers.get(timeout=TIMEOUT_S)) for _ in range(2)] == [PlaneBroken] * 2
    second.run()


@pytest.mark.parametrize("is_known_at_launch", [False, True])
def test_a_lost_device_ends_the_plane_and_is_the_answer_to_everything(
    driven: Driven, is_known_at_launch: bool
):
    driven.begin(0, 1)
    driven.send(decode(4, 0))
    first = driven.launched()
    if is_known_at_launch:
        driven.executor.launch_failure = DeviceLostError("an illegal address")
        driven.send(decode(4, 1))
    else:
        first.failure = DeviceLostError("an illegal address")
        driven.send(decode(5, 0))
        driven.launched()
    first.run()
    assert driven.broken.wait(TIMEOUT_S)
    assert [type(driven.answers.get(timeout=TIMEOUT_S)) for _ in range(2)] == [PlaneBroken] * 2
    with pytest.raises(PlaneBroken):
        driven.send(decode(6, 0))


def test_a_device_that_is_stuck_is_not_well(driven: Driven):
    assert driven.device.is_well(0.0)
    driven.send(prompts(0))
    driven.send(decode(4, 0))
    first, second = driven.launched(), driven.launched()
    assert driven.device.is_well(2 * TIMEOUT_S)
    assert not driven.device.is_well(0.0)
    first.run()
    driven.reply()
    assert not driven.device.is_well(0.0)
    second.run()
    driven.reply()
    assert driven.device.is_well(0.0)


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
    calls.get(timeout=TIMEOUT_S)()
    assert len(replies) == len(pipeline.unanswered()) == 1
    executor.steps[1].run()
    calls.get(timeout=TIMEOUT_S)()
    assert len(replies) == 2
    pipeline.close()


def test_answers_are_the_same_for_one_under_way_as_for_two(driven: Driven):
    tokens = [driven.begin(0)]
    for position in range(4, 12):
        driven.send(decode(position, 0))
        driven.launched().run()
        tokens.append(driven.tokens())
    assert np.concatenate(tokens).tolist() == alone(TEXT, 9)
