"""What a conversation is, by whichever surface it comes: who may speak, who may say what, tools.

Surfaces have schemas of their own, which name a mistake as the caller spelled it; what stands here
holds for all of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from planes.errors import ValidationError

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_TEMPLATE_ROLES: Final[Mapping[str, str]] = {"developer": "system"}
"""OpenAI's newer word for what templates call `system`."""

_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
"""What may spell half a character in JSON; with the other half behind it it is a whole one."""

MAX_TOOLS: Final = 128
MAX_TOOL_NAME_CHARACTERS: Final = 64


def template_messages(messages: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return the messages in the words that chat templates know.

    Raises ValidationError naming the first that is none: its role is unknown, or it has what only
    another role may have.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Mapping[str, object], path: str) -> Mapping[str, object]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ValidationError(
            f"{path}.role must be one of {', '.join(ROLES)}, got {role!r}", field=f"{path}.role"
        )
    if "tool_calls" in message and role != "assistant":
        raise ValidationError(
            f"{path}.tool_calls must be unset but for the assistant, got role {role!r}",
            field=f"{path}.tool_calls",
        )
    if "reasoning_content" in message and role != "assistant":
        raise ValidationError(
            f"{path}.reasoning_content must be unset but for the assistant, got role {role!r}",
            field=f"{path}.reasoning_content",
        )
    if ("tool_call_id" in message) != (role == "tool"):
        wanted = "given" if role == "tool" else "unset"
        raise ValidationError(
            f"{path}.tool_call_id must be {wanted} for role {role!r}", field=f"{path}.tool_call_id"
        )
    known = {**message, "role": _TEMPLATE_ROLES.get(role, role)}
    if "reasoning_content" in message and not (message.get("content") and "tool_calls" in message):
        # gpt-oss's word for it; its template refuses both before a call, and has content for it.
        known["thinking"] = message["reasoning_content"]
    return known


def check_continued(
    messages: Sequence[Mapping[str, object]],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> None:
    """Raise ValidationError where the last message is to be gone on with and cannot be."""
    if not continue_final_message:
        return
    field, last = "continue_final_message", messages[-1]
    if add_generation_prompt:
        raise ValidationError(
            f"{field} and add_generation_prompt must not both be true: an answer either goes on "
            "with the last message, or is a new one",
            field=field,
        )
    if last.get("role") != "assistant":
        raise ValidationError(
            f"{field} must be false unless the last message is the assistant's, got role "
            f"{last.get('role')!r}",
            field=field,
        )
    if last.get("tool_calls") or not str(last.get("content") or "").strip():
        raise ValidationError(
            f"{field} must be false unless the last message has content, and no tool_calls",
            field=field,
        )


def check_tools(tools: Sequence[Mapping[str, object]]) -> None:
    """Raise ValidationError for too many tools, or naming the first without a name of its own."""
    if len(tools) > MAX_TOOLS:
        raise ValidationError(
            f"tools must have at most {MAX_TOOLS} entries, got {len(tools)}", field="tools"
        )
    known: dict[str, int] = {}
    for index, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_TOOL_NAME_CHARACTERS:
            raise ValidationError(
                f"tools[{index}] must be a function with a name of 1 to "
                f"{MAX_TOOL_NAME_CHARACTERS} characters",
                field=f"tools[{index}]",
            )
        if known.setdefault(name, index) != index:
            raise ValidationError(
                f"tools[{index}] must have a name of its own, tools[{known[name]}] is called "
                f"{name!r}, too",
                field=f"tools[{index}]",
            )


def described(tools: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Return tools, checked, with an empty description where they have none."""
    found: list[Mapping[str, object]] = []
    for tool in tools:
        function = tool["function"]
        if isinstance(function, Mapping) and function.get("description") is None:
            tool = {**tool, "function": {**function, "description": ""}}
        found.append(tool)
    return found


def call_arguments(text: str) -> dict[str, Any] | str:
    """Return the arguments of an earlier call as chat templates get them.

    That is the JSON object that the text spells, or the text itself where it spells none, or one
    with half a character, which no prompt can have: models write such calls, and are told what they
    wrote beside what was wrong with it.
    """
    try:
        found = json_object(text)
        if _HALF.search(text):
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return found


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that a text spells; none is an empty one. Raises ValueError."""
    try:
        value = json.loads(
            text or "{}", parse_constant=_refuse_constant, parse_float=_finite_number
        )
    except RecursionError:
        raise ValueError("must be JSON that is not nested so deeply") from None
    except ValueError as error:
        raise ValueError(f"must be JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be the JSON text of an object, got {text[:40]}")  # noqa: TRY004 - it is no type of a caller's
    return value


def _finite_number(text: str) -> float:
    """Python reads 1e999 as infinite, and would spell it so."""
    number = float(text)
    if math.isinf(number):
        raise ValueError("a number is too large")
    return number


def _refuse_constant(word: str) -> NoReturn:
    """Python reads NaN and infinities, which JSON does not have."""
    raise ValueError(f"{word} is not in JSON")
