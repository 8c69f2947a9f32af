"""Batches launched before the answers of those before are there.

    device   │ step n          │ step n+1        │
    thread    prepare, launch n+1 ──▶  answer n   prepare, launch n+2 ──▶  answer n+1
    waiter    waits for n ────▶ done   waits for n+1 ─▶ done

The device thread stays the only one that touches slots, sessions and executor. While it has a batch
at hand that the device has no room for, it waits for the device itself. Where it waits for batches,
the waiter waits for the device: where a step is done, it says so to the device thread. (For one
step both wait if such a batch comes while it runs.)

A batch joins the one under way if nothing about it is unusual. Whatever is — another session, a
step repeated, a refusal, a token that the host must know first, drafts, a wish for some, a batch
without rows, a launch that fails — waits until all that is under way is answered, and is then
judged as if batches ran in turn. So replies leave in the order of steps, and each says what it
would have said in turn. Nothing joins a step that has drafts, how many tokens its slots have being
known when it has run, or that wants some, which a draft model guesses when it has.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from compute_plane.errors import BatchFailed, BatchRefused, DeviceLostError
from compute_plane.executor.decode_run import PreparedStep
from compute_plane.executor.draft_model import Drafter
from compute_plane.executor.interface import (
    MAX_STEPS_UNDER_WAY,
    LaunchedStep,
    PipelinedExecutor,
)
from compute_plane.executor.next_drafts import with_next_drafts
from compute_plane.executor.samples_ahead import SampleAwaited, SamplesAhead
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepBatch, StepReply, StepResult, StepTimings
from compute_plane.executor.work import Work, failed, microseconds, refused


@dataclass(slots=True, eq=False)
class Flight:
    """A step under way. `ahead`: its samples; None: it has drafts or wants some, and is waited for.

    `start_ns`: when it began, at the earliest: its launch, or the device's work if that is known.
    `fed_ns`: since when the device had work of it. `done_ns`: when the waiter saw that it was done.
    `is_watched`: whether the waiter waits for it.
    """

    work: Work
    prepared: PreparedStep
    ahead: SamplesAhead | None
    step: LaunchedStep
    start_ns: int
    fed_ns: int
    done_ns: int | None = None
    is_watched: bool = False


class StepPipeline:
    """Launches batches. Called by the device thread; `busy_since_ns` may be read by any.

    `call`: have something called on the device thread, behind the batches that wait for it; from
    any thread. `drafter`: as of `StepsInTurn`. `busy_since_ns`: since when the device works on the
    oldest step under way, or the thread on its launch; None while there is nothing to do.
    """

    def __init__(
        self,
        executor: PipelinedExecutor,
        slots: SlotTable,
        sessions: SessionLedger,
        call: Callable[[Callable[[], None]], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
        drafter: Drafter | None = None,
    ) -> None:
        self._executor = executor
        self._drafter = drafter
        self._slots = slots
        self._sessions = sessions
        self._call = call
        self._clock_ns = clock_ns
        self._slots_session = 0
        self._under_way: deque[Flight] = deque()
        self._last_end_ns: int | None = None
        self.busy_since_ns: int | None = None
        self._watched: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._waiter = threading.Thread(target=self._wait, name="device-waiter", daemon=True)

    def start(self) -> None:
        """Begin to wait for steps."""
        self._waiter.start()

    def close(self) -> None:
        """End the waiter, once it has waited for what is under way."""
        self._watched.put(None)

    def take(self, work: Work) -> None:
        """Launch one batch, or deliver its answer if that is known already."""
        header = work.header
        self._finish_down_to(MAX_STEPS_UNDER_WAY - 1)
        try:
            repeated = self._admit(work)
        except BatchRefused as refusal:
            work.deliver(refused(header, refusal, self._sessions))
            return
        if repeated is not None:
            work.deliver(repeated)
            return
        if header.session != self._slots_session:
            self._slots.reset()
            self._slots_session = header.session
        start_ns = self._clock_ns()
        try:
            self._launch(work, start_ns)
        except BatchRefused as refusal:
            self._refuse(work, refusal)
        finally:
            if not self._under_way:
                self.busy_since_ns = None

    def rest(self) -> None:
        """Have the waiter say when the oldest step is done: no batch is there to go on with."""
        if self._under_way and not self._under_way[0].is_watched:
            self._under_way[0].is_watched = True
            self._watched.put(self._under_way[0])

    def finish_oldest(self) -> None:
        """Wait for the oldest step under way and deliver its answer."""
        flight = self._under_way[0]
        work = flight.work
        refusal: BatchFailed | None = None
        result: StepResult | None = None
        try:
            result = self._result(flight)
        except BatchFailed as failure:
            refusal = failure
        end_ns = getattr(flight.step, "ended_ns", None) or flight.done_ns or self._clock_ns()
        if work.batch.wanted_drafts.any():
            end_ns = self._clock_ns()  # a draft model had the device behind the step
        timings = self._timings(flight, end_ns)
        self._last_end_ns = end_ns
        self.busy_since_ns = end_ns if len(self._under_way) > 1 else None
        if refusal is None:
            self._answer(work, StepReply(work.header, result=result, timings=timings))
        else:
            self._refuse(work, refusal)
        self._under_way.popleft()

    def finish_all(self) -> None:
        """Wait for every step under way and answer it."""
        self._finish_down_to(0)

    def unanswered(self) -> list[Work]:
        """Return the batches under way, the oldest first."""
        return [flight.work for flight in self._under_way]

    def _admit(self, work: Work) -> StepReply | None:
        """Say whether a batch may begin, as `SessionLedger.admit`. Raises BatchRefused."""
        header = work.header
        if self._under_way and header.session == self._slots_session:
            with contextlib.suppress(BatchRefused):
                if self._sessions.admit(header, len(self._under_way)) is None:
                    return None
        self.finish_all()
        return self._sessions.admit(header)

    def _prepare(self, batch: StepBatch) -> PreparedStep:
        """Take a batch into the slots. Raises BatchRefused, and then nothing is under way."""
        if self._under_way and not batch.is_waited_for:
            with contextlib.suppress(BatchRefused, SampleAwaited):
                return self._slots.prepare(batch)
        self.finish_all()
        return self._slots.prepare(batch)

    def _launch(self, work: Work, start_ns: int) -> None:
        """Check and launch one batch; raise BatchRefused, and then nothing is under way."""
        prepared = self._prepare(work.batch)
        if prepared.batch is None:
            self.finish_all()
            result = self._slots.complete(prepared, None)
            timings = StepTimings(queue_us=microseconds(start_ns - work.received_ns))
            self._answer(work, StepReply(work.header, result=result, timings=timings))
            return
        if self.busy_since_ns is None:
            self.busy_since_ns = max(start_ns, self._last_end_ns or 0)
        try:
            step = self._executor.launch(prepared.batch)
        except DeviceLostError:
            raise
        except Exception as error:
            # The executor may be a user's own: whatever it raises fails this batch alone.
            self.finish_all()
            self._slots.poison(prepared)
            raise failed(work, error) from error
        is_waited_for = work.batch.is_waited_for
        ahead = None if is_waited_for else self._slots.count_ahead(prepared)
        begun_ns: int | None = getattr(step, "begun_ns", None)
        fed_ns = self._clock_ns() if begun_ns is None else begun_ns
        flight = Flight(work, prepared, ahead, step, begun_ns or start_ns, fed_ns)
        self._under_way.append(flight)
        if is_waited_for:
            self.finish_oldest()

    def _finish(self, flight: Flight) -> None:
        """Answer a step that is done, unless it was answered since."""
        if self._under_way and self._under_way[0] is flight:
            self.finish_oldest()

    def _finish_down_to(self, num_left: int) -> None:
        while len(self._under_way) > num_left:
            self.finish_oldest()

    def _result(self, flight: Flight) -> StepResult:
        """Wait for a step and take it into the slots. Raises BatchFailed."""
        try:
            output = flight.step.answer()
            if flight.ahead is None:
                result = self._slots.complete(flight.prepared, output)
                return with_next_drafts(result, flight.work.batch, self._slots, self._drafter)
            return self._slots.complete_ahead(flight.ahead, output)
        except DeviceLostError:
            raise
        except Exception as error:
            # As where it was launched: whatever it is, it fails this batch alone.
            if flight.ahead is None:
                self._slots.poison(flight.prepared)
            else:
                self._slots.fail_ahead(flight.ahead)
            raise failed(flight.work, error) from error

    def _timings(self, flight: Flight, end_ns: int) -> StepTimings:
        """Return the timings of a step that the device began once the one before was over.

        It may have begun while the step was being launched, so it idled at most as long as told.
        """
        before_ns = self._last_end_ns or flight.fed_ns
        start_ns = max(flight.start_ns, self._last_end_ns or 0)
        return StepTimings(
            queue_us=microseconds(start_ns - flight.work.received_ns),
            execute_us=microseconds(end_ns - start_ns),
            idle_us=microseconds(flight.fed_ns - before_ns),
        )

    def _answer(self, work: Work, reply: StepReply) -> None:
        self._sessions.record(reply)
        work.deliver(reply)

    def _refuse(self, work: Work, refusal: BatchRefused) -> None:
        """Answer a batch that used its step up."""
        self._sessions.record(StepReply(work.header, refusal=refusal))
        work.deliver(refused(work.header, refusal, self._sessions))

    def _wait(self) -> None:
        """Say of each step when it is done; on a thread of its own."""
        while (flight := self._watched.get()) is not None:
            # Whatever a device reports, the device thread gets it with the answer.
            with contextlib.suppress(Exception):
                flight.step.wait()
            flight.done_ns = self._clock_ns()
            self._call(partial(self._finish, flight))
