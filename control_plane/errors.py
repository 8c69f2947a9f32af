"""Errors of the control plane's shell, each in one of the public families.

The table from class to gRPC status is `control_plane.api.status`.
"""

from __future__ import annotations

from planes.errors import (
    ConfigError,
    EngineError,
    ExecutionError,
    SchedulerError,
    ValidationError,
)


class ModelNotFoundError(ValidationError):
    """The request names a model that is not loaded."""

    reason = "MODEL_NOT_FOUND"


class QueueFullError(SchedulerError):
    """As many requests wait as the server holds; the caller may try again."""

    reason = "QUEUE_FULL"
    retry_after_s = 1.0


class DrainingError(EngineError):
    """The server is shutting down and takes no new requests."""

    reason = "DRAINING"
    retry_after_s = 1.0


class ComputeUnavailableError(ExecutionError):
    """The compute plane is away: not there yet, or lost and not back within the grace."""

    reason = "COMPUTE_UNAVAILABLE"
    retry_after_s = 1.0


class RequestFailedError(ExecutionError):
    """The computation of one request failed; others are not affected."""

    reason = "REQUEST_FAILED"


class EngineStoppedError(EngineError):
    """The engine stopped on a fault of its own; the log has it."""

    reason = "ENGINE_STOPPED"


class LinkError(ExecutionError):
    """The connection to the compute plane broke; what was in flight may or may not have run."""

    reason = "LINK_LOST"


class FencedError(ExecutionError):
    """Another control plane took the compute plane over; this one must stop, not fight."""

    reason = "FENCED"


class PlaneMismatchError(ConfigError):
    """The compute plane is not the one this control plane can work (or went on) with."""

    reason = "PLANE_MISMATCH"
