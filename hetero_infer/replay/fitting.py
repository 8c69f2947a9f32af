"""Whether a recording can run on a compute plane."""

from __future__ import annotations

from control_plane.core.embedding import EMBEDDINGS
from control_plane.engine.plane import (
    CONSTRAINTS,
    DRAFT_CONSTRAINTS,
    DRAFTS,
    START_PREFIXES,
)
from hetero_infer.replay.recording_reader import RecordingError
from planes.errors import ConfigError
from protos.hetero.compute.v1 import compute_pb2


def check_fit(
    recorded: compute_pb2.DescribeResponse, replaying: compute_pb2.DescribeResponse
) -> None:
    """Raise ConfigError, naming the first thing, where a recording cannot run on a plane at all."""
    was, now = recorded.model, replaying.model
    if was.sha256 and now.sha256 and was.sha256 != now.sha256:
        raise ConfigError(
            f"model: the recording is of {was.name} (sha256 {was.sha256[:12]}…), the compute plane "
            f"has {now.name} (sha256 {now.sha256[:12]}…)",
            field="model",
        )
    same = ("architecture", "vocab_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for name in same:
        if getattr(was, name) != getattr(now, name):
            raise ConfigError(
                f"{name}: the recorded model has {getattr(was, name)!r}, the compute plane's "
                f"{getattr(now, name)!r}",
                field=name,
            )
    if recorded.block_size != replaying.block_size:
        raise ConfigError(
            f"block_size: recorded with {recorded.block_size}, the compute plane has "
            f"{replaying.block_size}",
            field="block_size",
        )
    for name, before, after in (
        ("max_num_blocks", recorded.num_blocks, replaying.num_blocks),
        ("swap_space (blocks)", recorded.num_host_blocks, replaying.num_host_blocks),
        ("states", recorded.num_states, replaying.num_states),
        ("max_slots", recorded.limits.max_slots, replaying.limits.max_slots),
        ("max_rows", recorded.limits.max_rows, replaying.limits.max_rows),
        ("max_tokens_per_batch", recorded.limits.max_tokens, replaying.limits.max_tokens),
        ("context_length", was.context_length, now.context_length),
    ):
        if after < before:
            raise ConfigError(
                f"{name}: recorded with {before}, the compute plane has only {after}", field=name
            )
    if "logprobs" in recorded.features and "logprobs" not in replaying.features:
        raise ConfigError("the compute plane has no logprobs, the recording has", field="compute")


def check_adapters(
    batch: compute_pb2.ExecutionBatch,
    recorded: compute_pb2.DescribeResponse,
    replaying: compute_pb2.DescribeResponse,
) -> None:
    """Raise ConfigError for a batch that starts a slot with an adapter that the plane has not."""
    for number in sorted({start.adapter for start in batch.starts} - {0}):
        was, now = (
            plane.adapters[number - 1] if number <= len(plane.adapters) else None
            for plane in (recorded, replaying)
        )
        if was is None:
            raise RecordingError(
                f"the recording is damaged: step {batch.step_id} starts a slot with adapter "
                f"{number} of {len(recorded.adapters)}",
                field="recording",
            )
        if now is None or (was.name, was.sha256) != (now.name, now.sha256):
            raise ConfigError(
                f"lora: step {batch.step_id} was recorded with {_adapter(was)} as adapter "
                f"{number}, the compute plane has {_adapter(now)} there",
                field="lora",
            )


def _adapter(one: compute_pb2.AdapterDescription | None) -> str:
    if one is None:
        return "none"
    return f"{one.name!r} (sha256 {one.sha256[:12]}…)" if one.sha256 else repr(one.name)


def check_features(batch: compute_pb2.ExecutionBatch, plane: compute_pb2.DescribeResponse) -> None:
    """Raise ConfigError for a batch that asks for what the plane does not do."""
    if batch.constraints and CONSTRAINTS not in plane.features:
        raise ConfigError(
            f"step {batch.step_id} has constraints, which the compute plane does not keep to",
            field="compute",
        )
    if batch.embeddings and EMBEDDINGS not in plane.features:
        raise ConfigError(
            f"step {batch.step_id} wants hidden states, which the compute plane does not give",
            field="compute",
        )
    if batch.draft_ids and DRAFTS not in plane.features:
        raise ConfigError(
            f"step {batch.step_id} has drafts, which the compute plane takes none of; record "
            "without speculative_tokens and grammar_drafts",
            field="compute",
        )
    has_prefixes = any(start.HasField("prefix") for start in batch.starts)
    if has_prefixes and START_PREFIXES not in plane.features:
        raise ConfigError(
            f"step {batch.step_id} starts slots with what others have, which the compute plane "
            "does not",
            field="compute",
        )
    is_behind_drafts = any(constraint.num_drafts for constraint in batch.constraints)
    if is_behind_drafts and DRAFT_CONSTRAINTS not in plane.features:
        raise ConfigError(
            f"step {batch.step_id} has constraints of drafts, which the compute plane does not "
            "keep to; record without grammar_drafts",
            field="compute",
        )
