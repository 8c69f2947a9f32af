"""With what status the compute plane's process ends; the plane itself is a stand-in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from compute_plane import __main__ as entry
from planes.address import Address

SIGNALS = (signal.SIGTERM, signal.SIGINT)
PATIENCE_S = 120.0

SIGNAL_AT_EVERY_LINE = """
import faulthandler, os, signal, sys
from compute_plane import __main__ as entry
from planes.address import Address

faulthandler.dump_traceback_later(30, exit=True)
entry.SIGNAL_PAUSE_S = 0.001
entry.gc.freeze = lambda: None
left = 0

def trace(frame, event, _):
    global left
    left -= event == "line"
    if left == 0:
        left = -1
        os.kill(os.getpid(), signal.SIGTERM)
    return trace

class Plane:
    def __init__(self, _, *, on_fault):
        pass
    def start(self):
        sys._getframe(1).f_trace = trace
        sys.settrace(trace)
        return Address(path="/nowhere")
    def stop(self):
        sys.settrace(None)
        return True

entry.ComputePlane = Plane
for line in range(1, 100):
    left = line
    assert entry.main(["--executor=simulated", "--listen=unix:/nowhere", "--log-level=error"]) == 0
print("heard", line)
"""


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


@pytest.mark.wide
def test_a_signal_is_heard_whatever_the_wait_for_it_is_doing():
    done = subprocess.run(
        [sys.executable, "-c", SIGNAL_AT_EVERY_LINE],
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "heard 99\n"), done.stderr


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
