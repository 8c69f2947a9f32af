"""`/v1/chat/completions` on the wire: what is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias

from pydantic import Field, JsonValue, Tag, model_validator

from control_plane.core.generation_params import MAX_LOGPROBS
from control_plane.core.structured_outputs import StructuredOutputs
from control_plane.http.fields import (
    MAX_TOKENS,
    Conversation,
    HarmlessFields,
    Samples,
    SamplingFields,
    StreamFields,
    TemplateKwargs,
)
from control_plane.http.response_format import ResponseFormat, structure_of
from control_plane.http.tool_choice import Choice, NamedTool, choice_of
from control_plane.http.wire import Wire, one_of, text_or_list, word_of, wrong
from control_plane.text.answers.tool_choice import ToolChoice
from control_plane.text.bounds import (
    MAX_JSON_BYTES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOL_CALLS,
)
from control_plane.text.conversation import (
    MAX_TOOL_NAME_CHARACTERS,
    MAX_TOOLS,
    ROLES,
    call_arguments,
)
from control_plane.text.reasoning_effort import ReasoningEffort


class PartOfText(Protocol):
    """A part of a message, whatever an endpoint calls it."""

    text: str


class TextPart(Wire):
    """A part of a message; other kinds (images, audio, files) are refused."""

    type: Literal["text"]
    text: str


Content: TypeAlias = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("~list")
    ],
    one_of(text_or_list, "a string or a list of text parts"),
]


class NamedCall(Protocol):
    """A call of an earlier turn, whatever an endpoint calls its arguments."""

    name: str

    @property
    def parsed_arguments(self) -> dict[str, Any] | str:
        """The arguments as chat templates want them."""
        ...


class FunctionCall(Wire):
    """What an assistant called. `arguments`: JSON text of an object, unless it wrote another."""

    name: str
    arguments: str
    said_again: JsonValue = Field(
        None,
        alias="parsed_arguments",
        description="changes nothing: OpenAI's packages leave the arguments' value beside them",
    )

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        self.parsed_arguments  # noqa: B018 - they are kept
        return self

    @cached_property
    def parsed_arguments(self) -> dict[str, Any] | str:
        """The arguments as chat templates want them."""
        if len(self.arguments) > MAX_JSON_BYTES:
            raise wrong("arguments", f"arguments must have at most {MAX_JSON_BYTES} bytes")
        return call_arguments(self.arguments)


class ToolCall(Wire):
    """A call that an assistant made in an earlier turn."""

    id: str
    type: Literal["function"]
    function: FunctionCall
    index: int | None = Field(
        None, description="says nothing: OpenAI's packages leave it of a stream"
    )


class SystemMessage(Wire):
    """What the assistant is told first. `developer` is another word for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Wire):
    """What the user said."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class NothingSaid(Wire):
    """An object whose fields are all null."""


class AssistantMessage(Wire):
    """What the assistant said, as an earlier answer had it."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = Field(
        None, description="what it thought; told to chat templates that know it"
    )
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(
        None, max_length=MAX_TOOL_CALLS
    )
    annotations: list[JsonValue] | None = Field(None, max_length=0)
    parsed: JsonValue = Field(
        None, description="changes nothing: OpenAI's packages leave the content's value beside it"
    )
    provider_specific_fields: NothingSaid | None = Field(
        None, description="says nothing: LiteLLM leaves it, with what it has no name for"
    )

    @model_validator(mode="after")
    def _check_not_empty(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise wrong("content", "content is required without tool_calls")
        return self


class ToolMessage(Wire):
    """What a called tool returned."""

    role: Literal["tool"]
    content: Content
    name: str | None = None
    tool_call_id: str


_MESSAGE_TAGS = {
    "system": "~system",
    "developer": "~system",
    "user": "~user",
    "assistant": "~assistant",
    "tool": "~tool",
}


def _kind_of_message(given: object) -> str:
    role = given.get("role") if isinstance(given, dict) else None
    return _MESSAGE_TAGS.get(role, "") if isinstance(role, str) else ""


Message: TypeAlias = Annotated[
    Annotated[SystemMessage, Tag("~system")]
    | Annotated[UserMessage, Tag("~user")]
    | Annotated[AssistantMessage, Tag("~assistant")]
    | Annotated[ToolMessage, Tag("~tool")],
    one_of(
        _kind_of_message,
        "a message whose role is system, developer, user, assistant or tool",
    ),
    word_of("role", ROLES),
]


Messages: TypeAlias = Annotated[
    list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class FunctionDefinition(Wire):
    """A function the model may call. `parameters`: JSON schema."""

    name: str = Field(min_length=1, max_length=MAX_TOOL_NAME_CHARACTERS)
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = Field(
        None, description="arguments keep to parameters, which a tool_choice that forces has anyway"
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        name = type(self).model_fields["parameters"].alias or "parameters"
        check_json(name, self.parameters, "a JSON schema")
        return self


def check_json(name: str, value: object, kind: str) -> None:
    """Refuse what is no JSON, although its parser takes it: NaN, infinities, 1e999."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise wrong(name, f"{name} must be {kind}: {error}") from None


class Tool(Wire):
    """A tool as the chat template gets it."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(SamplingFields, StreamFields, HarmlessFields):
    """A conversation to go on with."""

    model: str
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    max_completion_tokens: int | None = Field(
        None, ge=1, le=MAX_TOKENS, description="default: as many as fit behind the prompt"
    )
    n: Samples | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most one call is returned"
    )
    add_generation_prompt: bool | None = Field(
        None, description="default: unless continue_final_message"
    )
    continue_final_message: bool | None = Field(
        None, description="go on with the last message, which is the assistant's"
    )
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="told to the chat template: as it is, or as a switch of thinking"
    )
    modalities: list[Literal["text"]] | None = Field(None, min_length=1, max_length=1)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise wrong("top_logprobs", "top_logprobs is only allowed with logprobs")
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise wrong(
                "max_tokens",
                "max_tokens and max_completion_tokens are two names of one thing and must be "
                f"equal, got {self.max_tokens} and {self.max_completion_tokens}",
            )
        if self.response_format is not None and self.structured_outputs is not None:
            raise wrong(
                "structured_outputs", "structured_outputs is not allowed with response_format"
            )
        return self

    @property
    def structure(self) -> StructuredOutputs | None:
        """What an answer must be."""
        return structure_of(self.response_format) or super().structure

    @property
    def calls(self) -> ToolChoice:
        """Whether tools are called, and which."""
        return choice_of(
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            strict=tuple(tool.function.name for tool in self.tools or () if tool.function.strict),
        )

    @property
    def names_function(self) -> bool:
        """Whether the one function to call is named: then OpenAI's reason of the end is `stop`."""
        return isinstance(self.tool_choice, NamedTool)

    @cached_property
    def conversation(self) -> Conversation:
        """The conversation as values; tools that must not be called are left out."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return plain_messages(self.messages), plain_tools(tools), self.chat_template_kwargs

    def prepare(self) -> None:
        """Make the conversation."""
        self.conversation  # noqa: B018 - it is kept

    def forget(self) -> None:
        """Let go of the conversation."""
        self.messages, self.tools = [], None
        self.__dict__.pop("conversation", None)


def plain_messages(messages: list[Message]) -> list[dict[str, object]]:
    """Return the messages as values: text in one piece, arguments parsed."""
    return [_plain_message(message) for message in messages]


def plain_tools(tools: list[Tool]) -> list[dict[str, object]]:
    """Return the tools as values, without what says nothing to a model."""
    return [plain_tool(tool.function) for tool in tools]


def plain_tool(function: FunctionDefinition) -> dict[str, object]:
    """Return a function as the chat template gets it."""
    # `model_dump` would copy the parameters, value by value, which are plain already.
    result: dict[str, object] = {"name": function.name}
    if function.description is not None:
        result["description"] = function.description
    if function.parameters is not None:
        result["parameters"] = function.parameters
    return {"type": "function", "function": result}


def _plain_message(message: Message) -> dict[str, object]:
    result: dict[str, object] = {
        "role": message.role,
        "content": content_text(message.content),
    }
    if message.name:
        result["name"] = message.name
    if isinstance(message, ToolMessage):
        result["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage) and message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    if isinstance(message, AssistantMessage) and message.tool_calls:
        result["tool_calls"] = [plain_call(call.id, call.function) for call in message.tool_calls]
    return result


def plain_call(call_id: str, call: NamedCall) -> dict[str, object]:
    """Return a call as values, its arguments parsed."""
    function = {"name": call.name, "arguments": call.parsed_arguments}
    return {"id": call_id, "type": "function", "function": function}


def content_text(content: str | Sequence[PartOfText] | None) -> str:
    """Return the parts of a message as one text, with nothing between them."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content or ())
