"""From what a client asks for to messages of `hetero.inference.v1`; pure, for every transport."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, Final

from control_plane.api.convert_structure import structure_to_proto
from control_plane.core.embedding_params import FIELD, Input
from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.tool_choice import ToolChoice
from hetero_infer.client.conversation import Message, Tool
from hetero_infer.client.requests import ChatRequest, Request, TextRequest
from hetero_infer.client.tool_choice import tool_choice_of
from planes.default_int import DefaultInt
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2

PARAMS: Final = frozenset(field.name for field in fields(GenerationParams))


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


def embed_request_to_proto(
    inputs: Iterable[Input],
    *,
    dimensions: int | None,
    normalize: bool,
    priority: int,
    cache_salt: str,
    model: str,
) -> inference_pb2.EmbedRequest:
    """Return the message that asks for embeddings. Raises ValidationError as above."""
    message = inference_pb2.EmbedRequest()
    for index, given in enumerate(inputs):
        with _Refusal(f"{FIELD}[{index}]", given):
            if isinstance(given, str):
                message.inputs.add(text=given)
            else:
                message.inputs.add().token_ids.ids.extend(given)
                message.inputs[-1].token_ids.SetInParent()
    for name, value in (
        ("dimensions", dimensions),
        ("normalize", normalize),
        ("priority", priority),
        ("cache_salt", cache_salt),
        ("model", model),
    ):
        if value is not None:
            with _Refusal(name, value):
                setattr(message, name, value)
    return message


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
