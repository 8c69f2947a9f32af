"""The samples of one answer, each with a parser of its own, and the names of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.call_ids import CallIds
from control_plane.text.answers.parser import AnswerFormat, AnswerParser, Thinking
from control_plane.text.answers.parts import Parts

_ALL_CONTENT: Final = ("json", "json_object", "choice")
"""Forms in which nobody writes `</think>` or calls: what looks like some is a value of theirs."""


class AnswerReader:
    """Takes the texts of one request's samples apart. `max_calls`: of each sample; None: all.

    `params`: the effective ones, with their seed. An answer that must be JSON, or one of some
    choices, is content, though the prompt may have begun reasoning, and may look like a call.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        prompt_token_ids: Sequence[int],
        params: GenerationParams,
        *,
        max_calls: int | None = None,
    ) -> None:
        form = params.structured_outputs
        if form is not None and form.kind in _ALL_CONTENT:
            answer_format = replace(answer_format, thinking=Thinking.IS_OVER, calls=None)
        self._format = answer_format
        self._max_calls = max_calls
        self._ids = CallIds(prompt_token_ids, params.seed)
        self._parsers: dict[int, AnswerParser] = {}

    def push(self, sample: int, text: str) -> Parts:
        """Take the next piece of a sample's text; the parts that are certain now."""
        return self._parser(sample).push(text)

    def feed(self, sample: int, text: str) -> None:
        """Take the next piece of a sample's text; its parts come with the next ones returned.

        For whole answers: at their end it would be long work at once.
        """
        self._parser(sample).feed(text)

    def finish(self, sample: int) -> Parts:
        """Return what was held back of a sample, and what was fed."""
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
