"""Constraints: the tokens that the samples of a row may be, as one bit a token.

The control plane knows why (`hetero.compute.v1.RowConstraint`); here they are bits. They are a
matter of one step: nothing of them is kept with a slot.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from compute_plane.errors import InvalidBatch
from compute_plane.executor.interface import UInt8Array

if TYPE_CHECKING:
    from compute_plane.executor.batch_checks import SlotLimits
    from compute_plane.executor.step import StepBatch


def check_constraints(batch: StepBatch, limits: SlotLimits) -> None:
    """Raise InvalidBatch for constraints that are wrong by themselves.

    A constraint that allows nothing is one: there would be no token to sample.
    """
    if not batch.constraints:
        return
    num_bytes = -(-limits.vocab_size // 8)
    sampled = set(batch.sampled_rows.tolist())
    seen: set[tuple[int, int]] = set()
    for index, constraint in enumerate(batch.constraints):
        field, row, num_drafts = f"constraints[{index}]", constraint.row, constraint.num_drafts
        if row not in sampled:
            raise InvalidBatch(
                f"{field}.row must be a row that is sampled, got {row}", field=f"{field}.row"
            )
        most = int(batch.draft_counts[row]) if batch.draft_counts.size else 0
        if num_drafts > most:
            raise InvalidBatch(
                f"{field}.num_drafts must be at most {most}, the drafts of row {row}, "
                f"got {num_drafts}",
                field=f"{field}.num_drafts",
            )
        if (row, num_drafts) in seen:
            behind = f" behind {num_drafts} drafts" if num_drafts else ""
            raise InvalidBatch(f"{field}.row repeats {row}{behind}", field=f"{field}.row")
        seen.add((row, num_drafts))
        allowed = constraint.allowed_tokens
        where = f"{field}.allowed_tokens"
        if allowed.size != num_bytes:
            raise InvalidBatch(
                f"{where} must have {num_bytes} bytes, a bit for each of {limits.vocab_size} "
                f"tokens, got {allowed.size}",
                field=where,
            )
        if not _allows_any(allowed, limits.vocab_size):
            raise InvalidBatch(f"{where} allows no token", field=where)
    _check_drafted_rows(batch, seen)


def _check_drafted_rows(batch: StepBatch, seen: set[tuple[int, int]]) -> None:
    """Raise InvalidBatch where a row with drafts has constraints, but not for each sample.

    `seen`: row and number of drafts of each constraint.
    """
    if not batch.draft_counts.size:
        return
    num_seen = Counter(row for row, _ in seen)
    for row, count in num_seen.items():
        wanted = 1 + int(batch.draft_counts[row])
        if count != wanted:
            raise InvalidBatch(
                f"constraints has {count} for row {row}, of {wanted} samples with those behind "
                "its drafts",
                field="constraints",
            )


def _allows_any(allowed: UInt8Array, vocab_size: int) -> bool:
    """Whether a bit of the vocabulary is set; those behind it mean nothing."""
    last_bits = (1 << (vocab_size - 1) % 8 + 1) - 1
    return bool(allowed[:-1].any()) or bool(allowed[-1] & last_bits)


def sample_masks(batch: StepBatch) -> dict[int, UInt8Array] | None:
    """Return the bits of each sample that has any; None where none has."""
    if not batch.constraints:
        return None
    of_row = {constraint.row: constraint.allowed_tokens for constraint in batch.constraints}
    return {
        sample: of_row[row]
        for sample, row in enumerate(batch.sampled_rows.tolist())
        if row in of_row
    }
