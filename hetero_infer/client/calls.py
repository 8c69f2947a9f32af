"""Calls with one answer: the message that asks, and how its answer is read.

Pure: `Client` and `AsyncClient` make them, each in its way.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage

from control_plane.core.embedding_params import TextEmbedding, inputs_of
from control_plane.telemetry import EngineMetrics
from hetero_infer.client.answers import Answer
from hetero_infer.client.arguments import check_flag, check_text, object_of, tokens_of
from hetero_infer.client.conversation import AnyMessage, AnyTool, messages_of, tools_of
from hetero_infer.client.convert_answers import (
    answer_from_proto,
    finish_reason_from_proto,
    state_from_proto,
    states_from_proto,
)
from hetero_infer.client.convert_requests import (
    embed_request_to_proto,
    messages_to_proto,
    object_to_proto,
    request_to_proto,
    tools_to_proto,
)
from hetero_infer.client.requests import Request, TextRequest, check_prompt_end
from hetero_infer.client.server_values import ChatPrompt, ModelInfo, PoolStats, ServedRequest
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call. `is_repeatable`: making it once more does no harm."""

    service: str
    method: str
    message: ProtoMessage
    read: Callable[[Any], T]
    is_repeatable: bool = True


def generate(request: Request) -> Call[Answer]:
    """Ask for a whole answer. Raises ValidationError for what cannot be sent."""
    method = "Generate" if isinstance(request, TextRequest) else "Chat"
    return Call("Inference", method, request_to_proto(request), answer_from_proto)


def embed(
    inputs: Sequence[str | Sequence[int]],
    *,
    dimensions: int | None,
    normalize: bool,
    priority: int,
    cache_salt: str,
    model: str,
) -> Call[list[TextEmbedding]]:
    """Ask for embeddings. Raises ValidationError for what cannot be sent."""
    message = embed_request_to_proto(
        inputs_of(inputs),
        dimensions=dimensions,
        normalize=normalize,
        priority=priority,
        cache_salt=cache_salt,
        model=model,
    )

    def read(answer: inference_pb2.EmbedResponse) -> list[TextEmbedding]:
        return [
            TextEmbedding(array("f", one.values), one.prompt_tokens, one.cached_tokens)
            for one in answer.embeddings
        ]

    return Call("Inference", "Embed", message, read)


def model_info(model: str) -> Call[ModelInfo]:
    """Ask what is loaded. Raises ValidationError for what is no name."""
    check_text(model, "model")
    message = inference_pb2.GetModelInfoRequest(model=model)
    return Call("Model", "GetModelInfo", message, _model_info)


def list_models() -> Call[tuple[ModelInfo, ...]]:
    """Ask for everything that is loaded."""

    def read(answer: inference_pb2.ListModelsResponse) -> tuple[ModelInfo, ...]:
        return tuple(map(_model_info, answer.models))

    return Call("Model", "ListModels", inference_pb2.ListModelsRequest(), read)


def tokenize(text: str, *, add_special_tokens: bool) -> Call[tuple[int, ...]]:
    """Ask for the tokens of a text. Raises ValidationError for what is no text."""

    def read(answer: inference_pb2.TokenizeResponse) -> tuple[int, ...]:
        return tuple(answer.token_ids)

    check_text(text, "text")
    check_flag(add_special_tokens, "add_special_tokens")
    try:
        message = inference_pb2.TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
    except (TypeError, ValueError) as error:
        raise ValidationError(f"text cannot be sent: {error}", field="text") from None
    return Call("Tokenizer", "Tokenize", message, read)


def detokenize(token_ids: Iterable[int], *, skip_special_tokens: bool) -> Call[str]:
    """Ask for the text of tokens. Raises ValidationError for what are none."""
    check_flag(skip_special_tokens, "skip_special_tokens")
    try:
        ids = inference_pb2.TokenIds(ids=tokens_of(token_ids, "token_ids"))
    except (TypeError, ValueError) as error:
        raise ValidationError(f"token_ids cannot be sent: {error}", field="token_ids") from None
    message = inference_pb2.DetokenizeRequest(
        token_ids=ids, skip_special_tokens=skip_special_tokens
    )

    def read(answer: inference_pb2.DetokenizeResponse) -> str:
        return answer.text

    return Call("Tokenizer", "Detokenize", message, read)


