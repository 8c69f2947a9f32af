"""Conversations of `hetero.inference.v1`, as the values that chat templates get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypedDict

from control_plane.apart import run_apart
from control_plane.core.tool_calls import TOOL_CHOICE
from control_plane.text.answers.tool_choice import Mode, ToolChoice
from control_plane.text.bounds import (
    MAX_INLINE_BYTES,
    MAX_JSON_BYTES,
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
)
from control_plane.text.conversation import MAX_TOOLS, call_arguments, json_object
from planes.errors import ValidationError
from protos.hetero.inference.v1 import inference_pb2

_MODES: Final[Mapping[int, Mode]] = {
    inference_pb2.TOOL_CHOICE_MODE_UNSPECIFIED: "auto",
    inference_pb2.TOOL_CHOICE_MODE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_MODE_NONE: "none",
    inference_pb2.TOOL_CHOICE_MODE_REQUIRED: "required",
}


class Conversation(NamedTuple):
    """Messages, the tools that may be called (None: there are none), variables of the template."""

    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None
    chat_template_kwargs: dict[str, object]


async def conversation_from_proto(
    request: inference_pb2.ChatRequest | inference_pb2.ApplyChatTemplateRequest,
) -> Conversation:
    """Return the conversation of a request.

    Raises ValidationError for too many messages, tools or calls, and for what is no JSON.
    """
    # Numbers first: they are known without a look at what is counted.
    _check_count(len(request.messages), MAX_MESSAGES, "messages")
    _check_count(len(request.tools), MAX_TOOLS, "tools")
    if request.ByteSize() <= MAX_INLINE_BYTES:
        return _read(request)
    return await run_apart(_read, request)


def _read(
    request: inference_pb2.ChatRequest | inference_pb2.ApplyChatTemplateRequest,
) -> Conversation:
    is_told = not (
        isinstance(request, inference_pb2.ChatRequest)
        and request.tool_choice.mode == inference_pb2.TOOL_CHOICE_MODE_NONE
    )
    return Conversation(
        messages_from_proto(request.messages),
        tools_from_proto(request.tools if is_told else ()),
        _json_from_proto(request.chat_template_kwargs_json, "chat_template_kwargs_json"),
    )


def tool_choice_from_proto(request: inference_pb2.ChatRequest) -> ToolChoice:
    """Return whether tools are called, and which. Raises ValidationError."""
    choice = request.tool_choice
    mode = _MODES.get(choice.mode)
    if mode is None:
        raise ValidationError(
            f"{TOOL_CHOICE}.mode must be auto, none or required, got {choice.mode}",
            field=f"{TOOL_CHOICE}.mode",
        )
    _check_count(len(choice.names), MAX_TOOLS, f"{TOOL_CHOICE}.names")
    strict = tuple(tool.name for tool in request.tools if tool.strict)
    return ToolChoice(mode, tuple(choice.names), is_single=choice.single, strict=strict)


class PromptEnd(TypedDict):
    """Where the prompt of a conversation ends."""

    add_generation_prompt: bool | None
    continue_final_message: bool


def prompt_end_from_proto(
    request: inference_pb2.ChatRequest | inference_pb2.ApplyChatTemplateRequest,
) -> PromptEnd:
    """Return where a prompt is to end."""
    is_set = request.HasField("add_generation_prompt")
    return {
        "add_generation_prompt": request.add_generation_prompt if is_set else None,
        "continue_final_message": request.continue_final_message,
    }


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
    if message.reasoning_content:
        found["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        path = f"messages[{index}].tool_calls"
        _check_count(len(message.tool_calls), MAX_TOOL_CALLS, path)
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments_from_proto(
                        call.arguments_json, f"{path}[{number}].arguments_json"
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
    function: dict[str, object] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        field = f"tools[{index}].parameters_json"
        function["parameters"] = _json_from_proto(tool.parameters_json, field)
    return {"type": "function", "function": function}


def _arguments_from_proto(text: str, field: str) -> dict[str, Any] | str:
    """Return what a call was given. Raises ValidationError."""
    _check_size(text, field)
    return call_arguments(text)


def _json_from_proto(text: str, field: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValidationError."""
    _check_size(text, field)
    try:
        return json_object(text)
    except ValueError as error:
        raise ValidationError(f"{field} {error}", field=field) from None


def _check_size(text: str, field: str) -> None:
    if len(text) > MAX_JSON_BYTES:
        raise ValidationError(
            f"{field} must have at most {MAX_JSON_BYTES} bytes, got {len(text)} or more",
            field=field,
        )


def _check_count(count: int, limit: int, field: str) -> None:
    if count > limit:
        raise ValidationError(
            f"{field} must have at most {limit} entries, got {count}", field=field
        )
