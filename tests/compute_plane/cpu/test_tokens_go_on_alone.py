"""Tokens whose output is wanted go through the last layers alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu.late_tokens import late_tokens
from compute_plane.cpu.pieces import PIECE_TOKENS, Piece, PieceKind, SortedTokens
from compute_plane.cpu.step_parts import Parts
from compute_plane.executor.token_layout import TokenLayout
from compute_plane.model.late_layers import first_late_layer
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_delta_net,
    with_gemma4,
    with_single_layers,
    with_states_beside,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights

SPEC = tiny_spec(quantisable=True)


def sorted_tokens(count: int, num_generated: int) -> SortedTokens:
    numbers = np.arange(count, dtype=np.int32)
    layout = TokenLayout(
        token_ids=numbers + 100,
        positions=numbers + 200,
        token_rows=numbers // 3,
        kv_slots=np.arange(count) + 300,
        block_tables=np.zeros((count, 1), np.int32),
        row_ends=np.arange(3, count + 3, 3),
    )
    return SortedTokens(layout, num_generated, None)


def test_they_are_copies_behind_all_others_and_keep_their_order_and_their_kind() -> None:
    wanted, embedded = np.array([7, 2]), np.array([9, 2])
    late = late_tokens(sorted_tokens(12, 5), wanted, embedded)
    assert late.taken.tolist() == [2, 7, 9]
    assert late.tokens.layout.token_ids.tolist() == [102, 107, 109]
    assert late.tokens.layout.positions.tolist() == [202, 207, 209]
    assert late.tokens.layout.token_rows.tolist() == [0, 2, 3]
    assert late.places(wanted).tolist() == [13, 12]
    assert late.places(embedded).tolist() == [14, 12]
    assert late.pieces() == [Piece(0, 1, False), Piece(1, 3, True)]


def test_none_are_left_where_all_are_wanted_and_no_piece_where_none_is() -> None:
    tokens = sorted_tokens(6, 6)
    assert late_tokens(tokens, np.arange(6), np.zeros(0, np.int64)) is None
    none = late_tokens(tokens, np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert none.pieces() == []


def test_many_of_them_are_cut_as_others_are() -> None:
    tokens = sorted_tokens(2 * PIECE_TOKENS, 0)
    late = late_tokens(tokens, np.arange(1, 2 * PIECE_TOKENS))
    assert [piece.end - piece.first for piece in late.pieces()] == [PIECE_TOKENS, PIECE_TOKENS - 1]


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (SPEC, 1),
        (with_gemma4(SPEC), 2),  # the last two read keys of the second and third
        (with_delta_net(replace(SPEC, num_layers=3)), 2),
        (with_states_beside(SPEC), 1),  # states are written with keys
        (with_single_layers(SPEC), 4),  # an MLP behind the last state
        (with_single_layers(SPEC, "M-*M"), None),
    ],
    ids=[
        "llama",
        "shared keys",
        "attention behind states",
        "both",
        "an MLP behind states",
        "a state last",
    ],
)
def test_they_go_on_alone_once_nothing_is_left_that_later_tokens_read(spec, first) -> None:
    assert first_late_layer(spec, 0) == first


def test_layers_that_run_elsewhere_are_not_counted() -> None:
    assert first_late_layer(with_gemma4(SPEC), 1) == 1
    assert first_late_layer(with_gemma4(SPEC), 3) is None


def test_nothing_of_the_last_layers_is_walked_where_no_output_is_wanted() -> None:
    spec = with_gemma4(SPEC)
    with tiny_executor(spec, tiny_weights(spec), pool_for(spec, 8, 16)) as executor:
        entries = executor._all_entries(Parts((PieceKind.GENERATED,), (), 0))
        whole = executor._all_entries(Parts((PieceKind.GENERATED,), None, 0))
        layers = executor._model.layers
    walked = {record for record, _ in entries}
    assert not walked.intersection(layers[2].read)
    assert not walked.intersection(r for layer in layers[3:] for r in (*layer.write, *layer.read))
    assert walked.issuperset((*layers[2].write, *layers[1].read))
    assert len(whole) - len(entries) == len(layers[2].read) + sum(
        len(layer.write) + len(layer.read) for layer in layers[3:]
    )
