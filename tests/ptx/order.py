"""What is ordered between blocks: fences, and atomic instructions on one place.

A lane that fences releases what its block did before its last barrier, and what it knows of other
blocks. An atomic instruction leaves that in its place and takes what others have left there; a
fence behind it makes that known to the lane, and a barrier to its block.

Source: PTX ISA 9.0, chapter 8.9 (release and acquire patterns, causality order).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

# The number of a block → how many barriers it had passed: what it did before the last is over.
Knowledge = dict[int, int]


class Order:
    """What the lanes and the blocks of one launch know of each other, all by number."""

    def __init__(self) -> None:
        self._of_lane: defaultdict[int, Knowledge] = defaultdict(dict)
        self._of_block: defaultdict[int, Knowledge] = defaultdict(dict)
        self._seen: defaultdict[int, Knowledge] = defaultdict(dict)
        self._released: defaultdict[int, Knowledge] = defaultdict(dict)
        self._left: defaultdict[int, Knowledge] = defaultdict(dict)
        self._lanes_of: defaultdict[int, set[int]] = defaultdict(set)  # that know something

    @property
    def has_fences(self) -> bool:
        """Whether any lane has fenced: before, an atomic instruction leaves and sees nothing."""
        return bool(self._released)

    def fence(self, lane: int, block: int, barriers: int) -> None:
        """Order what a lane knows and has seen before what it does next."""
        _add(self._of_lane[lane], self._seen[lane])
        self._lanes_of[block].add(lane)
        own = {block: barriers}
        self._released[lane] = own
        _add(own, self._of_block[block])
        _add(own, self._of_lane[lane])

    def meet(self, lane: int, place: int) -> None:
        """Leave what a lane has released in a place, and see what others have left."""
        left = self._left[place]
        _add(self._seen[lane], left)
        _add(left, self._released[lane])

    def pass_barrier(self, blocks: Iterable[int]) -> None:
        """Tell blocks what their lanes know."""
        if self._lanes_of:
            for block in blocks:
                for lane in self._lanes_of[block]:
                    _add(self._of_block[block], self._of_lane[lane])

    def is_known(self, lane: int, block: int, other: int, barriers: int) -> bool:
        """Return whether a lane knows what another block did at its `barriers`-th barrier."""
        known = (self._of_block[block].get(other, 0), self._of_lane[lane].get(other, 0))
        return max(known) > barriers


def _add(known: Knowledge, more: Knowledge) -> None:
    for block, barriers in more.items():
        known[block] = max(barriers, known.get(block, 0))
