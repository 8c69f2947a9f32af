"""What the engine publishes about requests: frozen values, safe in any thread."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.core.batch import EndToken, TokenLogprobs
from control_plane.core.request import FinishReason, RequestState, StateChange
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
    """How a request ended, with all its samples; `error` is set if it was refused or failed.

    `finish_reason`: of the first sample, and of every sample that had not ended. `cached_tokens`:
    tokens of the prompt that were found computed. `history`: every state it entered, and when on
    the engine's monotonic clock; empty if it was refused. `embedding`: of a completed request that
    asked for it, float64 [hidden size], not normalised.
    """

    state: RequestState
    finish_reason: FinishReason
    timings: RequestTimings
    error: EngineError | None = None
    cached_tokens: int = 0
    history: tuple[StateChange, ...] = ()
    embedding: array[float] | None = None


class RequestUpdate(NamedTuple):
    """News of one request. The first one of a request without an `end` says that it is admitted.

    `new_token_ids` belong to sample `sample_index`. `logprobs`: one entry for each of them, if the
    request asked for them. `finish_reason`: that sample has ended, by the token `matched_stop` if
    that is one of `stop_token_ids`; `end_token`: the token that ended it and is not among the new
    ones, if the request asked for log-probabilities. `prompt_logprobs`: of the prompt's tokens
    from its second on, once, if the request asked for them. `at`: when new tokens were committed,
    on the engine's monotonic clock. An `end`, of the request as a whole, comes exactly once and
    last.
    """

    request_id: int
    new_token_ids: tuple[int, ...] = ()
    end: RequestEnd | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    sample_index: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    at: float = 0.0
    end_token: EndToken | None = None


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """A request at one moment: under way, or ended not long ago.

    `name`: what its client calls it. `generated_tokens`: of each sample. `age_s`: since receipt.
    `history`: every state it entered, and when on the engine's monotonic clock, on which it was
    received at `arrival_time`. `finish_reason`: None while it goes on. `adapter`: as in `Request`.
    """

    request_id: int
    name: str
    state: RequestState
    priority: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: tuple[int, ...]
    arrival_time: float
    age_s: float
    history: tuple[StateChange, ...]
    finish_reason: FinishReason | None
    adapter: int = 0


Publisher = Callable[[Sequence[RequestUpdate]], None]
"""Called by the engine at most once a turn, with everything the turn brought."""
