"""OpenAI's `tool_choice` on the wire, as chat completions and as `/v1/responses` spell it."""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field, Tag

from control_plane.http.wire import Wire, one_of
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS


class FunctionName(Wire):
    """A function of `tools`."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS)


class NamedTool(Wire):
    """A tool of `tools`; as a choice, the one that is called, once."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Wire):
    """Some of `tools`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Wire):
    """Only these are called, if the model calls any, or at least one of them is."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class NamedFunction(FunctionName):
    """A tool of `tools`; as a choice, the one that is called, once."""

    type: Literal["function"]


class AllowedFunctions(Wire):
    """Only these are called, if the model calls any, or at least one of them is."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


def _kind(given: object) -> str:
    """Tell the choices apart for `one_of`."""
    if given in ("none", "auto", "required"):
        return "~word"
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return f"~{kind}" if kind in ("function", "allowed_tools") else ""


_Word: TypeAlias = Annotated[Literal["none", "auto", "required"], Tag("~word")]

_ONE_OF_THEM: Final = one_of(
    _kind, "'none', 'auto', 'required', or an object of the type function or allowed_tools"
)

Choice: TypeAlias = Annotated[
    _Word
    | Annotated[NamedTool, Tag("~function")]
    | Annotated[AllowedToolsChoice, Tag("~allowed_tools")],
    _ONE_OF_THEM,
]

ChoiceOfResponse: TypeAlias = Annotated[
    _Word
    | Annotated[NamedFunction, Tag("~function")]
    | Annotated[AllowedFunctions, Tag("~allowed_tools")],
    _ONE_OF_THEM,
]


def choice_of(
    given: Choice | ChoiceOfResponse | None, *, is_parallel: bool, strict: tuple[str, ...] = ()
) -> ToolChoice:
    """Return it as all surfaces have it.

    `is_parallel`: there may be several calls. `strict`: names of the tools that say so.
    """
    if isinstance(given, NamedTool | NamedFunction):
        return ToolChoice("required", (_name(given),), is_single=True, strict=strict)
    if isinstance(given, AllowedToolsChoice | AllowedFunctions):
        allowed = given if isinstance(given, AllowedFunctions) else given.allowed_tools
        names = tuple(_name(tool) for tool in allowed.tools)
        return ToolChoice(allowed.mode, names, is_single=not is_parallel, strict=strict)
    return ToolChoice(given or "auto", is_single=not is_parallel, strict=strict)


def _name(tool: NamedTool | NamedFunction) -> str:
    return tool.name if isinstance(tool, NamedFunction) else tool.function.name
