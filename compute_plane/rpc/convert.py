"""Between `hetero.compute.v1` and the plane's plain values; protobuf goes no further than here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from compute_plane import errors
from compute_plane.executor.interface import (
    EmbeddingPart,
    EmbeddingWant,
    LogitBias,
    SampleLogprobs,
    StateCopy,
)
from compute_plane.executor.step import (
    EMPTY,
    BlockMove,
    Int64Array,
    PromptLogprobsRequest,
    RowConstraint,
    RowFailureReason,
    SamplingKey,
    SlotPrefix,
    SlotStart,
    StepBatch,
    StepHeader,
    StepReply,
    TableCopy,
)
from compute_plane.facts import PlaneAssets, PlaneFacts
from protos.hetero.compute.v1 import compute_pb2

REFUSAL_REASON: Final[dict[type[errors.BatchRefused], compute_pb2.RefusalReason.ValueType]] = {
    errors.InvalidBatch: compute_pb2.REFUSAL_REASON_INVALID_BATCH,
    errors.UnsupportedBatch: compute_pb2.REFUSAL_REASON_UNSUPPORTED,
    errors.StepGap: compute_pb2.REFUSAL_REASON_STEP_GAP,
    errors.StaleSession: compute_pb2.REFUSAL_REASON_STALE_SESSION,
    errors.StaleEpoch: compute_pb2.REFUSAL_REASON_STALE_EPOCH,
    errors.BatchFailed: compute_pb2.REFUSAL_REASON_EXECUTION_FAILED,
}

ROW_FAILURE_REASON: Final = {
    RowFailureReason.NOT_FINITE: compute_pb2.ROW_FAILURE_REASON_NOT_FINITE,
    RowFailureReason.POISONED: compute_pb2.ROW_FAILURE_REASON_POISONED,
}


EMBEDDING_PART: Final = {
    compute_pb2.EMBEDDING_PART_LAST: EmbeddingPart.LAST,
    compute_pb2.EMBEDDING_PART_SUM: EmbeddingPart.SUM,
}


def header_from_proto(batch: compute_pb2.ExecutionBatch) -> StepHeader:
    """Take from a batch to whom it belongs and where it stands."""
    return StepHeader(
        session=batch.session,
        epoch=batch.epoch,
        step_id=batch.step_id,
        acked_step=batch.acked_step,
    )


def batch_from_proto(batch: compute_pb2.ExecutionBatch) -> StepBatch:
    """Take a batch's content from the wire. Any message converts; `SlotTable` judges it."""
    return StepBatch(
        slots=_column(batch.slots),
        query_lens=_column(batch.query_lens),
        positions=_column(batch.positions),
        token_counts=_column(batch.token_counts),
        token_ids=_column(batch.token_ids),
        new_block_counts=_column(batch.new_block_counts),
        new_block_ids=_column(batch.new_block_ids),
        sampled_rows=_column(batch.sampled_rows),
        sampled_slots=_column(batch.sampled_slots),
        released=_column(batch.released),
        starts=[_start_from_proto(start) for start in batch.starts],
        swap_out=_moves(batch.swap_out),
        copies=[
            TableCopy(copy.slot, copy.logical_index, copy.source_block, copy.destination_block)
            for copy in batch.copies
        ],
        swap_in=_moves(batch.swap_in),
        state_copies=[StateCopy(copy.source, copy.destination) for copy in batch.state_copies],
        prompt_logprobs=[
            PromptLogprobsRequest(request.row, request.num_logprobs)
            for request in batch.prompt_logprobs
        ],
        digest_blocks=_column(batch.digest_blocks),
        draft_counts=_column(batch.draft_counts),
        draft_ids=_column(batch.draft_ids),
        wanted_drafts=_column(batch.wanted_drafts),
        constraints=[
            RowConstraint(
                entry.row, np.frombuffer(entry.allowed_tokens, np.uint8), entry.num_drafts
            )
            for entry in batch.constraints
        ],
        embeddings=[
            EmbeddingWant(request.row, EMBEDDING_PART.get(request.part, EmbeddingPart.UNSAID))
            for request in batch.embeddings
        ],
    )


def _moves(moves: Sequence[compute_pb2.BlockMove]) -> Sequence[BlockMove]:
    if not moves:
        return ()
    return [BlockMove(move.source_block, move.destination_block) for move in moves]


def _column(values: Sequence[int]) -> Int64Array:
    # NumPy would look for its array protocols on the container first, which takes longer.
    return np.fromiter(values, np.int64, len(values)) if values else EMPTY


def _start_from_proto(start: compute_pb2.SlotStart) -> SlotStart:
    return SlotStart(
        slot=start.slot,
        token_ids=_column(start.token_ids),
        num_prompt_tokens=start.num_prompt_tokens,
        block_ids=_column(start.block_ids),
        sampling=_sampling_from_proto(start.sampling, start.sample_index),
        prefix=_prefix_from_proto(start.prefix) if start.HasField("prefix") else None,
        adapter=start.adapter,
    )


def _prefix_from_proto(prefix: compute_pb2.SlotPrefix) -> SlotPrefix:
    return SlotPrefix(prefix.slot, prefix.num_tokens, prefix.num_blocks)


def _sampling_from_proto(sampling: compute_pb2.SamplingParams, sample_index: int) -> SamplingKey:
    return SamplingKey(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        sample_index=sample_index,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=_logit_bias_from_proto(sampling.logit_bias) if sampling.logit_bias else None,
        num_logprobs=sampling.num_logprobs if sampling.HasField("num_logprobs") else None,
    )


