"""From the engine's numbers to `hetero.inference.v1`: models, memory, metrics, requests."""

from __future__ import annotations

from control_plane.api.convert import finish_reason_to_proto, state_to_proto, states_to_proto
from control_plane.core.kv_cache import MemoryStats
from control_plane.engine.events import RequestInfo
from control_plane.engine.plane import PlaneDescription
from control_plane.telemetry import EngineMetrics
from protos.hetero.inference.v1 import inference_pb2


def request_info_to_proto(info: RequestInfo, model: str) -> inference_pb2.RequestInfo:
    """Return what a request is doing; `model`: what computes it, by name."""
    finish_reason = (
        inference_pb2.FINISH_REASON_UNSPECIFIED
        if info.finish_reason is None
        else finish_reason_to_proto(info.finish_reason)
    )
    return inference_pb2.RequestInfo(
        request_id=info.name,
        model=model,
        state=state_to_proto(info.state),
        priority=info.priority,
        prompt_tokens=info.prompt_tokens,
        cached_tokens=info.cached_tokens,
        completion_tokens=info.generated_tokens,
        finish_reason=finish_reason,
        age_s=info.age_s,
        states=states_to_proto(info.history, arrival_time=info.arrival_time),
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
        num_plane_losses=metrics.num_plane_losses,
        num_stalls=metrics.num_stalls,
        last_step_age_s=metrics.last_step_age_s,
        plane_step_s=metrics.plane_step_s,
        plane_idle_share=metrics.plane_idle_share,
        scheduling_delay_p99_s=metrics.scheduling_delay_p99_s,
        num_drafts=metrics.num_drafts,
        num_kept_drafts=metrics.num_kept_drafts,
        plane_queue_s=metrics.plane_queue_s,
        num_kept_states=metrics.num_kept_states,
        num_state_hits=metrics.num_state_hits,
    )


def model_info_to_proto(
    plane: PlaneDescription, *, model: str, max_model_len: int, has_chat_template: bool
) -> inference_pb2.ModelInfo:
    """Return what is loaded, where, and how long a sequence may be; `model`: or an adapter."""
    number = plane.adapter_of(model)
    adapter = plane.adapters[number - 1] if number else None
    return inference_pb2.ModelInfo(
        model=model,
        base_model="" if adapter is None else plane.model,
        adapter_rank=0 if adapter is None else adapter.rank,
        architecture=plane.architecture,
        dtype=plane.dtype,
        weight_format=plane.weight_format,
        vocab_size=plane.vocab_size,
        context_length=plane.context_length,
        max_model_len=max_model_len,
        num_parameters=plane.num_parameters if adapter is None else adapter.num_parameters,
        executor=plane.executor,
        device=plane.device,
        numerics_id=plane.numerics_id,
        software_version=plane.software_version,
        has_chat_template=has_chat_template,
    )
