"""Requests with which planes were lost again and again, computed one at a time.

    lost with {a, b, c}, twice    a first: a token │ b: lost three times more: given up │ c …

So the one that kills planes ends, and those that happened to be in its steps do not. What counts
is how often a plane was lost with a request since its last token: other results in between clear
nobody (a prompt may kill with its end), and the count goes along to another plane. On trial is who
alone is admitted; those before it of whom a token has come go on beside it, and if it is one of
them after all that kills, a loss clears all the others of them.

Between two that are given up somebody else is computed: of a plane that works it is known then
that it does, however many there are that kill it. A scheduler of a user's own that cannot keep
requests waiting has no trials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from control_plane.core.interface import IsolatesRequests, SchedulerProtocol
from control_plane.engine.ledger import Ledger

LOSSES_BEFORE: Final = 2
"""With a request since its last token: one may be chance, and trials take a while."""


class Trials:
    """Says which request the scheduler computes alone."""

    def __init__(self, scheduler: SchedulerProtocol, ledger: Ledger) -> None:
        self._scheduler = scheduler if isinstance(scheduler, IsolatesRequests) else None
        self._ledger = ledger
        self._left: deque[int] = deque()
        self._probe: int | None = None

    @property
    def is_probing(self) -> bool:
        """Whether somebody is computed to see whether the plane works at all."""
        return self._probe is not None

    def begin(self, request_ids: Iterable[int]) -> None:
        """Compute those of these one at a time with which planes were lost often enough."""
        if self._scheduler is None:
            return
        losses_with = self._ledger.num_vain_losses
        suspects = {i for i in request_ids if losses_with(i) >= LOSSES_BEFORE}
        self._left.extend(sorted(suspects.difference(self._left)))
        self.go_on()

    def probe(self) -> None:
        """Compute the one next with which planes were lost least, until there is a result."""
        if self._scheduler is not None:
            self._probe = self._ledger.least_suspect()
            self.go_on()

    def end_probe(self) -> None:
        """Note that the plane has had a result, or was lost once more."""
        self._probe = None
        self.go_on()

    def go_on(self) -> None:
        """Go on to the next one if a token has come of the one on trial, or its end."""
        if self._scheduler is None:
            return
        left, ledger = self._left, self._ledger
        while left and ledger.num_vain_losses(left[0]) == 0:
            left.popleft()
        if self._probe is not None and not ledger.is_open(self._probe):
            self._probe = None
        first = left[0] if left else None
        self._scheduler.isolate(first if self._probe is None else self._probe)
