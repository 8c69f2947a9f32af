"""The samples of one answer, each with a parser of its own, and the names of their calls."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.text.answers.call_ids import CallIds
from control_plane.text.answers.parser import AnswerFormat, AnswerParser
from control_plane.text.answers.parts import Parts


class AnswerReader:
    """Takes the texts of one request's samples apart. `max_calls`: of each sample; None: all."""

    def __init__(
        self,
        answer_format: AnswerFormat,
        prompt_token_ids: Sequence[int],
        seed: int | None,
        *,
        max_calls: int | None = None,
    ) -> None:
        self._format = answer_format
        self._max_calls = max_calls
        self._ids = CallIds(prompt_token_ids, seed)
        self._parsers: dict[int, AnswerParser] = {}

    def push(self, sample: int, text: str) -> Parts:
        """Take the next piece of a sample's text; the parts that are certain now."""
        return self._parser(sample).push(text)

    def finish(self, sample: int) -> Parts:
        """Return what was held back of a sample: content and reasoning."""
        return self._parser(sample).finish()

    def is_calling(self, sample: int) -> bool:
        """Whether a sample calls tools, and said so to the end."""
        return self._parser(sample).is_calling

    def call_id(self, sample: int, call: int) -> str:
        """Return the id of a call."""
        return self._ids.name(sample, call)

    def _parser(self, sample: int) -> AnswerParser:
        parser = self._parsers.get(sample)
        if parser is None:
            parser = self._format.parser(max_calls=self._max_calls)
            self._parsers[sample] = parser
        return parser
