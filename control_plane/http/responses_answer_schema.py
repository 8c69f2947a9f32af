"""`/v1/responses` on the wire: what is answered, whole and as events."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field, JsonValue, RootModel

from control_plane.http.logprobs import TokenLogprob
from control_plane.http.tool_choice import ChoiceOfResponse
from control_plane.http.usage import ResponseUsage
from control_plane.text.reasoning_effort import ReasoningEffort

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


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
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(BaseModel):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(BaseModel):
    """What the model thought before it answered. `summary`: there is none."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[JsonValue]
    content: list[ReasoningText]


class OutputCall(BaseModel):
    """A call of a function. `arguments`: JSON text as the model wrote it, valid or not."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = Annotated[
    OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")
]


class IncompleteDetails(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    """Why a response failed, in a stream."""

    code: str
    message: str


class SaidFormat(BaseModel):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SaidSchema(BaseModel):
    """JSON that a schema allows."""

    type: Literal["json_schema"]
    name: str
    description: str | None
    schema_: dict[str, JsonValue] = Field(alias="schema")
    strict: bool | None


class ResponseText(BaseModel):
    """How the text is."""

    format: Annotated[SaidFormat | SaidSchema, Field(discriminator="type")]


class SaidReasoning(BaseModel):
    """How much the model was to think."""

    effort: ReasoningEffort | None
    summary: Literal["auto"] | None


class SaidTool(BaseModel):
    """A function that the model might call."""

    type: Literal["function"]
    name: str
    description: str | None
    parameters: dict[str, JsonValue] | None
    strict: bool


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
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: SaidReasoning
    store: Literal[False]
    system_fingerprint: str
    temperature: float
    text: ResponseText
    tool_choice: ChoiceOfResponse
    tools: list[SaidTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class _Event(BaseModel):
    """What every event has: its number in the stream."""

    sequence_number: int


class _ItemEvent(_Event):
    """Which of the items an event belongs to."""

    item_id: str
    output_index: int


class _PartEvent(_ItemEvent):
    """Which part of an item: a message has one, and so has reasoning."""

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
    """An item begins, or is done; one is done before the next begins."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(_PartEvent):
    """The part of a message or of reasoning begins, or is done."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


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


class ReasoningDeltaEvent(_PartEvent):
    """A piece of reasoning."""

    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDoneEvent(_PartEvent):
    """All of the reasoning."""

    type: Literal["response.reasoning_text.done"]
    text: str


class ArgumentsDeltaEvent(_ItemEvent):
    """A piece of the arguments of a call."""

    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_ItemEvent):
    """All of the arguments."""

    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ResponseEvent(
    RootModel[
        Annotated[
            ResponseStateEvent
            | OutputItemEvent
            | ContentPartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream, named by its `type`."""
