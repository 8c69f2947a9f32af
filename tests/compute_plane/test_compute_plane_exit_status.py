"""With what status the compute plane's process ends; the plane itself is a stand-in."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from compute_plane import __main__ as entry
from planes.address import Address

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(monkeypatch: pytest.MonkeyPatch, after_start: Callable[..., object], *, is_done: bool):
    """Run the process with a plane that calls `after_start` and stops in time or not."""

    class Plane:
        def __init__(self, _: object, *, on_fault: Callable[[], None]) -> None:
            self.on_fault = on_fault

        def start(self) -> Address:
            after_start(self)
            return Address(path="/nowhere")

        def is_well(self, _: float) -> bool:
            return True

        def stop(self) -> bool:
            return is_done

    monkeypatch.setattr(entry, "ComputePlane", Plane)
    monkeypatch.setattr(entry.gc, "freeze", lambda: None)
    return entry.main(["--executor=simulated", "--listen=unix:/nowhere", "--log-level=error"])


def terminate(_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_and_batches_that_finish_are_status_zero(monkeypatch):
    assert run(monkeypatch, terminate, is_done=True) == 0


def test_batches_that_do_not_finish_within_the_shutdown_timeout_are_a_fault(monkeypatch):
    assert run(monkeypatch, terminate, is_done=False) == 1


def test_a_fault_of_the_planes_own_code_ends_it_with_another_status_than_zero(monkeypatch):
    assert run(monkeypatch, lambda plane: plane.on_fault(), is_done=True) == 1


def test_a_signal_that_another_thread_takes_ends_the_plane_all_the_same(monkeypatch):
    """As right after SIGCONT, while the main thread does not run yet."""

    def elsewhere(_: object) -> None:
        # The main thread lets no signal in from here on: another one has to take it.
        taker_is_up, may_end = threading.Event(), threading.Event()

        def take() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            taker_is_up.set()
            may_end.wait(20)

        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=take, daemon=True).start()
        assert taker_is_up.wait(20)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

    try:
        assert run(monkeypatch, elsewhere, is_done=True) == 0
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
