"""Between `hetero.inference.v1` and the engine's values; the protobuf of clients ends here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from control_plane.api.convert_structure import structure_from_proto, structure_to_proto
from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import (
    MAX_LOGIT_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    GenerationParams,
)
from control_plane.core.request import FinishReason, RequestState, StateChange
from control_plane.core.request_options import RequestOptions
from control_plane.engine.events import RequestEnd, RequestTimings
from control_plane.engine.frontend import Generation
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
_COLLECTIONS = {
    "stop": (tuple, MAX_STOP_STRINGS),
    "stop_token_ids": (tuple, MAX_STOP_TOKENS),
    "logit_bias": (dict, MAX_LOGIT_BIASES),
}


# --- requests ---


def prompt_from_proto(request: inference_pb2.GenerateRequest) -> str | Sequence[int]:
    """Return the prompt, text or token ids. Raises ValidationError if there is none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return request.token_ids.ids
    raise ValidationError("the prompt must be given as text or token_ids", field="prompt")


def options_from_proto(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest | inference_pb2.EmbedRequest,
    *,
    name: str,
) -> RequestOptions:
    """Return what changes no token of the request. It is not checked yet."""
    return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, name=name)


def params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    """Return the parameters, defaults where a field is unset. They are not checked yet.

    Raises ValidationError for more entries than there may be: a mistake may have a million.
    """
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    for name, (collection, limit) in _COLLECTIONS.items():
        if name in given:
            if len(given[name]) > limit:
                what = "texts" if name == "stop" else "entries"
                raise ValidationError(
                    f"{name} must have at most {limit} {what}, got {len(given[name])}", field=name
                )
            given[name] = collection(given[name])
    if "structured_outputs" in given:
        given["structured_outputs"] = structure_from_proto(given["structured_outputs"])
    return dataclasses.replace(_DEFAULTS, **given)


# --- answers ---


def params_to_proto(params: GenerationParams) -> inference_pb2.SamplingParams:
    """Return the effective parameters, for the echo."""
    return inference_pb2.SamplingParams(
        **{
            **{field.name: getattr(params, field.name) for field in dataclasses.fields(params)},
            "structured_outputs": structure_to_proto(params.structured_outputs),
        }
    )


def finish_reason_to_proto(reason: FinishReason) -> inference_pb2.FinishReason.ValueType:
    """Return why a request ended."""
    return _FINISH_REASONS[reason]


def matched_stop_to_proto(stop: str | int | None) -> inference_pb2.MatchedStop | None:
    """Return which of the request's own stops ended a sample."""
    if stop is None:
        return None
    if isinstance(stop, str):
        return inference_pb2.MatchedStop(text=stop)
    return inference_pb2.MatchedStop(token_id=stop)


def logprobs_to_proto(entries: Sequence[TokenLogprobs]) -> list[inference_pb2.TokenLogprobs]:
    """Return log-probabilities, one message a token."""
    return [
        inference_pb2.TokenLogprobs(
            logprob=entry.logprob,
            top_token_ids=entry.top_token_ids,
            top_logprobs=entry.top_logprobs,
        )
        for entry in entries
    ]


def prompt_logprobs_to_proto(
    entries: Sequence[TokenLogprobs | None] | None,
) -> inference_pb2.PromptLogprobs | None:
    """Return those of a prompt but for its first token, which has none."""
    if entries is None:
        return None
    known = [entry for entry in entries if entry is not None]
    return inference_pb2.PromptLogprobs(logprobs=logprobs_to_proto(known))


def usage_to_proto(
    generation: Generation, end: RequestEnd, num_reasoning_tokens: int
) -> inference_pb2.Usage:
    """Return the token counts of a request that has ended."""
    return inference_pb2.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_generated_tokens,
        cached_tokens=end.cached_tokens,
        reasoning_tokens=num_reasoning_tokens,
    )


def state_to_proto(state: RequestState) -> inference_pb2.RequestState.ValueType:
    """Return a request's state."""
    return _STATES[state]


def states_to_proto(
    history: Sequence[StateChange], *, arrival_time: float
) -> list[inference_pb2.StateChange]:
    """Return the states a request entered, in seconds after its receipt."""
    return [
        inference_pb2.StateChange(state=_STATES[change.state], at_s=change.at - arrival_time)
        for change in history
    ]


def timings_to_proto(timings: RequestTimings) -> inference_pb2.Timings:
    """Return the milestones; one that was never reached is 0."""
    return inference_pb2.Timings(
        queue_s=timings.queue_s or 0.0,
        time_to_first_token_s=timings.time_to_first_token_s or 0.0,
        total_s=timings.total_s,
    )
