"""The requests that wait for admission, oldest first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import NamedTuple

from control_plane.core.request import Request


class Waiting(NamedTuple):
    """A waiting request and its place in the order of arrival."""

    arrival: int
    request: Request


class WaitingQueue:
    """First come, first served; a preempted request goes back to its place at the front.

    Requests are admitted in order of arrival, so whatever was running arrived before everything
    that never ran: the preempted ones, kept sorted, stand before the others. `append`, `pop` and
    `remove` cost O(1); `put_back` and removing a preempted request cost a binary search and a
    memory move over the preempted ones, of which there are never more than sequences can run.
    """

    __slots__ = ("_new", "_returned", "_returned_arrivals")

    def __init__(self) -> None:
        self._new: OrderedDict[int, Waiting] = OrderedDict()  # by request id
        # Youngest first, so that the oldest is popped off the end.
        self._returned: list[Waiting] = []
        self._returned_arrivals: dict[int, int] = {}  # by request id

    def __len__(self) -> int:
        return len(self._new) + len(self._returned)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._new or request_id in self._returned_arrivals

    def append(self, arrival: int, request: Request) -> None:
        """Add a request that arrives now; `arrival` is higher than any before."""
        self._new[request.id] = Waiting(arrival, request)

    def put_back(self, arrival: int, request: Request) -> None:
        """Add a request that was admitted before and lost its place."""
        insort(self._returned, Waiting(arrival, request), key=_youngest_first)
        self._returned_arrivals[request.id] = arrival

    def peek(self) -> Waiting:
        """Return the oldest request; the queue must not be empty."""
        if self._returned:
            return self._returned[-1]
        return next(iter(self._new.values()))

    def pop(self) -> Waiting:
        """Remove and return the oldest request; the queue must not be empty."""
        if self._returned:
            waiting = self._returned.pop()
            del self._returned_arrivals[waiting.request.id]
            return waiting
        return self._new.popitem(last=False)[1]

    def remove(self, request_id: int) -> Request | None:
        """Remove and return the request; None if it does not wait here."""
        waiting = self._new.pop(request_id, None)
        if waiting is not None:
            return waiting.request
        arrival = self._returned_arrivals.pop(request_id, None)
        if arrival is None:
            return None
        return self._returned.pop(
            bisect_left(self._returned, -arrival, key=_youngest_first)
        ).request


def _youngest_first(waiting: Waiting) -> int:
    return -waiting.arrival
