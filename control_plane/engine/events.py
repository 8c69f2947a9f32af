"""What the engine publishes about requests: frozen values, safe in any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.core.batch import TokenLogprobs
from control_plane.core.request import FinishReason, RequestState
from planes.errors import EngineError


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds on the engine's monotonic clock, each from receipt; None: never came to it.

    `queue_s`: to the first step with a row of the request. `time_to_first_token_s`: to its first
    token. `total_s`: to its end.
    """

    queue_s: float | None
    time_to_first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request ended; `error` is set if it was refused or failed."""

    state: RequestState
    finish_reason: FinishReason
    timings: RequestTimings
    error: EngineError | None = None


class RequestUpdate(NamedTuple):
    """News of one request. The first one of a request without an `end` says that it is admitted.

    `logprobs`: one entry per new token, if the request asked for them. An `end` comes exactly once
    and last.
    """

    request_id: int
    new_token_ids: tuple[int, ...] = ()
    end: RequestEnd | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


Publisher = Callable[[Sequence[RequestUpdate]], None]
"""Called by the engine at most once a turn, with everything the turn brought."""
