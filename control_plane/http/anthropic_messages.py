"""`POST /v1/messages` and its `count_tokens`: blocks of text, thinking and calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Final

from control_plane.api.forced_calls import calls_in_params
from control_plane.core.generation_params import GenerationParams
from control_plane.engine.frontend import ChatPrompt
from control_plane.http.answers import Piece, answers_to
from control_plane.http.anthropic_blocks import Blocks, Event
from control_plane.http.anthropic_errors import anthropic_error
from control_plane.http.anthropic_input import with_results_joined
from control_plane.http.anthropic_schema import CountRequest, MessageRequest
from control_plane.http.backend import LoadedEngine
from control_plane.http.errors import describe_error
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import Spelled, spell
from control_plane.http.messages import reader_of
from control_plane.http.reply import Connection
from control_plane.http.request_id import current_request_id
from control_plane.http.usage import TokenCounts, message_usage
from control_plane.metrics.visits import note_error
from control_plane.text.answers.text_form import text_form_of
from planes.default_int import DefaultInt
from planes.errors import EngineError, TokenizationError

NAMES: Final = {
    **FIELD_NAMES,
    "continue_final_message": "messages",
    "prompt": "messages",
    "stop": "stop_sequences",
    "strict": "tools",
    "token_ids": "messages",
}

PING_AFTER_S: Final = 10.0
"""In each of which a stream has an event: clients, and proxies between, give up on silent ones."""


async def answer_message(
    engine: LoadedEngine, request: MessageRequest, connection: Connection
) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    prompt = await _prompt_of(engine, request)
    # A default: what the context has no room for is not generated, as Anthropic has it.
    params = request.params(max_tokens=DefaultInt(request.max_tokens))
    choice, tools = request.calls, request.conversation[1]
    params = await calls_in_params(params, choice, tools, prompt.answer, "tools[{}].input_schema")
    del tools
    eager = request.eager_tools
    request.forget()
    async with answers_to(
        engine.frontend,
        [prompt.ids_for(params)],
        params,
        request.options(request_id),
        is_whole=not request.stream,
        form=text_form_of(prompt.answer, params, is_single=choice.is_single),
    ) as answers:
        reader = reader_of(engine, prompt, answers, is_single=choice.is_single)
        blocks = Blocks(
            reader,
            signature=request_id,
            omits_thinking=request.omits_thinking,
            eager=eager,
        )
        has_room = answers.prompt_of(0).params.max_tokens >= request.max_tokens
        draft = _Draft(f"msg_{request_id}", engine.model, blocks, has_room=has_room)
        if not request.stream:

            async def collect(_: int, piece: Piece) -> None:
                draft.take_end(piece)
                blocks.feed(piece)

            await answers.read(collect)
            blocks.finish(draft.finish_reason)
            await connection.send_json(draft.ended(answers.counts))
            return
        events = _Events(connection)

        async def forward(_: int, piece: Piece) -> None:
            draft.take_end(piece)
            await events.send(*blocks.push(piece))

        async with connection.events():
            await events.send({"type": "message_start", "message": draft.begun(answers.counts)})
            await events.ping()
            try:
                async with events.pings():
                    await answers.read(forward)
                await events.send(*blocks.finish(draft.finish_reason))
                await events.send(draft.end_event(answers.counts), {"type": "message_stop"})
            except EngineError as error:
                note_error(error.reason)
                await events.send(anthropic_error(describe_error(error, NAMES), request_id))


async def count_tokens(engine: LoadedEngine, request: CountRequest) -> int:
    """Return how many tokens the prompt of a message would have. Raises EngineError."""
    prompt = await _prompt_of(engine, request)
    return len(prompt.ids_for(GenerationParams(structured_outputs=request.form)))


async def _prompt_of(engine: LoadedEngine, request: CountRequest) -> ChatPrompt:
    """Return the prompt. A template may refuse text behind results: then they are one."""
    messages, tools, variables = request.conversation
    render = partial(
        engine.frontend.apply_chat_template,
        tools=tools,
        chat_template_kwargs=variables,
        continue_final_message=request.goes_on,
        thinking=request.wish,
    )
    try:
        return await render(messages)
    except TokenizationError:
        joined = with_results_joined(messages)
        if len(joined) < len(messages):
            with contextlib.suppress(TokenizationError):
                return await render(joined)
        raise


class _Draft:
    """A message that is being written. `has_room`: the context has some for all of its tokens."""

    def __init__(self, message_id: str, model: str, blocks: Blocks, *, has_room: bool) -> None:
        self._id, self._model = message_id, model
        self._blocks = blocks
        self._has_room = has_room
        self._matched_stop: str | None = None
        self.finish_reason = "stop"

    def take_end(self, piece: Piece) -> None:
        """Take note of how the answer ends, if the piece is its last."""
        if piece.finish_reason is not None:
            self.finish_reason = piece.finish_reason
            if isinstance(piece.matched_stop, str):
                self._matched_stop = piece.matched_stop

    def begun(self, counts: TokenCounts) -> dict[str, Any]:
        """Return the message before its first block."""
        return self._message({"stop_reason": None, "stop_sequence": None}, counts)

    def ended(self, counts: TokenCounts) -> dict[str, Any]:
        """Return the whole message."""
        return self._message(self._end(), counts)

    def end_event(self, counts: TokenCounts) -> Event:
        """Return the event that tells why it ends, and what it took."""
        return {"type": "message_delta", "delta": self._end(), "usage": self._usage(counts)}

    def _message(self, end: dict[str, str | None], counts: TokenCounts) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks.values(),
            **end,
            "usage": self._usage(counts),
        }

    def _end(self) -> dict[str, str | None]:
        """Return the reason; that calls are made is one before a text that ended the answer."""
        if self.finish_reason == "length":
            cut = "max_tokens" if self._has_room else "model_context_window_exceeded"
            return {"stop_reason": cut, "stop_sequence": None}
        if self._blocks.is_calling:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if self._matched_stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": self._matched_stop}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, counts: TokenCounts) -> dict[str, object]:
        return message_usage(counts, self._blocks.num_reasoning_tokens)


class _Events:
    """Writes the events of one stream, each named by its type."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._was_quiet = True

    async def send(self, *events: Event) -> None:
        """Write events, if there are any."""
        self._was_quiet = self._was_quiet and not events
        for event in events:
            told: object = event
            if "delta" not in event:  # those are many, and most of them short
                told = Spelled(await spell(event))
            await self._connection.send_events(told, name=event["type"])

    async def ping(self) -> None:
        """Write that the server is there."""
        await self.send({"type": "ping"})

    @contextlib.asynccontextmanager
    async def pings(self) -> AsyncIterator[None]:
        """Ping in the block where nothing else is written for long."""
        pinging = asyncio.create_task(self._ping_on())
        try:
            yield
        finally:
            pinging.cancel()
            await asyncio.wait([pinging])
        if not pinging.cancelled():
            pinging.result()

    async def _ping_on(self) -> None:
        while True:
            self._was_quiet = True
            await asyncio.sleep(PING_AFTER_S)
            if self._was_quiet:
                await self.ping()
