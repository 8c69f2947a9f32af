"""When a text is drafted for again after drafts of which none was right."""

from __future__ import annotations

_LONGEST_PAUSE = 64
"""Tokens after which a text whose drafts are never right is tried again."""


class DraftPause:
    """Of one sequence: a pause behind each miss, twice as long each time in a row."""

    __slots__ = ("_num_misses", "_resume_at")

    def __init__(self) -> None:
        self._num_misses = 0
        self._resume_at = 0

    def lasts(self, num_tokens: int) -> bool:
        """Whether a text that is so long now is not to be drafted for."""
        return num_tokens < self._resume_at

    def note(self, num_right: int, num_tokens: int) -> None:
        """Note how many drafts were right, made for a text that was so long."""
        if num_right:
            self._num_misses = 0
            return
        self._num_misses += 1
        self._resume_at = num_tokens + min(2**self._num_misses, _LONGEST_PAUSE)
