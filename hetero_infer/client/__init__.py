"""Clients of `hetero.inference.v1`: `Client` for threads, `AsyncClient` for an event loop.

What is asked and what is answered are frozen values (`requests`, `conversation`, `answers`,
`server_values`), turned into messages and back in one place (`convert`, `calls`); when a call is
made again, and how a stream goes on, is decided in one place too (`attempts`, `progress`). The two
clients only wait, each in its way.
"""

from __future__ import annotations

from hetero_infer.client.answers import (
    Answer,
    AnswerParts,
    Delta,
    Event,
    Finished,
    PartsDelta,
    PromptLogprobs,
    SampleAnswer,
    SampleFinished,
    Started,
    StateReached,
    ToolCallDelta,
)
from hetero_infer.client.async_stream import AsyncStream
from hetero_infer.client.asynchronous import AsyncClient
from hetero_infer.client.attempts import RESUMABLE
from hetero_infer.client.blocking import Client, Stream
from hetero_infer.client.conversation import Message, Tool, ToolCall
from hetero_infer.client.requests import ChatRequest, TextRequest
from hetero_infer.client.server_values import ChatPrompt, ModelInfo, PoolStats, ServedRequest

__all__ = [
    "Answer",
    "AnswerParts",
    "AsyncClient",
    "AsyncStream",
    "ChatPrompt",
    "ChatRequest",
    "Client",
    "Delta",
    "Event",
    "Finished",
    "Message",
    "ModelInfo",
    "PartsDelta",
    "PoolStats",
    "PromptLogprobs",
    "RESUMABLE",
    "SampleAnswer",
    "SampleFinished",
    "ServedRequest",
    "Started",
    "StateReached",
    "Stream",
    "TextRequest",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
]
