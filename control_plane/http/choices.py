"""From pieces to choices: what completions and chats have in common, whole and streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from control_plane.http.answers import Answers, Piece
from control_plane.http.backend import LoadedEngine
from control_plane.http.errors import describe_error
from control_plane.http.fields import StreamFields
from control_plane.http.json_text import Spelled, spell, to_json
from control_plane.http.reply import Connection
from control_plane.http.usage import TokenCounts, completion_usage
from control_plane.metrics.visits import note_error
from planes.errors import EngineError


class ChoiceShape(Protocol):
    """How an endpoint spells the choices of one answer.

    Log-probabilities in what `first` and `whole` return may be `Spelled`: there may be very many.
    """

    whole_object: str
    chunk_object: str

    @property
    def num_reasoning_tokens(self) -> int | None:
        """Of all choices, once they are at their ends; None: reasoning is not told apart."""
        ...

    async def first(self, index: int, answers: Answers) -> dict[str, object] | None:
        """Return the chunk before anything generated, if there is one; called once a choice."""
        ...

    def chunks(self, index: int, piece: Piece) -> list[dict[str, object]]:
        """Return the chunks of a piece, maybe none; the end of a choice is one of its own."""
        ...

    def keep(self, index: int, piece: Piece) -> None:
        """Take what is to be done with a piece before `whole`; called in order."""
        ...

    async def whole(
        self, index: int, text: str, finish_reason: str, answers: Answers
    ) -> dict[str, object]:
        """Return the whole choice; `text`: all that was generated of it."""
        ...


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object and chunk of one answer says."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def of(cls, engine: LoadedEngine, answer_id: str) -> Heading:
        """Make the heading of an answer that begins now."""
        return cls(answer_id, int(time.time()), engine.model, engine.fingerprint)

    def over(self, kind: str, **content: object) -> dict[str, object]:
        """Return an object of that kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **content,
        }


class ChunkSpeller:
    """Spells the chunks of one answer: what all of them say once, their choice each time.

    `counts_so_far`: for the usage of each chunk; None: they have none.
    """

    def __init__(
        self,
        heading: Heading,
        kind: str,
        *,
        has_usage: bool,
        counts_so_far: Callable[[], TokenCounts] | None = None,
    ) -> None:
        self._before = to_json(heading.over(kind, choices=[])).removesuffix(b"]}")
        self._counts_so_far = counts_so_far
        # OpenAI: every chunk has a usage if the last one has.
        self._after = b'],"usage":null}' if has_usage else b"]}"

    def around(self, *choice: bytes) -> Spelled:
        """Return the chunk of a choice that is spelled."""
        after = self._after
        if self._counts_so_far is not None:
            usage = completion_usage(self._counts_so_far(), None)
            after = b'],"usage":' + to_json(usage) + b"}"
        return Spelled([self._before, *choice, after])


async def send_whole(
    connection: Connection, answers: Answers, heading: Heading, shape: ChoiceShape
) -> None:
    """Collect all pieces and write one object. Raises EngineError before anything is written."""
    texts: list[list[str]] = [[] for _ in range(answers.num_choices)]
    reasons = [""] * answers.num_choices

    async def take(index: int, piece: Piece) -> None:
        texts[index].append(piece.text)
        reasons[index] = piece.finish_reason or reasons[index]
        shape.keep(index, piece)

    await answers.read(take)
    choices = [
        await shape.whole(index, "".join(texts[index]), reasons[index], answers)
        for index in range(answers.num_choices)
    ]
    usage = completion_usage(answers.counts, shape.num_reasoning_tokens)
    await connection.send_json(heading.over(shape.whole_object, choices=choices, usage=usage))


async def send_stream(
    connection: Connection,
    answers: Answers,
    heading: Heading,
    shape: ChoiceShape,
    *,
    asked: StreamFields,
    field_names: Mapping[str, str],
) -> None:
    """Write the pieces as they come, one event each, and the end of each choice as its own."""
    begun = [False] * answers.num_choices
    include_usage = asked.wants_usage_chunk
    chunks = ChunkSpeller(
        heading,
        shape.chunk_object,
        has_usage=include_usage,
        counts_so_far=(lambda: answers.counts) if asked.wants_usage_so_far else None,
    )

    async def take(index: int, piece: Piece) -> None:
        events: list[object] = []
        if not begun[index]:
            begun[index] = True
            first = await shape.first(index, answers)
            if first is not None:
                events.append(chunks.around(*await spell(first)))
        events += [chunks.around(to_json(chunk)) for chunk in shape.chunks(index, piece)]
        if events:
            await connection.send_events(*events)

    async with connection.events():
        try:
            await answers.read(take)
            if include_usage:
                usage = completion_usage(answers.counts, shape.num_reasoning_tokens)
                last = heading.over(shape.chunk_object, choices=[], usage=usage)
                await connection.send_events(last)
            await connection.send_done()
        except EngineError as error:
            note_error(error.reason)
            failure = describe_error(error, field_names)
            await connection.send_events({"error": failure.error}, name="error")
