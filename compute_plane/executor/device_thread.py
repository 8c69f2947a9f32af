"""The one thread that owns slots, pool and executor, and runs batches in the order they arrive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

import structlog

from compute_plane.errors import PlaneBroken, PlaneDraining
from compute_plane.executor.draft_model import Drafter
from compute_plane.executor.interface import GPUExecutor, PipelinedExecutor
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepBatch, StepHeader
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.steps_in_turn import StepsInTurn
from compute_plane.executor.work import Answer, Work, where
from planes.errors import EngineError

LEAST_END_S: Final = 1.0
"""What the thread gets to end, however short batches are to be waited for: it has to wake up."""

log = structlog.get_logger()

Item = Work | Callable[[], None] | None
"""A batch, something else that is to be done between batches, or the end."""


class DeviceThread:
    """Takes batches from a queue; checks session, order and content; runs; replies.

    A `PipelinedExecutor` is given the next batch while it works on one (`StepPipeline`), any other
    one batch at a time (`StepsInTurn`). `on_fault` is called if the plane's own code fails, or its
    device is lost: nothing it holds can be trusted then, and the process should end. A failing
    executor is no such fault: its batch is refused, the slots involved are poisoned, the plane goes
    on.
    """

    def __init__(
        self,
        executor: GPUExecutor,
        slots: SlotTable,
        sessions: SessionLedger,
        on_fault: Callable[[], None],
        drafter: Drafter | None = None,
    ) -> None:
        self._on_fault = on_fault
        self._queue: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._steps: StepsInTurn | StepPipeline
        if isinstance(executor, PipelinedExecutor):
            self._steps = StepPipeline(executor, slots, sessions, self._queue.put, drafter=drafter)
        else:
            self._steps = StepsInTurn(executor, slots, sessions, drafter)
        self._lock = threading.Lock()
        self._closed_by: EngineError | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Begin to take batches."""
        self._steps.start()
        self._thread.start()

    def is_well(self, patience_s: float) -> bool:
        """Whether the thread waits for a batch, or began the one at hand less than that ago.

        With several under way it is the one that the device works on.
        """
        since_ns = self._steps.busy_since_ns
        if since_ns is not None and time.monotonic_ns() - since_ns > patience_s * 1e9:
            return False
        return self._thread.is_alive()

    def check_open(self) -> None:
        """Raise PlaneDraining or PlaneBroken once no batch is begun any more."""
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by

    def submit(
        self, header: StepHeader, batch: StepBatch, deliver: Callable[[Answer], None]
    ) -> None:
        """Queue a batch. Raises PlaneDraining or PlaneBroken once no batch is begun any more."""
        work = Work(header, batch, deliver, time.monotonic_ns())
        with self._lock:
            if self._closed_by is not None:
                raise self._closed_by
            self._queue.put(work)

    def stop(self, timeout_s: float) -> bool:
        """Take no more batches, finish those queued; return whether that was done in time."""
        with self._lock:
            if self._closed_by is None:
                self._closed_by = PlaneDraining("the compute plane is shutting down")
                self._queue.put(None)
        self._thread.join(max(timeout_s, LEAST_END_S))
        return not self._thread.is_alive()

    def _run(self) -> None:
        item: Item = None
        try:
            while (item := self._next()) is not None:
                if isinstance(item, Work):
                    self._steps.take(item)
                else:
                    item()
            self._steps.finish_all()
            self._steps.close()
        except Exception:
            # Whatever it is: the plane's own code is broken or the device lost, not the batch.
            at_hand = item if isinstance(item, Work) else None
            names = {} if at_hand is None else where(at_hand.header)
            log.exception("the device thread failed", **names)
            self._break(at_hand)

    def _next(self) -> Item:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            self._steps.rest()
            return self._queue.get()

    def _break(self, at_hand: Work | None) -> None:
        """Answer everything begun and queued with the fault, and have the plane ended."""
        fault = PlaneBroken("the compute plane failed; its log has the fault")
        with self._lock:
            self._closed_by = fault
            self._queue.put(None)
        self._steps.close()
        begun = self._steps.unanswered()
        for work in begun:
            work.deliver(fault)
        if at_hand is not None and not any(work is at_hand for work in begun):
            at_hand.deliver(fault)
        while (item := self._queue.get()) is not None:
            if isinstance(item, Work):
                item.deliver(fault)
        self._on_fault()
