"""What an executor is asked and what it answers.

This is the seed documents' `ExecutionBatch`: whole token lists, positions and block tables, made
from the slots (`compute_plane.executor.slots`); the wire carries only differences.

Array letters: T tokens of the step, S rows (sequences), M width of the block table, K samples,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]
BoolArray = npt.NDArray[np.bool_]


NO_STATES: Final[Int32Array] = np.zeros(0, dtype=np.int32)
NO_STATES.flags.writeable = False

NO_ADAPTERS: Final[Int32Array] = np.zeros(0, dtype=np.int32)
NO_ADAPTERS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class LogitBias:
    """What is added to the logits of some tokens: [n] each, C-contiguous, no token twice."""

    token_ids: Int32Array
    values: Float32Array


class Penalties(NamedTuple):
    """Penalties for tokens that have occurred; `kernels.reference.logit_adjustments`.

    `repetition` 1, `presence` 0 and `frequency` 0 are off. `history`: [N] all tokens of the
    sequence so far, C-contiguous, the first `num_prompt` of them its prompt; it is a view of the
    slot's memory, valid for the call.
    """

    repetition: float
    presence: float
    frequency: float
    history: Int32Array
    num_prompt: int


class SamplingRow(NamedTuple):
    """How one sample is drawn; `kernels.reference.sampling` says exactly.

    The random number depends on `(seed, sample_index, position)` alone, where `position` is that of
    the token to be drawn. `temperature` 0 is greedy; `top_p` in (0, 1]; `top_k` 0 and `min_p` 0 are
    off. `penalties`, `logit_bias`: None where they change nothing. `num_logprobs`: how many most
    likely tokens to list with their log-probabilities, beside the token's own; None: nothing.
    `allowed_tokens`: the tokens that may be drawn, bit i of byte i / 8 (lowest first) for token i,
    uint8 [ceil(V / 8)], C-contiguous, at least one of V bits set; None: all.

    (A named tuple because one is made for every token.)
    """

    temperature: float
    top_p: float
    seed: int
    sample_index: int
    position: int
    top_k: int = 0
    min_p: float = 0.0
    penalties: Penalties | None = None
    logit_bias: LogitBias | None = None
    num_logprobs: int | None = None
    allowed_tokens: UInt8Array | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing but temperature, top-k, top-p and min-p is asked for."""
        return (
            self.penalties is None
            and self.logit_bias is None
            and self.num_logprobs is None
            and self.allowed_tokens is None
        )


class CopyKind(IntEnum):
    """Between which pools a block is copied."""

    WITHIN = 0
    """Within the device's pool."""
    SWAP_OUT = 1
    """From the device's pool to the host's."""
    SWAP_IN = 2
    """From the host's pool to the device's."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block `destination` becomes a copy of block `source` before any row runs.

    `kind`: which pools they belong to. An executor without a host pool gets WITHIN only.
    """

    source: int
    destination: int
    kind: CopyKind = CopyKind.WITHIN


class StateCopy(NamedTuple):
    """State `destination` becomes what state `source` is."""

    source: int
    destination: int


class EmbeddingPart(IntEnum):
    """Which hidden states of a row are wanted; the numbers are the wire's."""

    UNSAID = 0
    """No executor is asked for it."""
    LAST = 1
    """Those of its last token."""
    SUM = 2
    """The sum of those of all tokens that it computes."""


class EmbeddingWant(NamedTuple):
    """The hidden states of row `row` are wanted, behind the final norm (as the head reads them)."""

    row: int
    part: EmbeddingPart


