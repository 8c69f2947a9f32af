"""Drafts for the next batch, guessed behind the samples of one that has run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import structlog

from compute_plane.errors import DeviceLostError
from compute_plane.executor.draft_model import Drafter, KnownText
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepBatch, StepResult

log = structlog.get_logger()


def with_next_drafts(
    result: StepResult, batch: StepBatch, slots: SlotTable, drafter: Drafter | None
) -> StepResult:
    """Return the result of a step just completed with the drafts that its batch wants.

    Rows that failed have none. Raises DeviceLostError.
    """
    wanted = batch.wanted_drafts
    if drafter is None or not wanted.any():
        return result
    try:
        of_rows = _guesses(result, batch, slots, drafter)
    except DeviceLostError:
        raise
    except Exception:
        # The samples are there, whatever became of drafts.
        log.exception("no drafts were guessed")
        return result
    return replace(
        result,
        next_draft_counts=np.array([len(tokens) for tokens in of_rows], dtype=np.int64),
        next_draft_ids=np.array([token for tokens in of_rows for token in tokens], dtype=np.int64),
    )


def _guesses(
    result: StepResult, batch: StepBatch, slots: SlotTable, drafter: Drafter
) -> list[list[int]]:
    """Return what is guessed behind the sample of each row."""
    wanted = batch.wanted_drafts
    failed = {failure.row for failure in result.row_failures}
    texts: dict[int, KnownText] = {}
    for row in np.flatnonzero(wanted).tolist():
        slot, most = int(batch.slots[row]), int(wanted[row])
        text = None if row in failed else slots.known_text(slot, most)
        if text is not None:
            texts[row] = text
    guesses = dict(zip(texts, drafter.guess(list(texts.values())), strict=True))
    return [guesses.get(row, []) for row in range(wanted.size)]
