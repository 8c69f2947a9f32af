"""Sessions change, batches come twice, planes stop and break while two steps are under way."""

from __future__ import annotations

import queue
import threading

import pytest

from compute_plane.errors import (
    DeviceLostError,
    PlaneBroken,
    StaleSession,
    StepGap,
)
from compute_plane.executor.step import (
    StepHeader,
)
from tests.compute_plane.executor.driven_device import TEXT, Driven, decode, prompts
from tests.compute_plane.executor.pipelined_executors import (
    TIMEOUT_S,
)
from tests.compute_plane.executor.slot_batches import alone


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
