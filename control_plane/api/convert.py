"""Between `hetero.inference.v1` and the engine's values; the protobuf of clients ends here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request import FinishReason, RequestState, StateChange
from control_plane.core.request_options import RequestOptions
from control_plane.engine.events import RequestEnd, RequestInfo, RequestTimings
from control_plane.engine.frontend import Generation
from control_plane.engine.plane import PlaneDescription
from control_plane.errors import ModelNotFoundError
from control_plane.telemetry import EngineMetrics
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2

_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: inference_pb2.FINISH_REASON_CANCELLED,
    FinishReason.ERROR: inference_pb2.FINISH_REASON_ERROR,
}

_STATES = {
    RequestState.PENDING: inference_pb2.REQUEST_STATE_PENDING,
    RequestState.PREFILL: inference_pb2.REQUEST_STATE_PREFILL,
    RequestState.DECODE: inference_pb2.REQUEST_STATE_DECODE,
    RequestState.COMPLETED: inference_pb2.REQUEST_STATE_COMPLETED,
    RequestState.FAILED: inference_pb2.REQUEST_STATE_FAILED,
    RequestState.CANCELLED: inference_pb2.REQUEST_STATE_CANCELLED,
}

_DEFAULTS = GenerationParams()


def prompt_from_proto(request: inference_pb2.GenerateRequest) -> str | Sequence[int]:
    """Return the prompt, text or token ids. Raises ValidationError if there is none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return request.token_ids.ids
    raise ValidationError("the prompt must be given as text or token_ids", field="prompt")


def check_model(request: inference_pb2.GenerateRequest, loaded: str) -> None:
    """Raise ModelNotFoundError if the request names another model than the loaded one."""
    if request.model and request.model != loaded:
        raise ModelNotFoundError(
            f"model {request.model!r} is not loaded, {loaded!r} is", field="model"
        )


def options_from_proto(request: inference_pb2.GenerateRequest, *, name: str) -> RequestOptions:
    """Return what changes no token of the request. It is not checked yet."""
    return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, name=name)


def params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    """Return the parameters, defaults where a field is unset. They are not checked yet."""
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    return dataclasses.replace(_DEFAULTS, **given)


def params_to_proto(params: GenerationParams) -> inference_pb2.SamplingParams:
    """Return the effective parameters, for the echo."""
    return inference_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        seed=params.seed,
        ignore_eos=params.ignore_eos,
        n=params.n,
        beam_width=params.beam_width,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )


def finish_reason_to_proto(reason: FinishReason) -> inference_pb2.FinishReason.ValueType:
    """Return why a request ended."""
    return _FINISH_REASONS[reason]


def usage_to_proto(generation: Generation, end: RequestEnd) -> inference_pb2.Usage:
    """Return the token counts of a request that has ended."""
    return inference_pb2.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_generated_tokens,
        cached_tokens=end.cached_tokens,
    )


def states_to_proto(
    history: Sequence[StateChange], *, arrival_time: float
) -> list[inference_pb2.StateChange]:
    """Return the states a request entered, in seconds after its receipt."""
    return [
        inference_pb2.StateChange(state=_STATES[change.state], at_s=change.at - arrival_time)
        for change in history
    ]


def request_info_to_proto(info: RequestInfo) -> inference_pb2.RequestInfo:
    """Return what a request is doing."""
    finish_reason = (
        inference_pb2.FINISH_REASON_UNSPECIFIED
        if info.finish_reason is None
        else _FINISH_REASONS[info.finish_reason]
    )
    return inference_pb2.RequestInfo(
        request_id=info.name,
        state=_STATES[info.state],
        priority=info.priority,
        prompt_tokens=info.prompt_tokens,
        cached_tokens=info.cached_tokens,
        completion_tokens=info.generated_tokens,
        finish_reason=finish_reason,
        age_s=info.age_s,
        states=states_to_proto(info.history, arrival_time=info.arrival_time),
    )


def timings_to_proto(timings: RequestTimings) -> inference_pb2.Timings:
    """Return the milestones; one that was never reached is 0."""
    return inference_pb2.Timings(
        queue_s=timings.queue_s or 0.0,
        time_to_first_token_s=timings.time_to_first_token_s or 0.0,
        total_s=timings.total_s,
    )


def model_info_to_proto(
    plane: PlaneDescription, *, max_model_len: int
) -> inference_pb2.GetModelInfoResponse:
    """Return what is loaded, where, and how long a sequence may be."""
    return inference_pb2.GetModelInfoResponse(
        model=plane.model,
        architecture=plane.architecture,
        dtype=plane.dtype,
        weight_format=plane.weight_format,
        vocab_size=plane.vocab_size,
        context_length=plane.context_length,
        max_model_len=max_model_len,
        num_parameters=plane.num_parameters,
        executor=plane.executor,
        device=plane.device,
        numerics_id=plane.numerics_id,
        software_version=plane.software_version,
    )


def memory_stats_to_proto(
    stats: MemoryStats, *, block_size: int
) -> inference_pb2.GetMemoryStatsResponse:
    """Return the use of the block pool."""
    return inference_pb2.GetMemoryStatsResponse(
        block_size=block_size,
        total_blocks=stats.total_blocks,
        used_blocks=stats.used_blocks,
        free_blocks=stats.free_blocks,
        num_sequences=stats.num_sequences,
        cached_blocks=stats.cached_blocks,
        internal_fragmentation=stats.internal_fragmentation,
        utilization=stats.utilization,
        total_host_blocks=stats.total_host_blocks,
        used_host_blocks=stats.used_host_blocks,
    )


def metrics_to_proto(metrics: EngineMetrics) -> inference_pb2.GetMetricsResponse:
    """Return the engine's counts."""
    return inference_pb2.GetMetricsResponse(
        total_requests=metrics.total_requests,
        completed_requests=metrics.completed_requests,
        failed_requests=metrics.failed_requests,
        cancelled_requests=metrics.cancelled_requests,
        prompt_tokens=metrics.prompt_tokens,
        generated_tokens=metrics.generated_tokens,
        active_sequences=metrics.active_sequences,
        waiting_requests=metrics.waiting_requests,
        num_preemptions=metrics.num_preemptions,
        memory_utilization=metrics.memory_utilization,
        average_latency_s=metrics.average_latency_s,
        tokens_per_second=metrics.tokens_per_second,
        num_steps=metrics.num_steps,
        num_swaps=metrics.num_swaps,
        cached_tokens=metrics.cached_tokens,
    )
