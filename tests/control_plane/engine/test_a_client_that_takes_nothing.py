"""A send that does not come to its end ends its stream; one that is merely late does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from control_plane.engine.send_patience import SendPatience, send_patience
from control_plane.errors import SlowReaderError


class FakeTime:
    """The clock and the timers of an event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.timers: list[tuple[float, Callable[[], None]]] = []
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now)
        monkeypatch.setattr(loop, "call_later", lambda s, f: self.call_at(self.now + s, f))
        monkeypatch.setattr(loop, "call_at", self.call_at)

    def call_at(self, at: float, function: Callable[[], None]) -> FakeTime:
        self.timers.append((at, function))
        return self

    def cancel(self) -> None:
        self.timers.clear()

    def pass_to(self, at: float) -> None:
        self.now = at
        due = [function for when, function in self.timers if when <= at]
        self.timers = [timer for timer in self.timers if timer[0] > at]
        for function in due:
            function()


def run(
    monkeypatch: pytest.MonkeyPatch, work: Callable[[SendPatience, FakeTime], Awaitable[None]]
) -> FakeTime:
    async def main() -> FakeTime:
        clock = FakeTime(monkeypatch)
        async with send_patience(60.0) as patience:
            await work(patience, clock)
        return clock

    with asyncio.Runner() as runner:
        return runner.run(main())


def test_a_send_without_end_is_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(patience: SendPatience, clock: FakeTime) -> None:
        patience.begin()
        clock.pass_to(160.0)
        await asyncio.Event().wait()

    with pytest.raises(SlowReaderError, match="took nothing for 60 s"):
        run(monkeypatch, work)


def test_sends_that_end_in_time_may_take_as_long_together_as_they_like(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(patience: SendPatience, clock: FakeTime) -> None:
        for number in range(10):
            patience.begin()
            clock.pass_to(100.0 + 50 * (number + 1))
            await asyncio.sleep(0)
            patience.end()
        clock.pass_to(5000.0)  # nothing is sent meanwhile
        await asyncio.sleep(0)
        assert len(clock.timers) == 1

    assert run(monkeypatch, work).timers == []


def test_the_time_of_a_send_counts_from_its_own_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(patience: SendPatience, clock: FakeTime) -> None:
        clock.pass_to(159.0)
        patience.begin()
        clock.pass_to(160.0)
        await asyncio.sleep(0)
        assert [at for at, _ in clock.timers] == [219.0]
        clock.pass_to(219.0)
        await asyncio.Event().wait()

    with pytest.raises(SlowReaderError):
        run(monkeypatch, work)


def test_of_sends_that_overlap_the_one_that_is_left_is_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(patience: SendPatience, clock: FakeTime) -> None:
        patience.begin()
        clock.pass_to(130.0)
        patience.begin()
        clock.pass_to(150.0)
        patience.end()  # the client took something
        clock.pass_to(209.0)
        await asyncio.sleep(0)
        assert asyncio.current_task().cancelling() == 0
        clock.pass_to(210.0)
        await asyncio.sleep(0)

    with pytest.raises(SlowReaderError):
        run(monkeypatch, work)


def test_who_is_cancelled_by_somebody_else_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(patience: SendPatience, clock: FakeTime) -> None:
        patience.begin()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        clock.pass_to(160.0)
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        run(monkeypatch, work)
