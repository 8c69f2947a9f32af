"""When a call may be made again, and how long to wait before.

A call is made again only where that is safe, before its first message: the server was not there
(UNAVAILABLE), or said itself when to come again. A stream with `resume` also goes on behind what
came.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

from control_plane.errors import ComputeUnavailableError, DrainingError
from hetero_infer.client.arguments import check_seconds
from hetero_infer.wire_errors import ServerLostError
from planes.errors import EngineError, ValidationError

RESUMABLE: Final = (ServerLostError, DrainingError, ComputeUnavailableError)
"""What ends a stream without being its fault: the same request may go on, here or elsewhere."""

DEFAULT_RETRIES: Final = 3
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
"""Of this client's own choice; a server may ask for more."""

MAX_RETRY_AFTER_S: Final = 10.0
"""A server that asks for more patience is not waited for, without a word, by a single call."""

RESUME_PATIENCE_S: Final = 60.0
RESUME_PAUSE_S: Final = 0.1

MAX_TIMEOUT_S: Final = 1e8
"""Three years. gRPC counts nanoseconds in 64 bits, and takes a time beyond them for one that has
passed."""

Clock = Callable[[], float]

OnLost = Callable[[EngineError, float], None]
"""Told once for each loss: why the stream stopped, and how many seconds it is waited for."""


OnWait = Callable[[EngineError, float], None]
"""Told before a call is made again: why it is, and how many seconds are waited first."""


class Deadline:
    """A time after which nothing is waited for. `timeout_s`: None: for ever.

    Raises ValidationError for what is no time.
    """

    def __init__(self, timeout_s: float | None, clock: Clock = time.monotonic) -> None:
        if timeout_s is not None:
            check_seconds(timeout_s, "timeout_s")
        if timeout_s is not None and not timeout_s > 0:
            raise ValidationError(
                f"timeout_s must be greater than 0, got {timeout_s}", field="timeout_s"
            )
        self._clock = clock
        self._ends_at = None if timeout_s is None else clock() + min(timeout_s, MAX_TIMEOUT_S)

    def left_s(self) -> float | None:
        """Seconds that are left, 0 at least; None: no end."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock())

    def allows(self, pause_s: float) -> bool:
        """Whether there is time for a pause."""
        left_s = self.left_s()
        return left_s is None or pause_s < left_s


class Attempts:
    """Counts the calls that are made for one.

    `retries`: how many after the first, at most. `on_wait`: told of each pause.
    """

    def __init__(self, retries: int, deadline: Deadline, on_wait: OnWait | None = None) -> None:
        self._retries = retries
        self._on_wait = on_wait
        self._num_failed = 0
        self.deadline = deadline

    def pause_after(self, error: EngineError) -> float:
        """Return how long to wait before the next call; raise the error if there is to be none."""
        asked_s = error.retry_after_s
        if asked_s is None and not isinstance(error, RESUMABLE):
            raise error
        if self._num_failed >= self._retries:
            raise error
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_failed, MAX_PAUSE_S)
        pause_s *= random.uniform(0.5, 1.0)  # those that were refused together come apart
        if asked_s is not None:
            pause_s = max(pause_s, asked_s)
        if pause_s > MAX_RETRY_AFTER_S or not self.deadline.allows(pause_s):
            raise error
        self._num_failed += 1
        if self._on_wait is not None:
            self._on_wait(error, pause_s)
        return pause_s


class Patience:
    """How long a stream waits for a lost server: `patience_s` from the first loss after its tokens.

    A server that begins each answer and cannot compute it is as good as lost. `on_lost`: told of
    each loss that is waited for.
    """

    def __init__(
        self,
        patience_s: float,
        deadline: Deadline,
        clock: Clock,
        on_lost: OnLost | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._clock = clock
        self._lost_at: float | None = None
        self.deadline = deadline

    def note_progress(self) -> None:
        """Note that tokens came."""
        self._lost_at = None

    def pause_after(self, error: EngineError, *, has_spoken: bool) -> float:
        """Return how long to wait before going on; raise the error if that is of no use.

        `has_spoken`: the call that failed had brought a message.
        """
        asked_s = error.retry_after_s
        if not isinstance(error, RESUMABLE) and (has_spoken or asked_s is None):
            raise error
        now = self._clock()
        is_new = self._lost_at is None
        self._lost_at = now if self._lost_at is None else self._lost_at
        pause_s = max(RESUME_PAUSE_S, asked_s or 0.0)
        if now + pause_s - self._lost_at > self._patience_s or not self.deadline.allows(pause_s):
            raise error
        if is_new and self._on_lost is not None:
            self._on_lost(error, self._patience_s)
        return pause_s
