"""Waits for steps of a device that is a clock: who sleeps how long, and what is learned of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from compute_plane.cuda.step_times import (
    AWAKE_S,
    GROWTH,
    SHRINKING,
    WATCHED_AT_FIRST,
    WOKEN_LATE_S,
    StepTimes,
    TimedStep,
)

KIND, OTHER = 8, 32
STEP_S = 1e-3


@dataclass
class Device:
    """It works on one step after the other, `late_s` behind their time wake all who sleep.

    `sleeps`: how long each was meant to be. `watched_s`: time in which somebody looked.
    """

    now_s: float = 100.0
    late_s: float = 0.0
    free_at_s: float = 0.0
    watched_s: float = 0.0
    sleeps: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.times = StepTimes(lambda: self.now_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_s += seconds + self.late_s

    def launch(self, takes_s: float = STEP_S, kind: int | None = KIND) -> tuple[TimedStep, End]:
        self.free_at_s = max(self.free_at_s, self.now_s) + takes_s
        return self.times.begin(kind), End(self, self.free_at_s)

    def run(self, takes_s: float = STEP_S, kind: int = KIND) -> float:
        """Let one step run by itself and wait for it; return how late its end was seen."""
        step, end = self.launch(takes_s, kind)
        step.end(end).wait()
        return self.now_s - end.at_s


@dataclass
class End:
    device: Device
    at_s: float

    def is_done(self) -> bool:
        return self.device.now_s >= self.at_s

    def wait(self) -> None:
        left_s = self.at_s - self.device.now_s
        if left_s > 0:
            self.device.watched_s += left_s
            self.device.now_s = self.at_s


def known(late_s: float = 0.0, takes_s: float = STEP_S) -> Device:
    """A device of which a kind is known."""
    device = Device()
    for _ in range(WATCHED_AT_FIRST):
        assert device.run(takes_s) == 0
    assert device.sleeps == []
    device.watched_s, device.late_s = 0.0, late_s
    return device


def test_the_first_steps_of_a_kind_are_watched_and_the_next_ones_slept_through_but_for_their_ends():
    device = known()
    for _ in range(10):
        assert device.run() == 0
    assert device.sleeps == [pytest.approx(STEP_S - AWAKE_S)] * 10
    assert device.watched_s == pytest.approx(10 * AWAKE_S)


def test_a_slow_first_step_is_not_believed():
    device = Device()
    assert device.run(500 * STEP_S) == 0
    assert [device.run() for _ in range(20)] == [0] * 20
    assert len(device.sleeps) == 19


def test_a_step_launched_behind_another_one_is_expected_from_the_end_of_that():
    device = known()
    first, second = device.launch(), device.launch()
    for step, end in (first, second):
        step.end(end).wait()
        assert device.now_s == end.at_s == pytest.approx(step.ended_s)
    assert device.sleeps == [pytest.approx(STEP_S - AWAKE_S)] * 2


def test_sleepers_allow_for_how_late_this_machine_wakes_them():
    device = known(late_s=200e-6)
    late = [device.run() for _ in range(5)]
    assert late == [pytest.approx(150e-6), 0, 0, 0, 0]
    assert device.sleeps[-1] == pytest.approx(STEP_S - AWAKE_S - 200e-6)
    device.late_s = 0.0
    for _ in range(100):
        assert device.run() == 0
    assert device.sleeps[-1] == pytest.approx(STEP_S - AWAKE_S, rel=0.01)


def test_one_very_late_wake_does_not_keep_waiters_awake():
    device = known(late_s=2 * STEP_S)
    assert device.run() > 0
    device.late_s, device.watched_s = 0.0, 0.0
    for _ in range(200):
        device.run()
    assert len(device.sleeps) == 201
    assert device.watched_s < 0.2 * 200 * STEP_S


def test_steps_that_get_shorter_are_overslept_a_few_times_only():
    device = known(takes_s=8 * STEP_S)
    late = [device.run() for _ in range(12)]
    overslept = [seconds for seconds in late if seconds > 0]
    assert overslept[0] == pytest.approx(7 * STEP_S - AWAKE_S)
    assert overslept[1] == pytest.approx(8 * SHRINKING * STEP_S - AWAKE_S - STEP_S)
    assert len(overslept) == 3  # 8, 4 and 2 times as long as it takes, less `AWAKE_S`
    assert late[3:] == [0] * 9


def test_one_slow_step_lets_nobody_oversleep_the_next_one():
    device = known()
    assert [device.run(seconds) for seconds in (STEP_S, 20 * STEP_S, STEP_S)] == [0, 0, 0]
    assert device.sleeps[-1] == pytest.approx(GROWTH * STEP_S - AWAKE_S)


def test_kinds_are_expected_each_for_itself():
    device = known()
    for _ in range(WATCHED_AT_FIRST + 1):
        assert device.run() == device.run(3 * STEP_S, OTHER) == 0
    assert device.sleeps[-2:] == [
        pytest.approx(STEP_S - AWAKE_S),
        pytest.approx(3 * STEP_S - AWAKE_S),
    ]


def test_a_step_of_no_kind_is_waited_for_as_the_driver_does_and_the_next_one_begins_behind_it():
    device = known()
    first, second = device.launch(20 * STEP_S, None), device.launch()
    assert not first[0].is_watched
    assert second[0].is_watched
    first[0].end(first[1]).wait()
    assert (device.sleeps, device.watched_s) == ([], pytest.approx(20 * STEP_S))  # the driver's
    assert first[0].begun_ns is None
    assert first[0].ended_ns == pytest.approx(device.now_s * 1e9)
    device.watched_s = 0
    second[0].end(second[1]).wait()
    assert device.sleeps == [pytest.approx(STEP_S - WOKEN_LATE_S - AWAKE_S)]
    assert device.watched_s == pytest.approx(WOKEN_LATE_S + AWAKE_S)


def test_a_step_that_was_over_when_somebody_came_ended_when_it_was_expected_to():
    device = known()
    for _ in range(3):
        step, end = device.launch()
        device.now_s += 5 * STEP_S
        step.end(end).wait()
        assert step.ended_s == pytest.approx(end.at_s)
    assert device.sleeps == []
    assert device.run() == 0
    assert device.sleeps == [pytest.approx(STEP_S - AWAKE_S)]


def test_who_asks_again_for_a_step_that_is_over_does_not_sleep():
    device = known()
    step, end = device.launch()
    event = step.end(end)
    event.wait()
    device.sleeps.clear()
    event.wait()
    assert event.is_done()
    assert device.sleeps == []


def test_what_the_device_reports_reaches_who_waits():
    device = Device()
    step, _ = device.launch()

    class Broken(End):
        def is_done(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        step.end(Broken(device, 0.0)).wait()
    assert step.ended_s is None
