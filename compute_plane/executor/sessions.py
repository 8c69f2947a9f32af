"""Who drives the plane, and which step comes next.

One session at a time. It is *alive* while an Execute stream is attached to it, or for `LEASE_S`
after it was opened or last used by a unary call; while it is alive a second controller is refused
unless it takes over. A session whose stream has ended is not alive: its controller may reconnect
and go on (`resume`) as long as nobody else has opened a session.

Steps count from 1 within a session. A batch whose content is refused uses its step id up: the next
batch carries the next id, or the same one again, corrected. Replies of executed steps are kept
until they are acknowledged (`MAX_KEPT_REPLIES` at most), and repeated when their batch is sent
again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from compute_plane.errors import (
    InvalidBatch,
    SessionFenced,
    SessionHeld,
    StaleEpoch,
    StaleSession,
    StepGap,
)
from compute_plane.executor.step import StepHeader, StepReply
from planes.errors import EngineError

LEASE_S: Final = 2.0
MAX_KEPT_REPLIES: Final = 64


class AttachedStream(Protocol):
    """An Execute stream as the ledger sees it."""

    def end(self, reason: EngineError) -> None:
        """End the stream with an error; called from any thread, must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class SessionState:
    """What Describe says: `session` 0 means none."""

    session: int
    last_step: int


class SessionLedger:
    """The current session. Every method may be called from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = secrets.randbits(64) | 1  # never 0, which means "not given"
        self._clock = clock
        self._lock = threading.Lock()
        self._session = 0
        self._controller = ""
        self._stream: AttachedStream | None = None
        self._replaced: set[AttachedStream] = set()
        self._lease_end = clock()
        self._last_step = 0
        self._last_was_refused = False
        self._replies: dict[int, StepReply] = {}

    @property
    def state(self) -> SessionState:
        """The current session and its last step."""
        with self._lock:
            return SessionState(self._session, self._last_step)

    def open(self, controller: str, *, take_over: bool) -> SessionState:
        """Begin a new session; the stream of the one before is ended.

        Raises SessionHeld while another session is alive, unless `take_over`.
        """
        with self._lock:
            is_alive = self._stream is not None or self._clock() < self._lease_end
            if self._session and is_alive and not take_over:
                raise SessionHeld(
                    f"session {self._session} of controller {self._controller!r} is alive",
                    field="take_over",
                )
            fenced = self._stream
            self._session += 1
            self._controller = controller
            self._stream = None
            self._lease_end = self._clock() + LEASE_S
            self._last_step = 0
            self._last_was_refused = False
            self._replies.clear()
            state = SessionState(self._session, 0)
        if fenced is not None:
            fenced.end(SessionFenced(f"session {state.session} of {controller!r} took over"))
        return state

    def resume(self, session: int, epoch: int) -> SessionState:
        """Go on with the current session on a stream still to come; its older one is ended.

        Raises StaleEpoch, or StaleSession if that session is not the current one.
        """
        self._check_epoch(epoch)
        with self._lock:
            self._check_session(session)
            older, self._stream = self._stream, None
            if older is not None:
                self._replaced.add(older)
            self._lease_end = self._clock() + LEASE_S
            state = SessionState(self._session, self._last_step)
        if older is not None:
            older.end(SessionFenced(f"session {session} was resumed on another Execute stream"))
        return state

    def expect(self, stream: AttachedStream) -> None:
        """Let a stream that has sent nothing yet count for the current session, if that has none.

        So a controller that has opened its stream and waits for work is alive.
        """
        with self._lock:
            if self._session and self._stream is None:
                self._stream = stream

    def attach(self, session: int, stream: AttachedStream) -> None:
        """Note that `stream` carries batches of a session.

        If that is the current one, an older stream of it is ended; if not, the stream does not
        count for the current one. A stream that was replaced stays so, whatever it still brings.
        """
        older: AttachedStream | None = None
        with self._lock:
            if stream in self._replaced:
                return
            if self._stream is stream:
                if session != self._session:
                    self._stream = None
                    self._lease_end = self._clock()
            elif session == self._session and session != 0:
                older, self._stream = self._stream, stream
                if older is not None:
                    self._replaced.add(older)
        if older is not None:
            older.end(SessionFenced(f"session {session} has a newer Execute stream"))

    def detach(self, stream: AttachedStream) -> None:
        """Forget a stream that has ended; its session is then not alive."""
        with self._lock:
            self._replaced.discard(stream)
            if self._stream is stream:
                self._stream = None
                self._lease_end = self._clock()

    def touch(self, session: int) -> None:
        """Note that a unary call uses the session."""
        with self._lock:
            if session == self._session:
                self._lease_end = self._clock() + LEASE_S

    def admit(self, header: StepHeader, num_under_way: int = 0) -> StepReply | None:
        """Say whether a batch may begin: None, or the kept reply of a step that has run.

        `num_under_way`: steps of the session that were admitted and are not recorded yet. Called by
        the device thread when it takes the batch. Raises StaleEpoch, StaleSession, StepGap, or
        InvalidBatch for header fields that can never be right.
        """
        for name, value in (
            ("session", header.session),
            ("epoch", header.epoch),
            ("step_id", header.step_id),
        ):
            if value == 0:
                raise InvalidBatch(
                    f"{name} must be given (Open says which to use), got 0", field=name
                )
        if header.acked_step >= header.step_id:
            raise InvalidBatch(
                f"acked_step must be below step_id ({header.step_id}), got {header.acked_step}",
                field="acked_step",
            )
        self._check_epoch(header.epoch)
        with self._lock:
            self._check_session(header.session)
            kept = self._replies.get(header.step_id)
            self._forget_replies(header.acked_step)
            if kept is not None:
                return kept
            next_step = self._last_step + num_under_way + 1
            may_repeat = (
                self._last_was_refused and header.step_id == self._last_step and num_under_way == 0
            )
            if header.step_id != next_step and not may_repeat:
                raise StepGap(f"step_id must be {next_step}, got {header.step_id}", field="step_id")
        return None

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise StaleEpoch(f"epoch must be {self.epoch}, got {epoch}", field="epoch")

    def _check_session(self, session: int) -> None:
        """Raise StaleSession unless it is the current one; the lock is held."""
        if session != self._session:
            raise StaleSession(
                f"session must be the current one ({self._session}), got {session}",
                field="session",
            )

    def record(self, reply: StepReply) -> None:
        """Note that an admitted step has run or that its content was refused."""
        with self._lock:
            if reply.header.session != self._session:
                return  # taken over while it ran
            self._last_step = reply.header.step_id
            self._last_was_refused = reply.refusal is not None
            if reply.refusal is None:
                self._replies[reply.header.step_id] = reply
                self._forget_replies(self._last_step - MAX_KEPT_REPLIES)

    def _forget_replies(self, up_to_step: int) -> None:
        """Drop the replies of steps up to one; the lock is held. Steps are kept in order."""
        while self._replies:
            oldest = next(iter(self._replies))
            if oldest > up_to_step:
                return
            del self._replies[oldest]
