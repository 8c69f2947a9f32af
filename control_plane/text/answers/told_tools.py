"""What a chat template has no place for, said in messages that it has one for.

Tools are told in the system message, in the format in which calls are read; earlier calls are
written in it, and their results come from the user where the template knows of no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from control_plane.text.answers.written_calls import WRITERS, Call, Writer
from control_plane.text.chat_template import ChatTemplate

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
        self._writer = None if calls is None else WRITERS.get(calls)

    def rewritten(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, object]] | None
    ) -> Conversation:
        """Return a conversation in which nothing is left out, as far as that can be."""
        writer = self._writer
        has_calls = any(one.get("tool_calls") or one.get("role") == "tool" for one in messages)
        if writer is None or not (tools or has_calls):
            return Conversation(messages, tools)
        places = self._template.tool_places
        if not places.writes_calls:
            messages = _with_calls_written(messages, writer)
        role = places.role_of_results if places.knows_tools else None
        if role is None:
            messages = _with_results_of_the_user(messages)
        elif role != "tool":
            messages = [
                {**message, "role": role} if message.get("role") == "tool" else message
                for message in messages
            ]
        if tools and places.role_of_told and not places.tells:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            told = _TOLD.format(tools=lines, call=writer([_EXAMPLE]))
            return Conversation(_with_told(messages, told, places.role_of_told), None)
        return Conversation(messages, tools)


def _with_told(messages: Sequence[Message], told: str, role: str) -> Sequence[Message]:
    """Return messages of which the first of a role says it, too."""
    at = next((i for i, one in enumerate(messages) if one.get("role") == role), None)
    if at is None:
        return [{"role": role, "content": told}, *messages]
    content = str(messages[at].get("content") or "")
    both = (content, told) if role == "system" else (told, content)
    said = {**messages[at], "content": "\n\n".join(filter(None, both))}
    return [*messages[:at], said, *messages[at + 1 :]]


def _with_calls_written(messages: Sequence[Message], write: Writer) -> Sequence[Message]:
    found: list[Message] = []
    num_calls = 0
    for message in messages:
        calls = _calls_of(message, num_calls)
        num_calls += len(calls)
        if calls:
            content = (str(message.get("content") or ""), write(calls))
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**kept, "content": "\n".join(filter(None, content))}
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
    """Return messages in which results are said by the user, those of one answer in one message.

    What the user says behind them is in the same: many templates want the two in turns.
    """
    found: list[Message] = []
    is_behind_result = False
    for message in messages:
        role, content = message.get("role"), str(message.get("content") or "")
        is_result = role == "tool"
        if is_result:
            content = f"<tool_response>\n{content}\n</tool_response>"
        if is_behind_result and (is_result or role == "user"):
            content = f"{found.pop()['content']}\n{content}"
        elif not is_result:
            found.append(message)
            is_behind_result = False
            continue
        found.append({"role": "user", "content": content})
        is_behind_result = is_result
    return found
