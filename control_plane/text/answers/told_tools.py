"""What a chat template has no place for, said in messages that it has one for.

Tools are told in the system message, in the format in which calls are read; earlier calls are
written in it, and their results come from the user where the template knows of no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from control_plane.text.answers.written_calls import WRITERS, Call, message_with
from control_plane.text.chat_template import ChatTemplate
from planes.errors import ValidationError

Message = Mapping[str, object]

_EXAMPLE: Final = Call("NAME_OF_THE_FUNCTION", {"NAME_OF_A_PARAMETER": "VALUE"})

_TOLD: Final = """\
# Tools

You can call functions. These are the functions, described by JSON Schema:
<tools>
{tools}
</tools>

To call a function, answer with nothing but a call in this form:
{call}
The next message then has its result. Where no function helps, answer in words."""


class Conversation(NamedTuple):
    """Messages and tools as a template is given them."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, object]] | None


class ToldTools:
    """Says what a template cannot. `calls`: the format of calls; None: it is not known."""

    def __init__(self, template: ChatTemplate, calls: str | None) -> None:
        self._template = template
        self._calls = calls if calls in WRITERS else None

    def rewritten(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None
    ) -> Conversation:
        """Return a conversation in which the template leaves out no tools, calls or results.

        As far as examples show what it leaves out. Raises ValidationError for what is nested so
        deep that it cannot be written.
        """
        has_calls = any(one.get("tool_calls") or one.get("role") == "tool" for one in messages)
        if not (tools or has_calls):
            return Conversation(messages, tools)
        if has_calls and self._template.tool_places.writes_one:
            messages = _with_one_call_each(messages)
        if self._calls is None:
            return Conversation(messages, tools)
        try:
            return self._rewritten(messages, tools, self._calls)
        except RecursionError:
            raise ValidationError(
                "messages and tools must not be nested so deeply", field="messages"
            ) from None

    def _rewritten(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        calls: str,
    ) -> Conversation:
        places = self._template.tool_places
        if places.results_in_calls:
            messages = _with_results_in_calls(messages)
        role = places.role_of_results if places.knows_tools else None
        if role is None:
            messages = _with_results_of_the_user(messages)
        elif role != "tool":
            messages = [
                {**message, "role": role} if message.get("role") == "tool" else message
                for message in messages
            ]
        if not places.writes_calls:
            messages = _with_calls_written(messages, calls)
        if not tools or places.tells or not places.role_of_told:
            return Conversation(messages, tools)
        lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        told = _TOLD.format(tools=lines, call=WRITERS[calls]([_EXAMPLE]))
        return Conversation(_with_told(messages, told, places.role_of_told), None)


def _with_one_call_each(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which each call has one of its own, with its results behind it."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls")
        if not isinstance(calls, Sequence) or len(calls) < 2:
            found.append(message)
            continue
        end = at
        while end < len(messages) and messages[end].get("role") == "tool":
            end += 1
        results: dict[object, list[Message]] = {}
        for result in messages[at:end]:
            results.setdefault(result.get("tool_call_id"), []).append(result)
        for number, call in enumerate(calls):
            own = message if number == 0 else {"role": message["role"], "content": ""}
            found.append({**own, "tool_calls": [call]})
            found += results.pop(call.get("id") if isinstance(call, Mapping) else None, [])
        found += [result for some in results.values() for result in some]  # of no call here
        at = end
    return found


def _with_results_in_calls(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which those with calls have their results, as `tool_responses`.

    What the assistant says of them goes on with its message.
    """
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        end = at
        while message.get("tool_calls") and end < len(messages) and _is_result(messages[end]):
            end += 1
        if end > at:
            names = _names_of(message)
            responses = [
                {
                    "name": names.get(one.get("tool_call_id")) or one.get("name") or "unknown",
                    "response": _content_of(one),
                }
                for one in messages[at:end]
            ]
            message = {**message, "tool_responses": responses}
            at = end
            follows = messages[at] if at < len(messages) else {}
            is_said = follows.get("role") == "assistant" and not follows.get("tool_calls")
            if is_said and not _content_of(message):
                message = {**message, "content": _content_of(follows)}
                at += 1
        found.append(message)
    return found


def _is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def _names_of(message: Message) -> Mapping[object, object]:
    """Return the names of functions that a message calls, by the ids of the calls."""
    found: dict[object, object] = {}
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(call, Mapping) and isinstance(function, Mapping):
            found[call.get("id")] = function.get("name")
    return found


def _with_told(messages: Sequence[Message], told: str, role: str) -> Sequence[Message]:
    """Return messages of which the first of a role says it, too."""
    at = next((i for i, one in enumerate(messages) if one.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": told}, *messages]
    content = _content_of(messages[at])
    both = (content, told) if role == "system" else (told, content)
    said = {**messages[at], "content": "\n\n".join(filter(None, both))}
    return [*messages[:at], said, *messages[at + 1 :]]


def _with_calls_written(messages: Sequence[Message], calls_format: str) -> Sequence[Message]:
    found: list[Message] = []
    num_calls = 0
    for message in messages:
        calls = _calls_of(message, num_calls)
        num_calls += len(calls)
        if calls:
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            content = message_with(calls_format, _content_of(message), calls)
            message = {**kept, "content": content}
        found.append(message)
    return found


def _calls_of(message: Message, num_before: int) -> list[Call]:
    calls = message.get("tool_calls")
    found: list[Call] = []
    for call in calls if isinstance(calls, Sequence) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            known = arguments if isinstance(arguments, str | Mapping) else {}
            found.append(Call(str(function.get("name")), known, num_before + len(found)))
    return found


def _with_results_of_the_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages in which results are said by the user, in the order of their calls.

    Together with what else the user says beside them: many templates want the two in turns.
    """
    found: list[Message] = []
    order: dict[object, int] = {}  # of the calls before, by their ids
    at = 0
    while at < len(messages):
        message = messages[at]
        if message.get("role") not in ("user", "tool"):
            order = {call_id: number for number, call_id in enumerate(_ids_of(message))}
            found.append(message)
            at += 1
            continue
        end = at
        while end < len(messages) and messages[end].get("role") in ("user", "tool"):
            end += 1
        found += _of_the_user(messages[at:end], order)
        at = end
    return found


def _ids_of(message: Message) -> Sequence[object]:
    calls = message.get("tool_calls")
    some = calls if isinstance(calls, Sequence) else ()
    return [call.get("id") for call in some if isinstance(call, Mapping)]


def _of_the_user(messages: Sequence[Message], order: Mapping[object, int]) -> list[Message]:
    """Return what is said between two answers: in one message, if results are in it."""
    results = [message for message in messages if message.get("role") == "tool"]
    if not results:
        return [*messages]
    in_order = iter(sorted(results, key=lambda one: order.get(one.get("tool_call_id"), len(order))))
    texts: list[str] = []
    said: dict[str, object] = {}
    for message in messages:
        if message.get("role") == "tool":
            texts.append(f"<tool_response>\n{_content_of(next(in_order))}\n</tool_response>")
        else:
            texts.append(_content_of(message))
            said |= message
    return [{**said, "role": "user", "content": "\n".join(texts)}]


def _content_of(message: Message) -> str:
    return str(message.get("content") or "")
