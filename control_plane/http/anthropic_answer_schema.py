"""`/v1/messages` on the wire: what is answered, whole and as events."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, Field, JsonValue, RootModel

from control_plane.http.anthropic_errors import MessageErrorResponse
from control_plane.http.usage import MessageUsage

StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class AnsweredText(BaseModel):
    """What the model says."""

    type: Literal["text"]
    text: str
    citations: None


class AnsweredThinking(BaseModel):
    """What the model thinks. `signature`: of no meaning here; clients want one."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(BaseModel):
    """A tool that the model calls.

    `input`: `{"INVALID_JSON": text}` where what the model wrote, or was let write, is no object.
    """

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]


AnsweredBlock: TypeAlias = Annotated[
    AnsweredText | AnsweredThinking | AnsweredToolUse, Field(discriminator="type")
]


class AnsweredMessage(BaseModel):
    """The message that the model wrote. `stop_reason`: null while it does."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """How many tokens a prompt has."""

    input_tokens: int


class MessageStartEvent(BaseModel):
    """The message begins; how much of its input was found computed is told at its end."""

    type: Literal["message_start"]
    message: AnsweredMessage


class BlockStartEvent(BaseModel):
    """A block begins, without its text; the one before it has stopped."""

    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredBlock


class TextDelta(BaseModel):
    """A piece of what the model says."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(BaseModel):
    """A piece of what it thinks."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(BaseModel):
    """The whole signature, behind the thinking."""

    type: Literal["signature_delta"]
    signature: str


class InputDelta(BaseModel):
    """A piece of the JSON text of a call's input, as the model writes it."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDeltaEvent(BaseModel):
    """What is new of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputDelta, Field(discriminator="type")
    ]


class BlockStopEvent(BaseModel):
    """Nothing more comes of a block."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(BaseModel):
    """Why the message ends."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDeltaEvent(BaseModel):
    """The message ends; the counts are those of all of it."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageUsage


class MessageStopEvent(BaseModel):
    """The last event."""

    type: Literal["message_stop"]


class PingEvent(BaseModel):
    """Says that the server is there, at the beginning and where nothing else comes for long."""

    type: Literal["ping"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStartEvent
            | BlockStartEvent
            | BlockDeltaEvent
            | BlockStopEvent
            | MessageDeltaEvent
            | MessageStopEvent
            | PingEvent
            | MessageErrorResponse,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of a stream, named by its `type`."""
