"""`/v1/responses` on the wire: text in, text out, nothing stored."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, JsonValue, RootModel, Tag, model_validator

from control_plane.core.generation_params import MAX_LOGPROBS
from control_plane.http.fields import (
    MAX_TOKENS,
    HarmlessFields,
    SamplingFields,
    StreamFields,
    TemplateKwargs,
    Wire,
    one_of,
    text_or_list,
    wrong,
)
from control_plane.http.logprobs import TokenLogprob
from control_plane.http.usage import ResponseUsage
from control_plane.text.bounds import MAX_MESSAGES, MAX_PARTS

LOGPROBS = "message.output_text.logprobs"


class TextItem(Wire):
    """A part of a message; other kinds (images, files) are refused."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[JsonValue] | None = Field(None, max_length=0)
    logprobs: list[JsonValue] | None = None


ItemContent: TypeAlias = Annotated[
    Annotated[str, Tag("~text")]
    | Annotated[
        list[TextItem], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("~list")
    ],
    one_of(text_or_list, "a string or a list of input_text and output_text parts"),
]


class InputMessage(Wire):
    """One message of the input, as written by hand or as an earlier response had it."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: str | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


Input: TypeAlias = Annotated[
    Annotated[str, Field(min_length=1), Tag("~text")]
    | Annotated[
        list[InputMessage],
        Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES),
        Tag("~list"),
    ],
    one_of(text_or_list, "a string or a list of messages"),
]


class PlainText(Wire):
    """The one format there is."""

    type: Literal["text"]


class TextConfig(Wire):
    """How the text is to be."""

    format: PlainText | None = None


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
    include: list[Literal["message.output_text.logprobs"]] | None = None
    text: TextConfig | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    tools: list[JsonValue] | None = Field(None, max_length=0, description="none are supported")
    tool_choice: Literal["none", "auto"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.wants_logprobs:
            raise wrong("top_logprobs", f"top_logprobs is only allowed with {LOGPROBS} in include")
        if self.stream_options is not None and self.stream_options.include_usage is not None:
            raise wrong(
                "stream_options.include_usage",
                "stream_options has no include_usage here: a response has its usage",
            )
        return self

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are to be returned."""
        return bool(self.include)

    def prepare(self) -> None:
        """Make the conversation."""
        self.messages  # noqa: B018 - it is kept

    def forget(self) -> None:
        """Let go of the conversation."""
        self.input = ""
        self.__dict__.pop("messages", None)

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as values."""
        messages = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return messages + [
            {"role": message.role, "content": _text(message.content)} for message in self.input
        ]


def _text(content: str | list[TextItem]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[JsonValue]
    logprobs: list[TokenLogprob]


class OutputMessage(BaseModel):
    """The message the model wrote."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Why a response failed, in a stream."""

    code: str
    message: str


class PlainTextFormat(BaseModel):
    """The one format there is."""

    type: Literal["text"]


class ResponseText(BaseModel):
    """How the text is."""

    format: PlainTextFormat


class Response(BaseModel):
    """A response and what was asked for."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    system_fingerprint: str
    temperature: float
    text: ResponseText
    tool_choice: Literal["none", "auto"]
    tools: list[JsonValue]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _Event(BaseModel):
    """What every event has: its number in the stream."""

    sequence_number: int


class _PartEvent(_Event):
    """Where in the response an event belongs: there is one message, and one part of it."""

    item_id: str
    output_index: int
    content_index: int


class ResponseStateEvent(_Event):
    """The response begins, or has ended."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class OutputItemEvent(_Event):
    """The message begins, or is done."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputMessage


class ContentPartEvent(_PartEvent):
    """The part begins, or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDeltaEvent(_PartEvent):
    """A piece of text."""

    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[TokenLogprob]


class TextDoneEvent(_PartEvent):
    """All of the text."""

    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[TokenLogprob]


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseStateEvent
            | OutputItemEvent
            | ContentPartEvent
            | TextDeltaEvent
            | TextDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream, named by its `type`."""
