"""Both planes in this process over real gRPC, with a proxy between them that cuts the connection.

The oracle is the same work undisturbed: the same texts, and the same batches, each run once.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path

import pytest

from control_plane.engine.compute_client import RESUME_PAUSE_S, ComputeClient
from control_plane.engine.compute_session import MAX_RESUMES_WITHOUT_REPLY
from control_plane.errors import FencedError
from planes.address import Address, parse_address
from tests.compute_plane.rpc.plane_harness import Harness
from tests.control_plane.engine.loop_driver import Driver
from tests.faults.cuttable_proxy import TIMEOUT_S, CuttableProxy, Way
from tests.waiting import wait_until

PROMPTS = ["a", "hello there", "blocks " * 5]
MAX_TOKENS = 10


class World:
    """A plane, a proxy before it, and an engine loop that reaches the plane only through that."""

    def __init__(self, directory: Path, listen: str, **options) -> None:
        self.plane = Harness(directory)
        assert self.plane.address.path is not None
        self.proxy = CuttableProxy(parse_address(listen), Path(self.plane.address.path))
        self.driver = Driver(self.proxy.address, **options)
        self.executor = self.plane.executor
        self.ids: list[int] = []

    def begin(self) -> None:
        """Submit the work and let each request have a few tokens."""
        self.ids = [self.driver.submit(p, MAX_TOKENS, seed=i) for i, p in enumerate(PROMPTS)]
        tokens = self.driver.tokens
        self.driver.run_until(lambda: all(len(tokens.get(i, ())) >= 3 for i in self.ids))

    def send(self) -> int:
        """Fill the pipeline without waiting; the last step sent."""
        self.driver.send()
        return self.driver.client.under_way[-1].step_id

    def wait_until_run(self, step: int) -> None:
        """Wait until the plane has run a step; asks it directly."""
        wait_until(lambda: self.plane.describe().last_step >= step, f"step {step} is run")

    def finish(self) -> list[str]:
        """Run to the end; the texts."""
        self.driver.run()
        assert self.driver.loop.memory_stats.used_blocks == 0
        return [self.driver.text(request_id) for request_id in self.ids]

    def steps_run(self) -> list[list[int]]:
        """The tokens of every batch the executor ran."""
        return [batch.input_tokens.tolist() for batch in self.executor.batches]

    def close(self) -> None:
        self.driver.loop.close()
        self.driver.client.shut_down()
        self.proxy.close()
        self.plane.close()


@contextlib.contextmanager
def world(kind: str = "unix", **options):
    with tempfile.TemporaryDirectory() as directory:
        listen = f"unix:{directory}/proxy.sock" if kind == "unix" else "127.0.0.1:0"
        made = World(Path(directory), listen, **options)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def undisturbed():
    """Texts and batches of the same work without any cut."""
    with world() as calm:
        calm.begin()
        return calm.finish(), calm.steps_run()


def count_threads() -> int:
    """Those of this process, but for the server's workers, which come as they are needed."""
    return sum(not thread.name.startswith("rpc") for thread in threading.enumerate())


