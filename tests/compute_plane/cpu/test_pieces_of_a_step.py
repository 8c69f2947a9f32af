from __future__ import annotations

import numpy as np

from compute_plane.cpu.pieces import Piece, SortedTokens, sort_tokens
from compute_plane.executor.token_layout import TokenLayout


def layout_of(spans: list[tuple[int, int]]) -> TokenLayout:
    """Rows of positions start to end; token ids and slots tell all tokens apart."""
    positions = np.concatenate([np.arange(start, end) for start, end in spans]).astype(np.int32)
    lens = [end - start for start, end in spans]
    count = len(positions)
    return TokenLayout(
        token_ids=np.arange(100, 100 + count, dtype=np.int32),
        positions=positions,
        token_rows=np.repeat(np.arange(len(spans), dtype=np.int32), lens),
        kv_slots=np.arange(count, dtype=np.int64),
        block_tables=np.zeros((len(spans), 1), dtype=np.int32),
        row_ends=np.cumsum(lens, dtype=np.int64),
    )


def prompt_lens(*lens: int) -> np.ndarray:
    return np.array(lens, dtype=np.int32)


def pieces_of(tokens: SortedTokens, max_tokens: int) -> list[tuple[int, int, bool]]:
    return [(p.first, p.end, p.is_prompt) for p in tokens.pieces(max_tokens)]


def test_tokens_that_are_computed_alike_are_cut_where_the_buffers_end():
    tokens = sort_tokens(layout_of([(0, 5), (3, 8)]), None)
    assert pieces_of(tokens, 4) == [(0, 4, False), (4, 8, False), (8, 10, False)]
    assert tokens.order is None


def test_generated_tokens_before_a_prompt_stay_where_they_are():
    layout = layout_of([(7, 8), (9, 10), (0, 4)])
    tokens = sort_tokens(layout, prompt_lens(7, 3, 4))
    assert tokens.layout is layout
    assert list(tokens.pieces(8)) == [Piece(0, 2, is_prompt=False), Piece(2, 6, is_prompt=True)]
    assert tokens.places(np.array([1, 5])).tolist() == [1, 5]


def test_a_row_that_crosses_the_end_of_its_prompt_is_in_both_kinds_of_pieces():
    tokens = sort_tokens(layout_of([(0, 3), (0, 4), (5, 6)]), prompt_lens(3, 2, 5))
    layout = tokens.layout
    assert layout.token_rows.tolist() == [1, 1, 2, 0, 0, 0, 1, 1]
    assert layout.positions.tolist() == [2, 3, 5, 0, 1, 2, 0, 1]
    assert layout.token_ids.tolist() == [105, 106, 107, 100, 101, 102, 103, 104]
    assert layout.kv_slots.tolist() == [5, 6, 7, 0, 1, 2, 3, 4]
    assert pieces_of(tokens, 2) == [
        (0, 2, False), (2, 3, False), (3, 5, True), (5, 7, True), (7, 8, True),
    ]  # fmt: skip
    last_of_rows = layout.row_ends - 1
    assert tokens.places(last_of_rows).tolist() == [5, 1, 2]
