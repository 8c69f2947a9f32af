"""What is likely to be said where a form leaves a choice.

Between what a model decides stand brackets, names of properties, quotes and white space. A form may
leave several of them possible, yet one model writes them in one way all the time. So the draft for
a place is what was said last where the same tokens might follow the same token.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np

MAX_CHOICE: Final = 2048
"""Tokens that may follow, at most, where a form leaves a choice; in a text nearly all may."""

MAX_PLACES: Final = 1024
"""Places that are remembered, the ones met first go; each takes some 200 bytes."""

_MOST_TRUST: Final = 3


class Habits:
    """What answers of one form have said at the places of the form. A wrong draft does no harm.

    Answers of several engines, and those that begin, learn at once from threads of their own: each
    touch of the places is one that no other thread can come into.
    """

    __slots__ = ("_places",)

    def __init__(self) -> None:
        # Place → token, trust in it.
        self._places: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()

    def draft(self, before: int, allowed_tokens: bytes) -> int | None:
        """Return what may well follow token `before`, of what may follow at all."""
        num_allowed = _count(allowed_tokens)
        if num_allowed == 1:
            bits = np.frombuffer(allowed_tokens, dtype=np.uint8)
            place = int(bits.argmax())
            return 8 * place + int(bits[place]).bit_length() - 1
        if num_allowed > MAX_CHOICE:
            return None
        token, trust = self._places.get((before, hash(allowed_tokens)), (0, 0))
        return token if trust > 0 else None

    def learn(self, before: int, allowed_tokens: bytes, token: int) -> None:
        """Take in what followed."""
        if not 1 < _count(allowed_tokens) <= MAX_CHOICE:
            return
        places, place = self._places, (before, hash(allowed_tokens))
        known, trust = places.get(place, (token, 0))
        if known == token:
            places[place] = token, min(trust + 1, _MOST_TRUST)
        else:
            places[place] = (known, trust - 1) if trust > 1 else (token, 0)
        if len(places) > MAX_PLACES:
            places.popitem(last=False)


def _count(allowed_tokens: bytes) -> int:
    """Return how many bits are set: a fifth of the time that an `int` of them takes."""
    return int(np.bitwise_count(np.frombuffer(allowed_tokens, dtype=np.uint8)).sum())
