"""The samples of one answer, each with a parser of its own, and the names of their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from control_plane.core.generation_params import GenerationParams
from control_plane.core.tool_calls import ToolCalls
from control_plane.text.answers.call_ids import CallIds
from control_plane.text.answers.parser import AnswerFormat, AnswerParser, Thinking
from control_plane.text.answers.parts import CallPiece, Parts
from control_plane.text.answers.reasoning_tokens import ReasoningTokens
from control_plane.text.detokenizer import Detokenizer

_ALL_CONTENT: Final = ("json", "json_object", "choice")
"""Forms in which nobody writes `</think>` or calls: what looks like some is a value of theirs."""


class AnswerReader:
    """Takes the texts of one request's samples apart. `max_calls`: of each sample; None: all.

    `params`: the effective ones, with their seed. An answer that must be JSON, or one of some
    choices, is content, though the prompt may have begun reasoning, and may look like a call. One
    that must be calls has none.
    `make_detokenizer`: one like those that the texts come from; None: reasoning is not counted, and
    all that is spelled like a mark is one.
    """

    def __init__(
        self,
        answer_format: AnswerFormat,
        prompt_token_ids: Sequence[int],
        params: GenerationParams,
        *,
        max_calls: int | None = None,
        make_detokenizer: Callable[[], Detokenizer] | None = None,
    ) -> None:
        form = params.structured_outputs
        if form is not None and form.kind in _ALL_CONTENT:
            answer_format = replace(answer_format, thinking=Thinking.IS_OVER, calls=None)
        elif form is not None and answer_format.form_opening and not isinstance(form, ToolCalls):
            answer_format = replace(answer_format, is_start=False)  # the prompt opens its message
        self._is_only_calls = isinstance(form, ToolCalls) and not form.may_say
        self._format = answer_format
        self._max_calls = max_calls
        self._ids = CallIds(prompt_token_ids, params.seed)
        self._make_detokenizer = make_detokenizer
        self._parsers: dict[int, AnswerParser] = {}
        self._counters: dict[int, ReasoningTokens] = {}

    @property
    def num_reasoning_tokens(self) -> int:
        """Of all samples, once they have finished."""
        return sum(counter.count for counter in self._counters.values())

    def push(self, sample: int, text: str, token_ids: Sequence[int] = ()) -> Parts:
        """Take the next piece of a sample's text; the parts that are certain now.

        `token_ids`: those it comes from, to be counted.
        """
        parser = self._parser(sample)
        self._count(sample, token_ids)
        return self._wanted(parser.push(text))

    def feed(self, sample: int, text: str, token_ids: Sequence[int] = ()) -> None:
        """Take the next piece of a sample's text; its parts come with the next ones returned.

        For whole answers: at their end it would be long work at once.
        """
        parser = self._parser(sample)
        self._count(sample, token_ids)
        parser.feed(text)

    def finish(self, sample: int, finish_reason: str) -> Parts:
        """Return what was held back of a sample, and what was fed. `finish_reason`: its own."""
        parts = self._parser(sample).finish(is_cut_off=finish_reason != "stop")
        return self._wanted(parts)

    def _wanted(self, parts: Parts) -> Parts:
        """Leave out what is content in an answer that must be calls: pieces of one cut off."""
        return parts.without_content() if self._is_only_calls else parts

    def is_calling(self, sample: int) -> bool:
        """Whether a sample calls tools, and said so to the end."""
        return self._parser(sample).is_calling

    def call_id(self, sample: int, call: CallPiece) -> str:
        """Return the id of a call, which its first piece, or all of it, is given of."""
        calls, number = self._format.calls, self._format.num_earlier_calls + call.number
        wanted = None if calls is None else calls.call_id(call.name or "", number)
        return self._ids.name(sample, call.number) if wanted is None else wanted

    def _parser(self, sample: int) -> AnswerParser:
        parser = self._parsers.get(sample)
        if parser is None:
            make, spelled = self._make_detokenizer, self._format.spelled
            knows_marks = make is not None and self._format.marks_are_tokens
            parser = self._format.parser(max_calls=self._max_calls, knows_marks=knows_marks)
            self._parsers[sample] = parser
            if make is not None and (parser.may_think or knows_marks):
                self._counters[sample] = ReasoningTokens(parser, make(), spelled)
        return parser

    def _count(self, sample: int, token_ids: Sequence[int]) -> None:
        counter = self._counters.get(sample)
        if counter is not None:
            counter.take(token_ids)
