"""How often the event loop is given new tokens: as they come, unless that takes too much of it.

Each delivery makes the loop write a message for every stream: 30 to 50 µs each, most of them under
the interpreter lock, which the engine thread needs to answer the compute plane. With steps of a
millisecond and 32 streams the loop would do nothing else, and the engine would wait for it. Fewer
and larger messages cost less: what comes in the meantime is sent together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

MOST_BUSY: Final = 0.25
"""Of its time the event loop may work while every step's tokens are delivered at once."""

LONGEST_PAUSE_S: Final = 0.025
"""Between deliveries: forty a second are more than anybody reads."""

CREDIT_S: Final = 0.05
"""A loop that did little until now may do so much time's work before it is spared."""


class DeliveryPace:
    """Says how long the next delivery is to wait; lives on the event loop's thread.

    `clock`: seconds that pass; `busy_clock`: seconds of the processor that the loop's thread took.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        busy_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._busy_clock = busy_clock
        self._debt_s = -CREDIT_S
        self._at: float | None = None
        self._busy_at = 0.0

    def pause_s(self) -> float:
        """Return how long the loop is to be spared from now on: 0 to `LONGEST_PAUSE_S`.

        It is so much that the loop's work since it was asked last, and its debt until then, are
        `MOST_BUSY` of the time that will have passed.
        """
        now, busy = self._clock(), self._busy_clock()
        if self._at is not None:
            debt_s = self._debt_s + (busy - self._busy_at) / MOST_BUSY - (now - self._at)
            self._debt_s = min(max(debt_s, -CREDIT_S), LONGEST_PAUSE_S)
        self._at, self._busy_at = now, busy
        return max(0.0, self._debt_s)
