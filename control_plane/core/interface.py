"""What the scheduler is given and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol, runtime_checkable

from control_plane.core.batch import EndToken, StepBatch, StepResult, TokenLogprobs
from control_plane.core.kv_interface import MemoryStats
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.states import MIN_STATE_TOKENS
from planes.errors import ConfigError

MAY_BE_UNSET = ("max_slots", "max_prefill_tokens")
MOST_DRAFTS = 7
"""Of a decode row; more rows than 8 cost a step as much as they bring."""

OPTIONAL_PARAMETERS = (
    "n",
    "beam_width",
    "num_logprobs",
    "num_prompt_logprobs",
    "structured_outputs",
)
"""Fields of `GenerationParams` that take more of a scheduler than one answer of sampled tokens."""

ADAPTERS = "adapters"
"""Kept to by a scheduler that starts slots with the adapters of their requests."""

MAY_BE_ZERO = (
    "num_host_blocks",
    "speculative_tokens",
    "grammar_drafts",
    "embedding_size",
    "max_embeddings",
    "num_states",
)

NOT_INTEGERS = ("memory_threshold", "start_prefixes", "draft_model")

_NOT_WITH_STATES = ("num_host_blocks", "speculative_tokens", "grammar_drafts")
"""A state takes nothing back, and is not in the blocks that are swapped out."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises ConfigError naming the first field out of range.

    `max_batch_size`: rows of one step.
    `max_num_seqs`: admitted sequences, which hold a slot and KV blocks; the others wait. A request
    has one for each of its samples.
    `max_model_len`: prompt and completion tokens of one request.
    `max_total_tokens`: tokens computed by one step; a longer prompt is computed in chunks.
    `max_prefill_tokens`: tokens of prompts (prefill) among them; None: no limit of their own. It
    bounds how long one step keeps running streams waiting for their next token.
    `memory_threshold`: admission stops while the projected use of the block pool would exceed
    this share of it, in (0, 1]; a lone request runs regardless.
    `max_slots`: slots of the compute plane; None: as many as `max_num_seqs`.
    `prefill_patience`: after this many steps in a row in which decoding left no room for prompt
    work, the next step reserves a row and a share of its tokens for it. If a step has more rows
    than that, and decoding fills them all, every step does: it costs decoding less.
    `num_host_blocks`: blocks of the compute plane's host pool; a preempted sequence is swapped out
    there while there is room, and computed anew otherwise. 0: always computed anew.
    `speculative_tokens`: drafts of a decode row (`core.drafting`); 0: none. By prompt lookup and,
    with `draft_model`, by the compute plane's draft model.
    `prompt_lookup_min`: tokens that must have stood in the text before for a draft.
    `grammar_drafts`: drafts of a constrained decode row by its constraint; 0: none.
    `embedding_size`: numbers of a row's hidden states; `max_embeddings`: rows of one step that may
    give them. 0: the compute plane gives none.
    `num_states`: states of the compute plane (`control_plane.core.states`), at least as many as it
    has slots, and then without host blocks and drafts; 0: its model has none.
    `min_state_tokens`: tokens that a state kept to be found again saves at least.
    `start_prefixes`: whether the compute plane starts a slot with what another one has.
    """

    max_batch_size: int = 32
    max_num_seqs: int = 256
    max_model_len: int = 2048
    max_total_tokens: int = 4096
    max_prefill_tokens: int | None = None
    memory_threshold: float = 0.9
    max_slots: int | None = None
    prefill_patience: int = 8
    num_host_blocks: int = 0
    speculative_tokens: int = 0
    prompt_lookup_min: int = 3
    grammar_drafts: int = 0
    embedding_size: int = 0
    max_embeddings: int = 0
    num_states: int = 0
    min_state_tokens: int = MIN_STATE_TOKENS
    start_prefixes: bool = False
    draft_model: bool = False

    def __post_init__(self) -> None:
        """Check every field."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in NOT_INTEGERS or (value is None and f.name in MAY_BE_UNSET):
                continue
            least = 0 if f.name in MAY_BE_ZERO else 1
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"{f.name} must be an integer of at least {least}, got {value!r}", field=f.name
                )
        share = self.memory_threshold
        if (
            isinstance(share, bool)
            or not isinstance(share, int | float)
            or not math.isfinite(share)
            or not 0.0 < share <= 1.0
        ):
            raise ConfigError(
                f"memory_threshold must be greater than 0 and at most 1, got {share!r}",
                field="memory_threshold",
            )
        if self.num_states:
            self._check_states()

    def _check_states(self) -> None:
        num_slots = self.kept_states.start
        if self.num_states < num_slots:
            raise ConfigError(
                f"num_states must be 0 or at least that of slots ({num_slots}), "
                f"got {self.num_states}",
                field="num_states",
            )
        for name in _NOT_WITH_STATES:
            if getattr(self, name):
                raise ConfigError(
                    f"{name} must be 0 with num_states, got {getattr(self, name)}", field=name
                )

    @property
    def kept_states(self) -> range:
        """The states behind those of the slots that are used: to be kept and found again."""
        return range(self.num_slots, self.num_states)

    @property
    def num_slots(self) -> int:
        """Slots the scheduler uses; no more than that many sequences run."""
        if self.max_slots is None:
            return self.max_num_seqs
        return min(self.max_num_seqs, self.max_slots)


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step to send, and whose rows it has, in the order of the rows: decode, then prefill."""

    batch: StepBatch
    decode_request_ids: list[int]
    prefill_request_ids: list[int]


class RequestOutput(NamedTuple):
    """What happened to one request: new tokens, an end, or both.

    `new_token_ids` belong to sample `sample_index`. `finish_reason`: that sample has ended; `state`
    is the request's, and final once all its samples have. A final event comes exactly once a
    request. `logprobs`: of the new tokens, where the request asked. `matched_stop`: the token of
    `params.stop_token_ids` that ended the sample. `end_token`: the token that ended it and is not
    among the new ones, where the request asked for log-probabilities. `error_field`: the parameter
    of the request that its `error` is due to, if it is to one. (A named tuple because one is
    made for every token, and a frozen dataclass takes twice as long to make.)
    """

    request_id: int
    new_token_ids: tuple[int, ...]
    state: RequestState
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    sample_index: int = 0
    matched_stop: int | None = None
    end_token: EndToken | None = None
    error_field: str | None = None


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the start (`num_steps`, `num_preemptions`, `num_swaps`), numbers of now.

    `num_preemptions`: how often a sequence had to give way; `num_swaps` of these times its blocks
    were saved on the host, the other times it was to be computed anew. `num_running`: sequences
    that hold a slot and blocks, those on their way out included. `num_waiting`: sequences that wait
    for that, `num_waiting_requests` the requests they belong to; None: one each. `num_in_flight`:
    steps sent and not committed. `num_host_blocks_used`: blocks of the host pool that hold
    something. `num_drafts`: drafts computed, `num_kept_drafts` of them right.
    `num_kept_states`: states that can be found again; `num_state_hits`: how often one was.
    """

    num_steps: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_in_flight: int
    num_swaps: int = 0
    num_host_blocks_used: int = 0
    num_waiting_requests: int | None = None
    num_drafts: int = 0
    num_kept_drafts: int = 0
    num_kept_states: int = 0
    num_state_hits: int = 0

    @property
    def num_queued_requests(self) -> int:
        """Requests of which a sequence waits."""
        if self.num_waiting_requests is None:
            return self.num_waiting
        return self.num_waiting_requests


