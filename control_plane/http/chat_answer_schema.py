"""`/v1/chat/completions` on the wire: what is answered."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from control_plane.http.logprobs import ChatLogprobs
from control_plane.http.usage import CompletionUsage


class CalledFunction(BaseModel):
    """The function of a call. `arguments`: JSON text as the model wrote it, valid or not."""

    name: str
    arguments: str


class Called(BaseModel):
    """A tool that the model calls."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(BaseModel):
    """What the model said; null where it only calls tools.

    `reasoning_content` and `tool_calls` are there if there are any.
    """

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class ChatChoice(BaseModel):
    """One sample."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(BaseModel):
    """All samples."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage


class CalledFunctionDelta(BaseModel):
    """What is new of the function of a call."""

    name: str | None = None
    arguments: str


class CalledDelta(BaseModel):
    """What is new of call `index`; its first piece has all but the rest of the arguments."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class ChatDelta(BaseModel):
    """What is new in a chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledDelta] | None = None


class ChatChunkChoice(BaseModel):
    """A piece of one sample."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"] | None


class ChatChunk(BaseModel):
    """One event of a stream; the last, which alone has a usage, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: CompletionUsage | None = None
