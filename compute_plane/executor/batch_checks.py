"""Checks of a batch that need no slot: lengths, ranges, limits, what is not supported.

They run first and read nothing but the batch. Every refusal names the field with its index, the
limit and the given value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from compute_plane.errors import InvalidBatch, UnsupportedBatch
from compute_plane.executor.constraints import check_constraints
from compute_plane.executor.copy_checks import (
    check_block_copies,
    check_state_copies,
    check_swaps,
)
from compute_plane.executor.interface import BoolArray, EmbeddingPart
from compute_plane.executor.sampling_checks import check_num_logprobs, check_sampling
from compute_plane.executor.step import Int64Array, SlotStart, StepBatch

DRAFTS: Final = ("draft_constraints", "drafts")
"""The features of planes whose model has no states."""

SWAP: Final = "swap"
"""The feature of planes with a host pool."""

DRAFT_MODEL: Final = "draft_model"
"""The feature of planes with a draft model."""

STATES: Final = "states"
"""The feature of planes whose model has states."""

EMBEDDINGS: Final = "embeddings"
"""The feature of planes whose executor gives hidden states."""

MAX_EMBEDDING_BYTES: Final = 32 << 20
"""Of one reply, which has room for as much again."""

FEATURES: Final = (
    "block_digests",
    "constraints",
    "copies",
    "draft_constraints",
    "drafts",
    "logit_bias",
    "logprobs",
    "min_p",
    "penalties",
    "prompt_logprobs",
    "sampled_slots",
    "start_prefixes",
    "token_ids",
    "top_k",
)
"""Optional parts of a batch that `SlotTable` executes, in the words of Describe.features."""


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """What a batch must keep to: sizes of the plane and of its model.

    `embedding_size`: numbers of a row's hidden states; 0: the executor gives none. `num_states`:
    at least `max_slots`; 0: the model has no states. `has_draft_model`: whether drafts may be
    wanted. `num_adapters`: that slots may be computed with.
    """

    max_slots: int
    max_rows: int
    max_tokens: int
    block_size: int
    num_blocks: int
    vocab_size: int
    context_length: int
    num_host_blocks: int = 0
    embedding_size: int = 0
    num_states: int = 0
    has_draft_model: bool = False
    num_adapters: int = 0

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of one sequence that can be computed: the context, or the whole pool."""
        return min(self.context_length, self.num_blocks * self.block_size)

    @property
    def max_table_len(self) -> int:
        """Most blocks of one block table."""
        return -(-self.max_sequence_tokens // self.block_size)

    @property
    def max_embeddings(self) -> int:
        """Most rows of a batch whose hidden states may be wanted."""
        return max_embeddings(self.embedding_size) if self.embedding_size else 0


def features_of(limits: SlotLimits) -> tuple[str, ...]:
    """Return the optional parts of a batch that a plane of these limits executes."""
    swap = (SWAP,) if limits.num_host_blocks else ()
    embeddings = (EMBEDDINGS,) if limits.embedding_size else ()
    draft_model = (DRAFT_MODEL,) if limits.has_draft_model else ()
    if not limits.num_states:
        return (*FEATURES, *swap, *embeddings, *draft_model)
    # What a state has taken in cannot be taken back.
    kept = [name for name in FEATURES if name not in DRAFTS]
    return (*kept, STATES, *swap, *embeddings)


def max_embeddings(embedding_size: int) -> int:
    """Return how many rows of a batch may give their hidden states."""
    return MAX_EMBEDDING_BYTES // (8 * embedding_size)


def refuse_where(wrong: BoolArray, field: str, message: Callable[[int], str]) -> None:
    """Raise InvalidBatch for the first true entry, as `field[index]`."""
    if wrong.any():
        index = int(wrong.argmax())
        raise InvalidBatch(f"{field}[{index}] {message(index)}", field=f"{field}[{index}]")


def check_columns(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch or UnsupportedBatch for the first thing wrong with the batch by itself."""
    _check_rows(batch, limits)
    _check_flat("token_counts", batch.token_counts, "token_ids", batch.token_ids, batch.slots.size)
    check_range("token_ids", batch.token_ids, limits.vocab_size)
    _check_flat(
        "new_block_counts",
        batch.new_block_counts,
        "new_block_ids",
        batch.new_block_ids,
        batch.slots.size,
    )
    check_range("new_block_ids", batch.new_block_ids, limits.num_blocks)
    _check_flat("draft_counts", batch.draft_counts, "draft_ids", batch.draft_ids, batch.slots.size)
    check_range("draft_ids", batch.draft_ids, limits.vocab_size)
    if limits.num_states and batch.draft_ids.size:
        raise UnsupportedBatch(
            "draft_ids: the model of this plane has states, which cannot be taken back",
            field="draft_ids",
        )
    _check_samples(batch, limits)
    _check_prompt_logprobs(batch)
    check_constraints(batch, limits)
    _check_embeddings(batch, limits)
    check_range("released", batch.released, limits.max_slots)
    check_block_copies(batch, limits)
    check_swaps(batch, limits)
    check_state_copies(batch, limits)
    check_range("digest_blocks", batch.digest_blocks, limits.num_blocks)
    if batch.digest_blocks.size and not batch.slots.size:
        raise InvalidBatch("digest_blocks needs a step with rows", field="digest_blocks")
    _check_starts(batch, limits)


def check_range(field: str, values: Int64Array, limit: int) -> None:
    """Raise InvalidBatch unless every value is 0 ≤ value < limit."""
    # Seen as unsigned, a negative number is a huge one.
    if values.size and int(values.view(np.uint64).max()) >= limit:
        refuse_where(
            values.view(np.uint64) >= limit,
            field,
            lambda i: f"must be below {limit}, got {values[i]}",
        )


def _check_rows(batch: StepBatch, limits: SlotLimits) -> None:
    num_rows = batch.slots.size
    if num_rows > limits.max_rows:
        raise InvalidBatch(
            f"slots has {num_rows} rows, a batch has at most {limits.max_rows}", field="slots"
        )
    for name, column in (("query_lens", batch.query_lens), ("positions", batch.positions)):
        if column.size != num_rows:
            raise InvalidBatch(
                f"{name} must have one entry per row ({num_rows}), got {column.size}", field=name
            )
    if num_rows == 0:
        return
    check_range("slots", batch.slots, limits.max_slots)
    _check_unique("slots", batch.slots, "a slot appears in at most one row")
    refuse_where(
        batch.query_lens < 1,
        "query_lens",
        lambda i: f"must be at least 1, got {batch.query_lens[i]}",
    )
    num_tokens = int(batch.query_lens.sum())
    if num_tokens > limits.max_tokens:
        raise InvalidBatch(
            f"query_lens has {num_tokens} tokens, a batch has at most {limits.max_tokens}",
            field="query_lens",
        )
    most = limits.max_sequence_tokens
    check_range("positions", batch.positions, most)
    refuse_where(
        batch.positions + batch.query_lens > most,
        "positions",
        lambda i: (
            f"({batch.positions[i]}) + query_lens[{i}] ({batch.query_lens[i]}) must be at most "
            f"{most}, the longest sequence of this plane"
        ),
    )


def _check_flat(
    counts_field: str, counts: Int64Array, field: str, values: Int64Array, num_rows: int
) -> None:
    """Check a ragged column: one count a row or none at all, and as many values as they say."""
    if counts.size not in (0, num_rows):
        raise InvalidBatch(
            f"{counts_field} must be empty or have one entry per row ({num_rows}), "
            f"got {counts.size}",
            field=counts_field,
        )
    total = int(counts.sum())
    if total != values.size:
        raise InvalidBatch(
            f"{field} must have as many entries as {counts_field} says ({total}), "
            f"got {values.size}",
            field=field,
        )
    refuse_where(counts < 0, counts_field, lambda i: f"must not be negative, got {counts[i]}")


def _check_unique(field: str, values: Int64Array, rule: str) -> None:
    """Raise InvalidBatch if a value appears twice. Values are small: slots or rows."""
    if np.bincount(values).max() > 1:
        _, firsts = np.unique(values, return_index=True)
        repeated = np.ones(values.size, dtype=np.bool_)
        repeated[firsts] = False
        refuse_where(repeated, field, lambda i: f"repeats {values[i]}: {rule}")


def _check_samples(batch: StepBatch, limits: SlotLimits) -> None:
    num_samples = batch.sampled_rows.size
    if num_samples > limits.max_rows:
        raise InvalidBatch(
            f"sampled_rows has {num_samples} samples, a batch has at most {limits.max_rows}",
            field="sampled_rows",
        )
    if batch.sampled_slots.size not in (0, num_samples):
        raise InvalidBatch(
            f"sampled_slots must be empty or have one entry per sample ({num_samples}), "
            f"got {batch.sampled_slots.size}",
            field="sampled_slots",
        )
    if num_samples == 0:
        return
    num_rows = batch.slots.size
    check_range("sampled_rows", batch.sampled_rows, num_rows)
    if batch.sampled_slots.size:
        check_range("sampled_slots", batch.sampled_slots, limits.max_slots)
        _check_unique("sampled_slots", batch.sampled_slots, "a slot takes at most one sample")
    else:
        _check_unique("sampled_rows", batch.sampled_rows, "a slot takes at most one sample")


def _check_prompt_logprobs(batch: StepBatch) -> None:
    _check_asked_rows("prompt_logprobs", [request.row for request in batch.prompt_logprobs], batch)
    for index, request in enumerate(batch.prompt_logprobs):
        check_num_logprobs(f"prompt_logprobs[{index}].num_logprobs", request.num_logprobs)


def _check_embeddings(batch: StepBatch, limits: SlotLimits) -> None:
    wants = batch.embeddings
    if not wants:
        return
    if not limits.embedding_size:
        raise UnsupportedBatch(
            "embeddings: the executor of this plane gives no hidden states", field="embeddings"
        )
    _check_asked_rows("embeddings", [want.row for want in wants], batch)
    for index, want in enumerate(wants):
        field = f"embeddings[{index}]"
        if want.part is EmbeddingPart.UNSAID:
            raise InvalidBatch(f"{field}.part must be LAST or SUM", field=f"{field}.part")
        if batch.draft_counts.size and batch.draft_counts[want.row]:
            raise InvalidBatch(f"{field}.row has drafts", field=f"{field}.row")
    most = limits.max_embeddings
    if len(wants) > most:
        raise InvalidBatch(
            f"embeddings has {len(wants)} entries, a batch has at most {most}", field="embeddings"
        )


def _check_asked_rows(name: str, rows: Sequence[int], batch: StepBatch) -> None:
    """Check that something is asked of rows of the batch, of each once at most."""
    seen: set[int] = set()
    for index, row in enumerate(rows):
        field = f"{name}[{index}].row"
        if not 0 <= row < batch.slots.size:
            raise InvalidBatch(
                f"{field} must be below the number of rows ({batch.slots.size}), got {row}",
                field=field,
            )
        if row in seen:
            raise InvalidBatch(f"{field} repeats {row}", field=field)
        seen.add(row)


def _check_starts(batch: StepBatch, limits: SlotLimits) -> None:
    seen: set[int] = set()
    for index, start in enumerate(batch.starts):
        field = f"starts[{index}]"
        if not 0 <= start.slot < limits.max_slots:
            raise InvalidBatch(
                f"{field}.slot must be below {limits.max_slots}, got {start.slot}",
                field=f"{field}.slot",
            )
        if start.slot in seen:
            raise InvalidBatch(
                f"{field}.slot repeats {start.slot}: a slot is started at most once",
                field=f"{field}.slot",
            )
        seen.add(start.slot)
        if start.prefix is not None and not 0 <= start.prefix.slot < limits.max_slots:
            raise InvalidBatch(
                f"{field}.prefix.slot must be below {limits.max_slots}, got {start.prefix.slot}",
                field=f"{field}.prefix.slot",
            )
        if not 0 <= start.adapter <= limits.num_adapters:
            raise InvalidBatch(
                f"{field}.adapter must be at most {limits.num_adapters}, got {start.adapter}",
                field=f"{field}.adapter",
            )
        _check_start_lengths(field, start, limits)
        check_range(f"{field}.token_ids", start.token_ids, limits.vocab_size)
        check_range(f"{field}.block_ids", start.block_ids, limits.num_blocks)
        check_sampling(f"{field}.sampling", start.sampling, limits.vocab_size)


def _check_start_lengths(field: str, start: SlotStart, limits: SlotLimits) -> None:
    num_tokens = start.num_tokens
    if not 1 <= num_tokens <= limits.max_sequence_tokens:
        raise InvalidBatch(
            f"{field}.token_ids must have 1 to {limits.max_sequence_tokens} tokens, "
            f"got {num_tokens}",
            field=f"{field}.token_ids",
        )
    if not 1 <= start.num_prompt_tokens <= num_tokens:
        raise InvalidBatch(
            f"{field}.num_prompt_tokens must be 1 to the number of tokens ({num_tokens}), "
            f"got {start.num_prompt_tokens}",
            field=f"{field}.num_prompt_tokens",
        )
    if start.num_blocks > limits.max_table_len:
        raise InvalidBatch(
            f"{field}.block_ids must have at most {limits.max_table_len} blocks, "
            f"got {start.num_blocks}",
            field=f"{field}.block_ids",
        )
