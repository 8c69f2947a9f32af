"""A request and the sequence that computes it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from control_plane.core.generation_params import GenerationParams


class RequestState(enum.Enum):
    """What a client may see of a request's life.

    PENDING → PREFILL → DECODE → COMPLETED | FAILED | CANCELLED; a preempted request goes back to
    PENDING. Prefill and decode are words for what a row does; the scheduler has one rule for both.
    """

    PENDING = "pending"
    PREFILL = "prefill"
    DECODE = "decode"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the request has ended."""
        return self in (RequestState.COMPLETED, RequestState.FAILED, RequestState.CANCELLED)


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(slots=True)
class Request:
    """One generation asked for; owned by the scheduler once added.

    `id` is unique within the engine. `params.seed` is set by then. `eos_token_ids` end the
    generation unless `params.ignore_eos`; the end token itself is not part of `output_tokens`.
    `arrival_time` is the shell's monotonic clock, in seconds; the core never reads a clock.
    """

    id: int
    input_tokens: list[int]
    params: GenerationParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_time: float = 0.0
    output_tokens: list[int] = field(default_factory=list)
    state: RequestState = RequestState.PENDING
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.input_tokens)

    @property
    def max_total_len(self) -> int:
        """Most tokens this request can ever hold: prompt and completion."""
        return len(self.input_tokens) + self.params.max_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""
        return self.params.max_tokens

    @property
    def temperature(self) -> float:
        """Sampling temperature; 0 is greedy."""
        return self.params.temperature

    @property
    def top_p(self) -> float:
        """Nucleus sampling threshold."""
        return self.params.top_p


@dataclass(slots=True, eq=False)
class Sequence:
    """A running request with its KV blocks, seen from the scheduler.

    `seq_id` grows with arrival and stays the same when the request is preempted and comes back.
    `slot` is the compute plane's name for it. `num_computed_tokens` counts the tokens whose
    computation has been *sent*; `num_in_flight` the steps with a row of this sequence that have
    been sent and not committed; `num_pending_tokens` the samples among them whose value is not
    known yet. `needs_start`: the compute plane does not know the slot as this sequence.
    `draining`: not scheduled, waiting for its steps in flight, then preempted or finished.
    `max_computed_tokens`: tokens ever computed; the last one sampled is not.
    """

    seq_id: int
    request: Request
    slot: int
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_pending_tokens: int = 0
    needs_start: bool = True
    draining: bool = False
    last_scheduled_step: int = 0
    max_computed_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive what does not change."""
        self.max_computed_tokens = self.request.max_total_len - 1

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose value is known here: prompt and committed output."""
        return len(self.request.input_tokens) + len(self.request.output_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist: known here, or sampled on the compute plane and under way."""
        return self.num_known_tokens + self.num_pending_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.request.output_tokens)
