"""Where the tokens of an answer are in its text: which are reasoning, and which are marks."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from control_plane.text.answers.parser import AnswerParser
from control_plane.text.detokenizer import Detokenizer


class ReasoningTokens:
    """Counts the tokens of one sample any text of which is reasoning, however the text is cut.

    Those that are a mark or the space beside it, and nothing else, do not count; those that are
    part of a character count with it. `detokenizer`: one of the sample's kind, for nobody else.
    `spelled`: special tokens and what it makes of them; the parser is told of them.
    """

    def __init__(
        self, parser: AnswerParser, detokenizer: Detokenizer, spelled: Mapping[int, str]
    ) -> None:
        self._spelled = spelled
        self._parser = parser
        self._detokenizer = detokenizer
        self._starts = array("I")  # of each token in the text, in characters
        self._length = 0

    def take(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens, before the parser takes their text."""
        if not (self._parser.may_think or self._parser.knows_marks):
            return
        for token_id in token_ids:
            self._starts.append(self._length)
            self._length += len(self._detokenizer.push((token_id,)))
            name = self._spelled.get(token_id)
            if name is not None:
                self._parser.note_mark(self._length - len(name), name)

    @property
    def count(self) -> int:
        """Of all tokens taken, once the parser has finished."""
        return sum(self._between(first, end) for first, end in self._parser.reasoning)

    def _between(self, first: int, end: int) -> int:
        """Return how many tokens have any text between two places."""
        if first == end:
            return 0
        begin = bisect_left(self._starts, first)
        if begin == len(self._starts) or self._starts[begin] > first:
            begin -= 1  # a token that is a mark, and the first of the reasoning
        return bisect_left(self._starts, end) - begin
