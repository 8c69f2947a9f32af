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


class SlowReaderError(SchedulerError):
    """The client does not take its answer as fast as it comes, and too much of it waits."""

    reason = "READER_TOO_SLOW"


class SlowSenderError(SchedulerError):
    """The client does not send its message as fast as others need the room."""

    reason = "SENDER_TOO_SLOW"
    retry_after_s = 1.0


class RequestNotFoundError(ValidationError):
    """No request of that name is under way."""

    reason = "REQUEST_NOT_FOUND"


class DrainingError(EngineError):
    """The server drains: it takes no new requests."""

    reason = "DRAINING"
    retry_after_s = 1.0


class ComputeUnavailableError(ExecutionError):
    """The compute plane is away: not there yet, or lost and not back within the grace."""

    reason = "COMPUTE_UNAVAILABLE"
    retry_after_s = 1.0


class RequestFailedError(ExecutionError):
    """The computation of one request failed; others are not affected."""

    reason = "REQUEST_FAILED"


class RequestCancelledError(ExecutionError):
    """The request was ended by the server, by a client's word or by the end of the server."""

    reason = "REQUEST_CANCELLED"


class EngineStoppedError(EngineError):
    """The engine stopped on a fault of its own; the log has it."""

    reason = "ENGINE_STOPPED"


class LinkError(ExecutionError):
    """The connection to the compute plane broke; what was in flight may or may not have run."""

    reason = "LINK_LOST"


class PlaneNotThereError(LinkError):
    """Nothing listens where the compute plane is to be: it has not started yet, or has ended."""

    reason = "PLANE_NOT_THERE"


class FencedError(ExecutionError):
    """Another control plane took the compute plane over; this one must stop, not fight."""

    reason = "FENCED"


class PlaneMismatchError(ConfigError):
    """The compute plane is not the one this control plane can work (or went on) with."""

    reason = "PLANE_MISMATCH"


class TokenMissingError(EngineError):
    """The server wants a bearer token, and the request has none, or not as it should be."""

    reason = "TOKEN_MISSING"


class TokenUnknownError(EngineError):
    """The request's token is none of the server's, or not any more."""

    reason = "TOKEN_UNKNOWN"


class AdminTokenRequiredError(EngineError):
    """The method is for operators; the request's token is somebody else's."""

    reason = "ADMIN_TOKEN_REQUIRED"


class TooManyConcurrentRequestsError(SchedulerError):
    """As many requests of this token are under way as it may have at once."""

    reason = "TOO_MANY_CONCURRENT_REQUESTS"
    retry_after_s = 1.0


class TokenRateError(SchedulerError):
    """The token has used what it may use in a minute; `retry_after_s`: until it has paid for it."""

    reason = "TOKENS_PER_MINUTE_USED_UP"
    retry_after_s = 1.0

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreadableTokensError(ConfigError):
    """The file of tokens could not be opened or read: what it says is not known."""

    reason = "TOKENS_UNREADABLE"
