"""`tool_choice` as clients write it: OpenAI's words and objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from control_plane.core.tool_calls import TOOL_CHOICE
from control_plane.text.answers.tool_choice import Mode, ToolChoice
from hetero_infer.client.arguments import refuse

AnyToolChoice: TypeAlias = str | Mapping[str, Any] | ToolChoice
"""`auto`, `none`, `required`, `{"type": "function", "function": {"name": …}}` or
`{"type": "allowed_tools", "allowed_tools": {"mode": …, "tools": […]}}`."""

_MODES: Final[tuple[Mode, ...]] = ("auto", "none", "required")

_EXPECTED: Final = (
    "'none', 'auto', 'required', or OpenAI's object of the type function or allowed_tools"
)


def tool_choice_of(given: AnyToolChoice | None) -> ToolChoice | None:
    """Return it; None: nothing is said. Raises ValidationError for what is none."""
    found = given if given is None or isinstance(given, ToolChoice) else _choice(given)
    if given is not None and found is None:
        refuse(given, TOOL_CHOICE, _EXPECTED)
    return found


def _choice(given: object) -> ToolChoice | None:
    """Return what a word or an object of OpenAI's says; None: it is none."""
    for mode in _MODES:
        if given == mode:
            return ToolChoice(mode)
    name = _name(given)
    if name is not None:
        return ToolChoice("required", (name,), is_single=True)
    match given:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}:
            names = tuple(name for name in map(_name, tools) if name is not None)
            if mode in ("auto", "required") and len(names) == len(tools) > 0:
                return ToolChoice(mode, names)
    return None


def _name(tool: object) -> str | None:
    """Return the name in `{"type": "function", "function": {"name": …}}`."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None
