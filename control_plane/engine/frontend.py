"""The engine as API tasks see it: submit a prompt, read text, stop reading."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request import Request
from control_plane.engine.admission import Admission
from control_plane.engine.events import RequestEnd
from control_plane.engine.gate import Gate
from control_plane.engine.inbox import Inbox
from control_plane.engine.plane import PlaneDescription
from control_plane.engine.streams import StreamHub, TokenStream
from control_plane.telemetry import EngineMetrics
from control_plane.text.detokenizer import Detokenizer, make_detokenizer
from control_plane.text.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 2048
"""Longer prompts are tokenized on another thread: the event loop must not wait milliseconds."""


class TextDelta(NamedTuple):
    """A piece of the answer. `offset`: generated tokens before it. `end` is set on the last."""

    text: str
    token_ids: list[int]
    offset: int
    end: RequestEnd | None


class Generation:
    """One request under way, read by one task; leaving its `async with` ends the request.

    Raises the error of a request that was refused or failed, from `admitted` or `next_delta`.
    """

    def __init__(
        self,
        request: Request,
        stream: TokenStream,
        detokenizer: Detokenizer,
        *,
        abandon: Callable[[Generation], None],
    ) -> None:
        self.params = request.params
        self.engine_id = request.id
        self.num_prompt_tokens = len(request.input_tokens)
        self.num_generated_tokens = 0
        self._stream = stream
        self._detokenizer = detokenizer
        self._abandon = abandon
        self._early: TextDelta | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abandon(self)

    @property
    def has_ended(self) -> bool:
        """Whether the engine is done with the request."""
        return self._stream.has_ended

    async def admitted(self) -> None:
        """Wait until the engine has taken the request."""
        # Tokens may have come together with the admission.
        self._early = await self._next()

    async def next_delta(self) -> TextDelta:
        """Wait for the next piece of the answer; not to be called after one with an `end`."""
        early, self._early = self._early, None
        if early is not None and (early.token_ids or early.end is not None):
            return early
        return await self._next()

    async def _next(self) -> TextDelta:
        token_ids, end = await self._stream.next_part()
        if end is not None and end.error is not None:
            raise end.error
        text = self._detokenizer.push(token_ids)
        if end is not None:
            text += self._detokenizer.finish()
        offset = self.num_generated_tokens
        self.num_generated_tokens += len(token_ids)
        return TextDelta(text, token_ids, offset, end)


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What a front end works with; `metrics` and `memory_stats` read the engine's last turn."""

    plane: PlaneDescription
    tokenizer: Tokenizer
    admission: Admission
    inbox: Inbox
    hub: StreamHub
    gate: Gate
    metrics: Callable[[], EngineMetrics]
    memory_stats: Callable[[], MemoryStats]


class EngineFrontend:
    """Submits requests from tasks of one event loop. `clock` must be the engine loop's."""

    def __init__(self, parts: EngineParts, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._parts = parts
        self._clock = clock

    @property
    def plane(self) -> PlaneDescription:
        """The compute plane and its model."""
        return self._parts.plane

    @property
    def max_model_len(self) -> int:
        """Prompt and completion tokens of one request."""
        return self._parts.admission.max_model_len

    @property
    def metrics(self) -> EngineMetrics:
        """Counts as of the engine's last turn."""
        return self._parts.metrics()

    @property
    def memory_stats(self) -> MemoryStats:
        """Use of the block pool as of the engine's last turn."""
        return self._parts.memory_stats()

    async def submit(self, prompt: str | Sequence[int], params: GenerationParams) -> Generation:
        """Hand a prompt, text or token ids, to the engine.

        The result must be left through its `async with`. Raises EngineError for what is wrong with
        the request or with the server's state.
        """
        parts = self._parts
        arrival_time = self._clock()
        parts.gate.check()
        params.validate()
        token_ids = await self._tokenize(prompt) if isinstance(prompt, str) else prompt
        parts.gate.check()
        request = parts.admission.make_request(token_ids, params, arrival_time=arrival_time)
        stream = parts.hub.open(request.id)
        generation = Generation(
            request, stream, make_detokenizer(parts.tokenizer), abandon=self._abandon
        )
        parts.inbox.submit(request)
        return generation

    async def _tokenize(self, text: str) -> list[int]:
        admission = self._parts.admission
        admission.check_text(text)
        if len(text) <= MAX_INLINE_CHARACTERS:
            return admission.tokenize(text)
        return await asyncio.to_thread(admission.tokenize, text)

    def _abandon(self, generation: Generation) -> None:
        """Forget the stream, and end the request if it goes on."""
        self._parts.hub.close(generation.engine_id)
        if not generation.has_ended:
            self._parts.inbox.cancel(generation.engine_id)
