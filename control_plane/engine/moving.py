"""Requests on their way from one engine loop to another: how they leave and how they come in.

A request belongs to one engine thread at a time. It leaves as a message and comes in as a message;
in between nobody changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from control_plane.core.interface import MovesRequests, SchedulerProtocol
from control_plane.core.request import Request
from control_plane.engine.ledger import Entry, Ledger
from planes.errors import EngineError


class Moving(NamedTuple):
    """A request that no scheduler has, and what is in the books about it."""

    request: Request
    entry: Entry


def is_started(request: Request) -> bool:
    """Whether tokens of it were given out: those that follow must agree with them."""
    return bool(request.output_tokens) or any(
        sample.output_tokens or sample.finish_reason for sample in request.samples
    )


def begin_anew(request: Request) -> None:
    """Forget what a plane of other numbers has found of a request that nobody has seen."""
    request.search = None
    request.prompt_logprobs.clear()


def withdraw(
    scheduler: SchedulerProtocol, ledger: Ledger, may_go: Callable[[Request], bool]
) -> list[Moving]:
    """Take the requests that may go and hold nothing out of scheduler and books.

    None from a scheduler of a user's own that cannot: its requests wait for their plane.
    """
    if not isinstance(scheduler, MovesRequests):
        return []
    ids = [request.id for request in ledger.open_requests() if may_go(request)]
    return [Moving(request, ledger.release(request.id)) for request in scheduler.withdraw(ids)]


def adopt(scheduler: SchedulerProtocol, ledger: Ledger, moving: Moving) -> None:
    """Take a request in where it stands; end it with the scheduler's error if it refuses it."""
    ledger.adopt(moving.entry)
    if isinstance(scheduler, MovesRequests):
        try:
            scheduler.adopt(moving.request)
        except EngineError as error:
            ledger.fail(moving.request.id, error)
