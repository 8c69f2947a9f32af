"""Which compute plane gets a request: the one that has computed most of its prompt already.

What a plane has in its prefix cache only its own engine thread knows. Here each plane has a trace
instead: what was sent there of late, in chunks of tokens. It may be wrong about what was evicted;
it steers, and nothing else depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

CHUNK_TOKENS = 32
"""Beginnings of prompts are compared this many tokens at a time, whatever the block sizes."""

MAX_CHUNKS = 256
"""Looked at of a prompt: those after them hardly change where it goes, and cost as much."""

TOKENS_PER_REQUEST = 64
"""A plane with one request more than another must have computed this much more of the prompt.

Computing a prompt is an order of magnitude faster, by the token, than generating; a plane with many
requests gives each of them fewer tokens a second.
"""

MOST_AHEAD = 8
FACTOR_AHEAD = 1.5
"""A plane with more requests than the least busy one, by so many and so many times, gets none.

Else all with one long beginning would go to the plane that had it first, and the others would never
have it: no prefix is worth a plane that stands still.
"""


def chunk_hashes(tokens: Sequence[int], salt: str) -> list[int]:
    """Return a hash for each beginning of the prompt that is a whole number of chunks.

    As in the prefix cache, the last token does not count: it is always computed.
    """
    num_chunks = min((len(tokens) - 1) // CHUNK_TOKENS, MAX_CHUNKS)
    hashes: list[int] = []
    before = hash(salt)  # salted itself, so that nobody can choose prompts that collide
    for first in range(0, num_chunks * CHUNK_TOKENS, CHUNK_TOKENS):
        before = hash((before, *tokens[first : first + CHUNK_TOKENS]))
        hashes.append(before)
    return hashes


class PrefixTrace:
    """The chunks sent to one plane of late, `max_chunks` of them at most."""

    def __init__(self, max_chunks: int) -> None:
        self._max_chunks = max_chunks
        self._chunks: OrderedDict[int, None] = OrderedDict()  # longest ago first

    def __len__(self) -> int:
        return len(self._chunks)

    def num_cached_tokens(self, hashes: Iterable[int]) -> int:
        """Return how many tokens of a prompt with these chunks were sent before."""
        return CHUNK_TOKENS * sum(1 for _ in takewhile(self._chunks.__contains__, hashes))

    def note(self, hashes: Sequence[int]) -> None:
        """Note that a prompt is sent; the beginning of one is forgotten after its end."""
        chunks = self._chunks
        for chunk in reversed(hashes):
            chunks[chunk] = None
            chunks.move_to_end(chunk)
        while len(chunks) > self._max_chunks:
            chunks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the plane has."""
        self._chunks.clear()


class Candidate(NamedTuple):
    """A plane that could take a request. `load`: samples and beams that are there already."""

    num_cached_tokens: int
    load: int

    @property
    def score(self) -> int:
        """What speaks for it, in tokens."""
        return self.num_cached_tokens - TOKENS_PER_REQUEST * self.load


def choose(candidates: Sequence[Candidate]) -> int:
    """Return the index of the best of those that are about as busy as the least busy one.

    The least loaded of equals, the first of those.
    """
    least = min(candidate.load for candidate in candidates)
    most = max(least + MOST_AHEAD, FACTOR_AHEAD * least)
    return max(
        (index for index, candidate in enumerate(candidates) if candidate.load <= most),
        key=lambda index: (candidates[index].score, -candidates[index].load, -index),
    )
