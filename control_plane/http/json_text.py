"""JSON of answers, spelled a little at a time where it is much.

Python spells a value in one call, which nothing interrupts: a second for some ten megabytes, in
which no other client is served. So long lists are spelled as their members come, and an answer is
put together of what is spelled already.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

MEMBERS_AT_ONCE = 64
"""Of long lists: with 20 log-probabilities each they take 2 ms."""

# One for all: `json.dumps` would make one for every value.
_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
).encode

_PIECES_AT_ONCE = 512
_PIECE_BYTES = 128 << 10
"""What is written to a connection at a time, of a long answer."""


class Spelled:
    """A value that is spelled already, in pieces."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces


class SpelledList:
    """A list that is spelled as its members come."""

    __slots__ = ("_pieces",)

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def __bool__(self) -> bool:
        """Whether it has members."""
        return bool(self._pieces)

    def extend(self, members: list[Any]) -> None:
        """Append members."""
        if members:
            if self._pieces:
                self._pieces.append(b",")
            self._pieces.append(to_json(members)[1:-1])

    def add(self, other: SpelledList) -> None:
        """Append the members of another list."""
        if other._pieces:
            self._pieces += [b",", *other._pieces] if self._pieces else other._pieces

    def taken(self) -> Spelled:
        """Return this list, which has no members then."""
        spelled, self._pieces = self.joined(), []
        return spelled

    def joined(self, *others: SpelledList) -> Spelled:
        """Return this list and others behind it as one."""
        pieces = [b"["]
        for one in (self, *others):
            if one._pieces:
                if len(pieces) > 1:
                    pieces.append(b",")
                pieces += one._pieces
        pieces.append(b"]")
        return Spelled(pieces)


def to_json(value: Any) -> bytes:  # noqa: ANN401 - what JSON can spell
    """Spell as compact JSON in UTF-8."""
    return _encode(value).encode()


def pieces_of(value: Any) -> Iterator[bytes]:  # noqa: ANN401 - what JSON can spell, or `Spelled`
    """Spell a value that has `Spelled` ones in its objects and in their lists of objects."""
    if isinstance(value, Spelled):
        yield from value.pieces
    elif isinstance(value, dict) and value:
        before = b"{"
        for name, member in value.items():
            yield before + to_json(name) + b":"
            yield from pieces_of(member)
            before = b","
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        before = b"["
        for member in value:
            yield before
            yield from pieces_of(member)
            before = b","
        yield b"]"
    else:
        yield to_json(value)


async def spell(value: Any) -> list[bytes]:  # noqa: ANN401 - as in `pieces_of`
    """Spell a value, others' tasks between its pieces; in few pieces, one at least."""
    joined: list[bytes] = []
    pieces: list[bytes] = []
    size = 0
    for number, piece in enumerate(pieces_of(value), start=1):
        pieces.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            joined.append(b"".join(pieces))
            pieces, size = [], 0
        if number % _PIECES_AT_ONCE == 0:
            await asyncio.sleep(0)
    return [*joined, b"".join(pieces)]
