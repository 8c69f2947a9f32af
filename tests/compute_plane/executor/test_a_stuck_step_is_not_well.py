from __future__ import annotations

import queue
import threading

from compute_plane.executor.device_thread import DeviceThread
from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.simulated import SimulatedExecutor
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepHeader
from tests.compute_plane.executor.slot_batches import LIMITS, start, step

TIMEOUT_S = 30.0


class HeldExecutor(SimulatedExecutor):
    """Begins a step, then waits until it may end it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        self.begun.set()
        assert self.may_end.wait(TIMEOUT_S)
        return super().execute(batch)


def test_a_device_thread_is_well_unless_a_step_takes_longer_than_patience_lasts():
    executor, sessions = HeldExecutor(), SessionLedger()
    device = DeviceThread(executor, SlotTable(LIMITS), sessions, lambda: None)
    assert not device.is_well(TIMEOUT_S)  # it has not begun
    device.start()
    assert device.is_well(0.0)
    session = sessions.open("test", take_over=False)
    header = StepHeader(session.session, sessions.epoch, session.last_step + 1, 0)
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    device.submit(header, step([(0, 0, 4)], starts=[start(0, b"text", [0, 1])]), answers.put)
    assert executor.begun.wait(TIMEOUT_S)
    assert device.is_well(2 * TIMEOUT_S)
    assert not device.is_well(0.0)
    executor.may_end.set()
    answers.get(timeout=TIMEOUT_S)
    assert device.is_well(0.0)
    assert device.stop(TIMEOUT_S)
    assert not device.is_well(TIMEOUT_S)
