"""`/v1/responses` on the wire: what is asked. Nothing is stored."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from control_plane.core.generation_params import MAX_LOGPROBS
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.http.chat_schema import FunctionDefinition, plain_tool
from control_plane.http.fields import (
    MAX_TOKENS,
    Conversation,
    HarmlessFields,
    SamplingFields,
    StreamFields,
    TemplateKwargs,
)
from control_plane.http.json_text import Spelled, SpelledList
from control_plane.http.response_format import (
    NAME_IN_RESPONSES,
    FormatOfText,
    NamedSchemaFormat,
    structure_of,
)
from control_plane.http.responses_input import Input, plain_input
from control_plane.http.tool_choice import ChoiceOfResponse, choice_of
from control_plane.http.wire import OnlyFalse, Wire, wrong
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.conversation import MAX_TOOLS
from control_plane.text.reasoning_effort import ReasoningEffort

LOGPROBS = "message.output_text.logprobs"


class TextConfig(Wire):
    """How the text is to be."""

    format: FormatOfText | None = None


class ReasoningConfig(Wire):
    """How much the model is to think. There are no summaries of it, whatever their kind."""

    effort: ReasoningEffort | None = Field(
        None, description="told to the chat template: as it is, or as a switch of thinking"
    )
    summary: Literal["auto"] | None = Field(None, description="changes nothing: there is none")


class _IsFunction(Wire):
    """A tool's type, a base of its own so that it is checked before what other kinds lack."""

    type: Literal["function"]


class FunctionTool(FunctionDefinition, _IsFunction):
    """A function the model may call; the tools of OpenAI's own servers are refused."""


class ResponseRequest(SamplingFields, HarmlessFields, StreamFields):
    """A conversation to go on with; it is not stored, and none that was stored is found."""

    model: str
    input: Input
    instructions: str | None = None
    max_output_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="default: as many as fit behind the prompt"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description=f"only with {LOGPROBS} in include"
    )
    include: list[Literal["message.output_text.logprobs"]] | None = Field(
        None, description="not where tools may be called"
    )
    text: TextConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionTool], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: ChoiceOfResponse | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call is returned"
    )
    truncation: Literal["disabled"] | None = None
    background: OnlyFalse | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise wrong("top_logprobs", f"top_logprobs is only allowed with {LOGPROBS} in include")
        if self.wants_logprobs and self.tools and self.tool_choice != "none":
            raise wrong(
                "include",
                f"{LOGPROBS} is only allowed with tool_choice none where there are tools: "
                "log-probabilities have a place in messages, and none in calls",
            )
        if self._format is not None and self.structured_outputs is not None:
            raise wrong(
                "structured_outputs",
                f"structured_outputs is not allowed with {NAME_IN_RESPONSES}",
            )
        for option in ("include_usage", "continuous_usage_stats"):
            if getattr(self.stream_options, option, None) is not None:
                raise wrong(
                    f"stream_options.{option}",
                    f"stream_options has no {option} here: a response has its usage",
                )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are to be returned."""
        return bool(self.include)

    @property
    def structure(self) -> StructuredOutputs | None:
        """What an answer must be."""
        return structure_of(self._format, NAME_IN_RESPONSES) or super().structure

    @property
    def calls(self) -> ToolChoice:
        """Whether tools are called, and which."""
        return choice_of(
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            strict=tuple(tool.name for tool in self.tools or () if tool.strict),
        )

    @property
    def reasoning_effort(self) -> ReasoningEffort | None:
        """How much the model is to think."""
        return self.reasoning.effort if self.reasoning is not None else None

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as values; tools that must not be called are left out."""
        messages = plain_input(self.input)
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        tools = [] if self.tool_choice == "none" else self.tools or []
        return messages, [plain_tool(tool) for tool in tools], self.chat_template_kwargs

    @cached_property
    def echo(self) -> dict[str, object]:
        """What a response repeats of tools and format, its long values spelled."""
        tools = SpelledList()
        for tool in self.tools or ():
            said = {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            tools.extend([said])
        return {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": {
                "effort": self.reasoning_effort,
                "summary": self.reasoning.summary if self.reasoning is not None else None,
            },
            "text": {"format": self._said_format()},
            "tool_choice": self._said_choice(),
            "tools": tools.joined(),
        }

    def prepare(self) -> None:
        """Make the conversation, and what the response repeats."""
        self.conversation  # noqa: B018 - it is kept
        self.echo  # noqa: B018 - it is kept

    def forget(self) -> None:
        """Let go of the conversation, and of what is repeated already."""
        self.input, self.tools = "", None
        self.__dict__.pop("conversation", None)

    @property
    def _format(self) -> FormatOfText | None:
        return None if self.text is None else self.text.format

    def _said_choice(self) -> str | dict[str, object]:
        choice = self.tool_choice
        if choice is None or isinstance(choice, str):
            return choice or "auto"
        return choice.model_dump()

    def _said_format(self) -> dict[str, object]:
        wanted, structure = self._format, self.structure
        if not isinstance(wanted, NamedSchemaFormat) or structure is None:
            return {"type": "text" if wanted is None else wanted.type}
        return {
            "type": wanted.type,
            "name": wanted.name,
            "description": wanted.description,
            "schema": Spelled([str(structure.json).encode()]),
            "strict": wanted.strict,
        }
