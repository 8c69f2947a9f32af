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
        self._num = self._in_round = self._rounds = 0
        self._has_blamed = False

    def note_progress(self) -> None:
        """Note a result, or that nothing is left of what the plane was lost with."""
        self._num = self._in_round = self._rounds = 0
        self._has_blamed = False

    def note(self, *, while_computing: bool, is_probe: bool = False) -> None:
        """Note a loss; it counts if steps were under way.

        `is_probe`: they were of somebody who was computed between two rounds, and are of neither.
        """
        self._num += while_computing
        self._in_round += while_computing and not is_probe

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
        num_losses, self._num, self._rounds = self._num, 0, 0
        return num_losses
