"""A batch on its way through the device thread, and how it is refused and timed there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog

from compute_plane.errors import BatchFailed, BatchRefused
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.step import StepBatch, StepHeader, StepReply
from planes.errors import EngineError

MAX_MICROSECONDS: Final = (1 << 32) - 1
"""What the wire's timings hold."""

log = structlog.get_logger()

Answer = StepReply | EngineError
"""The reply to a batch, or why the plane never got to it."""


@dataclass(frozen=True, slots=True)
class Work:
    """A batch under way. `deliver` gets its answer, on the device thread, and must not wait."""

    header: StepHeader
    batch: StepBatch
    deliver: Callable[[Answer], None]
    received_ns: int


def refused(header: StepHeader, refusal: BatchRefused, sessions: SessionLedger) -> StepReply:
    """Log a refusal and return it as the reply."""
    log.warning(
        "batch refused",
        reason=refusal.reason,
        field=refusal.field,
        message=refusal.message,
        **where(header),
    )
    return StepReply(header, refusal=refusal, expected_step=sessions.state.last_step + 1)


def failed(work: Work, error: Exception) -> BatchFailed:
    """Log what an executor raised, while it is handled; return it as the refusal of its batch."""
    log.exception(
        "the executor failed; the slots of its batch are poisoned",
        num_rows=work.batch.slots.size,
        **where(work.header),
    )
    return BatchFailed(f"the executor failed: {type(error).__name__}: {error}")


def where(header: StepHeader) -> dict[str, int]:
    """Name a step in the log; binding the names as context would cost every step 5 µs."""
    return {"session": header.session, "step_id": header.step_id}


def microseconds(nanoseconds: int) -> int:
    """Return a duration as the wire has it."""
    return min(max(nanoseconds // 1000, 0), MAX_MICROSECONDS)
