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

    def note_progress(self) -> None:
        """Note a result, or that nothing is left of what the plane was lost with."""
        self._in_round = self._rounds = 0

    def note(self, *, while_computing: bool) -> None:
        """Note a loss; it counts if steps were under way."""
        self._in_round += while_computing

    def give_up_after(self, *, anyone_is_blamed: bool) -> int | None:
        """Return after how many losses all requests are given up; None: they go on.

        `anyone_is_blamed`: requests of the steps that were lost are given up now.
        """
        if self._in_round < MAX_LOSSES_WITHOUT_PROGRESS:
            return None
        self._in_round = 0
        self._rounds += 1
        if anyone_is_blamed and self._rounds < MAX_VAIN_ROUNDS:
            return None
        num_losses = self._rounds * MAX_LOSSES_WITHOUT_PROGRESS
        self._rounds = 0
        return num_losses
