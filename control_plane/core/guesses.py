"""What a draft model of the compute plane guesses behind a sequence, until it is sent as drafts."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.draft_pause import DraftPause


class Guesses:
    """Of one sequence. `output`: its own list of tokens, which grows.

    Guesses of which none was right are followed by a pause.
    """

    __slots__ = ("_end", "_output", "_pause", "_tokens")

    def __init__(self, output: Sequence[int]) -> None:
        self._output = output
        self._tokens: list[int] = []
        self._end = 0
        self._pause = DraftPause()

    @property
    def is_pausing(self) -> bool:
        """Whether none are wanted for now."""
        return self._pause.lasts(len(self._output))

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
        self._pause.note(num_right, len(self._output))
