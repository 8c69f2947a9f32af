"""A stream breaks while the plane has launched two batches and one or two more wait there."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from control_plane.engine import steps_in_flight
from tests.compute_plane.executor.pipelined_executors import DelayedExecutor, DelayedStep
from tests.compute_plane.rpc.plane_harness import TIMEOUT_S, Harness
from tests.faults import test_a_broken_stream_loses_nothing as broken
from tests.faults.cuttable_proxy import Way


class LaunchedExecutor(DelayedExecutor):
    """Runs launched steps on a thread, one after the other, while nobody holds the gate shut."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, is_driven_by_hand=True)
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[ExecutionBatch] = []
        self.device = ThreadPoolExecutor(1)

    def launch(self, batch: ExecutionBatch) -> DelayedStep:
        step = super().launch(batch)
        self.device.submit(step.run)
        return step

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        assert self.gate.wait(TIMEOUT_S)
        self.batches.append(batch)
        return super().execute(batch)


class LaunchingHarness(Harness):
    """A plane whose executor is given batches ahead."""

    def _build(self, name: str, context: ExecutorContext) -> BuiltExecutor:
        self.executor = LaunchedExecutor(  # type: ignore[assignment]
            num_blocks=context.num_blocks, block_size=context.block_size
        )
        return BuiltExecutor(name, self.executor, "simulated/test")

    def close(self) -> None:
        super().close()
        self.executor.device.shutdown()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True, params=[3, 4])
def depth(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Batches under way, from the first one on."""
    monkeypatch.setattr(broken, "Harness", LaunchingHarness)
    monkeypatch.setattr(steps_in_flight, "USUAL_DEPTH", request.param)
    return int(request.param)


def texts_and_steps(depth: int) -> tuple[list[str], list[list[int]]]:
    """Of the same work without any cut."""
    with broken.world(pipeline_depth=depth) as calm:
        calm.begin()
        return calm.finish(), calm.steps_run()


@pytest.mark.parametrize("way", list(Way))
def test_what_batches_sampled_is_heard_once_though_the_stream_broke(way: Way, depth: int) -> None:
    undisturbed = texts_and_steps(depth)
    with broken.world(pipeline_depth=depth) as cut:
        cut.begin()
        cut.executor.gate.clear()
        cut.proxy.hold(way)
        cut.send()
        assert len(cut.driver.client.under_way) == depth
        if way is Way.DOWN:
            cut.executor.gate.set()
            cut.wait_until_run(cut.driver.client.under_way[-1].step_id)
        cut.proxy.cut()
        cut.executor.gate.set()
        broken.check(cut, undisturbed)


def test_a_stream_cut_again_and_again_loses_nothing_of_several_batches(depth: int) -> None:
    undisturbed = texts_and_steps(depth)
    with broken.world(pipeline_depth=depth) as cut:
        cut.begin()
        while cut.driver.loop.has_pending_work:
            cut.proxy.cut()
            cut.driver.loop.step()
        assert cut.proxy.num_cuts > 5
        broken.check(cut, undisturbed)
