"""Between the client's values and `hetero.inference.v1`; pure, for every transport."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, Final

from control_plane.api.convert_structure import structure_from_proto, structure_to_proto
from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.tool_choice import ToolChoice
from hetero_infer.client.answers import (
    Answer,
    AnswerParts,
    Delta,
    Event,
    Finished,
    PartsDelta,
    PromptLogprobs,
    SampleAnswer,
    SampleFinished,
    Started,
    StateReached,
    ToolCallDelta,
)
from hetero_infer.client.conversation import Message, Tool, ToolCall
from hetero_infer.client.requests import ChatRequest, Request, TextRequest
from hetero_infer.client.tool_choice import tool_choice_of
from hetero_infer.wire_errors import ServerLostError
from planes.default_int import DefaultInt
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2

PLAIN: Final = GenerationParams()
COLLECTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "structured_outputs": structure_from_proto,
}

PARAMS: Final = frozenset(field.name for field in fields(GenerationParams))


# --- requests ---


def request_to_proto(request: Request) -> inference_pb2.GenerateRequest | inference_pb2.ChatRequest:
    """Return the message of a request. Raises ValidationError for what no message can say."""
    if isinstance(request, TextRequest):
        return _text_request(request)
    return _chat_request(request)


def _text_request(request: TextRequest) -> inference_pb2.GenerateRequest:
    prompt = request.prompt
    with _Refusal("prompt", prompt):
        message = inference_pb2.GenerateRequest()
        if isinstance(prompt, str):
            message.text = prompt
        else:
            # Empty, too, it is a prompt: the server says what is wrong with it.
            message.token_ids.SetInParent()
            message.token_ids.ids.extend(prompt)
    _add_options(message, request)
    return message


def _chat_request(request: ChatRequest) -> inference_pb2.ChatRequest:
    choice = tool_choice_of(request.tool_choice) or ToolChoice()
    message = inference_pb2.ChatRequest(
        messages=messages_to_proto(request.messages),
        tools=tools_to_proto(request.tools, strict=choice.strict),
        chat_template_kwargs_json=object_to_proto(request.chat_template_kwargs),
        continue_final_message=request.continue_final_message,
        add_generation_prompt=request.add_generation_prompt,
    )
    mode = f"TOOL_CHOICE_MODE_{choice.mode.upper()}"
    with _Refusal("tool_choice", choice):
        message.tool_choice.mode = inference_pb2.ToolChoiceMode.Value(mode)
        message.tool_choice.names.extend(choice.names)
        message.tool_choice.single = choice.is_single or not request.parallel_tool_calls
    _add_options(message, request)
    return message


def _add_options(
    message: inference_pb2.GenerateRequest | inference_pb2.ChatRequest, request: Request
) -> None:
    if request.params is not None:
        message.sampling.CopyFrom(params_to_proto(request.params))
    with _Refusal("priority", request.priority):
        message.priority = request.priority
    with _Refusal("cache_salt", request.cache_salt):
        message.cache_salt = request.cache_salt
    with _Refusal("model", request.model):
        message.model = request.model


def resume_to_proto(request: Request, received: Iterable[int]) -> inference_pb2.ResumeRequest:
    """Return the message that asks for the rest of an answer. Raises ValidationError as above."""
    message = request_to_proto(request)
    with _Refusal("received_token_ids", received):
        if isinstance(message, inference_pb2.GenerateRequest):
            return inference_pb2.ResumeRequest(generate=message, received_token_ids=received)
        return inference_pb2.ResumeRequest(chat=message, received_token_ids=received)


def messages_to_proto(messages: Iterable[Message]) -> list[inference_pb2.ChatMessage]:
    """Return a conversation. Raises ValidationError for what is no text."""
    found = []
    for index, message in enumerate(messages):
        with _Refusal(f"messages[{index}]", message):
            found.append(
                inference_pb2.ChatMessage(
                    role=message.role,
                    content=message.content,
                    name=message.name,
                    tool_call_id=message.tool_call_id,
                    reasoning_content=message.reasoning_content,
                    tool_calls=[
                        inference_pb2.ToolCall(
                            id=call.id, name=call.name, arguments_json=call.arguments
                        )
                        for call in message.tool_calls
                    ],
                )
            )
    return found


def tools_to_proto(
    tools: Iterable[Tool], *, strict: Collection[str] = ()
) -> list[inference_pb2.Tool]:
    """Return the tools; those named in `strict` are. Raises ValidationError for a bad schema."""
    found = []
    for index, tool in enumerate(tools):
        with _Refusal(f"tools[{index}]", tool):
            schema = "" if tool.parameters is None else json.dumps(tool.parameters)
            found.append(
                inference_pb2.Tool(
                    name=tool.name,
                    description=tool.description,
                    parameters_json=schema,
                    strict=tool.strict or tool.name in strict,
                )
            )
    return found


def object_to_proto(given: Mapping[str, Any] | None) -> str:
    """Return the text of a JSON object; of none, and of an empty one, no text."""
    return json.dumps(given) if given else ""


def params_to_proto(params: GenerationParams) -> inference_pb2.SamplingParams:
    """Return the parameters. Raises ValidationError for those that no message can hold."""
    values = {name: getattr(params, name) for name in PARAMS}
    if isinstance(params.max_tokens, DefaultInt):
        del values["max_tokens"]  # the server knows what there is room for
    try:
        values["structured_outputs"] = structure_to_proto(params.structured_outputs)
        return inference_pb2.SamplingParams(**values)
    except (TypeError, ValueError) as error:
        params.validate()  # it says which field, and what is wrong with it
        raise ValidationError(f"the parameters cannot be sent: {error}") from None


class _Refusal:
    """Turns what protobuf says of a value into a ValidationError that names its field."""

    def __init__(self, field: str, value: object) -> None:
        self._field = field
        self._value = value

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # UnicodeEncodeError, which text with a lone surrogate raises, is a ValueError.
        if isinstance(error, TypeError | ValueError):
            shown = repr(self._value)
            shown = shown if len(shown) <= 80 else shown[:80] + "…"
            raise ValidationError(
                f"{self._field} cannot be sent, got {shown}: {error}", field=self._field
            ) from None


# --- answers ---


def params_from_proto(sampling: inference_pb2.SamplingParams) -> GenerationParams:
    """Return the effective parameters; those that this client does not know are left out."""
    given: dict[str, Any] = {field.name: value for field, value in sampling.ListFields()}
    return replace(
        PLAIN,
        **{
            name: COLLECTIONS[name](value) if name in COLLECTIONS else value
            for name, value in given.items()
            if name in PARAMS
        },
    )


def event_from_proto(response: inference_pb2.GenerateStreamResponse) -> Event:
    """Return one event. Raises ServerLostError for one that this client does not know."""
    kind = response.WhichOneof("event")
    if kind == "delta":
        delta = response.delta
        return Delta(
            text=delta.text,
            token_ids=tuple(delta.token_ids),
            index=delta.index,
            offset=delta.offset,
            logprobs=_logprobs(delta.logprobs),
            parts=_parts_delta(delta),
        )
    if kind == "started":
        started = response.started
        return Started(
            request_id=started.request_id,
            model=started.model,
            prompt_tokens=started.prompt_tokens,
            params=params_from_proto(started.sampling),
            received_tokens=started.received_tokens,
        )
    if kind == "prompt_logprobs":
        return PromptLogprobs(_logprobs(response.prompt_logprobs.logprobs))
    if kind == "sample_finished":
        ended = response.sample_finished
        reason = finish_reason_from_proto(ended.finish_reason)
        return SampleFinished(
            ended.index,
            reason,
            ended.completion_tokens,
            _matched_stop(ended),
            _parts_delta(ended),
        )
    if kind == "finished":
        return replace(_finished(response.finished), parts=_parts_delta(response.finished))
    raise ServerLostError(
        "the server sent an event this client does not know; their versions differ"
    )


def answer_from_proto(response: inference_pb2.GenerateResponse) -> Answer:
    """Return a whole answer."""
    params = params_from_proto(response.sampling)
    samples = tuple(_sample(sample, sample.index) for sample in response.samples)
    return Answer(
        started=Started(
            request_id=response.request_id,
            model=response.model,
            prompt_tokens=response.usage.prompt_tokens,
            params=params,
        ),
        samples=samples or (_sample(response, 0),),
        finished=_finished(response),
        prompt_logprobs=(
            None
            if params.num_prompt_logprobs is None
            else _logprobs(response.prompt_logprobs.logprobs)
        ),
    )


def finish_reason_from_proto(reason: inference_pb2.FinishReason.ValueType) -> str:
    """Return why a sample ended; empty: it has not."""
    if reason == inference_pb2.FINISH_REASON_UNSPECIFIED:
        return ""
    return inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()


def state_from_proto(state: inference_pb2.RequestState.ValueType) -> str:
    """Return the name of a state."""
    return inference_pb2.RequestState.Name(state).removeprefix("REQUEST_STATE_").lower()


def states_from_proto(states: Iterable[inference_pb2.StateChange]) -> tuple[StateReached, ...]:
    """Return the states a request entered."""
    return tuple(StateReached(state_from_proto(change.state), change.at_s) for change in states)


def _finished(message: inference_pb2.Finished | inference_pb2.GenerateResponse) -> Finished:
    usage, timings = message.usage, message.timings
    return Finished(
        finish_reason=finish_reason_from_proto(message.finish_reason),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        queue_s=timings.queue_s,
        time_to_first_token_s=timings.time_to_first_token_s,
        total_s=timings.total_s,
        cached_tokens=usage.cached_tokens,
        matched_stop=_matched_stop(message),
        states=states_from_proto(message.states),
    )


def _sample(
    message: inference_pb2.Sample | inference_pb2.GenerateResponse, index: int
) -> SampleAnswer:
    return SampleAnswer(
        index=index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=finish_reason_from_proto(message.finish_reason),
        logprobs=_logprobs(message.logprobs),
        matched_stop=_matched_stop(message),
        parts=_parts(message),
    )


def _parts(
    message: inference_pb2.Sample | inference_pb2.GenerateResponse,
) -> AnswerParts | None:
    if not message.HasField("parts"):
        return None
    parts = message.parts
    calls = (ToolCall(call.id, call.name, call.arguments_json) for call in parts.tool_calls)
    return AnswerParts(parts.content, parts.reasoning_content, tuple(calls))


def _parts_delta(
    message: inference_pb2.Delta | inference_pb2.SampleFinished | inference_pb2.Finished,
) -> PartsDelta | None:
    if not message.HasField("parts"):
        return None
    parts = message.parts
    return PartsDelta(
        parts.content,
        parts.reasoning_content,
        tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments_json)
            for call in parts.tool_calls
        ),
    )


def _logprobs(entries: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(entry.logprob, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in entries
    )


def _matched_stop(
    message: (
        inference_pb2.SampleFinished
        | inference_pb2.Finished
        | inference_pb2.Sample
        | inference_pb2.GenerateResponse
    ),
) -> str | int | None:
    kind = message.matched_stop.WhichOneof("stop")
    if kind is None:
        return None
    return message.matched_stop.text if kind == "text" else message.matched_stop.token_id
