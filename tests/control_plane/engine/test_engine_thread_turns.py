from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from control_plane.engine.gate import Gate
from control_plane.engine.thread import EngineThread
from control_plane.errors import (
    ComputeUnavailableError,
    DrainingError,
    EngineStoppedError,
    FencedError,
    PlaneMismatchError,
)

TIMEOUT_S = 30.0


class Loop:
    """A loop whose turns wait until they are woken, and may be held up."""

    failed_with: Exception | None = None

    def __init__(self) -> None:
        self.woken, self.turned = threading.Semaphore(0), threading.Semaphore(0)
        self.may_turn = threading.Event()
        self.may_turn.set()

    def step(self) -> None:
        pass

    def turn(self) -> None:
        assert self.woken.acquire(timeout=TIMEOUT_S)
        assert self.may_turn.wait(TIMEOUT_S)
        self.turned.release()

    def wake(self) -> None:
        self.woken.release()

    def fail_all(self, error: Exception) -> None:
        self.failed_with = error

    def close(self) -> None:
        pass


def test_an_idle_engine_turns_when_it_is_asked_and_a_stuck_one_does_not():
    loop, faults = Loop(), []
    thread = EngineThread(loop, on_fault=faults.append)  # type: ignore[arg-type]
    thread.start()
    assert not thread.has_turned()  # nothing woke it before
    for _ in range(3):
        # A turn is counted just behind its end, so the question may come too early once.
        assert loop.turned.acquire(timeout=TIMEOUT_S)
        while not thread.has_turned():
            assert loop.turned.acquire(timeout=TIMEOUT_S)
    loop.may_turn.clear()
    answers = [thread.has_turned() for _ in range(1000)]
    assert not any(answers[-100:])
    loop.may_turn.set()
    thread.stop(TIMEOUT_S)
    assert not faults


@pytest.mark.parametrize(
    ("fault", "ends_as", "then"),
    [
        (FencedError("another took it"), ComputeUnavailableError, DrainingError),
        (PlaneMismatchError("other", field="model"), EngineStoppedError, EngineStoppedError),
        (ValueError("ours"), EngineStoppedError, EngineStoppedError),
    ],
    ids=["fenced", "mismatch", "ours"],
)
def test_requests_may_go_on_if_another_controller_took_the_plane_and_not_after_another_fault(
    fault, ends_as, then
):
    loop, faults = Loop(), SimpleQueue()

    def fail() -> None:
        raise fault

    loop.step = fail
    EngineThread(loop, on_fault=faults.put).start()  # type: ignore[arg-type]
    assert faults.get(timeout=TIMEOUT_S) is fault
    assert type(loop.failed_with) is ends_as
    assert loop.failed_with.field is None
    assert str(loop.failed_with) == f"the engine stopped: {fault}"
    gate = Gate()
    gate.stop(fault)
    gate.set_linked(is_linked=True)
    with pytest.raises(then):
        gate.check()
