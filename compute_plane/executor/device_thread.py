"""The one thread that owns slots, pool and executor, and runs batches in the order they arrive."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from compute_plane.errors import BatchFailed, BatchRefused, PlaneBroken, PlaneDraining
from compute_plane.executor.interface import GPUExecutor
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    StepBatch,
    StepHeader,
    StepReply,
    StepResult,
    StepTimings,
)
from planes.errors import EngineError

MAX_MICROSECONDS: Final = (1 << 32) - 1
"""What the wire's timings hold."""

log = structlog.get_logger()


Answer = StepReply | EngineError
"""The reply to a batch, or why the plane never got to it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch under way. `deliver` gets its answer, on the device thread, and must not wait."""

    header: StepHeader
    batch: StepBatch
    deliver: Callable[[Answer], None]
    received_ns: int


class DeviceThread:
    """Takes batches from a queue; checks session, order and content; runs; replies.

    `on_fault` is called if the plane's own code fails: nothing it holds can be trusted then, and
    the process should end. A failing executor is no such fault: its batch is refused, the slots
    involved are poisoned, the plane goes on.
    """

    def __init__(
        self,
        executor: GPUExecutor,
        slots: SlotTable,
        sessions: SessionLedger,
        on_fault: Callable[[], None],
    ) -> None:
        self._executor = executor
        self._slots = slots
        self._sessions = sessions
        self._on_fault = on_fault
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed_by: EngineError | None = None
        self._slots_session = 0
        self._last_end_ns: int | None = None
        self._busy_since_ns: int | None = None
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def is_well(self, patience_s: float) -> bool:
        """Whether the thread waits for a batch, or began the one at hand less than that ago."""
        since_ns = self._busy_since_ns
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
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            header = work.header
            try:
                reply = self._step(work)
            except Exception:
                # Whatever it is: the plane's own code is broken, not the batch or the executor.
                log.exception("the device thread failed", **_where(header))
                self._break(work)
                return
            work.deliver(reply)

    def _break(self, work: Work | None) -> None:
        """Answer everything queued with the fault, and have the plane ended."""
        fault = PlaneBroken("the compute plane failed; its log has the fault")
        with self._lock:
            self._closed_by = fault
            self._queue.put(None)
        while work is not None:
            work.deliver(fault)
            work = self._queue.get()
        self._on_fault()

    def _step(self, work: Work) -> StepReply:
        """Run one batch, or say why not."""
        header = work.header
        try:
            repeated = self._sessions.admit(header)
        except BatchRefused as refusal:
            return self._refused(header, refusal)
        if repeated is not None:
            return repeated
        if header.session != self._slots_session:
            self._slots.reset()
            self._slots_session = header.session
        start_ns = self._busy_since_ns = time.monotonic_ns()
        try:
            result = self._execute(header, work.batch)
        except BatchRefused as refusal:
            self._last_end_ns = time.monotonic_ns()
            self._sessions.record(StepReply(header, refusal=refusal))
            return self._refused(header, refusal)
        finally:
            self._busy_since_ns = None
        end_ns = time.monotonic_ns()
        reply = StepReply(
            header,
            result=result,
            timings=StepTimings(
                queue_us=_microseconds(start_ns - work.received_ns),
                execute_us=_microseconds(end_ns - start_ns),
                idle_us=_microseconds(start_ns - (self._last_end_ns or start_ns)),
            ),
        )
        self._last_end_ns = end_ns
        self._sessions.record(reply)
        return reply

    def _execute(self, header: StepHeader, batch: StepBatch) -> StepResult:
        """Check and run one batch. Raises BatchRefused."""
        prepared = self._slots.prepare(batch)
        try:
            output = None if prepared.batch is None else self._executor.execute(prepared.batch)
            return self._slots.complete(prepared, output)
        except Exception as error:
            # The executor may be a user's own: whatever it raises fails this batch alone.
            self._slots.poison(prepared)
            log.exception(
                "the executor failed; the slots of its batch are poisoned",
                num_rows=batch.slots.size,
                **_where(header),
            )
            raise BatchFailed(f"the executor failed: {type(error).__name__}: {error}") from error

    def _refused(self, header: StepHeader, refusal: BatchRefused) -> StepReply:
        log.warning(
            "batch refused",
            reason=refusal.reason,
            field=refusal.field,
            message=refusal.message,
            **_where(header),
        )
        state = self._sessions.state
        return StepReply(header, refusal=refusal, expected_step=state.last_step + 1)


def _where(header: StepHeader) -> dict[str, int]:
    """Name a step in the log; binding the names as context would cost every step 5 µs."""
    return {"session": header.session, "step_id": header.step_id}


def _microseconds(nanoseconds: int) -> int:
    return min(max(nanoseconds // 1000, 0), MAX_MICROSECONDS)
