"""`POST /v1/chat/completions`."""

from __future__ import annotations

from control_plane.http.answers import Answers, Piece, answers_to
from control_plane.http.backend import LoadedEngine
from control_plane.http.chat_schema import ChatRequest
from control_plane.http.choices import Heading, send_stream, send_whole
from control_plane.http.edge import current_request_id
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import SpelledList
from control_plane.http.logprobs import chat_logprobs
from control_plane.http.reply import Connection

NAMES = {
    **FIELD_NAMES,
    "num_logprobs": "top_logprobs",
    "prompt": "messages",
    "token_ids": "messages",
}


async def answer_chat(engine: LoadedEngine, request: ChatRequest, connection: Connection) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    prompt = (await engine.frontend.apply_chat_template(*request.conversation)).token_ids
    request.forget()
    max_tokens = request.max_completion_tokens or request.max_tokens
    params = request.params(
        max_tokens=max_tokens or engine.max_new_tokens(len(prompt)),
        n=request.n or 1,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    heading = Heading.of(engine, f"chatcmpl-{request_id}")
    async with answers_to(
        engine.frontend,
        [prompt],
        params,
        request.options(request_id),
        is_whole=not request.stream,
    ) as answers:
        shape = ChatShape(engine, wants_logprobs=bool(request.logprobs))
        if request.stream:
            await send_stream(
                connection,
                answers,
                heading,
                shape,
                include_usage=request.wants_usage_chunk,
                field_names=NAMES,
            )
        else:
            await send_whole(connection, answers, heading, shape)


class ChatShape:
    """Choices that are messages of the assistant."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, engine: LoadedEngine, *, wants_logprobs: bool) -> None:
        self._speller = engine.speller
        self._wants_logprobs = wants_logprobs
        self._kept: dict[int, SpelledList] = {}

    async def first(self, index: int, answers: Answers) -> dict[str, object]:  # noqa: ARG002
        """Return the chunk that says who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def chunk(self, index: int, piece: Piece) -> dict[str, object]:
        """Return a piece; the one with the reason says nothing else."""
        return {
            "index": index,
            "delta": {} if piece.finish_reason is not None else {"content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }

    def keep(self, index: int, piece: Piece) -> None:
        """Spell the log-probabilities of a piece."""
        if piece.logprobs:
            entries = chat_logprobs(self._speller, piece.token_ids, piece.logprobs)
            self._kept.setdefault(index, SpelledList()).extend(entries)

    async def whole(
        self,
        index: int,
        text: str,
        finish_reason: str | None,
        answers: Answers,  # noqa: ARG002 - others echo the prompt
    ) -> dict[str, object]:
        """Return the message."""
        logprobs = None
        if self._wants_logprobs:
            content = self._kept.get(index, SpelledList()).joined()
            logprobs = {"content": content, "refusal": None}
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        if not piece.logprobs:
            return None
        content = chat_logprobs(self._speller, piece.token_ids, piece.logprobs)
        return {"content": content, "refusal": None}