@runtime_checkable
class ReportsMemory(Protocol):
    """A scheduler that knows more of the block pool than the KV cache manager does."""

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the pool, with what only the scheduler knows."""
        ...


@runtime_checkable
class EndsSamples(Protocol):
    """A scheduler that can end one sample of a request from outside: its text is complete."""

    def end_sample(
        self, request_id: int, sample_index: int, num_tokens: int, now: float = 0.0
    ) -> RequestOutput | None:
        """End a sample with its first `num_tokens` tokens; the event, or None if it has ended."""
        ...


@runtime_checkable
class KeepsParameters(Protocol):
    """A scheduler that keeps to more than the parameters every scheduler must keep to.

    Others are given no request with a value of their own for one of `OPTIONAL_PARAMETERS`, and none
    with an `embedding` or an `adapter`.
    """

    @property
    def keeps(self) -> frozenset[str]:
        """Those of `OPTIONAL_PARAMETERS` that it keeps to, and of `EMBEDDINGS` and `ADAPTERS`."""
        ...


@runtime_checkable
class FlushesPrefixCache(Protocol):
    """A scheduler whose prefix cache can be emptied."""

    def flush_prefix_cache(self) -> int:
        """Let no request find what earlier ones have left; how many idle blocks held something."""
        ...


@runtime_checkable
class MovesRequests(Protocol):
    """A scheduler whose requests may move to another one; see `Scheduler` for what each does."""

    def withdraw(self, request_ids: Iterable[int] | None = None) -> list[Request]:
        """Let go of requests that hold no slot and no block; None: of all of those."""
        ...

    def adopt(self, request: Request) -> int:
        """Queue a request that another scheduler let go. Raises ValidationError or MemoryError."""
        ...


@runtime_checkable
class IsolatesRequests(Protocol):
    """A scheduler that can compute one request alone."""

    def isolate(self, request_id: int | None) -> None:
        """Admit nobody but this request, which may be unknown; None: all again."""
        ...


@runtime_checkable
class SchedulerProtocol(Protocol):
    """What the engine loop needs of a scheduler; another one may be given to the engine.

    Every scheduler keeps to `Request.max_tokens` and ends a sample at a token of
    `Request.end_token_ids`; other parameters are for the compute plane (`SlotStart.params`), but
    for those of `KeepsParameters`. A request may come with `output_tokens`: it goes on behind them.

    Where the model has states (`SchedulerConfig.num_states`), a row that goes on from tokens that
    another slot computed needs a copy of its state (`StepBatch.state_copies`).

    `now`: the engine's monotonic clock, in seconds, the same that stamped `Request.arrival_time`. A
    scheduler that notes no times may ignore it. What it notes in a request (`state`, `history`,
    `samples`, `cached_tokens`) is shown to clients.
    """

    def add_request(self, request: Request) -> int:
        """Queue a request and return its id. Raises ValidationError or MemoryError."""
        ...

    def cancel(self, request_id: int, now: float = 0.0) -> RequestOutput | None:
        """End a request; its final event, or None if it is unknown or has ended."""
        ...

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Return the next step to send; None if there is nothing to send now."""
        ...

    def commit(self, result: StepResult, now: float = 0.0) -> list[RequestOutput]:
        """Take in the result of the oldest step in flight; what it means for each request.

        After a result with a `refusal` the session ends: nothing in flight counts, and `lose_epoch`
        comes next. `row_failures`: of these rows samples mean nothing, and their requests have
        failed.
        """
        ...

    def get_completed(self) -> list[Request]:
        """Return the requests that ended since the last call."""
        ...

    def has_pending_work(self) -> bool:
        """Whether any request waits, runs or still holds blocks."""
        ...

    def lose_epoch(self, last_step: int = 0) -> None:
        """Forget what the compute plane held; the next step is `last_step + 1`.

        Steps in flight are never committed. Requests stay: they are computed anew, from prompt and
        the tokens they have.
        """
        ...

    def get_stats(self) -> SchedulerStats:
        """Return the counters."""
        ...
