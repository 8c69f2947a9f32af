"""The tile list of prefill attention: every query token once, longest first, room checked."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.cuda.attention_prefill import MAX_TILES, PrefillVariant
from kernels.cuda.attention_tiles import NO_ROW, TileListFullError, most_tiles, plan_tiles
from kernels.cuda.attention_variant import HEAD_SIZES, MOST_GROUPS
from kernels.cuda.errors import UnsupportedVariantError


def test_the_tile_with_the_most_keys_comes_first_and_spare_entries_last():
    # Rows of the drawing in the module: 12, 2, none and 16 query tokens, all but one whole prompts.
    tiles = plan_tiles([12, 2, 0, 16], [12, 2, 40, 16], 8, capacity=8)

    assert tiles.num_tiles == 5
    assert tiles.rows.tolist() == [3, 0, 0, 3, 1, NO_ROW, NO_ROW, NO_ROW]
    assert tiles.tokens.tolist() == [8, 8, 0, 0, 0, 0, 0, 0]
    assert tiles.rows.dtype == tiles.tokens.dtype == np.int32


def test_a_cached_prefix_counts_for_the_length_of_a_tile():
    tiles = plan_tiles([8, 8], [8, 100], 8)

    assert tiles.rows.tolist() == [1, 0]


def test_every_query_token_is_in_exactly_one_tile_and_none_is_longer_than_the_one_before():
    rng = np.random.default_rng(0)
    query_lens = rng.integers(0, 60, 50)
    seq_lens = query_lens + rng.integers(0, 100, 50)

    tiles = plan_tiles(query_lens, seq_lens, 7)

    covered = [
        (row, token)
        for row, first in zip(tiles.rows, tiles.tokens, strict=True)
        for token in range(first, min(first + 7, query_lens[row]))
    ]
    expected = [(row, token) for row in range(50) for token in range(query_lens[row])]
    assert sorted(covered) == expected
    last = np.minimum(tiles.tokens + 7, query_lens[tiles.rows])
    num_keys = (seq_lens - query_lens)[tiles.rows] + last
    assert (np.diff(num_keys) <= 0).all()


def test_a_batch_without_query_tokens_has_no_tiles():
    assert plan_tiles([], [], 32).num_tiles == 0
    assert plan_tiles([0, 0], [5, 0], 32, capacity=2).rows.tolist() == [NO_ROW, NO_ROW]


def test_a_list_without_room_is_refused_by_name():
    with pytest.raises(TileListFullError, match="needs 3 tiles, the list has room for 2"):
        plan_tiles([17], [17], 8, capacity=2)


@pytest.mark.parametrize(("query_lens", "given"), [([3, 9], 9), ([3, -1], -1)])
def test_more_query_tokens_than_tokens_are_refused_by_name(query_lens, given):
    message = rf"query_lens\[1\] must be between 0 and seq_lens\[1\] = 8, got {given}"
    with pytest.raises(ValueError, match=message):
        plan_tiles(query_lens, [8, 8], 4)


def test_the_most_tiles_are_enough_for_any_batch_and_needed_by_one():
    rng = np.random.default_rng(1)
    for _ in range(200):
        query_lens = rng.integers(0, 40, rng.integers(1, 9))
        bound = most_tiles(int(query_lens.sum()), len(query_lens), 8)
        assert plan_tiles(query_lens, query_lens, 8).num_tiles <= bound
    assert plan_tiles([1, 1, 9], [1, 1, 9], 8).num_tiles == most_tiles(11, 3, 8)


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_a_tile_has_all_the_tokens_whose_heads_find_places_in_a_block(head_size):
    in_float32 = 12 if head_size == 256 else 16
    for dtype, places in (("bfloat16", 128), ("float32", in_float32)):
        for group in range(1, MOST_GROUPS[head_size] + 1):
            tokens = PrefillVariant(dtype, head_size, group, 16).tile_tokens
            assert tokens * group <= places < (tokens + 1) * group


def test_a_grid_the_device_cannot_hold_is_refused_by_name():
    variant = PrefillVariant("bfloat16", 128, 4, 16)

    assert variant.grid(8, MAX_TILES) == (8, MAX_TILES, 1)
    with pytest.raises(UnsupportedVariantError, match="num_tiles must be at most 65535, got 65536"):
        variant.grid(8, MAX_TILES + 1)
