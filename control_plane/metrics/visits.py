"""Requests as they come in by gRPC and HTTP: how many, how many fail and why, how many are here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

GRPC = "grpc"
HTTP = "http"

FAULT = "INTERNAL"
"""The reason of a failure that is nobody's error class: a fault of ours."""


@dataclass(slots=True)
class Visit:
    """One request by RPC or HTTP while it is here. `error`: why it failed, the first reason."""

    protocol: str
    is_streamed: bool = False
    error: str | None = None


_visit: ContextVar[Visit | None] = ContextVar("visit", default=None)


class VisitMeter:
    """Sums over all requests to the public API; used on the event loop only.

    `num_requests`: by protocol and method, which is one of a fixed set. `num_errors`: by protocol
    and the reason that the client was told. `num_streamed`: answers begun as a stream.
    """

    def __init__(self) -> None:
        self.num_requests: Counter[tuple[str, str]] = Counter()
        self.num_errors: Counter[tuple[str, str]] = Counter()
        self.num_streamed = Counter({GRPC: 0, HTTP: 0})
        self.num_in_flight = Counter({GRPC: 0, HTTP: 0})

    @contextmanager
    def visit(self, protocol: str, method: str) -> Iterator[Visit]:
        """Count a request, which this task serves, until the block is left.

        An exception that leaves the block is none of the visit's: who answers for it notes it.
        """
        visit = Visit(protocol)
        token = _visit.set(visit)
        self.num_requests[protocol, method] += 1
        self.num_in_flight[protocol] += 1
        try:
            yield visit
        finally:
            _visit.reset(token)
            self.num_in_flight[protocol] -= 1
            if visit.error is not None:
                self.num_errors[protocol, visit.error] += 1
            if visit.is_streamed:
                self.num_streamed[protocol] += 1


def note_error(reason: str) -> None:
    """Note why the request that this task serves has failed; the first reason counts."""
    visit = _visit.get()
    if visit is not None and visit.error is None:
        visit.error = reason


def note_streamed() -> None:
    """Note that the answer of the request that this task serves begins as a stream."""
    visit = _visit.get()
    if visit is not None:
        visit.is_streamed = True