@dataclass(frozen=True, slots=True)
class ExecutionBatch:
    """One step, complete.

    `input_tokens`, `positions`: [T], rows one after the other.
    `query_lens`: [S] tokens of each row, ≥ 1; sums to T.
    `seq_lens`: [S] tokens of the row's sequence once the row is computed (its last position + 1).
    `block_tables`: [S, M] int32; entries past ceil(seq_len / block_size) are meaningless. Of an
    array that nobody can write, which later batches may have again, the others never change.
    `is_prefill`: [S], whether the row computes tokens that were given rather than sampled.
    `prompt_lens`: [S] tokens of the row's sequence that are its prompt, the first ones; the others
    were generated, now or before the sequence was started again. What is computed of a token may
    depend on that, and on nothing else of its batch.
    `sampled_rows`: [K] rows whose last token's logits are sampled, `sampling[k]` says how.
    `prompt_logprob_rows`: rows for which the log-probability of each *next* known token is wanted;
    `prompt_logprob_targets[i]`: those next tokens of row `prompt_logprob_rows[i]` (at most
    query_len, one fewer where the token after the row's last is unknown);
    `prompt_num_logprobs[i]`: the most likely tokens wanted beside each; empty: none for any.
    `digest_blocks`: blocks whose content is wanted as a digest once the step is over.
    `embeddings`: rows whose hidden states are wanted, no row twice; given to executors with
    `gives_embeddings` only.
    `copies` run first, in order. Then in every layer all KV writes before any attention read, so
    rows may share blocks that one of them fills.
    `states`: [S] int32, of models with states (`compute_plane.model.delta_net`): that of each row,
    no state twice; empty for others. A row at position 0 begins with an empty one.
    `state_copies` run one after the other, before any row.
    `adapters`: [S] int32, what each row is computed with: adapter i of those that the executor was
    built with is i + 1, 0 is the model as it is. Empty: that is so of all rows.

    `input_sources`: [T] int32, only given to `PipelinedExecutor.launch`. −1: the token is known;
    k: it is sample k of the step launched just before, `input_tokens` has a 0 in its place. A row
    with such a token has no other, and where its sample has a penalty, that token is also the last
    one of the history. None: all tokens are known.
    """

    input_tokens: Int32Array
    positions: Int32Array
    seq_lens: Int32Array
    block_tables: Int32Array
    is_prefill: BoolArray
    prompt_lens: Int32Array
    query_lens: Int32Array
    sampled_rows: Int32Array
    sampling: Sequence[SamplingRow] = ()
    copies: Sequence[BlockCopy] = ()
    prompt_logprob_rows: Sequence[int] = ()
    prompt_logprob_targets: Sequence[Int32Array] = ()
    prompt_num_logprobs: Sequence[int] = ()
    digest_blocks: Sequence[int] = ()
    embeddings: Sequence[EmbeddingWant] = ()
    states: Int32Array = field(default_factory=lambda: NO_STATES)
    state_copies: Sequence[StateCopy] = ()
    adapters: Int32Array = field(default_factory=lambda: NO_ADAPTERS)
    input_sources: Int32Array | None = None


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most likely tokens of some positions, [P, n] each, the most likely first.

    n is the number asked for, at most V. The log-probabilities are those of the raw logits.
    """

    token_ids: Int32Array
    logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """Log-probabilities of sample `sample`: of its token, and of the most likely (`top`, P = 1)."""

    sample: int
    logprob: float
    top: TopLogprobs


@dataclass(frozen=True, slots=True)
class ExecutionOutput:
    """What a step produced.

    `next_tokens`: [K]. `failed_rows`: row → message, for rows whose logits were not finite; their
    entries of `next_tokens` are meaningless. `logits`: [K, V] where the executor keeps them.
    `sample_logprobs`: one entry per sample that asked, in order. `prompt_logprobs[i]`: one float32
    per target of `prompt_logprob_targets[i]`; `prompt_top_logprobs[i]`: the most likely tokens at
    the same places, where some were asked for (else this may be empty as a whole).
    `block_digests`: 64 bits for each of `digest_blocks`, equal where the blocks' bytes are.
    `embeddings`: [E, hidden], one row for each of `embeddings` of the batch, if there are any: not
    scaled as logits are, summed as `compute_plane.executor.embeddings` says. Rows that have one
    that is not finite fail.
    """

    next_tokens: Int32Array
    failed_rows: dict[int, str] = field(default_factory=dict)
    logits: Float32Array | None = None
    prompt_logprobs: Sequence[Float32Array] = ()
    sample_logprobs: Sequence[SampleLogprobs] = ()
    prompt_top_logprobs: Sequence[TopLogprobs] = ()
    block_digests: Sequence[int] = ()
    embeddings: Float64Array | None = None


@runtime_checkable
class GPUExecutor(Protocol):
    """Runs batches on one device. Called by one thread only, the device thread.

    The name is the public one of the seed documents; the device need not be a GPU. It may have
    `numerics_id`, a text that is equal where results are equal to the bit; `gives_embeddings`: true
    if it can be asked for hidden states (`ExecutionBatch`); and `launch` (`PipelinedExecutor`). The
    plane calls `execute` alone: an executor with graphs takes them there by itself, and the other
    two are for whoever drives it by hand.
    """

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step. Raises ExecutionError if the step failed as a whole.

        A DeviceLostError ends the plane, as its device can run nothing any more.
        """
        ...

    def capture_decode_graph(self, batch_size: int) -> None:
        """Prepare a fixed-size decode step where the device profits from it; else do nothing."""
        ...

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run a decode-only step through a captured graph, or like `execute` without one."""
        ...


MAX_STEPS_UNDER_WAY: Final = 2
"""Steps that are launched and whose answers were not taken.

No more will do: a step is prepared with one before it unanswered, and that one's samples are the
only tokens that inputs and histories may lack (`samples_ahead`, `SlotTable`).
"""


class LaunchedStep(Protocol):
    """A step that a device works on, or will.

    It may say more, as `time.monotonic_ns`, or None: `begun_ns`, since when the device has had
    nearly all that it works on, where its launch is no part of it; `ended_ns`, when it was over,
    once it has been waited for.
    """

    def wait(self) -> None:
        """Wait until it is done, without the interpreter lock; from any thread, also later on."""
        ...

    def answer(self) -> ExecutionOutput:
        """Return what it produced, once it is done; once only, in the order of the launches.

        Raises ExecutionError, or whatever the device reports, if it failed as a whole; as in
        `GPUExecutor.execute`.
        """
        ...


@runtime_checkable
class PipelinedExecutor(GPUExecutor, Protocol):
    """A `GPUExecutor` whose device works while the next step is prepared.

    Steps run in the order of the launches. An executor that has no `launch` runs steps in turn.
    """

    def launch(self, batch: ExecutionBatch) -> LaunchedStep:
        """Begin one step without waiting for it; `MAX_STEPS_UNDER_WAY` at once.

        Raises ExecutionError families, and then nothing is under way of it.
        """
        ...
