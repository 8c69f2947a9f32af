from __future__ import annotations

import numpy as np
import pytest

from compute_plane.errors import (
    InvalidBatch,
    SessionFenced,
    SessionHeld,
    StaleEpoch,
    StaleSession,
    StepGap,
)
from compute_plane.executor.sessions import LEASE_S, MAX_KEPT_REPLIES, SessionLedger
from compute_plane.executor.step import StepHeader, StepReply, StepResult
from planes.errors import EngineError


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FakeStream:
    def __init__(self) -> None:
        self.reasons: list[EngineError] = []

    def end(self, reason: EngineError) -> None:
        self.reasons.append(reason)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(clock: Clock) -> SessionLedger:
    return SessionLedger(clock)


def run(ledger: SessionLedger, step_id: int, session: int = 1, acked: int = 0) -> StepReply:
    """Admit a step and note that it has run."""
    header = StepHeader(session, ledger.epoch, step_id, acked)
    assert ledger.admit(header) is None
    reply = StepReply(header, result=StepResult(np.zeros(0, dtype=np.int32)))
    ledger.record(reply)
    return reply


def test_every_plane_has_an_epoch_of_its_own():
    assert len({SessionLedger().epoch for _ in range(20)}) == 20


def test_a_session_just_opened_is_alive_for_its_lease(ledger: SessionLedger, clock: Clock):
    ledger.open("a", take_over=False)
    clock.now_s += LEASE_S * 0.9
    with pytest.raises(SessionHeld, match="session 1 of controller 'a'"):
        ledger.open("b", take_over=False)
    clock.now_s += LEASE_S * 0.2
    assert ledger.open("b", take_over=False).session == 2


def test_a_unary_call_extends_the_lease(ledger: SessionLedger, clock: Clock):
    ledger.open("a", take_over=False)
    for _ in range(3):
        clock.now_s += LEASE_S * 0.9
        ledger.touch(1)
    with pytest.raises(SessionHeld):
        ledger.open("b", take_over=False)


def test_a_session_is_alive_as_long_as_its_stream(ledger: SessionLedger, clock: Clock):
    stream = FakeStream()
    ledger.open("a", take_over=False)
    ledger.expect(stream)  # nothing sent yet
    clock.now_s += LEASE_S * 100
    with pytest.raises(SessionHeld):
        ledger.open("b", take_over=False)
    ledger.attach(1, stream)
    ledger.detach(stream)
    assert ledger.open("b", take_over=False).session == 2
    assert not stream.reasons


def test_a_session_whose_stream_has_ended_is_free_at_once_even_if_just_opened(
    ledger: SessionLedger,
):
    stream = FakeStream()
    ledger.open("a", take_over=False)
    ledger.expect(stream)
    ledger.detach(stream)
    assert ledger.open("b", take_over=False).session == 2


def test_a_resumed_session_is_alive_before_its_next_stream_is_there(
    ledger: SessionLedger, clock: Clock
):
    ledger.open("a", take_over=False)
    stream = FakeStream()
    ledger.attach(1, stream)
    clock.now_s += LEASE_S * 5
    ledger.detach(stream)
    ledger.resume(1, ledger.epoch)
    clock.now_s += LEASE_S * 0.9
    with pytest.raises(SessionHeld):
        ledger.open("b", take_over=False)


def test_a_stream_that_was_replaced_stays_so_whatever_it_still_brings(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    older, newer = FakeStream(), FakeStream()
    ledger.attach(1, older)
    ledger.resume(1, ledger.epoch)
    ledger.expect(newer)
    ledger.attach(1, older)
    assert newer.reasons == []
    assert [type(reason) for reason in older.reasons] == [SessionFenced]


def test_an_expected_stream_of_another_session_does_not_count(ledger: SessionLedger):
    stream = FakeStream()
    ledger.open("a", take_over=False)
    ledger.open("b", take_over=True)
    ledger.expect(stream)
    ledger.attach(1, stream)
    assert ledger.open("c", take_over=False).session == 3
    assert not stream.reasons


def test_taking_over_ends_the_stream(ledger: SessionLedger):
    stream = FakeStream()
    ledger.open("a", take_over=False)
    ledger.attach(1, stream)
    ledger.open("b", take_over=True)
    assert [type(reason) for reason in stream.reasons] == [SessionFenced]
    with pytest.raises(StaleSession):
        run(ledger, 1, session=1)


def test_steps_follow_one_another(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    run(ledger, 1)
    run(ledger, 2)
    for wrong in (4, 5000):
        with pytest.raises(StepGap, match="must be 3"):
            run(ledger, wrong)
    assert ledger.state.last_step == 2


def test_a_kept_reply_is_repeated_until_it_is_acknowledged(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    replies = [run(ledger, step_id) for step_id in (1, 2, 3)]
    for step_id in (2, 3):
        header = StepHeader(1, ledger.epoch, step_id, 1)
        assert ledger.admit(header) is replies[step_id - 1]
    with pytest.raises(StepGap):
        ledger.admit(StepHeader(1, ledger.epoch, 1, 0))


def test_a_step_that_has_run_is_never_run_again(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    run(ledger, 1)
    with pytest.raises(StepGap):
        ledger.admit(StepHeader(1, ledger.epoch, 9, 1))  # acknowledges step 1 all the same
    with pytest.raises(StepGap, match="must be 2, got 1"):
        ledger.admit(StepHeader(1, ledger.epoch, 1, 0))


def test_replies_nobody_acknowledges_are_bounded(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    for step_id in range(1, MAX_KEPT_REPLIES + 11):
        run(ledger, step_id)
    with pytest.raises(StepGap):
        ledger.admit(StepHeader(1, ledger.epoch, 10, 0))
    assert ledger.admit(StepHeader(1, ledger.epoch, 11, 0)) is not None


def test_a_refused_step_may_not_come_again_once_the_next_one_is_under_way(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    header = StepHeader(1, ledger.epoch, 1, 0)
    ledger.record(StepReply(header, refusal=InvalidBatch("planted")))
    assert ledger.admit(StepHeader(1, ledger.epoch, 2, 0)) is None
    with pytest.raises(StepGap, match="must be 3"):
        ledger.admit(header, num_under_way=1)
    assert ledger.admit(StepHeader(1, ledger.epoch, 3, 0), num_under_way=1) is None


def test_a_refused_step_may_come_again_or_be_passed_over(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    header = StepHeader(1, ledger.epoch, 1, 0)
    ledger.record(StepReply(header, refusal=InvalidBatch("no")))
    run(ledger, 1)
    ledger.record(StepReply(StepHeader(1, ledger.epoch, 2, 0), refusal=InvalidBatch("no")))
    run(ledger, 3)
    with pytest.raises(StepGap):
        run(ledger, 2)


def test_a_step_of_a_session_taken_over_while_it_ran_is_not_recorded(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    header = StepHeader(1, ledger.epoch, 1, 0)
    ledger.admit(header)
    ledger.open("b", take_over=True)
    ledger.record(StepReply(header, result=StepResult(np.zeros(0, dtype=np.int32))))
    assert ledger.state.last_step == 0
    run(ledger, 1, session=2)


def test_another_epoch_is_stale(ledger: SessionLedger):
    ledger.open("a", take_over=False)
    with pytest.raises(StaleEpoch):
        ledger.admit(StepHeader(1, ledger.epoch + 2, 1, 0))
