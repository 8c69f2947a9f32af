"""Errors of the compute plane's shell, each in one of the public families.

The table from class to gRPC status is `compute_plane.rpc.status`; errors of model files are
`compute_plane.model.errors`.
"""

from __future__ import annotations

from planes.errors import ConfigError, EngineError, ExecutionError, SchedulerError, ValidationError


class DeviceUnavailableError(ConfigError):
    """The device or number format asked for is not there on this machine or in this version."""

    reason = "DEVICE_UNAVAILABLE"


class ExecutorLoadError(ConfigError):
    """The executor named in the configuration cannot be imported or built."""

    reason = "EXECUTOR_NOT_LOADED"


class ListenError(ConfigError):
    """The listen address cannot be bound."""

    reason = "CANNOT_LISTEN"


class BatchRefused(ExecutionError):
    """A batch was refused whole. `field` names the part of `ExecutionBatch` that was wrong."""

    reason = "BATCH_REFUSED"


class InvalidBatch(BatchRefused, ValidationError):
    """The batch contradicts itself, the plane's limits or what its slots hold."""

    reason = "INVALID_BATCH"


class UnsupportedBatch(BatchRefused, ValidationError):
    """The batch asks for something this plane does not do; Describe.features says what it does."""

    reason = "UNSUPPORTED"


class StepGap(BatchRefused, SchedulerError):
    """The batch's step id is not the one that follows the last step."""

    reason = "STEP_GAP"


class StaleSession(BatchRefused, SchedulerError):
    """The batch belongs to a session that is not, or is no longer, the current one."""

    reason = "STALE_SESSION"


class StaleEpoch(BatchRefused, SchedulerError):
    """The batch was made for another life of this plane; slots and KV contents of then are gone."""

    reason = "STALE_EPOCH"


class BatchFailed(BatchRefused):
    """The executor failed as a whole; the slots of the batch are poisoned."""

    reason = "BATCH_FAILED"


class GraphCaptureError(ExecutionError):
    """A decode step could not be captured as a graph."""

    reason = "GRAPH_NOT_CAPTURED"


class GraphReplayError(ExecutionError):
    """A captured decode step could not be run."""

    reason = "GRAPH_FAILED"


class DeviceLostError(ExecutionError):
    """The device reports a fault that outlives the step: this process can run nothing on it.

    No refusal of a batch: the process has to begin anew, and requests go on from there.
    """

    reason = "DEVICE_LOST"


class SessionHeld(SchedulerError):
    """Another controller's session is alive and `take_over` was not given."""

    reason = "SESSION_HELD"


class SessionFenced(SchedulerError):
    """The stream's session was taken over, or the session has a newer stream; do not fight."""

    reason = "SESSION_FENCED"


class ProtocolMismatch(SchedulerError):
    """The controller speaks another version of the wire."""

    reason = "PROTOCOL_MISMATCH"


class TooManyStreams(SchedulerError):
    """More Execute streams are open than the plane serves at once."""

    reason = "TOO_MANY_STREAMS"


class PlaneDraining(EngineError):
    """The plane is shutting down and begins no new batch."""

    reason = "DRAINING"


class PlaneBroken(ExecutionError):
    """A fault of the plane's own code stopped it; the log has it."""

    reason = "PLANE_BROKEN"
