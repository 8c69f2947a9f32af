"""The error families of the engine.

The families are those of the public API: Config, Memory, Validation, Execution, Scheduler,
Tokenization under `EngineError`. Each plane derives its own errors from them and keeps one table
from class to gRPC status (`control_plane.api.status`, `compute_plane.rpc.status`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One field of a request that a server refuses, by its path in the message, and why."""

    field: str
    description: str


class EngineError(Exception):
    """Any failure the engine reports on purpose.

    `reason` is a stable UPPER_SNAKE word for programs (`google.rpc.ErrorInfo.reason`);
    `field` names the offending parameter, where there is one; the message is for people and says
    the limit and the given value.

    What came over a wire has more to tell. `retry_after_s`: trying again makes sense after so many
    seconds; None: nobody said so. `request_id`: under which the server's log has it.
    `field_violations`: every field that was named, as the message spells it.
    """

    reason: str = "ENGINE_ERROR"
    retry_after_s: float | None = None
    request_id: str | None = None
    field_violations: tuple[FieldViolation, ...] = ()

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class ConfigError(EngineError):
    """A configuration value is missing, malformed or out of range."""

    reason = "INVALID_CONFIG"


class MemoryError(EngineError):  # noqa: A001 - the family's public name
    """KV blocks or memory ran out, or a request can never fit."""

    reason = "OUT_OF_MEMORY"


class ValidationError(EngineError):
    """A request's parameter is invalid; the caller's fault."""

    reason = "INVALID_REQUEST"


class ExecutionError(EngineError):
    """The compute plane failed to run a batch."""

    reason = "EXECUTION_FAILED"


class SchedulerError(EngineError):
    """The scheduler was asked for something its state does not allow."""

    reason = "SCHEDULER_ERROR"


class TokenizationError(EngineError):
    """Text could not be turned into tokens or back."""

    reason = "TOKENIZATION_FAILED"
