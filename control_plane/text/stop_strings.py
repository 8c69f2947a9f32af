"""Stop strings, found while the text comes in pieces, however it is cut.

Text that may be the beginning of a stop string is held back until it is one or cannot be: what was
returned is never taken back, and no part of a stop string is ever returned (unless it is asked
for). Which one is found does not depend on the pieces: the one that is complete first, and among
those complete at the same character the longest.

Each string is followed by its own automaton (Knuth, Morris, Pratt, "Fast Pattern Matching in
Strings", 1977): the work is linear in the text, whatever string and text are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class Released(NamedTuple):
    """Text that is certain now; `matched`: the stop string that ends it, nothing follows."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Looks for the first of some strings in one text; used by one task at a time.

    `stops`: not empty, nor any of them. `include_stop`: return the stop string itself too.
    """

    __slots__ = ("_followers", "_held", "_include_stop")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._followers = [_Follower(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""

    @property
    def held(self) -> str:
        """What is held back: it may be the beginning of a stop string."""
        return self._held

    def push(self, text: str, *, ends: bool = True) -> Released:
        """Take the next piece; what can be returned now. Not to be called after a match.

        `ends`: whether a stop string that is complete in it counts.
        """
        if not text:
            return Released("")
        found: tuple[int, int, str] | None = None
        for follower in self._followers:
            end = follower.advance(text, ends=ends)
            if end is not None:
                key = (end, -len(follower.stop), follower.stop)
                found = key if found is None else min(found, key)
        known = self._held + text
        if found is not None:
            end, minus_length, stop = found
            end += len(self._held)
            self._held = ""
            return Released(known[: end if self._include_stop else end + minus_length], stop)
        num_held = max(follower.num_matched for follower in self._followers)
        certain = len(known) - num_held
        self._held = known[certain:]
        return Released(known[:certain])

    def finish(self) -> str:
        """Return what was held back: the text is over, and it was no stop string."""
        held, self._held = self._held, ""
        return held


class _Follower:
    """Knows how many characters at the end of the text are the beginning of one string."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallbacks(stop)

    def advance(self, text: str, *, ends: bool) -> int | None:
        """Take the next characters; where in `text` the string is first complete, if it is.

        `ends`: else it goes on behind it.
        """
        stop, fallback, matched = self.stop, self._fallback, self.num_matched
        last, index, end = len(stop) - 1, 0, len(text)
        while index < end:
            if matched == 0:  # nearly always: leave the search for a beginning to `str`
                index = text.find(stop[0], index)
                if index < 0:
                    break
            character = text[index]
            while matched and stop[matched] != character:
                matched = fallback[matched - 1]
            if stop[matched] == character:
                if matched < last:
                    matched += 1
                elif ends:
                    return index + 1
                else:
                    matched = fallback[last]
            index += 1
        self.num_matched = matched
        return None


@lru_cache(maxsize=64)
def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return, for each prefix of a string, the length of the longest shorter one that ends it.

    Kept for the other samples of the same request: there may be 128, with sixteen strings each.
    """
    lengths = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = lengths[length - 1]
        if stop[index] == stop[length]:
            length += 1
        lengths[index] = length
    return tuple(lengths)
