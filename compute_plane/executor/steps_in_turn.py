"""Batches run one after the other, each answered before the next one is looked at.

For executors whose host does the work, or that cannot launch a step without waiting for it.
"""

from __future__ import annotations

import time

from compute_plane.errors import BatchRefused, DeviceLostError
from compute_plane.executor.draft_model import Drafter
from compute_plane.executor.interface import GPUExecutor
from compute_plane.executor.next_drafts import with_next_drafts
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepReply, StepResult, StepTimings
from compute_plane.executor.work import Work, failed, microseconds, refused


class StepsInTurn:
    """Runs batches on an executor. Called by the device thread; `busy_since_ns` may be read by any.

    `drafter`: who guesses what follows, where a batch wants that. `busy_since_ns`: when the step at
    hand began; None between steps.
    """

    def __init__(
        self,
        executor: GPUExecutor,
        slots: SlotTable,
        sessions: SessionLedger,
        drafter: Drafter | None = None,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._slots = slots
        self._sessions = sessions
        self._slots_session = 0
        self._last_end_ns: int | None = None
        self.busy_since_ns: int | None = None

    def start(self) -> None:
        """Do nothing: the device thread is enough."""

    def close(self) -> None:
        """Do nothing, likewise."""

    def take(self, work: Work) -> None:
        """Run one batch, or say why not, and deliver that."""
        work.deliver(self._step(work))

    def rest(self) -> None:
        """Do nothing: no step is under way."""

    def finish_all(self) -> None:
        """Do nothing: every batch taken is answered."""

    def unanswered(self) -> list[Work]:
        """Return the batches taken and not answered, but for the one at hand: none."""
        return []

    def _step(self, work: Work) -> StepReply:
        header = work.header
        try:
            repeated = self._sessions.admit(header)
        except BatchRefused as refusal:
            return refused(header, refusal, self._sessions)
        if repeated is not None:
            return repeated
        if header.session != self._slots_session:
            self._slots.reset()
            self._slots_session = header.session
        start_ns = self.busy_since_ns = time.monotonic_ns()
        try:
            result = self._execute(work)
        except BatchRefused as refusal:
            self._last_end_ns = time.monotonic_ns()
            self._sessions.record(StepReply(header, refusal=refusal))
            return refused(header, refusal, self._sessions)
        finally:
            self.busy_since_ns = None
        end_ns = time.monotonic_ns()
        reply = StepReply(
            header,
            result=result,
            timings=StepTimings(
                queue_us=microseconds(start_ns - work.received_ns),
                execute_us=microseconds(end_ns - start_ns),
                idle_us=microseconds(start_ns - (self._last_end_ns or start_ns)),
            ),
        )
        self._last_end_ns = end_ns
        self._sessions.record(reply)
        return reply

    def _execute(self, work: Work) -> StepResult:
        """Check and run one batch. Raises BatchRefused."""
        prepared = self._slots.prepare(work.batch)
        try:
            output = None if prepared.batch is None else self._executor.execute(prepared.batch)
            result = self._slots.complete(prepared, output)
            return with_next_drafts(result, work.batch, self._slots, self._drafter)
        except DeviceLostError:
            raise
        except Exception as error:
            # The executor may be a user's own: whatever it raises fails this batch alone.
            self._slots.poison(prepared)
            raise failed(work, error) from error
