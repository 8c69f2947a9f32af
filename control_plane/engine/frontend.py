"""The engine as API tasks see it: submit a prompt, read text, stop reading."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request import FinishReason, Request
from control_plane.core.request_options import PLAIN, RequestOptions
from control_plane.engine.admission import Admission
from control_plane.engine.events import RequestEnd, RequestInfo
from control_plane.engine.gate import Gate
from control_plane.engine.inbox import Inbox
from control_plane.engine.plane import PlaneDescription
from control_plane.engine.streams import StreamHub, TokenStream
from control_plane.errors import EngineStoppedError
from control_plane.telemetry import EngineMetrics
from control_plane.text.detokenizer import Detokenizer, make_detokenizer
from control_plane.text.tokenizer import Tokenizer

MAX_INLINE_CHARACTERS = 2048
"""Longer prompts are tokenized on another thread: the event loop must not wait milliseconds."""


INSPECT_PATIENCE_S = 10.0
"""The engine answers between two turns, each of which waits for one step at most."""


class TextDelta(NamedTuple):
    """A piece of the answer, of sample `sample_index`; `offset`: its generated tokens before it.

    `finish_reason` is set on the last piece of each sample, `end` on the last piece of all.
    """

    text: str
    token_ids: list[int]
    offset: int
    end: RequestEnd | None
    sample_index: int = 0
    finish_reason: FinishReason | None = None


class _SampleText:
    """The text of one sample as far as it is known."""

    __slots__ = ("detokenizer", "has_ended", "num_tokens")

    def __init__(self, detokenizer: Detokenizer) -> None:
        self.detokenizer = detokenizer
        self.num_tokens = 0
        self.has_ended = False


class Generation:
    """One request under way, read by one task; leaving its `async with` ends the request.

    Raises the error of a request that was refused or failed, from `admitted` or `next_delta`.
    """

    def __init__(
        self,
        request: Request,
        stream: TokenStream,
        tokenizer: Tokenizer,
        *,
        abandon: Callable[[Generation], None],
    ) -> None:
        self.params = request.params
        self.engine_id = request.id
        self.arrival_time = request.arrival_time
        self.num_prompt_tokens = len(request.input_tokens)
        self._stream = stream
        self._texts = [_SampleText(make_detokenizer(tokenizer)) for _ in range(request.params.n)]
        self._abandon = abandon
        self._ready: deque[TextDelta] = deque()

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

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples, those of pieces not taken yet included."""
        return sum(text.num_tokens for text in self._texts)

    async def admitted(self) -> None:
        """Wait until the engine has taken the request."""
        await self._fetch()  # tokens may have come together with the admission

    async def next_delta(self) -> TextDelta:
        """Wait for the next piece of the answer; not to be called after one with an `end`."""
        while not self._ready:
            await self._fetch()
        return self._ready.popleft()

    async def _fetch(self) -> None:
        """Wait for news and make pieces of it."""
        samples, end = await self._stream.next_part()
        if end is not None and end.error is not None:
            raise end.error
        for index, token_ids, reason in samples:
            self._ready.append(self._delta(index, token_ids, reason))
        if end is None:
            return
        for index, text in enumerate(self._texts):
            if not text.has_ended:
                self._ready.append(self._delta(index, [], end.finish_reason))
        last = self._ready.pop() if self._ready else TextDelta("", [], 0, None)
        self._ready.append(last._replace(end=end))

    def _delta(self, index: int, token_ids: list[int], reason: FinishReason | None) -> TextDelta:
        sample = self._texts[index]
        text = sample.detokenizer.push(token_ids)
        if reason is not None:
            text += sample.detokenizer.finish()
            sample.has_ended = True
        offset = sample.num_tokens
        sample.num_tokens += len(token_ids)
        return TextDelta(text, token_ids, offset, None, index, reason)


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

    async def submit(
        self,
        prompt: str | Sequence[int],
        params: GenerationParams,
        options: RequestOptions = PLAIN,
    ) -> Generation:
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
        request = parts.admission.make_request(
            token_ids, params, arrival_time=arrival_time, options=options
        )
        stream = parts.hub.open(request.id)
        generation = Generation(request, stream, parts.tokenizer, abandon=self._abandon)
        parts.inbox.submit(request)
        return generation

    async def list_requests(self, *, include_ended: bool = False) -> list[RequestInfo]:
        """Return what the requests are doing, also those that ended not long ago if wanted.

        Raises EngineStoppedError if the engine does not answer.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[RequestInfo]] = loop.create_future()

        def settle(infos: list[RequestInfo]) -> None:
            if not answer.done():
                answer.set_result(infos)

        def reply(infos: list[RequestInfo]) -> None:
            # Nobody waits for it where the event loop is closed: the process ends.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, infos)

        self._parts.inbox.inspect(reply, include_ended=include_ended)
        try:
            return await asyncio.wait_for(answer, INSPECT_PATIENCE_S)
        except TimeoutError:
            raise EngineStoppedError("the engine does not answer; see its log") from None

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
