"""What of conversations with tools a chat template has places for, as examples show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from control_plane.text import example_call
from planes.errors import TokenizationError

_SAID: Final = "what-is-said"
"""In the messages of examples. Nothing that templates would write of themselves."""

_NO_ROLE: Final = "what-has-no-role"
"""Which no template knows."""

_RESULT: Final = "tool"
_ROLES_OF_RESULTS: Final = (_RESULT, "environment")
"""What templates call it; the second is OLMo's."""


class ToolPlaces(NamedTuple):
    """Whether a template tells of tools, and writes calls of earlier messages.

    `writes_one`: of several calls of a message it writes the first alone, or refuses them.
    `role_of_results`: with which it writes their results; None: with none. `results_in_calls`: it
    knows them as `tool_responses` of the message of their calls, and that role as any other.
    `role_of_told`: with which it writes what a first message says, best `system`; None: it takes no
    example.
    """

    tells: bool
    writes_calls: bool
    writes_one: bool
    role_of_results: str | None
    results_in_calls: bool
    role_of_told: str | None

    @property
    def knows_tools(self) -> bool:
        """Whether it was made for a model that was made to call any."""
        return self.tells or self.writes_calls


def places_of(render: Callable[..., str]) -> ToolPlaces:
    """Return them. `render`: takes messages and `tools`, and raises TokenizationError."""

    def text_of(
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        try:
            return render(messages, tools=tools)
        except TokenizationError:
            return ""

    asking, calling = example_call.ASKING, example_call.calling()
    twice = example_call.calling_twice()
    tools = example_call.tools_for(render)
    called = text_of([*asking, calling], tools)
    writes_calls = bool(called) and not hides_tool_calls(
        lambda messages: render(messages, tools=tools), [*asking, calling], called
    )
    if not writes_calls:
        calling = {"role": "assistant", "content": example_call.NAME}
    result = {"content": _SAID, "tool_call_id": example_call.ID, "name": example_call.NAME}

    def resulting(role: str) -> str:
        return text_of([*asking, calling, {**result, "role": role}], tools)

    roles = (role for role in _ROLES_OF_RESULTS if _SAID in resulting(role))
    responses = [{"name": example_call.NAME, "response": _SAID}]
    in_call = text_of([*asking, {**calling, "tool_responses": responses}], tools)
    as_any_other = resulting(_NO_ROLE).replace(_NO_ROLE, _RESULT)
    return ToolPlaces(
        tells=bool(tools) and example_call.NAME in text_of(asking, tools),
        writes_calls=writes_calls,
        writes_one=writes_calls and _writes_one(called, text_of([*asking, twice], tools)),
        role_of_results=next(roles, None),
        results_in_calls=_SAID in in_call and resulting(_RESULT) in ("", as_any_other),
        role_of_told=_role_of_told(text_of),
    )


def _writes_one(called: str, called_twice: str) -> bool:
    """Whether texts of one call and of two show that only one is written at a time."""
    number, other = (
        str(arguments["count"])
        for arguments in (example_call.ARGUMENTS, example_call.OTHER_ARGUMENTS)
    )
    return number in called and not (number in called_twice and other in called_twice)


def _role_of_told(text_of: Callable[[Sequence[Mapping[str, object]]], str]) -> str | None:
    if _SAID in text_of([{"role": "system", "content": _SAID}, *example_call.ASKING]):
        return "system"
    return "user" if _SAID in text_of([{"role": "user", "content": _SAID}]) else None


def hides_tool_calls(
    render: Callable[[Sequence[Mapping[str, object]]], str],
    messages: Sequence[Mapping[str, object]],
    text: str,
) -> bool:
    """Whether a template leaves out the tool calls of messages that `render` made `text` of."""
    if not any(message.get("tool_calls") for message in messages):
        return False
    without = [
        {key: value for key, value in message.items() if key != "tool_calls"}
        for message in messages
    ]
    try:
        return render(without) == text
    except TokenizationError:  # it wants them
        return False
