"""One step as the control plane sends it and as it comes back: plain columns, no protobuf.

`StepBatch` mirrors `hetero.compute.v1.ExecutionBatch` (which see for the meaning and order of the
parts) without session, epoch and acknowledgement: those belong to the link.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from control_plane.core.generation_params import GenerationParams


class BlockMove(NamedTuple):
    """The content of a block goes to another pool: device → host or host → device."""

    source: int
    destination: int


class BlockCopy(NamedTuple):
    """Entry `logical_index` of a slot's table was `source` and becomes `destination`, its copy."""

    slot: int
    logical_index: int
    source: int
    destination: int


class StateCopy(NamedTuple):
    """State `destination` becomes what state `source` is."""

    source: int
    destination: int


class SlotPrefix(NamedTuple):
    """What a slot begins with as slot `slot` does: its first tokens, and entries of its table.

    It is as the batch's copies and the starts before this one have left it, released or not.
    """

    slot: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SlotStart:
    """Everything the compute plane must know to continue a sequence from nothing.

    `token_ids`: all tokens known so far, prompt first, and `block_ids`: the whole block table; both
    behind what they have of the `prefix`. `adapter`: what they are computed with; 0: the model as
    it is.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    params: GenerationParams
    sample_index: int = 0
    prefix: SlotPrefix | None = None
    adapter: int = 0


class PromptLogprobsRequest(NamedTuple):
    """The log-probabilities of the known tokens after each token of a row are wanted.

    `num_logprobs`: and those of so many most likely ones at each place.
    """

    row: int
    num_logprobs: int


class RowConstraint(NamedTuple):
    """The samples of a row are among the tokens whose bits are set in `allowed_tokens`.

    Of a row with drafts: the sample behind the first `num_drafts` of them.
    """

    row: int
    allowed_tokens: bytes
    num_drafts: int = 0


class EmbeddingRequest(NamedTuple):
    """A row's hidden states are wanted: those of its last token, or the sum of all its tokens'."""

    row: int
    is_sum: bool


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The rows of one step and the slot changes before them.

    Order: `swap_out`, `copies`, `swap_in`, `state_copies`, `released`, `starts`, rows.

    Row columns (`slots`, `query_lens`, `positions`, `new_block_counts`) have one entry a row;
    `new_block_ids` is flat. `sampled_rows[k]` is the row whose last logits give sample k, and
    `sampled_slots[k]` the slot that takes it; empty: each sample goes to the slot of its row.
    `draft_counts`, `draft_ids`: the drafts computed behind each row's token; empty: none.
    `wanted_drafts`: how many shall be guessed behind each row's sample, at most; empty: none.
    """

    step_id: int
    swap_out: tuple[BlockMove, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockMove, ...] = ()
    released: tuple[int, ...] = ()
    starts: tuple[SlotStart, ...] = ()
    slots: list[int] = field(default_factory=list)
    query_lens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    new_block_counts: list[int] = field(default_factory=list)
    new_block_ids: list[int] = field(default_factory=list)
    sampled_rows: list[int] = field(default_factory=list)
    sampled_slots: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[PromptLogprobsRequest, ...] = ()
    draft_counts: list[int] = field(default_factory=list)
    draft_ids: list[int] = field(default_factory=list)
    constraints: tuple[RowConstraint, ...] = ()
    embeddings: tuple[EmbeddingRequest, ...] = ()
    state_copies: tuple[StateCopy, ...] = ()
    wanted_drafts: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes."""
        return sum(self.query_lens)


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that failed alone; `row` indexes the batch."""

    row: int
    message: str


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and the most likely tokens in its place with theirs.

    Of the model's own logits: before bias, penalties and temperature.
    """

    logprob: float
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class EndToken(NamedTuple):
    """The token that ended a sample and is no part of it."""

    token_id: int
    logprobs: TokenLogprobs


class PromptLogprobs(NamedTuple):
    """Log-probabilities of known tokens: entry i is that of position `first_position` + i."""

    row: int
    first_position: int
    entries: tuple[TokenLogprobs, ...]


class RowEmbedding(NamedTuple):
    """The hidden states that were wanted of a row, float64."""

    row: int
    values: array[float]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced.

    `sampled_token_ids[k]` belongs to `sampled_rows[k]` of the batch. `refusal`: the batch was
    refused whole and changed nothing. `sample_logprobs`: sample → its log-probabilities, for the
    samples that asked and did not fail. `kept_drafts[k]`: drafts that come before the token of
    sample k; empty: none for any; `draft_logprobs`: theirs, by sample. `prompt_logprobs`: of the
    rows for which they were asked. `embeddings`: of the rows for which they were asked and that did
    not fail. `next_drafts`: by row, what was guessed behind its sample, where that was wanted.
    Microseconds: `queue_us` the batch waited at the plane, `execute_us` the plane computed,
    `idle_us` it had nothing to compute before that, `waited_us` the result waited for the engine
    thread.
    """

    step_id: int
    sampled_token_ids: list[int] = field(default_factory=list)
    row_failures: tuple[RowFailure, ...] = ()
    refusal: str | None = None
    sample_logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    execute_us: int = 0
    idle_us: int = 0
    waited_us: int = 0
    queue_us: int = 0
    kept_drafts: list[int] = field(default_factory=list)
    draft_logprobs: Mapping[int, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embeddings: tuple[RowEmbedding, ...] = ()
    next_drafts: Mapping[int, list[int]] = field(default_factory=dict)
