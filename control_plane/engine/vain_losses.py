"""Losses of a compute plane with no result in between: when what waits is given up, too.

lost, lost, lost, lost, lost    what the steps computed is given up: a round; what waited goes on
three rounds in a row           it is the plane, whatever it is given: all is given up
"""

from __future__ import annotations

MAX_LOSSES_WITHOUT_PROGRESS = 5
"""When the plane is lost this often with no result in between, what it was given is to blame; of
results in between, a request that had no token of them: a long prompt may kill with its end."""
MAX_VAIN_ROUNDS = 3


class VainLosses:
    """Counts losses since the last result."""

    def __init__(self) -> None:
        self._in_round = self._rounds = 0
        self._has_blamed = False

    @property
    def in_a_row(self) -> int:
        """How many there are since a result, or since somebody was given up for them."""
        return self._in_round

    def note_progress(self) -> None:
        """Note a result, or that nothing is left of what the plane was lost with."""
        self._in_round = self._rounds = 0
        self._has_blamed = False

    def note(self, *, while_computing: bool) -> None:
        """Note a loss; it counts if steps were under way."""
        self._in_round += while_computing

    def note_blame(self) -> None:
        """Note that a request is given up for them."""
        self._has_blamed = True

    def give_up_after(self) -> int | None:
        """Return after how many losses all requests are given up; None: they go on."""
        if self._in_round < MAX_LOSSES_WITHOUT_PROGRESS:
            return None
        has_blamed, self._has_blamed = self._has_blamed, False
        self._in_round = 0
        self._rounds += 1
        if has_blamed and self._rounds < MAX_VAIN_ROUNDS:
            return None
        num_losses = self._rounds * MAX_LOSSES_WITHOUT_PROGRESS
        self._rounds = 0
        return num_losses
