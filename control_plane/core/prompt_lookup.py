"""Drafts by prompt lookup: what followed the last tokens where they stood in the text before.

Texts repeat what they were given: names, code, the sentence that is quoted. A draft costs a row of
a step and is never wrong to make: the compute plane keeps what it would have sampled anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.draft_pause import DraftPause

_MOST_PLACES = 8
"""Places of the same tokens that are compared, the latest ones."""

_LONGEST_MATCH = 16
"""Tokens before a place that are compared: who agrees in more is right more often."""

_READ_AT_ONCE = 4096
"""Tokens taken in by a call, some 2 ms: the thread that reads a long prompt serves all others."""


class PromptLookup:
    """What one sequence has said so far, and where.

    `prompt`, `output`: the sequence's own lists; the output grows, nothing else changes. `least`:
    tokens that must agree, at least 1. Each token is read once, for a dictionary entry; of a long
    prompt some by each call, and until all are nothing is found.

    Drafts of which none was right are followed by a pause.
    """

    __slots__ = ("_least", "_output", "_pause", "_places", "_prompt", "_tokens")

    def __init__(self, prompt: Sequence[int], output: Sequence[int], least: int) -> None:
        self._least = least
        self._output = output
        self._prompt = prompt
        self._tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}  # tokens → where what follows begins
        self._pause = DraftPause()
        self._read(prompt[:_READ_AT_ONCE])

    def find(self, most: int) -> list[int]:
        """Return the tokens that may come next, at most `most`; none where nothing is alike."""
        tokens, least = self._tokens, self._least
        num_prompt = len(self._prompt)
        if len(tokens) < num_prompt:
            self._read(self._prompt[len(tokens) : len(tokens) + _READ_AT_ONCE])
        if len(tokens) >= num_prompt:
            self._read(self._output[len(tokens) - num_prompt :])
        num_left = num_prompt + len(self._output) - len(tokens)
        if num_left or self._pause.lasts(len(tokens)) or len(tokens) < least:
            return []
        places = self._places.get(tuple(tokens[-least:]))
        if not places or most < 1:
            return []
        best = max(reversed(places), key=self._num_alike)  # the latest of equals
        # A text that repeats itself at once goes on with what is drafted here.
        found = tokens[best : best + most]
        while len(found) < most:
            found.append(found[best - len(tokens) + len(found)])
        return found

    def note(self, num_right: int) -> None:
        """Note how many drafts were right."""
        self._pause.note(num_right, len(self._tokens))

    def _read(self, new: Sequence[int]) -> None:
        """Take in tokens: each begins what follows those before it."""
        tokens, least, places = self._tokens, self._least, self._places
        for token in new:
            if len(tokens) >= least:
                of_these = places.setdefault(tuple(tokens[-least:]), [])
                of_these.append(len(tokens))
                if len(of_these) > _MOST_PLACES:
                    del of_these[0]
            tokens.append(token)

    def _num_alike(self, place: int) -> int:
        """Return how many tokens before a place are those at the end."""
        tokens, end = self._tokens, len(self._tokens)
        most = min(place, _LONGEST_MATCH)
        for count in range(self._least, most):
            if tokens[place - 1 - count] != tokens[end - 1 - count]:
                return count
        return most
