"""What a draft model of the compute plane guesses behind a sequence, until it is sent as drafts."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.draft_pause import DraftPause

_MOST_VAIN = 8
"""Answers without a guess in a row that are followed by none but a pause: a long text is read in
parts, and a word that could be any is no reason."""


class Guesses:
    """Of one sequence. `output`: its own list of tokens, which grows.

    Guesses of which none was right are followed by a pause, and so are questions that had no
    answer: the text is none for the draft model, or nothing it knows is likely.
    """

    __slots__ = ("_end", "_num_vain", "_output", "_pause", "_tokens")

    def __init__(self, output: Sequence[int]) -> None:
        self._output = output
        self._tokens: list[int] = []
        self._end = 0
        self._pause = DraftPause()
        self._num_vain = 0

    @property
    def is_pausing(self) -> bool:
        """Whether none are wanted for now."""
        return self._pause.lasts(len(self._output))

    def keep(self, tokens: list[int]) -> None:
        """Keep what may follow the output as it is now."""
        self._tokens, self._end = tokens, len(self._output)
        self._num_vain = 0 if tokens else self._num_vain + 1
        if self._num_vain >= _MOST_VAIN:
            self._pause.note(0, self._end)

    def take(self, most: int) -> list[int]:
        """Return what may follow the output, at most `most`; once, and nothing in a pause."""
        is_of_now = self._end == len(self._output) and not self.is_pausing
        found = self._tokens[:most] if is_of_now else []
        self._tokens = []
        return found

    def note(self, num_right: int) -> None:
        """Note how many of those sent were right, before their tokens are appended."""
        self._pause.note(num_right, len(self._output))