def check(cut: World, undisturbed) -> None:
    texts, steps = undisturbed
    assert cut.finish() == texts
    assert cut.steps_run() == steps
    assert cut.driver.links == [True]
    assert cut.plane.describe().current_session == 1


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_batch_that_never_arrived_is_sent_again(undisturbed, kind):
    with world(kind) as cut:
        cut.begin()
        cut.proxy.hold(Way.UP)
        cut.send()
        cut.proxy.wait_held(Way.UP)
        cut.proxy.cut()
        check(cut, undisturbed)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_reply_that_was_never_sent_is_repeated_and_its_batch_not_run_again(undisturbed, kind):
    with world(kind) as cut:
        cut.begin()
        cut.proxy.hold(Way.DOWN)
        cut.wait_until_run(cut.send())
        cut.proxy.cut()
        check(cut, undisturbed)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_reply_cut_in_two_is_repeated_and_its_batch_not_run_again(undisturbed, kind):
    with world(kind) as cut:
        cut.begin()
        cut.proxy.hold(Way.DOWN)
        cut.wait_until_run(cut.send())
        cut.proxy.pass_held(Way.DOWN, cut.proxy.wait_held(Way.DOWN) // 2)
        cut.proxy.cut()
        check(cut, undisturbed)


def test_a_batch_cut_off_while_it_runs_is_answered_on_the_next_stream(undisturbed):
    with world() as cut:
        cut.begin()

        def close_gate() -> None:
            while cut.executor.entered.acquire(blocking=False):
                pass
            cut.executor.gate.clear()

        cut.driver.client.on_result = close_gate  # what is in flight; its next step is not sent yet
        cut.driver.loop.turn()
        cut.driver.client.on_result = None
        assert cut.executor.entered.acquire(timeout=TIMEOUT_S)
        cut.proxy.cut()
        resumed = cut.driver.client.receive(0.1)  # there is no answer yet
        assert resumed is None
        cut.executor.gate.set()
        check(cut, undisturbed)


@pytest.mark.spread(1)
@pytest.mark.parametrize("way", list(Way))
def test_a_cut_after_any_byte_changes_nothing(undisturbed, way):
    texts, steps = undisturbed
    with world() as cut:
        num_cuts, offset = cut.proxy.num_cuts, 1
        while offset < 900:
            cut.executor.batches.clear()
            cut.driver.loop.inbox.flush_prefix_cache(lambda _: None)
            cut.begin()
            cut.proxy.cut_after(way, offset)
            assert cut.finish() == texts, offset
            assert cut.steps_run() == steps, offset
            offset += 37
        assert cut.proxy.num_cuts - num_cuts > 15
        assert cut.driver.links == [True]
        assert cut.plane.describe().current_session == 1


def test_a_connection_cut_again_and_again_changes_nothing(undisturbed):
    with world() as cut:
        cut.begin()
        while cut.driver.loop.has_pending_work:
            cut.proxy.cut()
            cut.driver.loop.step()
        assert cut.proxy.num_cuts > 5
        check(cut, undisturbed)


def test_an_idle_session_whose_connection_was_cut_takes_the_next_request(undisturbed):
    with world() as cut:
        cut.driver.loop.step()
        cut.proxy.cut()
        cut.begin()
        check(cut, undisturbed)


def test_streams_that_break_while_nothing_is_sent_leave_no_thread():
    with world() as cut:
        cut.begin()
        cut.finish()  # what has answered has all its threads
        client, num_threads = cut.driver.client, count_threads()
        for num_resumes in range(1, MAX_RESUMES_WITHOUT_REPLY):
            cut.proxy.cut()
            while client._session._num_resumes < num_resumes:
                client.receive(RESUME_PAUSE_S)
        wait_until(lambda: count_threads() <= num_threads, "their threads end")


def test_a_session_that_somebody_took_while_the_stream_was_broken_is_not_fought_for():
    with world() as cut:
        cut.begin()
        cut.proxy.hold(Way.UP)
        cut.send()
        cut.plane.open("another")
        cut.proxy.cut()
        with pytest.raises(FencedError):
            cut.driver.run()


def test_a_plane_that_is_another_process_is_a_new_epoch_and_not_resumed(undisturbed):
    with tempfile.TemporaryDirectory() as directory, world() as cut:
        cut.begin()
        cut.proxy.hold(Way.UP)
        cut.send()
        other = Harness(Path(directory))
        try:
            assert other.address.path is not None
            cut.proxy.target = Path(other.address.path)
            cut.proxy.cut()
            assert cut.finish() == undisturbed[0]
            assert cut.driver.links == [True, False, True]
        finally:
            cut.driver.loop.close()
            other.close()


def test_a_resumed_session_that_waits_for_work_keeps_others_out():
    with world() as cut:
        cut.driver.loop.step()
        cut.proxy.cut()
        cut.driver.client.receive(1.0)  # mends the stream; nothing is sent on it
        rival = ComputeClient(Address(path=cut.plane.address.path), controller="rival")
        assert rival.open() is None
        rival.shut_down()
