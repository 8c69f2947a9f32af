"""The front door: `from hetero_infer import InferenceEngine, EngineConfig, GenerationParams`.

Names are loaded when they are first used, so that importing the package, or asking the command line
for its version, costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compute_plane.executor.interface import ExecutionBatch, ExecutionOutput, GPUExecutor
    from compute_plane.executor.registry import ExecutorContext
    from control_plane.core.batch import SlotStart, StepBatch, StepResult
    from control_plane.core.embedding_params import TextEmbedding
    from control_plane.core.errors import (
        ContextLengthError,
        OutOfBlocksError,
        RequestNeverFitsError,
    )
    from control_plane.core.generation_params import GenerationParams
    from control_plane.core.interface import (
        RequestOutput,
        SchedulerConfig,
        SchedulerOutput,
        SchedulerProtocol,
        SchedulerStats,
    )
    from control_plane.core.kv_cache import KVCacheManager, MemoryStats
    from control_plane.core.kv_interface import KVCacheManagerProtocol
    from control_plane.core.request import (
        FinishReason,
        Request,
        RequestState,
        Sequence,
        StateChange,
    )
    from control_plane.core.scheduler import Scheduler
    from control_plane.core.structured_outputs import StructuredOutputs
    from control_plane.engine.events import RequestInfo
    from control_plane.errors import (
        AdminTokenRequiredError,
        ComputeUnavailableError,
        DrainingError,
        EngineStoppedError,
        FencedError,
        LinkError,
        ModelNotFoundError,
        PlaneMismatchError,
        PlaneNotThereError,
        QueueFullError,
        RequestCancelledError,
        RequestFailedError,
        RequestNotFoundError,
        SlowReaderError,
        SlowSenderError,
        TokenMissingError,
        TokenRateError,
        TokenUnknownError,
        TooManyConcurrentRequestsError,
        UnreadableTokensError,
    )
    from control_plane.telemetry import EngineMetrics
    from control_plane.text.simple_tokenizer import SimpleTokenizer
    from control_plane.text.tokenizer import Tokenizer
    from hetero_infer.client import (
        Answer,
        AnswerParts,
        AsyncClient,
        AsyncStream,
        ChatPrompt,
        ChatRequest,
        Client,
        Delta,
        Finished,
        Message,
        ModelInfo,
        PartsDelta,
        PoolStats,
        PromptLogprobs,
        SampleAnswer,
        SampleFinished,
        ServedRequest,
        Started,
        Stream,
        TextRequest,
        Tool,
        ToolCall,
        ToolCallDelta,
    )
    from hetero_infer.completed import CompletedRequest, CompletedSample
    from hetero_infer.config import EngineConfig
    from hetero_infer.engine import InferenceEngine
    from hetero_infer.plane_process import PlaneStartError
    from hetero_infer.wire_errors import DeadlineExceededError, ServerLostError
    from planes.errors import (
        ConfigError,
        EngineError,
        ExecutionError,
        FieldViolation,
        MemoryError,  # noqa: A004 - the family's public name
        SchedulerError,
        TokenizationError,
        ValidationError,
    )
    from planes.tls_files import ClientFiles

    __version__: str

__all__ = [
    "InferenceEngine",
    "EngineConfig",
    "GenerationParams",
    "StructuredOutputs",
    "CompletedRequest",
    "CompletedSample",
    "TextEmbedding",
    "EngineMetrics",
    "MemoryStats",
    "Request",
    "RequestInfo",
    "RequestOutput",
    "RequestState",
    "StateChange",
    "FinishReason",
    "Sequence",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerProtocol",
    "SchedulerStats",
    "StepBatch",
    "StepResult",
    "SlotStart",
    "KVCacheManager",
    "KVCacheManagerProtocol",
    "ExecutionBatch",
    "ExecutionOutput",
    "GPUExecutor",
    "ExecutorContext",
    "Tokenizer",
    "SimpleTokenizer",
    "Client",
    "AsyncClient",
    "ClientFiles",
    "Stream",
    "AsyncStream",
    "ChatPrompt",
    "TextRequest",
    "ChatRequest",
    "Message",
    "Tool",
    "ToolCall",
    "Answer",
    "AnswerParts",
    "PartsDelta",
    "ToolCallDelta",
    "SampleAnswer",
    "Started",
    "PromptLogprobs",
    "Delta",
    "SampleFinished",
    "ServedRequest",
    "Finished",
    "ModelInfo",
    "PoolStats",
    "EngineError",
    "FieldViolation",
    "ServerLostError",
    "DeadlineExceededError",
    "ConfigError",
    "MemoryError",
    "ValidationError",
    "ExecutionError",
    "SchedulerError",
    "TokenizationError",
    "PlaneStartError",
    "OutOfBlocksError",
    "ContextLengthError",
    "RequestNeverFitsError",
    "AdminTokenRequiredError",
    "ComputeUnavailableError",
    "DrainingError",
    "EngineStoppedError",
    "FencedError",
    "LinkError",
    "ModelNotFoundError",
    "PlaneMismatchError",
    "PlaneNotThereError",
    "QueueFullError",
    "RequestCancelledError",
    "RequestFailedError",
    "RequestNotFoundError",
    "SlowReaderError",
    "SlowSenderError",
    "TokenMissingError",
    "TokenRateError",
    "TokenUnknownError",
    "TooManyConcurrentRequestsError",
    "UnreadableTokensError",
    "__version__",
]

_MODULES = {
    "compute_plane.executor.interface": ("ExecutionBatch", "ExecutionOutput", "GPUExecutor"),
    "compute_plane.executor.registry": ("ExecutorContext",),
    "control_plane.core.batch": ("SlotStart", "StepBatch", "StepResult"),
    "control_plane.core.embedding_params": ("TextEmbedding",),
    "control_plane.core.errors": (
        "OutOfBlocksError",
        "ContextLengthError",
        "RequestNeverFitsError",
    ),
    "control_plane.core.generation_params": ("GenerationParams",),
    "control_plane.core.structured_outputs": ("StructuredOutputs",),
    "control_plane.core.interface": (
        "RequestOutput",
        "SchedulerConfig",
        "SchedulerOutput",
        "SchedulerProtocol",
        "SchedulerStats",
    ),
    "control_plane.core.kv_cache": ("KVCacheManager", "MemoryStats"),
    "control_plane.core.kv_interface": ("KVCacheManagerProtocol",),
    "control_plane.core.request": (
        "FinishReason",
        "Request",
        "RequestState",
        "Sequence",
        "StateChange",
    ),
    "control_plane.core.scheduler": ("Scheduler",),
    "control_plane.engine.events": ("RequestInfo",),
    "control_plane.errors": (
        "AdminTokenRequiredError",
        "ComputeUnavailableError",
        "DrainingError",
        "EngineStoppedError",
        "FencedError",
        "LinkError",
        "ModelNotFoundError",
        "PlaneMismatchError",
        "PlaneNotThereError",
        "QueueFullError",
        "RequestCancelledError",
        "RequestFailedError",
        "RequestNotFoundError",
        "SlowReaderError",
        "SlowSenderError",
        "TokenMissingError",
        "TokenRateError",
        "TokenUnknownError",
        "TooManyConcurrentRequestsError",
        "UnreadableTokensError",
    ),
    "control_plane.telemetry": ("EngineMetrics",),
    "control_plane.text.simple_tokenizer": ("SimpleTokenizer",),
    "control_plane.text.tokenizer": ("Tokenizer",),
    "hetero_infer.client": (
        "Answer",
        "AnswerParts",
        "AsyncClient",
        "AsyncStream",
        "ChatPrompt",
        "ChatRequest",
        "Client",
        "Delta",
        "Finished",
        "Message",
        "ModelInfo",
        "PartsDelta",
        "PoolStats",
        "PromptLogprobs",
        "SampleAnswer",
        "SampleFinished",
        "ServedRequest",
        "Started",
        "Stream",
        "TextRequest",
        "Tool",
        "ToolCall",
        "ToolCallDelta",
    ),
    "hetero_infer.completed": ("CompletedRequest", "CompletedSample"),
    "hetero_infer.config": ("EngineConfig",),
    "hetero_infer.engine": ("InferenceEngine",),
    "hetero_infer.plane_process": ("PlaneStartError",),
    "hetero_infer.wire_errors": ("DeadlineExceededError", "ServerLostError"),
    "planes.errors": (
        "ConfigError",
        "EngineError",
        "ExecutionError",
        "FieldViolation",
        "MemoryError",
        "SchedulerError",
        "TokenizationError",
        "ValidationError",
    ),
    "planes.tls_files": ("ClientFiles",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module's attributes are of any type
    """Load a public name."""
    value: Any
    if name == "__version__":
        from hetero_infer.version import version

        value = version()
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Show the public names before they are loaded, too."""
    return sorted({*globals(), *__all__})
