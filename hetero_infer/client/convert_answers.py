"""From the messages of `hetero.inference.v1` to what a client sees; pure, for every transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from control_plane.api.convert_structure import structure_from_proto
from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
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
from hetero_infer.client.conversation import ToolCall
from hetero_infer.client.convert_requests import PARAMS
from hetero_infer.wire_errors import ServerLostError
from protos.hetero.inference.v1 import inference_pb2

PLAIN: Final = GenerationParams()
COLLECTIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "structured_outputs": structure_from_proto,
}


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
        reasoning_tokens=usage.reasoning_tokens,
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
