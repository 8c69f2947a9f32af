"""`POST /v1/chat/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from control_plane.api.forced_calls import calls_in_params
from control_plane.http.answers import Answers, Piece, answers_to
from control_plane.http.backend import LoadedEngine
from control_plane.http.chat_schema import ChatRequest
from control_plane.http.choices import Heading, send_stream, send_whole
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import SpelledList
from control_plane.http.logprobs import chat_logprobs
from control_plane.http.messages import Messages, reader_of
from control_plane.http.reply import Connection
from control_plane.http.request_id import current_request_id
from control_plane.text.answers.text_form import text_form_of
from control_plane.text.answers.tool_choice import PARAMETERS
from planes.errors import EngineError

NAMES = {
    **FIELD_NAMES,
    "num_logprobs": "top_logprobs",
    "prompt": "messages",
    "strict": "tools",
    "token_ids": "messages",
}


async def answer_chat(engine: LoadedEngine, request: ChatRequest, connection: Connection) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    prompt = await engine.frontend.apply_chat_template(
        *request.conversation,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        reasoning_effort=request.reasoning_effort,
    )
    max_tokens = request.max_completion_tokens or request.max_tokens
    params = request.params(
        max_tokens=max_tokens or engine.max_new_tokens,
        n=request.n or 1,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    choice, tools = request.calls, request.conversation[1]
    params = await calls_in_params(params, choice, tools, prompt.answer, PARAMETERS)
    del tools
    request.forget()
    heading = Heading.of(engine, f"chatcmpl-{request_id}")
    with _limit_as_called(request):
        async with answers_to(
            engine.frontend,
            [prompt.ids_for(params)],
            params,
            request.options(request_id),
            is_whole=not request.stream,
            form=text_form_of(prompt.answer, params, is_single=choice.is_single),
        ) as answers:
            reader = reader_of(engine, prompt, answers, is_single=choice.is_single)
            messages = Messages(reader, says_calls=not request.names_function)
            shape = ChatShape(engine, messages, wants_logprobs=bool(request.logprobs))
            if request.stream:
                await send_stream(
                    connection,
                    answers,
                    heading,
                    shape,
                    asked=request,
                    field_names=NAMES,
                )
            else:
                await send_whole(connection, answers, heading, shape)


@contextlib.contextmanager
def _limit_as_called(request: ChatRequest) -> Iterator[None]:
    """Name the most tokens in errors as the caller did, who has two names for it."""
    try:
        yield
    except EngineError as error:
        if error.field == "max_tokens" and request.max_completion_tokens is not None:
            error.field = "max_completion_tokens"
            error.message = error.message.replace("max_tokens", error.field, 1)
        raise


class ChatShape:
    """Choices that are messages of the assistant."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, engine: LoadedEngine, messages: Messages, *, wants_logprobs: bool) -> None:
        self._speller = engine.speller
        self._messages = messages
        self._wants_logprobs = wants_logprobs
        self._kept: dict[int, SpelledList] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all samples, once they are at their ends."""
        return self._messages.num_reasoning_tokens

    async def first(self, index: int, answers: Answers) -> dict[str, object]:  # noqa: ARG002
        """Return the chunk that says who speaks."""
        return _chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """Return a piece, with the log-probabilities of its tokens, whatever they say.

        What was held back of the message, and the reason, come in chunks of their own.
        """
        messages, found = self._messages, []
        if piece.text or piece.token_ids:
            delta = messages.delta(index, piece)
            if delta or piece.logprobs:
                found.append(_chunk(index, delta, self._logprobs(piece)))
        if piece.finish_reason is not None:
            rest = messages.last_delta(index, piece.finish_reason)
            if rest:
                found.append(_chunk(index, rest))
            reason = messages.finish_reason(index, piece.finish_reason)
            found.append(_chunk(index, {}, finish_reason=reason))
        return found

    def keep(self, index: int, piece: Piece) -> None:
        """Spell the log-probabilities of a piece, and read its text."""
        self._messages.feed(index, piece)
        if piece.logprobs:
            entries = chat_logprobs(self._speller, piece.token_ids, piece.logprobs)
            self._kept.setdefault(index, SpelledList()).extend(entries)

    async def whole(
        self,
        index: int,
        text: str,
        finish_reason: str,
        answers: Answers,  # noqa: ARG002 - others echo the prompt
    ) -> dict[str, object]:
        """Return the message."""
        message = self._messages.whole(index, text, finish_reason)
        logprobs = None
        if self._wants_logprobs:
            content = self._kept.get(index, SpelledList()).joined()
            logprobs = {"content": content, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._messages.finish_reason(index, finish_reason),
        }

    def _logprobs(self, piece: Piece) -> dict[str, object] | None:
        if not piece.logprobs:
            return None
        content = chat_logprobs(self._speller, piece.token_ids, piece.logprobs)
        return {"content": content, "refusal": None}


def _chunk(
    index: int,
    delta: dict[str, object],
    logprobs: dict[str, object] | None = None,
    finish_reason: str | None = None,
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
