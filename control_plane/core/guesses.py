"""What a draft model of the compute plane guesses behind a sequence, until it is sent as drafts."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_PAUSE = 64
"""Tokens after which a text whose guesses were all wrong is guessed at again."""


class Guesses:
    """Of one sequence. `output`: its own list of tokens, which grows.

    Guesses of which none was right are followed by a pause, twice as long each time in a row.
    """

    __slots__ = ("_end", "_num_misses", "_output", "_resume_at", "_tokens")

    def __init__(self, output: Sequence[int]) -> None:
        self._output = output
        self._tokens: list[int] = []
        self._end = 0
        self._num_misses = 0
        self._resume_at = 0

    @property
    def is_pausing(self) -> bool:
        """Whether none are wanted for now."""
        return len(self._output) < self._resume_at

    def keep(self, tokens: list[int]) -> None:
        """Keep what may follow the output as it is now."""
        self._tokens, self._end = tokens, len(self._output)

    def take(self, most: int) -> list[int]:
        """Return what may follow the output, at most `most`; once, and nothing in a pause."""
        is_of_now = self._end == len(self._output) and not self.is_pausing
        found = self._tokens[:most] if is_of_now else []
        self._tokens = []
        return found

    def note(self, num_right: int) -> None:
        """Note how many of those sent were right, before their tokens are appended."""
        if num_right:
            self._num_misses = 0
            return
        self._num_misses += 1
        self._resume_at = len(self._output) + min(2**self._num_misses, _LONGEST_PAUSE)
