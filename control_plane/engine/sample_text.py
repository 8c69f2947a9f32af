"""The text of one sample: tokens in; text, and the tokens it comes from, out.

This is done as tokens arrive and not when somebody reads: a stop string ends the sample, and must
be found however slow the reader is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from control_plane.core.batch import TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.text.answers.text_form import PLAIN, FirstCall, TextForm
from control_plane.text.detokenizer import make_detokenizer
from control_plane.text.stop_strings import StopMatcher
from control_plane.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """The next piece of a sample. `logprobs`: one for each token, or none."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] = ()


NOTHING = TextPiece("", ())


class _Held(NamedTuple):
    """A token not given yet, and where its text begins and ends, in characters of the sample."""

    first: int
    end: int
    token_id: int
    logprobs: TokenLogprobs | None


class SampleText:
    """Turns the tokens of one sample into text, and finds the stop string that ends it.

    Text and tokens are given together: a token is held back while any of its text may belong to a
    stop string, so what was given is at any moment the text of the tokens given (but for a
    character that is not whole). Once a stop string is found (`matched_stop`, `has_ended`) nothing
    more is taken, and the tokens that have no part in the text before it are not given.

    `num_tokens`: those given, and those it was primed with, the text of which is `primed_text`.
    A text may also be whole before that (`form.make_end`): its last token is the one with which
    it is. `ended_itself`: it has ended by what it says, and not because no more tokens came.
    """

    __slots__ = (
        "_certain",
        "_certain_from",
        "_detokenizer",
        "_end",
        "_given_to",
        "_held",
        "_matcher",
        "_num_held_open",
        "_pushed_to",
        "ended_itself",
        "has_ended",
        "matched_stop",
        "num_tokens",
        "primed_text",
    )

    def __init__(
        self, tokenizer: Tokenizer, params: GenerationParams, form: TextForm = PLAIN
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, form.spelled)
        self._end = None if form.make_end is None else form.make_end()
        self._matcher: StopMatcher | None = None
        if params.stop:
            self._matcher = StopMatcher(params.stop, include_stop=params.include_stop)
        self._num_held_open = params.min_tokens  # tokens to come that no stop string may end
        self._held: deque[_Held] = deque()
        # Places in the sample's text, in characters: what the tokens say reaches to the first, what
        # was given to the second; the matcher has let go of `certain`, which begins at the third.
        self._pushed_to = self._given_to = self._certain_from = 0
        self._certain = ""
        self.num_tokens = 0
        self.primed_text = ""
        self.matched_stop: str | int | None = None
        self.has_ended = self.ended_itself = False

    def prime(self, token_ids: Sequence[int]) -> None:
        """Take the first tokens, which the reader has with their text."""
        # One by one, as they came when the reader got them.
        texts = [self.push((token_id,)).text for token_id in token_ids]
        if self._matcher is not None and not self.has_ended:
            texts += (self._certain, self._matcher.held)
        self.primed_text = "".join(texts)
        self._held.clear()
        self._given_to = self._pushed_to
        self.num_tokens = len(token_ids)

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> TextPiece:
        """Take the next tokens; the piece that is certain now. Nothing once it has ended."""
        if self.has_ended:
            return NOTHING
        if self._matcher is None:
            if self._end is not None:
                return self._push_to(self._end, token_ids, logprobs)
            self.num_tokens += len(token_ids)
            return TextPiece(self._detokenizer.push(token_ids), token_ids, logprobs)
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push((token_id,))
            first = self._pushed_to
            self._match(self._matcher, text)
            self._num_held_open -= self._num_held_open > 0
            if self._end is not None and not self.has_ended and self._end.push(text, token_id):
                self._certain += self._matcher.finish()
                self.has_ended = self.ended_itself = True
            entry = logprobs[index] if logprobs else None
            self._held.append(_Held(first, self._pushed_to, token_id, entry))
            if self.has_ended:
                break
        return self._take()

    def finish(self) -> TextPiece:
        """Return the rest: no more tokens come."""
        if self.has_ended:
            return NOTHING
        rest = self._detokenizer.finish()
        if self._matcher is not None:
            self._match(self._matcher, rest)
            if not self.has_ended:
                self._certain += self._matcher.finish()
        self.has_ended = True
        return TextPiece(rest, ()) if self._matcher is None else self._take()

    def _match(self, matcher: StopMatcher, text: str) -> None:
        """Pass text through the matcher."""
        self._pushed_to += len(text)
        certain, self.matched_stop = matcher.push(text, ends=self._num_held_open == 0)
        self._certain += certain
        self.has_ended = self.ended_itself = self.matched_stop is not None

    def _push_to(
        self, end: FirstCall, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> TextPiece:
        """Take tokens up to the one with which the text is whole."""
        texts: list[str] = []
        for token_id in token_ids:
            text = self._detokenizer.push((token_id,))
            texts.append(text)
            if text and end.push(text, token_id):
                self.has_ended = self.ended_itself = True
                break
        count = len(texts)
        self.num_tokens += count
        return TextPiece("".join(texts), token_ids[:count], logprobs[:count])

    def _take(self) -> TextPiece:
        """Return the tokens all of whose text is certain, with it; all there is at the end."""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        held, before = self._held, self._given_to
        certain_to = self._certain_from + len(self._certain)
        given_to = certain_to if self.has_ended else before
        while held:
            first, end, token_id, entry = held[0]
            if end > certain_to and not (self.has_ended and first < certain_to):
                break
            held.popleft()
            token_ids.append(token_id)
            if entry is not None:
                logprobs.append(entry)
            given_to = max(given_to, min(end, certain_to))
        if self.has_ended:
            held.clear()
        text = self._certain[max(0, before - self._certain_from) : given_to - self._certain_from]
        if given_to > before:
            self._certain = self._certain[given_to - self._certain_from :]
            self._certain_from = self._given_to = given_to
        self.num_tokens += len(token_ids)
        return TextPiece(text, token_ids, logprobs)
