"""A draft model takes of its pool what is there of a text, and nothing that is of another one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.executor.draft_cache import DraftCache

SIZE = 4
TEXT = tuple(range(10, 20))  # two blocks and a half

Operation = tuple[list[int], list[int], int, int]


def ints(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class Cache:
    """A cache that is asked with sequences."""

    def __init__(self, num_blocks: int = 16, block_size: int = SIZE, longest: int = 64) -> None:
        self._cache = DraftCache(num_blocks, block_size, longest)

    def found(self, tokens: Sequence[int], table: Sequence[int]) -> int:
        return self._cache.num_computed(ints(tokens), ints(table))

    def note(self, tokens: Sequence[int], table: Sequence[int], first: int = 0) -> None:
        self._cache.note(ints(tokens), ints(table), first)


def changed(tokens: Sequence[int], place: int) -> list[int]:
    return [token + 100 * (at == place) for at, token in enumerate(tokens)]


def test_nothing_is_computed_at_first() -> None:
    for tokens in ([], [0], [0] * SIZE, [0] * (3 * SIZE - 1), TEXT):
        assert Cache().found(tokens, [0, 1, 2]) == 0
        assert Cache().found(tokens, [5, 0, 3]) == 0


@pytest.mark.parametrize("length", range(1, 3 * SIZE + 1))
def test_what_was_noted_is_found_again(length: int) -> None:
    cache, tokens = Cache(), list(range(length))
    cache.note(tokens, [7, 2, 5])
    assert cache.found(tokens, [7, 2, 5]) == length


def test_tokens_of_zeros_are_found_as_far_as_they_were_noted() -> None:
    cache = Cache()
    cache.note([0] * 6, [0, 1])
    assert cache.found([0] * 12, [0, 1, 2]) == 6
    # Not at another place of the text, though all tokens before it and in it are the same.
    assert cache.found([0] * 12, [0, 0, 0]) == SIZE
    assert cache.found([0] * 12, [1, 0, 2]) == 0


@pytest.mark.parametrize("noted", [1, 3, 4, 5, 8, 10])
@pytest.mark.parametrize("more", [1, 2, 3, 7])
def test_of_a_longer_text_the_part_is_found_that_was_noted(noted: int, more: int) -> None:
    cache, tokens = Cache(), list(range(noted + more))
    cache.note(tokens[:noted], [3, 1, 2, 4, 0])
    assert cache.found(tokens, [3, 1, 2, 4, 0]) == noted


@pytest.mark.parametrize("length", range(11))
def test_a_shorter_text_is_found_whole(length: int) -> None:
    cache = Cache()
    cache.note(TEXT, [3, 1, 2])
    assert cache.found(TEXT[:length], [3, 1, 2]) == length


@pytest.mark.parametrize("place", range(10))
def test_a_text_that_differs_in_the_middle_is_found_up_to_there(place: int) -> None:
    cache = Cache()
    cache.note(TEXT, [3, 1, 2])
    assert cache.found(changed(TEXT, place), [3, 1, 2]) == place
    assert cache.found(TEXT, [3, 1, 2]) == len(TEXT)


@pytest.mark.parametrize("place", range(SIZE))
def test_a_block_behind_another_prefix_is_not_valid(place: int) -> None:
    cache, other = Cache(), changed(TEXT, place)
    cache.note(TEXT, [0, 1, 2])
    cache.note(other[:SIZE], [3])  # whose next blocks would hold the same tokens
    assert cache.found(other, [3, 1, 2]) == SIZE
    cache.note(other[:SIZE], [0])
    assert cache.found(other, [0, 1, 2]) == SIZE
    assert cache.found(TEXT, [0, 1, 2]) == place


def test_a_half_filled_block_behind_another_prefix_is_not_valid() -> None:
    cache, other = Cache(), changed(TEXT, 0)
    cache.note(TEXT[:6], [0, 1])
    cache.note(other[:SIZE], [3])
    assert cache.found(other[:6], [3, 1]) == SIZE


def test_the_order_of_the_tokens_before_a_block_counts() -> None:
    cache, other = Cache(), [TEXT[1], TEXT[0], *TEXT[2:]]
    cache.note(TEXT, [0, 1, 2])
    cache.note(other[:SIZE], [3])
    assert cache.found(other, [3, 1, 2]) == SIZE


def test_blocks_that_another_sequence_took_are_not_found_any_more() -> None:
    cache, other = Cache(), list(range(50, 58))
    cache.note(TEXT, [0, 1, 2])
    cache.note(other, [4, 1])  # the middle one
    assert cache.found(TEXT, [0, 1, 2]) == SIZE
    assert cache.found(other, [4, 1]) == len(other)
    cache.note(TEXT, [0, 1, 2], first=SIZE)
    assert cache.found(TEXT, [0, 1, 2]) == len(TEXT)
    assert cache.found(other, [4, 1]) == SIZE


def test_of_a_block_that_another_sequence_took_in_part_nothing_is_left() -> None:
    cache = Cache()
    cache.note(TEXT, [0, 1, 2])
    cache.note([77], [0])
    assert cache.found(TEXT, [0, 1, 2]) == 0
    assert cache.found([77, *TEXT[1:]], [0, 1, 2]) == 1


def test_what_is_behind_a_block_that_was_lost_is_found_once_that_is_computed_again() -> None:
    cache = Cache()
    cache.note(TEXT, [0, 1, 2])
    cache.note([77], [0])
    cache.note(TEXT[:SIZE], [0])
    assert cache.found(TEXT, [0, 1, 2]) == len(TEXT)


def test_a_table_in_another_order_is_found_up_to_its_first_other_block() -> None:
    cache = Cache()
    cache.note(TEXT[:8], [0, 1])
    assert cache.found(TEXT[:8], [1, 0]) == 0
    assert cache.found(TEXT[:8], [0, 2]) == SIZE
    assert cache.found(TEXT[:8], [2, 1]) == 0
    cache.note(TEXT[:8], [1, 0])
    assert cache.found(TEXT[:8], [1, 0]) == 8
    assert cache.found(TEXT[:8], [0, 1]) == 0


def test_a_half_filled_block_is_filled_on() -> None:
    cache = Cache()
    cache.note(TEXT[:5], [0, 1])
    for length in range(6, 11):
        assert cache.found(TEXT, [0, 1, 2]) == length - 1
        cache.note(TEXT[:length], [0, 1, 2], first=length - 1)
    assert cache.found(TEXT, [0, 1, 2]) == len(TEXT)


def test_tokens_in_a_block_are_written_over_by_those_that_were_said_instead() -> None:
    cache = Cache()
    cache.note(TEXT[:8], [0, 1])  # of which two were guesses
    said = [*TEXT[:6], 90]
    assert cache.found(said, [0, 1]) == 6
    cache.note(said, [0, 1], first=6)
    assert cache.found([*said, 91], [0, 1]) == 7
    assert cache.found([*said, TEXT[7]], [0, 1]) == 7
    assert cache.found(TEXT[:8], [0, 1]) == 6


def test_noting_leaves_blocks_before_and_behind_as_they_are() -> None:
    cache = Cache()
    cache.note(TEXT, [0, 1, 2])
    cache.note(TEXT[:8], [0, 1], first=SIZE)
    assert cache.found(TEXT, [0, 1, 2]) == len(TEXT)
    cache.note([*TEXT[:SIZE], 70], [9, 1], first=SIZE)  # block 9 was said to be valid, and is not
    assert cache.found(TEXT, [9, 1, 2]) == 0


def test_two_sequences_share_the_blocks_they_begin_with() -> None:
    cache = Cache()
    one, two = [*TEXT[:8], 60, 61], [*TEXT[:8], 70, 71, 72]
    cache.note(one, [0, 1, 2])
    assert cache.found(two, [0, 1, 3]) == 8
    cache.note(two, [0, 1, 3], first=8)
    assert cache.found(one, [0, 1, 2]) == len(one)
    assert cache.found(two, [0, 1, 3]) == len(two)


@pytest.mark.parametrize(("num_blocks", "found"), [(0, 0), (1, SIZE), (2, 2 * SIZE), (3, 10)])
def test_of_a_table_shorter_than_the_text_no_more_is_found_than_it_holds(
    num_blocks: int, found: int
) -> None:
    cache = Cache()
    cache.note(TEXT, [0, 1, 2])
    assert cache.found(TEXT, [0, 1, 2][:num_blocks]) == found


def test_a_table_longer_than_the_text_does_no_harm() -> None:
    cache = Cache()
    cache.note(TEXT[:8], [0, 1, 2, 3])
    assert cache.found(TEXT[:8], [0, 1, 2, 3]) == 8
    assert cache.found(TEXT[:7], [0, 1, 2, 3]) == 7


class Remembered:
    """Says by the texts themselves what a cache says by hashes, and what is really in the pool."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._noted: dict[int, tuple[int, ...]] = {}
        self._computed: dict[tuple[int, int], tuple[int, ...]] = {}

    def found(self, tokens: list[int], table: list[int]) -> int:
        count = 0
        for place, block in enumerate(table):
            begin, noted = place * self._size, self._noted.get(block, ())
            if (len(noted) - 1) // self._size != place or noted[:begin] != tuple(tokens[:begin]):
                break
            while count < min(len(noted), len(tokens)) and noted[count] == tokens[count]:
                count += 1
            if count < begin + self._size:
                break
        return count

    def is_in_pool(self, tokens: list[int], table: list[int]) -> bool:
        """Whether the keys and values of all `tokens` are there: each is made of all before it."""
        return all(
            self._computed.get((table[at // self._size], at % self._size))
            == tuple(tokens[: at + 1])
            for at in range(len(tokens))
        )

    def note(self, tokens: list[int], table: list[int], first: int) -> None:
        for at in range(first, len(tokens)):
            self._computed[table[at // self._size], at % self._size] = tuple(tokens[: at + 1])
        for place in range(first // self._size, -(-len(tokens) // self._size)):
            self._noted[table[place]] = tuple(tokens[: (place + 1) * self._size])


@st.composite
def operations(draw: st.DrawFn) -> list[Operation]:
    """Draw texts with tables: of a few that share beginnings and blocks, or none is found again.

    With each: how many tokens are computed, and how many of those anew that are there.
    """
    root = draw(st.lists(st.integers(0, 2), min_size=12, max_size=12))
    ends = st.lists(st.integers(0, 2), min_size=12, max_size=12)
    forks = draw(st.lists(st.tuples(st.integers(0, 12), ends), max_size=3))
    texts = [root, *((root[:place] + end)[:12] for place, end in forks)]
    tables = draw(st.lists(st.permutations(range(6)), min_size=1, max_size=3))
    operation = st.builds(
        lambda text, length, table, num_blocks, count, again: (
            text[:length], table[:num_blocks], count, again,
        ),
        st.sampled_from(texts), st.integers(1, 12), st.sampled_from(tables), st.integers(1, 6),
        st.integers(1, 12), st.sampled_from((0, 0, 1, 2, 5)),
    )  # fmt: skip
    return draw(st.lists(operation, min_size=1, max_size=20))


@settings(max_examples=60)
@given(block_size=st.integers(1, 5), drawn=operations())
def test_whatever_is_noted_in_turn_exactly_that_is_found(
    block_size: int, drawn: list[Operation]
) -> None:
    cache, remembered = Cache(6, block_size, 12), Remembered(block_size)
    for tokens, table, count, again in drawn:
        found = cache.found(tokens, table)
        assert found == remembered.found(tokens, table)
        assert remembered.is_in_pool(tokens[:found], table)
        # As a draft model does: at least the last token is computed, to sample behind it.
        first = max(min(found, len(tokens) - 1) - again, 0)
        end = min(first + count, len(tokens), len(table) * block_size)
        if first < end:
            cache.note(tokens[:end], table, first)
            remembered.note(tokens[:end], table, first)
            assert cache.found(tokens[:end], table) == end
