"""One step as it arrives on the wire and as it is answered: plain columns, no protobuf.

The fields are those of `hetero.compute.v1.ExecutionBatch` and `ExecutionOutput`, which see for
their meaning. Integers of the wire are unsigned 32-bit; here they are int64, so that sums and
comparisons are exact.

Array letters: S rows, K samples.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compute_plane.errors import BatchRefused
from compute_plane.executor.interface import (
    EmbeddingWant,
    Float32Array,
    Float64Array,
    Int32Array,
    LogitBias,
    SampleLogprobs,
    StateCopy,
    TopLogprobs,
    UInt8Array,
)

Int64Array = npt.NDArray[np.int64]

EMPTY: Final[Int64Array] = np.zeros(0, dtype=np.int64)
EMPTY.flags.writeable = False


@dataclass(frozen=True, slots=True)
class SamplingKey:
    """How a slot's tokens are drawn, as `SamplingRow` says.

    `repetition_penalty` 1 is off. `logit_bias`: as given, in any order.
    """

    temperature: float
    top_p: float
    seed: int
    sample_index: int
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: LogitBias | None = None
    num_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is on."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class SlotPrefix(NamedTuple):
    """The first tokens of slot `slot`, and the first entries of its block table."""

    slot: int
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A slot built anew: all tokens known so far and the whole block table, behind `prefix`.

    `adapter`: as in `ExecutionBatch.adapters`.
    """

    slot: int
    token_ids: Int64Array
    num_prompt_tokens: int
    block_ids: Int64Array
    sampling: SamplingKey
    prefix: SlotPrefix | None = None
    adapter: int = 0

    @property
    def num_tokens(self) -> int:
        """All tokens it has."""
        return self.token_ids.size + (self.prefix.num_tokens if self.prefix else 0)

    @property
    def num_blocks(self) -> int:
        """All entries of its block table."""
        return self.block_ids.size + (self.prefix.num_blocks if self.prefix else 0)


@dataclass(frozen=True, slots=True)
class TableCopy:
    """Entry `logical_index` of a slot's table becomes `destination`, a copy of `source`."""

    slot: int
    logical_index: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class BlockMove:
    """A block that is swapped: from the device's pool to the host's, or back."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class PromptLogprobsRequest:
    """The log-probabilities of the known tokens after each token of a row are wanted.

    `num_logprobs`: and those of so many most likely tokens at each place.
    """

    row: int
    num_logprobs: int


@dataclass(frozen=True, slots=True)
class RowConstraint:
    """What the samples of row `row` may be; of one with drafts, that behind `num_drafts` of them.

    `allowed_tokens`: uint8 [ceil(vocabulary / 8)], the lowest bit of the first byte for token 0.
    """

    row: int
    allowed_tokens: UInt8Array
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepHeader:
    """To whom a batch belongs and where it stands in the order of steps."""

    session: int
    epoch: int
    step_id: int
    acked_step: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The columns of one batch. `sampled_slots` empty: each sample goes to the slot of its row."""

    slots: Int64Array = field(default_factory=lambda: EMPTY)
    query_lens: Int64Array = field(default_factory=lambda: EMPTY)
    positions: Int64Array = field(default_factory=lambda: EMPTY)
    token_counts: Int64Array = field(default_factory=lambda: EMPTY)
    token_ids: Int64Array = field(default_factory=lambda: EMPTY)
    new_block_counts: Int64Array = field(default_factory=lambda: EMPTY)
    new_block_ids: Int64Array = field(default_factory=lambda: EMPTY)
    sampled_rows: Int64Array = field(default_factory=lambda: EMPTY)
    sampled_slots: Int64Array = field(default_factory=lambda: EMPTY)
    released: Int64Array = field(default_factory=lambda: EMPTY)
    starts: Sequence[SlotStart] = ()
    swap_out: Sequence[BlockMove] = ()
    copies: Sequence[TableCopy] = ()
    swap_in: Sequence[BlockMove] = ()
    state_copies: Sequence[StateCopy] = ()
    prompt_logprobs: Sequence[PromptLogprobsRequest] = ()
    digest_blocks: Int64Array = field(default_factory=lambda: EMPTY)
    draft_counts: Int64Array = field(default_factory=lambda: EMPTY)
    draft_ids: Int64Array = field(default_factory=lambda: EMPTY)
    constraints: Sequence[RowConstraint] = ()
    embeddings: Sequence[EmbeddingWant] = ()
    wanted_drafts: Int64Array = field(default_factory=lambda: EMPTY)

    @property
    def is_waited_for(self) -> bool:
        """Whether it has drafts or wants some: nothing is launched beside it."""
        return self.draft_ids.size > 0 or bool(self.wanted_drafts.any())


class RowFailureReason(enum.Enum):
    """Why a row failed alone."""

    NOT_FINITE = "not_finite"
    POISONED = "poisoned"


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row of the batch that failed alone."""

    row: int
    reason: RowFailureReason
    message: str


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Entry i of `logprobs` belongs to the token at position `first_position + i`.

    `top`: the most likely tokens at the same places, where some were asked for.
    """

    row: int
    first_position: int
    logprobs: Float32Array
    top: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class RowEmbedding:
    """The hidden states that were wanted of a row, [hidden]."""

    row: int
    values: Float64Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. `sampled_token_ids`: [K], entries of failed rows mean nothing.

    `sample_logprobs`: of the samples that asked and whose row did not fail. `block_digests`: one
    for each of the batch's `digest_blocks`. `kept_drafts`: [K], empty in a step without drafts;
    `draft_logprobs`: of these, where the sample asked. `embeddings`: of the rows for which they
    were asked and that did not fail. `next_draft_counts` [S], empty where none were wanted, and
    `next_draft_ids`: what a draft model guesses behind the samples.
    """

    sampled_token_ids: Int32Array
    row_failures: Sequence[RowFailure] = ()
    prompt_logprobs: Sequence[PromptLogprobs] = ()
    sample_logprobs: Sequence[SampleLogprobs] = ()
    block_digests: Sequence[int] = ()
    kept_drafts: Int64Array = field(default_factory=lambda: EMPTY)
    draft_logprobs: Sequence[SampleLogprobs] = ()
    embeddings: Sequence[RowEmbedding] = ()
    next_draft_counts: Int64Array = field(default_factory=lambda: EMPTY)
    next_draft_ids: Int64Array = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Microseconds the batch waited, ran, and the device idled before it."""

    queue_us: int = 0
    execute_us: int = 0
    idle_us: int = 0


@dataclass(frozen=True, slots=True)
class StepReply:
    """The answer to a batch: exactly one of `result` and `refusal` is set.

    `expected_step`: with a refusal, the step the plane would accept next.
    """

    header: StepHeader
    result: StepResult | None = None
    refusal: BatchRefused | None = None
    expected_step: int = 0
    timings: StepTimings = field(default_factory=StepTimings)
