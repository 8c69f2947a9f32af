"""A request, its samples, and the sequences that compute them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.core.batch import SlotPrefix, TokenLogprobs
from control_plane.core.beam import BeamSearch
from control_plane.core.constraint import Constraint
from control_plane.core.embedding import Embedding
from control_plane.core.generation_params import GenerationParams
from control_plane.core.guesses import Guesses
from control_plane.core.prefix_cache import TokenChain
from control_plane.core.prompt_lookup import PromptLookup
from control_plane.core.request_options import MAX_SALT_BYTES
from control_plane.core.token_masks import of_both


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


class StateChange(NamedTuple):
    """A request entered `state` at `at`, in seconds of the engine's monotonic clock."""

    state: RequestState
    at: float


@dataclass(slots=True)
class Sample:
    """One continuation of a request's prompt; a request has `params.n` of them.

    `output_tokens`: without an end token. `finish_reason`: None while it goes on.
    """

    output_tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class Request:
    """One generation asked for; owned by the scheduler once added.

    `id` is unique within the engine. `params.seed` is set by then. `eos_token_ids` end the
    generation unless `params.ignore_eos`; the end token itself is not part of `output_tokens`.
    `arrival_time` is the engine's monotonic clock, in seconds; the core never reads a clock.
    `output_tokens`: of the first sample; the scheduler makes `samples`, whose first has this list.
    `finish_reason`: of the request as a whole, that is of its first sample where all ran to an end.
    `priority`: lower ones are served first; within one, first come, first served.
    `cache_salt`: requests find only what requests of the same salt have left in the prefix cache.
    `adapter`: what its tokens are computed with, of those of the compute plane, counted from 1; 0:
    the model as it is.
    `uses_cache`: whether it may find anything there at all.
    `cached_tokens`: tokens of the prompt that it found there.
    `prompt_logprobs`: of the prompt's tokens from its second on, as far as they are known, if
    `params.num_prompt_logprobs` asks for them.
    `history`: every state it entered, in order, and when.
    `name`: what its client calls it; shown, never looked at.
    `search`: where its beam search stands; the scheduler makes it.
    `constraints`: what each of its samples may say, behind the tokens that it has; empty: anything.
    `open_tokens`: what each may say in its first `params.min_tokens`: all that does not end it, as
    `RowConstraint` has it; empty: anything.
    `embedding`: of its prompt, with which it ends then: nothing is generated, and `params` are
    `NOTHING_GENERATED`; None: it generates.
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
    priority: int = 0
    cache_salt: str = ""
    uses_cache: bool = True
    cached_tokens: int = 0
    samples: list[Sample] = field(default_factory=list)
    history: list[StateChange] = field(default_factory=list)
    name: str = ""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    search: BeamSearch | None = None
    constraints: tuple[Constraint, ...] = ()
    open_tokens: bytes = b""
    embedding: Embedding | None = None
    adapter: int = 0

    @property
    def cache_scope(self) -> str:
        """What tells its blocks from those of others with the same tokens: salt and adapter.

        With an adapter it has more bytes than any salt that is let in, so that none is the same.
        """
        if not self.adapter:
            return self.cache_salt
        return f"{self.adapter}".ljust(MAX_SALT_BYTES + 1, "\0") + self.cache_salt

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and not all known."""
        wants = self.params.num_prompt_logprobs is not None
        return wants and len(self.prompt_logprobs) < len(self.input_tokens) - 1

    def enter(self, state: RequestState, at: float) -> None:
        """Go into another state; a time before the last change counts as that of the last."""
        self.state = state
        self.history.append(StateChange(state, max(at, self.history[-1].at)))

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens that end a sample.

        A constrained one is given those of the model where its text may end, and then it does.
        """
        own = self.params.stop_token_ids
        goes_on = self.params.ignore_eos and not self.constraints
        eos = frozenset() if goes_on else self.eos_token_ids
        return eos.union(own) if own else eos

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.input_tokens)

    @property
    def max_total_len(self) -> int:
        """Most tokens one sample of this request can ever hold: prompt and completion."""
        return len(self.input_tokens) + self.params.max_tokens

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most, for each sample."""
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
class Group:
    """The sequences of one request that have not ended, waiting or running.

    Sample i is sequence `first_seq_id` + i. `unborn`: indices of samples that begin when the prompt
    is computed, out of the same blocks. `params`: what the compute plane is told.

    `search`: of a beam search, whose beam i is sequence `beams[i]`.
    """

    request: Request
    params: GenerationParams
    first_seq_id: int
    search: BeamSearch | None = None
    beams: list[Sequence] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    unborn: list[int] = field(default_factory=list)
    num_running: int = 0


class LeftBlock(NamedTuple):
    """A block that a sequence took a copy of, in a step, and left to others.

    `is_own`: the sequence had filled it; else it had borrowed it.
    """

    step_id: int
    block_id: int
    is_own: bool


