"""Errors of the scheduling core, each in one of the public families."""

from __future__ import annotations

from planes.errors import MemoryError as EngineMemoryError
from planes.errors import ValidationError


class OutOfBlocksError(EngineMemoryError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""

    reason = "OUT_OF_BLOCKS"


class ContextLengthError(ValidationError):
    """Prompt and completion together exceed the longest sequence the engine takes."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class RequestNeverFitsError(EngineMemoryError):
    """The request needs more KV blocks than the whole pool has, so waiting cannot help."""

    reason = "REQUEST_NEVER_FITS"
