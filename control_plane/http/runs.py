"""One answer as runs: what was thought, said and called, one behind the other.

A run begins when the first of it is written. Responses have an item for each, Anthropic's messages
a block.
"""

from __future__ import annotations

from typing import NamedTuple

from control_plane.http.answers import Piece
from control_plane.text.answers.parts import CallPiece, Part, Parts
from control_plane.text.answers.reader import AnswerReader


class Run(NamedTuple):
    """A text that goes on with the last run, or begins one.

    `part`: whose kind it is; of a call that begins with its name. `call_id`: of such a call.
    `is_behind_calls`: it stands behind all that was read of calls until now, whole or not.
    """

    part: Part
    text: str
    is_new: bool
    is_behind_calls: bool
    call_id: str = ""


class Runs:
    """Takes one answer's text apart. `reader`: None: all of it is said."""

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._last: type[Part] | None = None

    @property
    def num_reasoning_tokens(self) -> int:
        """Once it has finished."""
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    @property
    def is_calling(self) -> bool:
        """Whether the answer calls tools, and said so to the end."""
        return self._reader is not None and self._reader.is_calling(0)

    def push(self, piece: Piece) -> list[Run]:
        """Take the next piece; what is certain now."""
        if self._reader is None:
            return self._runs(Parts(piece.text))
        return self._runs(self._reader.push(0, piece.text, piece.token_ids))

    def feed(self, piece: Piece) -> list[Run]:
        """Take the next piece of an answer that is wanted as a whole; what needs no reading."""
        if self._reader is None:
            return self._runs(Parts(piece.text))
        self._reader.feed(0, piece.text, piece.token_ids)
        return []

    def finish(self, reason: str) -> list[Run]:
        """Return what was held back. `reason`: of the end, in OpenAI's word."""
        return [] if self._reader is None else self._runs(self._reader.finish(0, reason))

    def _runs(self, parts: Parts) -> list[Run]:
        found = []
        num_calls = len(parts.calls)
        for part in parts.in_order():
            is_behind_calls = num_calls == 0
            if isinstance(part, CallPiece):
                num_calls -= 1
            found.append(self._run(part, is_behind_calls=is_behind_calls))
        return found

    def _run(self, part: Part, *, is_behind_calls: bool) -> Run:
        if isinstance(part, CallPiece):
            is_new = part.name is not None
            text, call_id = part.arguments, ""
            if is_new and self._reader is not None:
                call_id = self._reader.call_id(0, part)
        else:
            is_new = self._last is not type(part)
            text, call_id = part.text.removeprefix(part.gap) if is_new else part.text, ""
        self._last = type(part)
        return Run(part, text, is_new, is_behind_calls, call_id)
