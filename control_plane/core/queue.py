"""The sequences that wait for admission."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count

from control_plane.core.request import Sequence

_DEAD_ENTRIES_KEPT = 64

# Its order, a number that no other entry has, and the sequence, which so is never compared: a beam
# may be made anew under the `seq_id` of one whose entry is dead.
_Entry = tuple[int, float, int, int, Sequence]


class WaitingQueue:
    """Lowest priority number first, and first come, first served among equals.

    The order is that of `Sequence.order`, so a preempted sequence gets back its place in front of
    all that arrived later. `add` and `pop` cost O(log n); `remove` leaves a dead entry in the heap,
    which is cleared once most of it is dead: O(1) on average.
    """

    __slots__ = ("_heap", "_num_of_request", "_numbers", "_waiting", "alone")

    def __init__(self) -> None:
        self.alone: int | None = None
        """The request whose sequences alone may be taken out; None: all."""
        self._heap: list[_Entry] = []
        self._waiting: dict[int, _Entry] = {}  # by seq_id; what else the heap has is dead
        self._numbers = count()
        self._num_of_request: dict[int, int] = {}  # how many sequences of it wait

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._waiting

    @property
    def num_requests(self) -> int:
        """Requests of which a sequence waits."""
        return len(self._num_of_request)

    def add(self, seq: Sequence) -> None:
        """Add a sequence, at the place of its order."""
        self._waiting[seq.seq_id] = entry = (*seq.order, next(self._numbers), seq)
        counts = self._num_of_request
        counts[seq.request_id] = counts.get(seq.request_id, 0) + 1
        heappush(self._heap, entry)

    @property
    def has_next(self) -> bool:
        """Whether there is a sequence to take out."""
        return bool(self._waiting) and (self.alone is None or self.alone in self._num_of_request)

    def peek(self) -> Sequence:
        """Return the first sequence to take out; there must be one."""
        if self.alone is not None:
            return min(
                entry for entry in self._waiting.values() if entry[4].request_id == self.alone
            )[4]
        heap = self._heap
        while not self._is_alive(heap[0]):
            heappop(heap)
        return heap[0][4]

    def pop(self) -> Sequence:
        """Remove and return the first sequence to take out; there must be one."""
        seq = self.peek()
        if self.alone is None:
            heappop(self._heap)
            self._forget(seq)
        else:
            self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, from anywhere."""
        self._forget(seq)
        if len(self._heap) > 2 * len(self._waiting) + _DEAD_ENTRIES_KEPT:
            self._heap = [entry for entry in self._heap if self._is_alive(entry)]
            heapify(self._heap)

    def _is_alive(self, entry: _Entry) -> bool:
        return self._waiting.get(entry[2]) is entry

    def _forget(self, seq: Sequence) -> None:
        del self._waiting[seq.seq_id]
        counts = self._num_of_request
        counts[seq.request_id] -= 1
        if counts[seq.request_id] == 0:
            del counts[seq.request_id]