class Origin(NamedTuple):
    """Whose first tokens and blocks a sequence has: those of `seq`, in its stay `stay`."""

    seq: Sequence
    stay: int
    num_tokens: int
    num_blocks: int

    def prefix(self) -> SlotPrefix | None:
        """Return what a slot may be started with; None: the plane has it no more, or not yet."""
        seq = self.seq
        if seq.stay != self.stay or not seq.is_on_plane:
            return None
        return SlotPrefix(seq.slot, self.num_tokens, self.num_blocks)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, seen from the scheduler: waiting, or running with its KV blocks.

    `seq_id` grows as requests come to the scheduler, and stays the same when the sequence is
    preempted and comes back.
    `slot` is the compute plane's name for it while it runs. `num_computed_tokens` counts the tokens
    whose computation has been *sent*; `num_in_flight` the steps with a row or a sample of this
    sequence that have been sent and not committed; `num_pending_tokens` the samples among them
    whose value is not known yet. `num_saved_tokens`: tokens whose KV is in the host pool.
    `num_borrowed_blocks`: blocks at the beginning of its table that others filled. `left_blocks`:
    those it left to others when it took a copy. `state_places`: numbers of tokens behind which it
    leaves a state to be found again (`control_plane.core.states`).

    `stay`: the number of the time for which it holds a slot and a table; 0: it holds none.
    `needs_start`: the compute plane does not know the slot as this sequence, or not all its
    tokens; `is_on_plane`: its slot is started there, with this sequence's table. `origin`: what it
    can be started from, as long as that stays; `begun_from`: the stay of whom its slot was started
    with. `shares_tail`: its last block may be half-full and in another table too. `draining`: not
    scheduled, waiting for its steps in flight, then preempted or finished. `constraint`: what it
    may say, None: anything; its rows wait for its newest token, which decides that. `first_end`:
    place of the first token, the prompt's counted, that may be an end. Before it, and with any of
    the other four, it `is_special`: a decode row of it takes more than the next token.

    `is_beam`: it is scheduled again only when all beams of its search have `logprobs`, those of the
    tokens that may follow. `is_done`: the sample has ended. `discards`: what its steps in flight
    bring is not to be used; it is computed anew. `lookup`: what its drafts are found in;
    `awaits_draft`: a step waited for its newest token to have some. `guesses`: its drafts of a
    draft model.

    `max_computed_tokens`: tokens ever computed; the last one sampled is not. `output_tokens`,
    `end_token_ids`, `max_tokens`, `request_id`: the sample's and the request's, at hand.
    """

    seq_id: int
    request: Request
    group: Group
    sample_index: int = 0
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_pending_tokens: int = 0
    num_saved_tokens: int = 0
    num_borrowed_blocks: int = 0
    stay: int = 0
    needs_start: bool = True
    is_on_plane: bool = False
    origin: Origin | None = None
    begun_from: int = 0
    shares_tail: bool = False
    draining: bool = False
    is_special: bool = True
    is_done: bool = False
    discards: bool = False
    was_admitted: bool = False
    left_blocks: list[LeftBlock] = field(default_factory=list)
    state_places: tuple[int, ...] = ()
    chain: TokenChain | None = None
    lookup: PromptLookup | None = None
    awaits_draft: bool = False
    guesses: Guesses | None = None
    logprobs: TokenLogprobs | None = None
    is_beam: bool = field(init=False)
    slot: int = field(init=False)
    constraint: Constraint | None = field(init=False)
    first_end: int = field(init=False)
    max_computed_tokens: int = field(init=False)
    max_tokens: int = field(init=False)
    request_id: int = field(init=False)
    output_tokens: list[int] = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Derive what does not change."""
        request = self.request
        self.request_id = request.id
        self.max_computed_tokens = request.max_total_len - 1
        self.max_tokens = request.params.max_tokens
        self.is_beam = self.group.search is not None
        if request.embedding is not None:
            self.max_computed_tokens = len(request.input_tokens)
        if self.is_beam:
            self.max_computed_tokens += 1  # how a beam ends is for its search to say
            self.output_tokens = []
        else:
            self.output_tokens = request.samples[self.sample_index].output_tokens
        self.end_token_ids = request.end_token_ids
        constraints = request.constraints
        self.constraint = constraints[self.sample_index] if constraints else None
        self.first_end = 0
        if request.open_tokens:
            self.first_end = len(request.input_tokens) + request.params.min_tokens

    @property
    def order(self) -> tuple[int, float, int]:
        """Who is served first: the lowest. By arrival at the server, whoever had it before."""
        request = self.request
        return request.priority, request.arrival_time, self.seq_id

    @property
    def num_known_tokens(self) -> int:
        """Tokens whose value is known here: prompt and committed output."""
        return len(self.request.input_tokens) + len(self.output_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens that exist: known here, or sampled on the compute plane and under way."""
        return self.num_known_tokens + self.num_pending_tokens

    def mark(self) -> None:
        """Derive `is_special` after a change of what it depends on."""
        self.is_special = (
            self.needs_start
            or self.shares_tail
            or self.draining
            or self.constraint is not None
            or self.num_computed_tokens + 1 < self.first_end
        )

    def allowed_tokens(self) -> bytes | None:
        """Return what may be sampled behind the tokens computed so far; None: anything.

        A form that wants an end before `first_end` has it.
        """
        constraint = self.constraint
        allowed = None if constraint is None else constraint.allowed_tokens
        if self.num_computed_tokens >= self.first_end:
            return allowed
        opens = self.request.open_tokens
        return opens if allowed is None else of_both(allowed, opens)