def _logit_bias_from_proto(entries: Sequence[compute_pb2.LogitBias]) -> LogitBias:
    token_ids = np.array([entry.token_id for entry in entries], dtype=np.uint32)
    return LogitBias(
        token_ids=token_ids.view(np.int32),
        values=np.array([entry.bias for entry in entries], dtype=np.float32),
    )


def reply_to_proto(reply: StepReply) -> compute_pb2.ExecutionOutput:
    """Put the answer to a batch on the wire."""
    header, result = reply.header, reply.result
    output = compute_pb2.ExecutionOutput(
        session=header.session,
        epoch=header.epoch,
        step_id=header.step_id,
        timings=compute_pb2.StepTimings(
            queue_us=reply.timings.queue_us,
            execute_us=reply.timings.execute_us,
            idle_us=reply.timings.idle_us,
        ),
    )
    if reply.refusal is not None:
        output.refusal.reason = refusal_reason(reply.refusal)
        output.refusal.field = reply.refusal.field or ""
        output.refusal.message = reply.refusal.message
        output.refusal.expected_step = reply.expected_step
    if result is not None:
        output.sampled_token_ids.extend(result.sampled_token_ids.tolist())
        for failure in result.row_failures:
            output.row_failures.add(
                row=failure.row,
                reason=ROW_FAILURE_REASON[failure.reason],
                message=failure.message,
            )
        output.sample_logprobs.extend(map(_sample_logprobs, result.sample_logprobs))
        output.kept_drafts.extend(result.kept_drafts.tolist())
        output.draft_logprobs.extend(map(_sample_logprobs, result.draft_logprobs))
        output.next_draft_counts.extend(result.next_draft_counts.tolist())
        output.next_draft_ids.extend(result.next_draft_ids.tolist())
        output.block_digests.extend(result.block_digests)
        for embedding in result.embeddings:
            values = embedding.values.astype("<f8", copy=False)
            output.embeddings.add(row=embedding.row, values=values.tobytes())
        for entry in result.prompt_logprobs:
            output.prompt_logprobs.add(
                row=entry.row,
                first_position=entry.first_position,
                logprobs=entry.logprobs.tolist(),
                top_token_ids=entry.top.token_ids.ravel().tolist() if entry.top else (),
                top_logprobs=entry.top.logprobs.ravel().tolist() if entry.top else (),
            )
    return output


def _sample_logprobs(entry: SampleLogprobs) -> compute_pb2.SampleLogprobs:
    return compute_pb2.SampleLogprobs(
        sample=entry.sample,
        logprob=entry.logprob,
        top_token_ids=entry.top.token_ids.ravel().tolist(),
        top_logprobs=entry.top.logprobs.ravel().tolist(),
    )


def refusal_reason(refusal: errors.BatchRefused) -> compute_pb2.RefusalReason.ValueType:
    """Return the wire's word for why a batch was refused."""
    for cls in type(refusal).__mro__:
        if cls in REFUSAL_REASON:
            return REFUSAL_REASON[cls]
    return compute_pb2.REFUSAL_REASON_INVALID_BATCH


def facts_to_proto(facts: PlaneFacts) -> compute_pb2.DescribeResponse:
    """Put what the plane is on the wire; epoch and session are the caller's to add."""
    spec, device, limits = facts.spec, facts.device, facts.limits
    return compute_pb2.DescribeResponse(
        protocol_version=facts.protocol_version,
        model=compute_pb2.ModelDescription(
            name=spec.name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            hidden_size=spec.hidden_size,
            context_length=spec.context_length,
            dtype=facts.dtype,
            weight_format=spec.weight_format,
            num_parameters=spec.num_parameters,
            sha256=facts.model_sha256,
            pooling=spec.pooling,
        ),
        numerics_id=facts.numerics_id,
        executor=facts.executor,
        device=compute_pb2.DeviceDescription(
            kind=device.kind,
            name=device.name,
            capability=device.capability,
            total_memory_bytes=device.total_memory_bytes,
            kv_pool_bytes=facts.kv_pool_bytes,
            weights_bytes=facts.weights_bytes,
            num_threads=device.num_threads,
        ),
        block_size=limits.block_size,
        num_blocks=limits.num_blocks,
        num_host_blocks=limits.num_host_blocks,
        limits=compute_pb2.BatchLimits(
            max_slots=limits.max_slots,
            max_rows=limits.max_rows,
            max_tokens=limits.max_tokens,
            preferred_prefill_chunk=facts.preferred_prefill_chunk,
            max_message_bytes=facts.max_message_bytes,
            max_embeddings=limits.max_embeddings,
        ),
        max_batches_in_flight=facts.max_batches_in_flight,
        features=facts.features,
        software_version=facts.software_version,
        tells_prompts_apart=facts.tells_prompts_apart,
        num_states=limits.num_states,
        adapters=[
            compute_pb2.AdapterDescription(
                name=adapter.name,
                rank=adapter.rank,
                num_parameters=adapter.num_parameters,
                sha256=adapter.sha256,
            )
            for adapter in facts.adapters
        ],
    )


def assets_to_proto(assets: PlaneAssets) -> compute_pb2.GetModelAssetsResponse:
    """Put the model's text side on the wire."""
    response = compute_pb2.GetModelAssetsResponse(
        chat_template=assets.chat_template,
        bos_token_id=assets.bos_token_id,
        eos_token_ids=assets.eos_token_ids,
        pad_token_id=assets.pad_token_id,
        add_bos_token=assets.add_bos_token,
        context_length=assets.context_length,
        model_name=assets.model_name,
        text_end_token_ids=assets.text_end_token_ids,
    )
    if assets.tokenizer_json is not None:
        response.tokenizer_json = assets.tokenizer_json
    else:
        response.simple.vocab_size = assets.vocab_size
    return response
