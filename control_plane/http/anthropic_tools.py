"""Tools and `tool_choice` of `/v1/messages` on the wire."""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self, TypeAlias

from pydantic import Field, JsonValue, model_validator

from control_plane.http.anthropic_input import CacheControl
from control_plane.http.chat_schema import FunctionDefinition
from control_plane.http.wire import OnlyFalse, Wire, word_of, wrong
from control_plane.text.answers.tool_choice import Mode, ToolChoice
from control_plane.text.conversation import MAX_TOOL_NAME_CHARACTERS, MAX_TOOLS


class CustomTool(FunctionDefinition):
    """A tool the model may call; the tools that Anthropic defines or runs itself are refused."""

    type: Literal["custom"] | None = None
    parameters: dict[str, JsonValue] = Field(alias="input_schema", description="JSON schema")
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = Field(
        None,
        description="true: input is streamed as it is written, and may become no JSON; else whole",
    )
    defer_loading: OnlyFalse | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(fail_fast=True)] | None = Field(
        None, max_length=16
    )


Tools: TypeAlias = Annotated[
    list[Annotated[CustomTool, word_of("type", ("custom",), is_required=False)]],
    Field(fail_fast=True, max_length=MAX_TOOLS),
]


class MessageToolChoice(Wire):
    """Whether tools are called, and which.

    `auto`: the model decides; `any`: at least one; `tool`: the named one, once; `none`: none.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(
        None, min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS, description="with the type tool"
    )
    disable_parallel_tool_use: bool | None = Field(
        None, description="true: at most one call is returned"
    )

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise wrong("name", "name is required with the type tool")
        if self.type != "tool" and self.name is not None:
            raise wrong("name", f"name is only allowed with the type tool, got {self.type}")
        return self


_MODES: Final[dict[str, Mode]] = {
    "auto": "auto", "any": "required", "tool": "required", "none": "none",
}  # fmt: skip


def choice_of_message(given: MessageToolChoice | None, tools: list[CustomTool]) -> ToolChoice:
    """Return it as all surfaces have it."""
    strict = tuple(tool.name for tool in tools if tool.strict)
    if given is None:
        return ToolChoice(strict=strict)
    is_named = given.name is not None
    return ToolChoice(
        _MODES[given.type],
        (given.name,) if given.name is not None else (),
        is_single=is_named or bool(given.disable_parallel_tool_use),
        strict=strict,
    )
