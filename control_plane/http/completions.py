"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from control_plane.http.answers import Answers, Piece, answers_to
from control_plane.http.backend import LoadedEngine
from control_plane.http.choices import Heading, send_stream, send_whole
from control_plane.http.completion_schema import DEFAULT_MAX_TOKENS, CompletionRequest
from control_plane.http.fields import FIELD_NAMES
from control_plane.http.json_text import MEMBERS_AT_ONCE
from control_plane.http.logprobs import Columns, completion_logprobs
from control_plane.http.reply import Connection
from control_plane.http.request_id import current_request_id
from control_plane.http.spelling import TextRuler

NAMES = {**FIELD_NAMES, "num_logprobs": "logprobs", "num_prompt_logprobs": "logprobs"}


async def answer_completion(
    engine: LoadedEngine, request: CompletionRequest, connection: Connection
) -> None:
    """Answer one request, whole or as a stream. Raises EngineError before anything is written."""
    request_id = current_request_id()
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    params = request.params(
        max_tokens=max(1, max_tokens),
        n=request.num_samples,
        num_logprobs=request.logprobs,
        num_prompt_logprobs=request.logprobs if request.echo else None,
    )
    prompts = request.prompts
    heading = Heading.of(engine, f"cmpl-{request_id}")
    async with answers_to(
        engine.frontend,
        prompts,
        params,
        request.options(request_id),
        is_whole=not request.stream,
        only_prompts=max_tokens == 0,
    ) as answers:
        echoes = await _echoes(engine, prompts) if request.echo else None
        shape = CompletionShape(
            engine, echoes, num_samples=params.n, wants_logprobs=request.logprobs is not None
        )
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


async def _echoes(engine: LoadedEngine, prompts: list[str] | list[list[int]]) -> list[str]:
    """Return the prompts as text."""
    return [
        prompt if isinstance(prompt, str) else await engine.frontend.text_of_prompt(prompt)
        for prompt in prompts
    ]


class CompletionShape:
    """Choices that are plain text, behind the echo of their prompt if that is wanted.

    `echoes`: the text of every prompt; None: not wanted.
    """

    whole_object = "text_completion"
    chunk_object = "text_completion"
    num_reasoning_tokens = None

    def __init__(
        self,
        engine: LoadedEngine,
        echoes: Sequence[str] | None,
        *,
        num_samples: int,
        wants_logprobs: bool,
    ) -> None:
        self._speller = engine.speller
        self._echoes = echoes
        self._num_samples = num_samples
        self._wants_logprobs = wants_logprobs
        self._rulers: dict[int, TextRuler] = {}
        self._echoed: dict[int, Columns] = {}
        self._kept: dict[int, Columns] = {}

    async def first(self, index: int, answers: Answers) -> dict[str, object] | None:
        """Return the echo."""
        if self._echoes is None:
            return None
        logprobs = None
        if self._wants_logprobs:
            logprobs = (await self._echoed_logprobs(index, answers)).joined()
        return _choice(index, self._echo(index), logprobs, None)

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """Return a piece, and its end."""
        found = []
        if piece.text or piece.logprobs:
            content = Piece(piece.text, piece.token_ids, piece.logprobs)
            found.append(self._chunk(index, content))
        if piece.finish_reason is not None:
            end = Piece("", finish_reason=piece.finish_reason, end_token=piece.end_token)
            found.append(self._chunk(index, end))
        return found

    def _chunk(self, index: int, piece: Piece) -> dict[str, object]:
        logprobs = None
        if self._wants_logprobs and (piece.logprobs or piece.end_token):
            logprobs = self._logprobs(index, piece)
        return _choice(index, piece.text, logprobs, piece.finish_reason)

    def keep(self, index: int, piece: Piece) -> None:
        """Spell the log-probabilities of a piece."""
        if self._wants_logprobs and (piece.logprobs or piece.end_token):
            self._kept.setdefault(index, Columns()).extend(self._logprobs(index, piece))

    async def whole(
        self, index: int, text: str, finish_reason: str, answers: Answers
    ) -> dict[str, object]:
        """Return all of it behind the echo."""
        logprobs = None
        if self._wants_logprobs:
            kept = self._kept.get(index, Columns())
            if self._echoes is None:
                logprobs = kept.joined()
            else:
                logprobs = (await self._echoed_logprobs(index, answers)).joined(kept)
        return _choice(index, self._echo(index) + text, logprobs, finish_reason)

    def _echo(self, index: int) -> str:
        return "" if self._echoes is None else self._echoes[index // self._num_samples]

    def _logprobs(self, index: int, piece: Piece) -> dict[str, list[Any]]:
        ruler = self._rulers.get(index)
        if ruler is None:
            ruler = self._rulers[index] = self._speller.ruler(len(self._echo(index)))
        token_ids, logprobs = piece.token_ids, piece.logprobs
        if piece.end_token is not None:
            token_ids = [*token_ids, piece.end_token.token_id]
            logprobs = [*logprobs, piece.end_token.logprobs]
        offsets = ruler.offsets(token_ids)
        return completion_logprobs(self._speller, token_ids, logprobs, offsets)

    async def _echoed_logprobs(self, index: int, answers: Answers) -> Columns:
        """Return those of the choice's prompt, spelled once for all its samples."""
        number = index // self._num_samples
        echoed = self._echoed.get(number)
        if echoed is None:
            echoed = Columns()
            prompt, text = answers.prompt_of(index), self._echo(index)
            ruler, speller = self._speller.ruler(), self._speller
            all_ids, all_logprobs = prompt.prompt_token_ids, prompt.prompt_logprobs or ()
            for start in range(0, len(all_ids), MEMBERS_AT_ONCE):
                token_ids = all_ids[start : start + MEMBERS_AT_ONCE]
                logprobs = all_logprobs[start : start + MEMBERS_AT_ONCE]
                offsets = ruler.offsets(token_ids, text)
                echoed.extend(completion_logprobs(speller, token_ids, logprobs, offsets))
                await asyncio.sleep(0)
            self._echoed[number] = echoed
        return echoed


def _choice(
    index: int, text: str, logprobs: Mapping[str, object] | None, finish_reason: str | None
) -> dict[str, object]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
