"""Text up to the first of some markers, released as soon as it is certain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from control_plane.text.stop_strings import StopMatcher

SPACE: Final = " \t\r\n"


def in_front_of(pattern: re.Pattern[str], text: str, most: int) -> tuple[str, str]:
    """Part `text` where the pattern first matches, or behind `most` characters: both parts."""
    found = pattern.search(text)
    end = min(len(text) if found is None else found.start(), most)
    return text[:end], text[end:]


class Reached(NamedTuple):
    """`text` is certain now. `opening`: the marker, once it has come, and the space before it.

    `rest`: what stands behind the marker.
    """

    text: str
    opening: str = ""
    rest: str = ""


class Until:
    """Looks for the first of some markers. Space in front of a marker belongs to it.

    What is held back is space at the end, and what may be the beginning of a marker.
    """

    __slots__ = ("_markers", "_matcher", "_space")

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = markers
        self._matcher = StopMatcher(markers)
        self._space: list[str] = []  # in pieces: a model that is lost writes nothing else

    def push(self, text: str) -> Reached:
        """Take the next piece. Behind a marker it begins anew."""
        known = self._matcher.held + text
        released, marker = self._matcher.push(text)
        said = released.rstrip(SPACE)
        space = released[len(said) :]
        if said:
            said = self._take_space() + said
        self._space.append(space)
        if marker is None:
            return Reached(said)
        opening = self._take_space() + marker
        self._matcher = StopMatcher(self._markers)
        return Reached(said, opening, known[len(released) + len(marker) :])

    def finish(self) -> str:
        """Return what was held back: there is no marker any more."""
        return self._take_space() + self._matcher.finish()

    def _take_space(self) -> str:
        space = "".join(self._space)
        self._space.clear()
        return space