def apply_chat_template(
    messages: Sequence[AnyMessage],
    tools: Sequence[AnyTool],
    chat_template_kwargs: Mapping[str, Any] | None,
    *,
    continue_final_message: bool,
    add_generation_prompt: bool | None,
) -> Call[ChatPrompt]:
    """Ask for the prompt that a conversation becomes. Raises ValidationError."""

    def read(answer: inference_pb2.ApplyChatTemplateResponse) -> ChatPrompt:
        return ChatPrompt(answer.text, tuple(answer.token_ids))

    check_prompt_end(continue_final_message, add_generation_prompt)
    variables = object_of(chat_template_kwargs, "chat_template_kwargs")
    message = inference_pb2.ApplyChatTemplateRequest(
        messages=messages_to_proto(messages_of(messages)),
        tools=tools_to_proto(tools_of(tools)),
        continue_final_message=continue_final_message,
        add_generation_prompt=add_generation_prompt,
        chat_template_kwargs_json=object_to_proto(variables),
    )
    return Call("Tokenizer", "ApplyChatTemplate", message, read)


def metrics() -> Call[EngineMetrics]:
    """Ask for the engine's counts."""

    def read(answer: inference_pb2.GetMetricsResponse) -> EngineMetrics:
        return EngineMetrics(**_named(answer, EngineMetrics))

    return Call("Admin", "GetMetrics", inference_pb2.GetMetricsRequest(), read)


def memory_stats() -> Call[PoolStats]:
    """Ask for the use of the KV pool."""

    def read(answer: inference_pb2.GetMemoryStatsResponse) -> PoolStats:
        return PoolStats(**_named(answer, PoolStats))

    return Call("Admin", "GetMemoryStats", inference_pb2.GetMemoryStatsRequest(), read)


def list_requests(*, include_ended: bool) -> Call[tuple[ServedRequest, ...]]:
    """Ask what the requests are doing."""

    def read(answer: inference_pb2.ListRequestsResponse) -> tuple[ServedRequest, ...]:
        return tuple(map(_served_request, answer.requests))

    check_flag(include_ended, "include_ended")
    message = inference_pb2.ListRequestsRequest(include_ended=include_ended)
    return Call("Admin", "ListRequests", message, read)


def abort(request_id: str) -> Call[None]:
    """Ask for the end of a request. Raises ValidationError for what is no name."""
    check_text(request_id, "request_id")
    message = inference_pb2.AbortRequest(request_id=request_id)
    # Once more, it would find that there is no such request any more.
    return Call("Admin", "Abort", message, lambda _: None, is_repeatable=False)


def drain() -> Call[int]:
    """Ask that no new requests be taken; how many are under way."""

    def read(answer: inference_pb2.DrainResponse) -> int:
        return answer.num_requests

    return Call("Admin", "Drain", inference_pb2.DrainRequest(), read)


def flush_prefix_cache() -> Call[int]:
    """Ask that no request find what earlier ones left; how many idle blocks held something."""

    def read(answer: inference_pb2.FlushPrefixCacheResponse) -> int:
        return answer.num_blocks

    message = inference_pb2.FlushPrefixCacheRequest()
    return Call("Admin", "FlushPrefixCache", message, read, is_repeatable=False)


def _model_info(info: inference_pb2.ModelInfo) -> ModelInfo:
    return ModelInfo(**_named(info, ModelInfo))


def _served_request(info: inference_pb2.RequestInfo) -> ServedRequest:
    return ServedRequest(
        request_id=info.request_id,
        model=info.model,
        state=state_from_proto(info.state),
        priority=info.priority,
        prompt_tokens=info.prompt_tokens,
        cached_tokens=info.cached_tokens,
        completion_tokens=tuple(info.completion_tokens),
        finish_reason=finish_reason_from_proto(info.finish_reason),
        age_s=info.age_s,
        states=states_from_proto(info.states),
    )


def _named(message: ProtoMessage, cls: type) -> dict[str, Any]:
    """Return the fields that a message and a dataclass both have."""
    known = {descriptor.name for descriptor in message.DESCRIPTOR.fields}
    return {
        field.name: getattr(message, field.name) for field in fields(cls) if field.name in known
    }
