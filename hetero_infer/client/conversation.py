"""Conversations as clients write them: messages and tools, typed or as JSON objects.

The JSON is OpenAI's: `{"role": …, "content": …}`, of the assistant also `tool_calls`. A key that
has no meaning here is refused, not ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from planes.errors import ValidationError


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the assistant called. `arguments`: a JSON object, as text.

    Those of an answer are as the model wrote them, which may be no JSON.
    """

    id: str
    name: str
    arguments: str = "{}"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `role`: system (or developer, the same), user, assistant, tool.

    `tool_calls`, `reasoning_content`: of the assistant. `tool_call_id`: of a tool, the call that it
    answers.
    """

    role: str
    content: str
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning_content: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    `parameters`: a JSON schema; None: it has none. `strict`: arguments keep to it also where the
    model decides whether to call; where it must, they do anyway.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


AnyMessage = Message | Mapping[str, Any]
AnyTool = Tool | Mapping[str, Any]

TypedT = TypeVar("TypedT", Message, Tool)

_TEXTS: Final = ("role", "content", "name", "tool_call_id", "reasoning_content")


def messages_of(given: Sequence[AnyMessage]) -> tuple[Message, ...]:
    """Return typed messages. Raises ValidationError that names the first wrong key."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise ValidationError(
            f"messages must be a list of messages, got {type(given).__name__}", field="messages"
        )
    return tuple(
        _checked(message, f"messages[{index}]", _TEXTS)
        if isinstance(message, Message)
        else _message(message, f"messages[{index}]")
        for index, message in enumerate(given)
    )


def tools_of(given: Sequence[AnyTool]) -> tuple[Tool, ...]:
    """Return typed tools. Raises ValidationError that names the first wrong key."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
        raise ValidationError(
            f"tools must be a list of tools, got {type(given).__name__}", field="tools"
        )
    return tuple(
        _checked(tool, f"tools[{index}]", ("name", "description"))
        if isinstance(tool, Tool)
        else _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(given)
    )


def _checked(given: TypedT, path: str, texts: Sequence[str]) -> TypedT:
    """Return what is typed already. Raises ValidationError for bytes and others that are no text.

    protobuf would take bytes for text.
    """
    for name in texts:
        if not isinstance(getattr(given, name), str):
            value = getattr(given, name)
            raise ValidationError(f"{path}.{name} must be text, got {value!r}", field=path)
    return given


def _message(given: object, path: str) -> Message:
    fields = _object(given, path, (*_TEXTS, "tool_calls"))
    calls = fields.get("tool_calls") or []
    if not isinstance(calls, list | tuple):
        raise ValidationError(f"{path}.tool_calls must be a list, got {calls!r}", field=path)
    if "role" not in fields:
        raise ValidationError(f"{path}.role is missing", field=path)
    # The assistant may have called tools and said nothing.
    texts = {name: _text(fields, name, path) for name in _TEXTS if fields.get(name) is not None}
    return Message(
        role=texts.get("role", ""),
        content=texts.get("content", ""),
        name=texts.get("name", ""),
        tool_call_id=texts.get("tool_call_id", ""),
        reasoning_content=texts.get("reasoning_content", ""),
        tool_calls=tuple(
            _tool_call(call, f"{path}.tool_calls[{index}]") for index, call in enumerate(calls)
        ),
    )


def _tool_call(given: object, path: str) -> ToolCall:
    fields = _object(given, path, ("id", "type", "function"))
    _check_function(fields, path)
    function = _object(fields.get("function"), f"{path}.function", ("name", "arguments"))
    arguments = function.get("arguments", "{}")
    return ToolCall(
        id=_text(fields, "id", path),
        name=_text(function, "name", f"{path}.function"),
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _tool(given: object, path: str) -> Tool:
    fields = _object(given, path, ("type", "function"))
    _check_function(fields, path)
    names = ("name", "description", "parameters", "strict")
    function = _object(fields.get("function"), f"{path}.function", names)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ValidationError(
            f"{path}.function.parameters must be an object, got {parameters!r}", field=path
        )
    description = function.get("description")
    return Tool(
        name=_text(function, "name", f"{path}.function"),
        description=_text(function, "description", path) if description is not None else "",
        parameters=parameters,
        strict=_flag(function.get("strict"), f"{path}.function.strict"),
    )


def _flag(value: object, path: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ValidationError(f"{path} must be true or false, got {value!r}", field=path)
    return bool(value)


def _check_function(fields: Mapping[str, Any], path: str) -> None:
    if fields.get("type", "function") != "function":
        raise ValidationError(f"{path}.type must be 'function', got {fields['type']!r}", field=path)


def _object(given: object, path: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValidationError(f"{path} must be an object, got {given!r}", field=path)
    for key in given:
        if key not in known:
            raise ValidationError(
                f"{path} has the unknown key {key!r}; known are {', '.join(known)}", field=path
            )
    return given


def _text(fields: Mapping[str, Any], name: str, path: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValidationError(f"{path}.{name} must be text, got {value!r}", field=path)
    return value
