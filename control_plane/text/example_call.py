"""A conversation with a call, with which chat templates are tried: they say nothing of themselves.

What they write of it shows the format of calls, and in what form they want arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from planes.errors import TokenizationError

NAME: Final = "look_up"
ARGUMENTS: Final[Mapping[str, object]] = {"key": "a b", "count": 729}
ASKING: Final[list[Mapping[str, object]]] = [{"role": "user", "content": "hello"}]
TOOL: Final[Mapping[str, object]] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "looks up",
        "parameters": {"type": "object", "properties": {}},
    },
}
ID: Final = "abcdefghi"
"""Mistral's templates refuse most others."""
OTHER_ARGUMENTS: Final[Mapping[str, object]] = {"key": "c d", "count": 731}
OTHER_ID: Final = "jklmnopqr"


def tools_for(render: Callable[..., str]) -> list[Mapping[str, object]] | None:
    """Return the tools of the example; None for a template that refuses any.

    `render`: takes messages and `tools`, and raises TokenizationError.
    """
    try:
        return [TOOL] if render(ASKING, tools=[TOOL]) else None
    except TokenizationError:
        return None


def calling(*, call_id: str = ID) -> Mapping[str, object]:
    """Return the message in which the assistant calls."""
    return {"role": "assistant", "content": "", "tool_calls": [_call(ARGUMENTS, call_id)]}


def calling_twice() -> Mapping[str, object]:
    """Return the same with another call behind that."""
    calls = [_call(ARGUMENTS, ID), _call(OTHER_ARGUMENTS, OTHER_ID)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _call(arguments: Mapping[str, object], call_id: str) -> Mapping[str, object]:
    function = {"name": NAME, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}
