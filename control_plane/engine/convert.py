"""Between the core's values and `hetero.compute.v1`; protobuf goes no further than here."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from itertools import islice

from control_plane.core.batch import (
    BlockMove,
    PromptLogprobs,
    RowEmbedding,
    RowFailure,
    SlotStart,
    StepBatch,
    StepResult,
    TokenLogprobs,
)
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.plane import AdapterDescription, PlaneDescription
from control_plane.text.assets import ModelAssets
from planes.errors import SchedulerError
from protos.hetero.compute.v1 import compute_pb2

FLOAT64_BYTES = 8
MIN_POSITIVE = 2.0**-126
"""The wire has float32, and less would become 0 there, which is no legal value of top_p and means
another repetition_penalty. Long before that, the nucleus is the most likely token alone, and no
token that was ever seen can be the best or anything but the best."""


def batch_to_proto(
    batch: StepBatch, *, session: int, epoch: int, acked_step: int
) -> compute_pb2.ExecutionBatch:
    """Put a step on the wire.

    Tokens travel only in `starts`, and as drafts: a prefill row reads them there, a decode row
    continues from the token the plane sampled itself.
    """
    has_new_blocks = bool(batch.new_block_ids)
    return compute_pb2.ExecutionBatch(
        session=session,
        epoch=epoch,
        step_id=batch.step_id,
        acked_step=acked_step,
        swap_out=[_move_to_proto(move) for move in batch.swap_out],
        copies=[
            compute_pb2.BlockCopy(
                slot=copy.slot,
                logical_index=copy.logical_index,
                source_block=copy.source,
                destination_block=copy.destination,
            )
            for copy in batch.copies
        ],
        swap_in=[_move_to_proto(move) for move in batch.swap_in],
        released=batch.released,
        starts=_starts_to_proto(batch.starts),
        slots=batch.slots,
        query_lens=batch.query_lens,
        positions=batch.positions,
        new_block_counts=batch.new_block_counts if has_new_blocks else (),
        new_block_ids=batch.new_block_ids,
        sampled_rows=batch.sampled_rows,
        sampled_slots=batch.sampled_slots,
        prompt_logprobs=[
            compute_pb2.PromptLogprobsRequest(row=row, num_logprobs=num_logprobs)
            for row, num_logprobs in batch.prompt_logprobs
        ],
        draft_counts=batch.draft_counts,
        draft_ids=batch.draft_ids,
        wanted_drafts=batch.wanted_drafts,
        constraints=[
            compute_pb2.RowConstraint(row=row, allowed_tokens=allowed, num_drafts=num_drafts)
            for row, allowed, num_drafts in batch.constraints
        ],
        embeddings=[
            compute_pb2.EmbeddingRequest(
                row=row,
                part=compute_pb2.EMBEDDING_PART_SUM if is_sum else compute_pb2.EMBEDDING_PART_LAST,
            )
            for row, is_sum in batch.embeddings
        ],
        state_copies=[
            compute_pb2.StateCopy(source=copy.source, destination=copy.destination)
            for copy in batch.state_copies
        ],
    )


def _move_to_proto(move: BlockMove) -> compute_pb2.BlockMove:
    return compute_pb2.BlockMove(source_block=move.source, destination_block=move.destination)


def _starts_to_proto(starts: Iterable[SlotStart]) -> list[compute_pb2.SlotStart]:
    """Return the starts of a batch; samples of one request have one object of parameters."""
    made: dict[int, compute_pb2.SamplingParams] = {}
    found = []
    for start in starts:
        sampling = made.get(id(start.params))
        if sampling is None:
            sampling = made[id(start.params)] = _params_to_proto(start.params)
        found.append(_start_to_proto(start, sampling))
    return found


def _start_to_proto(
    start: SlotStart, sampling: compute_pb2.SamplingParams
) -> compute_pb2.SlotStart:
    prefix = start.prefix
    return compute_pb2.SlotStart(
        slot=start.slot,
        token_ids=start.token_ids,
        num_prompt_tokens=start.num_prompt_tokens,
        block_ids=start.block_ids,
        sampling=sampling,
        sample_index=start.sample_index,
        prefix=None
        if prefix is None
        else compute_pb2.SlotPrefix(
            slot=prefix.slot, num_tokens=prefix.num_tokens, num_blocks=prefix.num_blocks
        ),
        adapter=start.adapter,
    )


def _params_to_proto(params: GenerationParams) -> compute_pb2.SamplingParams:
    if params.seed is None:
        raise SchedulerError("a request reached the wire before its seed was drawn", field="seed")
    return compute_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=max(params.top_p, MIN_POSITIVE),
        seed=params.seed,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=max(params.repetition_penalty, MIN_POSITIVE),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=[
            compute_pb2.LogitBias(token_id=token_id, bias=bias)
            for token_id, bias in params.logit_bias.items()
        ],
        num_logprobs=params.num_logprobs,
    )


def result_from_proto(output: compute_pb2.ExecutionOutput, *, waited_us: int = 0) -> StepResult:
    """Take the result of a step from the wire."""
    refusal = None
    if output.HasField("refusal"):
        reason = compute_pb2.RefusalReason.Name(output.refusal.reason)
        where = f" at {output.refusal.field}" if output.refusal.field else ""
        refusal = f"{reason.removeprefix('REFUSAL_REASON_')}{where}: {output.refusal.message}"
    failures = output.row_failures
    return StepResult(
        step_id=output.step_id,
        sampled_token_ids=list(output.sampled_token_ids),
        row_failures=tuple(RowFailure(row=f.row, message=f.message) for f in failures)
        if failures
        else (),
        refusal=refusal,
        execute_us=output.timings.execute_us,
        idle_us=output.timings.idle_us,
        waited_us=waited_us,
        queue_us=output.timings.queue_us,
        sample_logprobs={
            entry.sample: _logprobs_from_proto(entry) for entry in output.sample_logprobs
        },
        kept_drafts=list(output.kept_drafts),
        draft_logprobs=_draft_logprobs_from_proto(output) if output.draft_logprobs else {},
        prompt_logprobs=tuple(map(_prompt_logprobs_from_proto, output.prompt_logprobs)),
        embeddings=tuple(map(_embedding_from_proto, output.embeddings)),
        next_drafts=_next_drafts_from_proto(output) if output.next_draft_counts else {},
    )


def _next_drafts_from_proto(output: compute_pb2.ExecutionOutput) -> dict[int, list[int]]:
    """Take those of each row apart; of counts that are not those of the ids, what there is."""
    ids = iter(output.next_draft_ids)
    counts = enumerate(output.next_draft_counts)
    return {row: list(islice(ids, count)) for row, count in counts if count}


def _embedding_from_proto(entry: compute_pb2.RowEmbedding) -> RowEmbedding:
    """Take the numbers of a row; of bytes that are no float64 those in front of them."""
    values = array("d")
    values.frombytes(entry.values[: len(entry.values) // FLOAT64_BYTES * FLOAT64_BYTES])
    if sys.byteorder == "big":
        values.byteswap()
    return RowEmbedding(entry.row, values)


def _logprobs_from_proto(entry: compute_pb2.SampleLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs))


def _draft_logprobs_from_proto(
    output: compute_pb2.ExecutionOutput,
) -> dict[int, list[TokenLogprobs]]:
    """Take those of each sample together, in order."""
    found: dict[int, list[TokenLogprobs]] = {}
    for entry in output.draft_logprobs:
        found.setdefault(entry.sample, []).append(_logprobs_from_proto(entry))
    return found


def _prompt_logprobs_from_proto(entry: compute_pb2.PromptLogprobs) -> PromptLogprobs:
    """Take the flat columns of one row apart."""
    ids, tops = list(entry.top_token_ids), list(entry.top_logprobs)
    width = len(ids) // max(1, len(entry.logprobs))
    return PromptLogprobs(
        entry.row,
        entry.first_position,
        tuple(
            TokenLogprobs(
                logprob,
                tuple(ids[index * width : (index + 1) * width]),
                tuple(tops[index * width : (index + 1) * width]),
            )
            for index, logprob in enumerate(entry.logprobs)
        ),
    )


def description_from_proto(response: compute_pb2.DescribeResponse) -> PlaneDescription:
    """Take the plane's description from the wire."""
    model, limits, device = response.model, response.limits, response.device
    return PlaneDescription(
        protocol_version=response.protocol_version,
        model=model.name,
        architecture=model.architecture,
        dtype=model.dtype,
        weight_format=model.weight_format,
        model_sha256=model.sha256,
        num_parameters=model.num_parameters,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        numerics_id=response.numerics_id,
        executor=response.executor,
        device=device.name or device.kind,
        block_size=response.block_size,
        num_blocks=response.num_blocks,
        max_slots=limits.max_slots,
        max_rows=limits.max_rows,
        max_tokens=limits.max_tokens,
        preferred_prefill_chunk=limits.preferred_prefill_chunk,
        max_batches_in_flight=response.max_batches_in_flight,
        software_version=response.software_version,
        epoch=response.epoch,
        current_session=response.current_session,
        num_host_blocks=response.num_host_blocks,
        tells_prompts_apart=response.tells_prompts_apart,
        features=frozenset(response.features),
        hidden_size=model.hidden_size,
        max_embeddings=limits.max_embeddings,
        pooling=model.pooling,
        num_states=response.num_states,
        adapters=tuple(
            AdapterDescription(one.name, one.rank, one.num_parameters, one.sha256)
            for one in response.adapters
        ),
    )


def assets_from_proto(response: compute_pb2.GetModelAssetsResponse) -> ModelAssets:
    """Take the model's text side from the wire."""
    kind = response.WhichOneof("tokenizer")
    return ModelAssets(
        model_name=response.model_name,
        tokenizer_json=response.tokenizer_json if kind == "tokenizer_json" else None,
        simple_vocab_size=response.simple.vocab_size if kind == "simple" else None,
        chat_template=response.chat_template or None,
        bos_token_id=response.bos_token_id if response.HasField("bos_token_id") else None,
        eos_token_ids=tuple(response.eos_token_ids),
        pad_token_id=response.pad_token_id if response.HasField("pad_token_id") else None,
        add_bos_token=response.add_bos_token,
        text_end_token_ids=tuple(response.text_end_token_ids),
    )
