"""A compute plane that is alive and does not get on: noticed, reported, taken over, not trusted."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import structlog

from control_plane.core.request import FinishReason
from planes.address import parse_address
from tests.compute_plane.rpc.plane_harness import TIMEOUT_S, Harness
from tests.control_plane.engine.loop_driver import Driver

PROMPTS = ["a", "hello there", "blocks " * 4]


class World:
    """A plane whose device thread can be held in a step, and a loop on a clock of the test's."""

    def __init__(self, directory: Path) -> None:
        self.now_s = 100.0
        self.plane = Harness(directory)
        self.executor = self.plane.executor
        self.driver = Driver(self.plane.address, clock=lambda: self.now_s)
        self.loop = self.driver.loop
        self.ids: list[int] = []

    def begin(self) -> None:
        """Submit the work and let each request have a few tokens."""
        self.ids = [self.driver.submit(p, 10, seed=i) for i, p in enumerate(PROMPTS)]
        tokens = self.driver.tokens
        self.driver.run_until(lambda: all(len(tokens.get(i, ())) >= 3 for i in self.ids))

    def stall(self) -> int:
        """Hold the device thread in a step, another one waiting, until the step is overdue."""
        link = self.driver.client
        link.on_result = self.close_gate
        self.loop.turn()
        link.on_result = None
        assert self.executor.entered.acquire(timeout=TIMEOUT_S)
        self.driver.send()
        step = link.under_way[0].step_id
        self.now_s += link.waits_s
        self.loop.step()
        return step

    def close_gate(self) -> None:
        """Hold the device thread in the next step; none is under way."""
        while self.executor.entered.acquire(blocking=False):
            pass
        self.executor.gate.clear()

    def finish(self) -> list[str]:
        self.driver.run()
        return [self.driver.text(request_id) for request_id in self.ids]

    def close(self) -> None:
        self.executor.gate.set()
        self.loop.close()
        self.driver.client.shut_down()
        self.plane.close()


@contextlib.contextmanager
def world():
    with tempfile.TemporaryDirectory() as directory:
        made = World(Path(directory))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def undisturbed():
    with world() as calm:
        calm.begin()
        return calm.finish()


def test_a_step_over_its_deadline_is_logged_with_its_id_and_counted():
    with world() as held, structlog.testing.capture_logs() as logs:
        held.begin()
        assert held.loop.metrics.num_stalls == 0
        step = held.stall()
        (entry,) = [entry for entry in logs if entry["event"] == "step overdue"]
        assert entry["step_id"] == step
        assert entry["num_rows"] == len(PROMPTS)
        assert held.loop.metrics.num_stalls == 1


def test_the_age_of_the_last_step_grows_while_nothing_comes_and_is_zero_when_idle(undisturbed):
    with world() as held:
        held.begin()
        held.now_s += 2.5
        assert held.loop.metrics.last_step_age_s == pytest.approx(2.5)
        assert held.finish() == undisturbed
        held.now_s += 50.0
        assert held.loop.metrics.last_step_age_s == 0.0


def test_health_goes_with_the_stall_and_comes_back_with_progress_not_with_the_session(undisturbed):
    with world() as held:
        held.begin()
        held.stall()
        assert held.driver.links == [True, False]
        held.driver.send()  # opens the next session; the device thread is still held
        assert held.plane.describe().current_session == 2
        assert held.driver.links == [True, False]
        held.executor.gate.set()
        assert held.finish() == undisturbed
        assert held.driver.links == [True, False, True]


def test_a_stalled_plane_of_which_nobody_wants_anything_is_well():
    with world() as held:
        held.begin()
        held.stall()
        for request_id in held.ids:
            held.loop.inbox.cancel(request_id)
        held.driver.send()
        assert held.driver.links == [True, False, True]
        ends = [held.driver.ends[request_id].finish_reason for request_id in held.ids]
        assert ends == [FinishReason.CANCELLED] * len(PROMPTS)


def test_what_waited_behind_the_stall_is_not_run_in_the_next_session(undisturbed):
    with world() as held:
        held.begin()
        held.stall()
        held.driver.send()
        num_begun = len(held.executor.batches)
        held.executor.gate.set()
        assert held.finish() == undisturbed
        # The held step ends, its session is over: the one that waited behind it, of single decode
        # rows, is dropped, and every row after it begins with a prompt.
        next_batch = held.executor.batches[num_begun]
        assert next_batch.input_tokens.size > len(PROMPTS)
        session = {reply.header.session for reply in held.plane.plane._sessions._replies.values()}
        assert session == {2}


def test_a_stopped_process_is_taken_over_when_it_wakes_and_its_old_session_is_dead(undisturbed):
    with tempfile.TemporaryDirectory() as directory:
        address = f"unix:{directory}/compute.sock"
        flags = ["--executor=simulated", "--block-size=4", "--max-num-blocks=96"]
        with subprocess.Popen(
            [sys.executable, "-m", "compute_plane", f"--listen={address}", *flags],
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                driver = Driver(parse_address(address))
                ids = [driver.submit(p, 10, seed=i) for i, p in enumerate(PROMPTS)]
                driver.run_until(lambda: all(len(driver.tokens.get(i, ())) >= 3 for i in ids))
                process.send_signal(signal.SIGSTOP)
                driver.run_until(lambda: driver.links[-1:] == [False])
                process.send_signal(signal.SIGCONT)
                driver.run()
                assert [driver.text(request_id) for request_id in ids] == undisturbed
                assert driver.links == [True, False, True]
                assert driver.client.describe().current_session == 2
                driver.loop.close()
                driver.client.shut_down()
                process.terminate()
                assert process.wait(TIMEOUT_S) == 0
            finally:
                process.kill()  # one that is stopped would be waited for
