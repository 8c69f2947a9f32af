"""`POST /v1/responses`: items of text, reasoning and calls, whole or as typed events."""

from __future__ import annotations

import time
from typing import Final

from control_plane.api.forced_calls import calls_in_params
from control_plane.core.generation_params import GenerationParams
from control_plane.http.answers import Piece, answers_to
from control_plane.http.backend import LoadedEngine
from control_plane.http.errors import describe_error
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import Spelled, spell
from control_plane.http.logprobs import chat_logprobs
from control_plane.http.messages import reader_of
from control_plane.http.reply import Connection
from control_plane.http.request_id import current_request_id
from control_plane.http.responses_items import (
    COMPLETED,
    IN_PROGRESS,
    INCOMPLETE,
    Entries,
    Event,
    Output,
)
from control_plane.http.responses_schema import ResponseRequest
from control_plane.http.usage import TokenCounts, response_usage
from control_plane.metrics.visits import note_error
from control_plane.text.answers.text_form import text_form_of
from planes.errors import EngineError

NAMES: Final = {
    **FIELD_NAMES,
    "max_tokens": "max_output_tokens",
    "num_logprobs": "top_logprobs",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning.effort",
    "strict": "tools",
    "token_ids": "input",
}


async def answer_response(
    engine: LoadedEngine, request: ResponseRequest, connection: Connection
) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    prompt = await engine.frontend.apply_chat_template(
        *request.conversation, reasoning_effort=request.reasoning_effort
    )
    params = request.params(
        max_tokens=request.max_output_tokens or engine.max_new_tokens,
        num_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
    )
    choice, tools = request.calls, request.conversation[1]
    params = await calls_in_params(params, choice, tools, prompt.answer, "tools[{}].parameters")
    del tools
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
        draft = _Draft(engine, request, params, Output(request_id, reader), request_id)
        if not request.stream:

            async def collect(_: int, piece: Piece) -> None:
                draft.output.feed(piece, draft.take(piece))

            await answers.read(collect)
            draft.output.finish(draft.end_status)
            await connection.send_json(draft.ended(answers.counts))
            return
        events = _Events(connection)

        async def forward(_: int, piece: Piece) -> None:
            await events.send(*draft.output.push(piece, draft.take(piece)))

        async with connection.events():
            for kind in ("response.created", "response.in_progress"):
                await events.send((kind, {"response": draft.begun()}))
            try:
                await answers.read(forward)
                await events.send(*draft.output.finish(draft.end_status))
                end = {"response": draft.ended(answers.counts)}
                await events.send((f"response.{draft.end_status}", end))
            except EngineError as error:
                note_error(error.reason)
                failure = describe_error(error, NAMES).error
                await events.send(("response.failed", {"response": draft.failed(failure)}))


class _Draft:
    """A response that is being written."""

    def __init__(
        self,
        engine: LoadedEngine,
        request: ResponseRequest,
        params: GenerationParams,
        output: Output,
        request_id: str,
    ) -> None:
        self.output = output
        self._speller = engine.speller
        self._finish_reason: str | None = None
        self._said = {
            "id": f"resp_{request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": engine.model,
            "previous_response_id": None,
            "store": False,
            "system_fingerprint": engine.fingerprint,
            "temperature": params.temperature,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": request.user,
            **request.echo,
        }

    def take(self, piece: Piece) -> Entries:
        """Take note of how the answer ends; the piece's log-probabilities, spelled."""
        self._finish_reason = piece.finish_reason or self._finish_reason
        if not piece.logprobs:
            return []
        return chat_logprobs(self._speller, piece.token_ids, piece.logprobs)

    @property
    def end_status(self) -> str:
        """`incomplete` where the answer was cut off."""
        return INCOMPLETE if self._finish_reason == "length" else COMPLETED

    def begun(self) -> dict[str, object]:
        """Return the response before its first word."""
        return self._response(IN_PROGRESS)

    def ended(self, counts: TokenCounts) -> dict[str, object]:
        """Return the finished response."""
        status = self.end_status
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        usage = response_usage(counts, self.output.num_reasoning_tokens)
        return self._response(status, incomplete_details=details, usage=usage)

    def failed(self, error: dict[str, str | None]) -> dict[str, object]:
        """Return the response as it is when something goes wrong in the middle."""
        self.output.cut_off()
        # OpenAI's codes are a closed list; this is the one that fits.
        reason = {"code": "server_error", "message": error["message"]}
        return self._response("failed", error=reason)

    def _response(self, status: str, **rest: object) -> dict[str, object]:
        unset = {"error": None, "incomplete_details": None, "usage": None}
        said = {**self._said, "status": status, "output": self.output.values()}
        return {**said, **unset, **rest}


class _Events:
    """Writes the events of one stream, numbered."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = 0

    async def send(self, *events: Event) -> None:
        """Write events."""
        for kind, content in events:
            event: object = {"type": kind, "sequence_number": self._number, **content}
            self._number += 1
            # Deltas are many, and most of them short.
            if "delta" not in content or content.get("logprobs"):
                event = Spelled(await spell(event))
            await self._connection.send_events(event, name=kind)
