"""Which lanes go on next, and how far: those at the lowest place, up to where others wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.lanes import Mask

Array = npt.NDArray[Any]


class Front:
    """Where each lane of a crowd is, in a program of `count` instructions.

    The lanes of `mask` are on their way: they are at `here` and may go on together to `limit`. The
    places of the others are in `at`; `waits` are those who wait for company where they are, `done`
    those at their end.
    """

    def __init__(self, size: int, count: int) -> None:
        self._count = count
        self.at: Array = np.zeros(size, np.int64)
        self.waits: Array = np.zeros(size, np.bool_)
        self.done: Array = np.zeros(size, np.bool_)
        self.here, self.limit = 0, count
        self.mask: Mask = True

    def choose(self) -> bool:
        """Send the lanes at the lowest place on their way; say whether there are any."""
        ready = ~(self.done | self.waits)
        if not ready.any():
            return False
        self.here = int(self.at[ready].min())
        mask = ready & (self.at == self.here)
        others = ready & ~mask
        self.limit = int(self.at[others].min()) if others.any() else self._count
        self.mask = True if mask.all() else mask
        return True

    def halt(self, place: int | Array) -> None:
        """Leave the lanes that were on their way at a place, or each at its own."""
        chosen = slice(None) if self.mask is True else self.mask
        self.at[chosen] = place if isinstance(place, int) else place[chosen]
