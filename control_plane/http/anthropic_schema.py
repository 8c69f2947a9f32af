"""`/v1/messages` and `/v1/messages/count_tokens` on the wire: what is asked."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from control_plane.core.generation_params import MAX_STOP_STRINGS
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.http.anthropic_input import (
    AssistantMessage,
    CacheControl,
    Messages,
    Texts,
    plain_conversation,
)
from control_plane.http.anthropic_tools import MessageToolChoice, Tools, choice_of_message
from control_plane.http.chat_schema import plain_tool
from control_plane.http.errors import THREAD_UNSUPPORTED
from control_plane.http.fields import (
    MAX_TOKENS,
    Conversation,
    MessageMetadata,
    SamplingFields,
    StopText,
    TemplateKwargs,
)
from control_plane.http.wire import Wire, wrong
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.reasoning_effort import ReasoningEffort, ThinkingWish

FORMAT: Final = "output_config.format"

MIN_BUDGET: Final = 1024
"""Anthropic's."""


class ThinkingConfig(Wire):
    """Whether the model is to think, where its chat template can be told.

    `adaptive`: as much as it likes, which is what `enabled` is here, too.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(
        None, ge=MIN_BUDGET, le=MAX_TOKENS, description="changes nothing: max_tokens bounds it all"
    )
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="omitted: thinking has no text; there are no summaries of it"
    )


class SchemaFormat(Wire):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    schema_: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(Wire):
    """How the answer is to be, and how much the model is to think for it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="told to chat templates that read it; max as xhigh"
    )
    format: SchemaFormat | None = None


class KeepAll(Wire):
    """The same as the word."""

    type: Literal["all"]


class KeptThinking(Wire):
    """An edit that changes nothing: what was thought stays."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] | KeepAll


class ContextManagement(Wire):
    """What is to be left out of the conversation: nothing."""

    edits: Annotated[list[KeptThinking], Field(fail_fast=True)] | None = Field(None, max_length=16)


def _refuse_thread(given: object) -> None:
    if given is not None:
        raise PydanticCustomError(
            THREAD_UNSUPPORTED, "nothing is stored here: send all messages, and no thread"
        )


class CountRequest(Wire):
    """A conversation whose tokens are counted; the fields change the prompt, or are harmless."""

    model: str
    messages: Messages
    system: Texts | None = None
    tools: Tools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    speed: Literal["standard"] | None = None
    thread: Annotated[None, BeforeValidator(_refuse_thread)] = Field(
        None, description="nothing is stored: all messages are sent again"
    )

    @model_validator(mode="after")
    def _check_last(self) -> Self:
        """Refuse an answer of the assistant that cannot be gone on with."""
        if self.goes_on:
            last = self.conversation[0][-1]
            if last.get("tool_calls") or not str(last["content"]).strip():
                raise wrong(
                    f"messages[{len(self.messages) - 1}]",
                    "the last message must be the user's, or the assistant's with a text that "
                    "the answer goes on with, and no tool_use behind it",
                )
        return self

    @property
    def goes_on(self) -> bool:
        """Whether the answer goes on with the last message, which is the assistant's."""
        return isinstance(self.messages[-1], AssistantMessage)

    @property
    def form(self) -> StructuredOutputs | None:
        """What an answer must be. Raises ValidationError."""
        wanted = self._format
        return None if wanted is None else StructuredOutputs(json=wanted.schema_, name=FORMAT)

    @property
    def calls(self) -> ToolChoice:
        """Whether tools are called, and which."""
        return choice_of_message(self.tool_choice, self.tools or [])

    @property
    def wish(self) -> ThinkingWish | None:
        """How much the model is to think; None: nothing is said."""
        asked = None if self.output_config is None else self.output_config.effort
        effort: ReasoningEffort | None = "xhigh" if asked == "max" else asked
        if self.thinking is None:
            return None if effort is None else ThinkingWish(None, effort, "output_config.effort")
        return ThinkingWish(self.thinking.type != "disabled", effort, "thinking")

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as values; tools that must not be called are left out."""
        tools = [] if self.calls.mode == "none" else self.tools or []
        messages = plain_conversation(self.system, self.messages)
        return messages, [plain_tool(tool) for tool in tools], self.chat_template_kwargs

    @property
    def _format(self) -> SchemaFormat | None:
        return None if self.output_config is None else self.output_config.format

    def prepare(self) -> None:
        """Make the conversation."""
        self.conversation  # noqa: B018 - it is kept

    def forget(self) -> None:
        """Let go of the conversation."""
        self.messages, self.tools, self.system = [], None, None
        self.__dict__.pop("conversation", None)


class MessageRequest(SamplingFields, CountRequest):
    """A conversation to go on with, of which nothing is stored."""

    max_tokens: int = Field(
        ge=1, le=MAX_TOKENS, description="the context may have room for fewer behind the prompt"
    )
    stop: Annotated[list[StopText], Field(fail_fast=True)] | None = Field(
        None, alias="stop_sequences", max_length=MAX_STOP_STRINGS
    )
    stream: bool | None = None
    metadata: MessageMetadata | None = Field(None, description="taken, changes nothing")
    service_tier: Literal["auto", "standard_only"] | None = Field(None, description="there is one")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self._format is not None and self.structured_outputs is not None:
            raise wrong("structured_outputs", f"structured_outputs is not allowed with {FORMAT}")
        if (self.min_tokens or 0) > self.max_tokens:
            raise wrong(
                "min_tokens",
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        return self

    @property
    def structure(self) -> StructuredOutputs | None:
        """What an answer must be."""
        return self.form or super().structure

    @property
    def eager_tools(self) -> frozenset[str]:
        """The names of tools whose input is wanted as it is written, whatever it becomes."""
        return frozenset(tool.name for tool in self.tools or () if tool.eager_input_streaming)

    @property
    def omits_thinking(self) -> bool:
        """Whether what the model thinks is not wanted."""
        return self.thinking is not None and self.thinking.display == "omitted"
