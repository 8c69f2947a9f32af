"""What is likely to be said where a form leaves a choice.

Between what a model decides stand brackets, names of properties, quotes and white space. A form may
leave several of them possible, yet one model writes them in one way all the time. So the guess for
a place is what was said last where the same tokens might follow the same token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_CHOICE: Final = 2048
"""Tokens that may follow, at most, where a form leaves a choice; in a text nearly all may."""

MAX_PLACES: Final = 1024
"""Places that are remembered, the ones met first go; each takes some 200 bytes."""

_MOST_TRUST: Final = 3


class Habits:
    """What answers of one form have said at the places of the form. A wrong guess does no harm.

    Answers of several engines, and those that begin, learn at once from threads of their own: each
    touch of the places is one that no other thread can come into.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        # Place → token, trust in it.
        self._places: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def guess(self, before: int, allowed_tokens: bytes) -> int | None:
        """Return what may well follow token `before`, of what may follow at all."""
        bits = int.from_bytes(allowed_tokens, "little")
        num_allowed = bits.bit_count()
        if num_allowed == 1:
            return bits.bit_length() - 1
        if num_allowed > MAX_CHOICE:
            return None
        token, trust = self._places.get((before, hash(allowed_tokens)), (0, 0))
        return token if trust > 0 else None

    def learn(self, before: int, allowed_tokens: bytes, token: int) -> None:
        """Take in what followed."""
        num_allowed = int.from_bytes(allowed_tokens, "little").bit_count()
        if not 1 < num_allowed <= MAX_CHOICE:
            return
        places, place = self._places, (before, hash(allowed_tokens))
        known, trust = places.get(place, (token, 0))
        if known == token:
            places[place] = token, min(trust + 1, _MOST_TRUST)
        else:
            places[place] = (known, trust - 1) if trust > 1 else (token, 0)
        if len(places) > MAX_PLACES:
            places.popitem(last=False)
