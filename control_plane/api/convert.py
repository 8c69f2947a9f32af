"""Between `hetero.inference.v1` and the engine's values; the protobuf of clients ends here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, RequestState, StateChange
from control_plane.core.request_options import RequestOptions
from control_plane.engine.events import RequestEnd, RequestTimings
from control_plane.engine.frontend import Generation
from control_plane.errors import ModelNotFoundError
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
_COLLECTIONS = {"stop": tuple, "stop_token_ids": tuple, "logit_bias": dict}


# --- requests ---


def check_model(name: str, loaded: str) -> None:
    """Raise ModelNotFoundError if a request names another model than the loaded one."""
    if name and name != loaded:
        raise ModelNotFoundError(f"model {name!r} is not loaded, {loaded!r} is", field="model")


def prompt_from_proto(request: inference_pb2.GenerateRequest) -> str | Sequence[int]:
    """Return the prompt, text or token ids. Raises ValidationError if there is none."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        return request.token_ids.ids
    raise ValidationError("the prompt must be given as text or token_ids", field="prompt")


def options_from_proto(
    request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, *, name: str
) -> RequestOptions:
    """Return what changes no token of the request. It is not checked yet."""
    return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, name=name)


def params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    """Return the parameters, defaults where a field is unset. They are not checked yet."""
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    for name, collection in _COLLECTIONS.items():
        if name in given:
            given[name] = collection(given[name])
    return dataclasses.replace(_DEFAULTS, **given)


def messages_from_proto(
    messages: Sequence[inference_pb2.ChatMessage],
) -> list[dict[str, object]]:
    """Return a conversation as templates know it: without the fields that are not set."""
    return [_message_from_proto(message, index) for index, message in enumerate(messages)]


def _message_from_proto(message: inference_pb2.ChatMessage, index: int) -> dict[str, object]:
    found: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        found["name"] = message.name
    if message.tool_call_id:
        found["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _json_from_proto(
                        call.arguments_json,
                        f"messages[{index}].tool_calls[{number}].arguments_json",
                    ),
                },
            }
            for number, call in enumerate(message.tool_calls)
        ]
    return found


def tools_from_proto(tools: Sequence[inference_pb2.Tool]) -> list[dict[str, object]] | None:
    """Return the tools as templates know them; None if there are none."""
    return [_tool_from_proto(tool, index) for index, tool in enumerate(tools)] or None


def _tool_from_proto(tool: inference_pb2.Tool, index: int) -> dict[str, object]:
    function: dict[str, object] = {"name": tool.name, "description": tool.description}
    if tool.parameters_json:
        field = f"tools[{index}].parameters_json"
        function["parameters"] = _json_from_proto(tool.parameters_json, field)
    return {"type": "function", "function": function}


def _json_from_proto(text: str, field: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValidationError."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{field} is not JSON: {error}", field=field) from None
    if not isinstance(value, dict):
        raise ValidationError(f"{field} must be a JSON object, got {text[:40]}", field=field)
    return value


# --- answers ---


def params_to_proto(params: GenerationParams) -> inference_pb2.SamplingParams:
    """Return the effective parameters, for the echo."""
    return inference_pb2.SamplingParams(
        **{field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
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


def usage_to_proto(generation: Generation, end: RequestEnd) -> inference_pb2.Usage:
    """Return the token counts of a request that has ended."""
    return inference_pb2.Usage(
        prompt_tokens=generation.num_prompt_tokens,
        completion_tokens=generation.num_generated_tokens,
        cached_tokens=end.cached_tokens,
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
