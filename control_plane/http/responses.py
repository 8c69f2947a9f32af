"""`POST /v1/responses`: one message of text, whole or as typed events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from control_plane.core.generation_params import GenerationParams
from control_plane.http.answers import Piece, answers_to
from control_plane.http.backend import LoadedEngine
from control_plane.http.edge import current_request_id
from control_plane.http.errors import describe_error
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import Spelled, SpelledList, spell
from control_plane.http.logprobs import chat_logprobs
from control_plane.http.reply import Connection
from control_plane.http.responses_schema import ResponseRequest
from control_plane.http.usage import TokenCounts, response_usage
from control_plane.metrics.visits import note_error
from planes.errors import EngineError

NAMES = {
    **FIELD_NAMES,
    "max_tokens": "max_output_tokens",
    "num_logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "token_ids": "input",
}


async def answer_response(
    engine: LoadedEngine, request: ResponseRequest, connection: Connection
) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    prompt = (
        await engine.frontend.apply_chat_template(
            request.messages, chat_template_kwargs=request.chat_template_kwargs
        )
    ).token_ids
    request.forget()
    params = request.params(
        max_tokens=request.max_output_tokens or engine.max_new_tokens(len(prompt)),
        num_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
    )
    async with answers_to(
        engine.frontend,
        [prompt],
        params,
        request.options(request_id),
        is_whole=not request.stream,
    ) as answers:
        draft = _Draft(engine, request, params, request_id)
        if not request.stream:

            async def collect(_: int, piece: Piece) -> None:
                draft.add(piece)

            await answers.read(collect)
            await connection.send_json(draft.ended(answers.counts))
            return
        events = _Events(connection)

        async def forward(_: int, piece: Piece) -> None:
            entries = draft.add(piece)
            if piece.text or entries:
                await events.delta(draft, piece.text, entries)

        async with connection.events():
            await events.begin(draft)
            try:
                await answers.read(forward)
                await events.end(draft, answers.counts)
            except EngineError as error:
                note_error(error.reason)
                failure = describe_error(error, NAMES).error
                await events.send("response.failed", response=draft.failed(failure))


class _Draft:
    """A response that is being written."""

    def __init__(
        self,
        engine: LoadedEngine,
        request: ResponseRequest,
        params: GenerationParams,
        request_id: str,
    ) -> None:
        self._speller = engine.speller
        self._texts: list[str] = []
        self._logprobs = SpelledList()
        self._finish_reason: str | None = None
        self.message_id = f"msg_{request_id}"
        self._said = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": engine.model,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "system_fingerprint": engine.fingerprint,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": request.tool_choice or "auto",
            "tools": [],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
        }

    def add(self, piece: Piece) -> list[dict[str, object]]:
        """Take the next piece; its log-probabilities, spelled."""
        entries = []
        if piece.logprobs:
            entries = chat_logprobs(self._speller, piece.token_ids, piece.logprobs)
            self._logprobs.extend(entries)
        self._texts.append(piece.text)
        self._finish_reason = piece.finish_reason or self._finish_reason
        return entries

    @property
    def end_status(self) -> str:
        """`incomplete` where the text was cut off."""
        return "incomplete" if self._finish_reason == "length" else "completed"

    def part(self) -> dict[str, Any]:
        """Return the text as far as it is written."""
        return {
            "type": "output_text",
            "text": "".join(self._texts),
            "annotations": [],
            "logprobs": self._logprobs.joined(),
        }

    def message(self, status: str) -> dict[str, object]:
        """Return the message as far as it is written."""
        content = [] if status == "in_progress" else [self.part()]
        return {
            "id": self.message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def begun(self) -> dict[str, object]:
        """Return the response before its first word."""
        return self._response("in_progress", [])

    def ended(self, counts: TokenCounts) -> dict[str, object]:
        """Return the finished response."""
        status = self.end_status
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._response(
            status,
            [self.message(status)],
            incomplete_details=details,
            usage=response_usage(counts),
        )

    def failed(self, error: dict[str, str | None]) -> dict[str, object]:
        """Return the response as it is when something goes wrong in the middle."""
        # OpenAI's codes are a closed list; this is the one that fits.
        reason = {"code": "server_error", "message": error["message"]}
        return self._response("failed", [self.message("incomplete")], error=reason)

    def _response(
        self, status: str, output: list[dict[str, object]], **rest: object
    ) -> dict[str, object]:
        unset = {"error": None, "incomplete_details": None, "usage": None}
        return {**self._said, "status": status, "output": output, **unset, **rest}


class _Events:
    """Writes the events of one stream, numbered."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0

    async def send(self, kind: str, **content: object) -> None:
        """Write one event, in which some may be `Spelled`."""
        event = Spelled(await spell(self._event(kind, content)))
        await self._connection.send_events(event, name=kind)

    async def begin(self, draft: _Draft) -> None:
        """Say that a response, its one message and its one part begin."""
        await self.send("response.created", response=draft.begun())
        await self.send("response.in_progress", response=draft.begun())
        await self.send(
            "response.output_item.added", output_index=0, item=draft.message("in_progress")
        )
        await self.send("response.content_part.added", **_place(draft), part=draft.part())

    async def delta(self, draft: _Draft, text: str, logprobs: list[dict[str, object]]) -> None:
        """Write the next piece of text."""
        kind = "response.output_text.delta"
        event = self._event(kind, {**_place(draft), "delta": text, "logprobs": logprobs})
        await self._connection.send_events(event, name=kind)

    async def end(self, draft: _Draft, counts: TokenCounts) -> None:
        """Say that part, message and response are done, with all there is of each."""
        part, place, status = draft.part(), _place(draft), draft.end_status
        await self.send(
            "response.output_text.done", **place, text=part["text"], logprobs=part["logprobs"]
        )
        await self.send("response.content_part.done", **place, part=part)
        await self.send("response.output_item.done", output_index=0, item=draft.message(status))
        await self.send(f"response.{status}", response=draft.ended(counts))

    def _event(self, kind: str, content: Mapping[str, object]) -> dict[str, object]:
        event = {"type": kind, "sequence_number": self._number, **content}
        self._number += 1
        return event


def _place(draft: _Draft) -> dict[str, Any]:
    return {"item_id": draft.message_id, "output_index": 0, "content_index": 0}
