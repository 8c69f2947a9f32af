"""Requests with which a plane was lost again and again, computed one at a time.

    lost with {a, b, c}, twice    a alone: a token │ b alone: lost three times: given up │ c alone …

So the one that kills planes ends, and those that happened to be in its steps do not. Nothing else
is computed meanwhile. A scheduler of a user's own that cannot keep requests waiting has none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from control_plane.core.interface import IsolatesRequests, SchedulerProtocol
from control_plane.engine.ledger import Ledger

LOSSES_BEFORE: Final = 2
"""In a row with no result in between: one may be chance, and trials take a while."""


class Trials:
    """Says which request the scheduler computes alone."""

    def __init__(self, scheduler: SchedulerProtocol, ledger: Ledger) -> None:
        self._scheduler = scheduler if isinstance(scheduler, IsolatesRequests) else None
        self._ledger = ledger
        self._left: deque[int] = deque()

    def begin(self, suspects: Iterable[int]) -> None:
        """Compute these one at a time, whatever was on trial before."""
        if self._scheduler is None:
            return
        others = set(suspects).difference(self._left)
        self._left.extend(sorted(others))
        self.go_on()

    def go_on(self) -> None:
        """Go on to the next one if a token has come of the one on trial, or its end."""
        left = self._left
        if self._scheduler is None or not left:
            return
        while left and self._ledger.is_cleared(left[0]):
            left.popleft()
        self._scheduler.isolate(left[0] if left else None)
