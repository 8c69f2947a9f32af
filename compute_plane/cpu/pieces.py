"""How a step's tokens are cut into pieces, each of one kind: generated tokens, or those of prompts.

    batch     │ row 0: g │ row 1: p p p │ row 2: p p g g │        as sent, rows one after the other
    pieces    │ g  g g │ p p p  p p │                             generated tokens first

Where both kinds are computed alike there is one kind. A row may lie in several pieces: its tokens
keep their order, and all keys and values of a layer are written before any piece reads them. Where
tokens leave a state to those behind them, pieces of prompts go first: a row's prompt comes before
what was generated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Final

import numpy as np

from compute_plane.executor.interface import Int32Array
from compute_plane.executor.token_layout import Int64Array, TokenLayout

PIECE_TOKENS: Final = 512
"""Tokens that go through a layer together: their activations stay in the second-level cache."""


class PieceKind(IntEnum):
    """Which records a piece of a step goes through."""

    GENERATED = 0
    PROMPT = 1
    ADAPTED = 2
    """Of generated tokens of which some have an adapter."""
    ADAPTED_PROMPT = 3

    @classmethod
    def of(cls, *, is_prompt: bool, is_adapted: bool) -> PieceKind:
        """Return the kind of a piece."""
        return cls(is_prompt + 2 * is_adapted)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `first` to `end` of a sorted step."""

    first: int
    end: int
    is_prompt: bool


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """A step's tokens, the generated ones first.

    `layout`: the tokens in that order; its `row_ends` still count tokens as sent. `num_generated`:
    how many come before those of prompts. `order` [T]: each token's number as sent, None where
    nothing moved.
    """

    layout: TokenLayout
    num_generated: int
    order: Int64Array | None

    def places(self, tokens: Int64Array) -> Int64Array:
        """Return where tokens, numbered as sent, are now."""
        if self.order is None:
            return tokens
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(places))
        return places[tokens]

    def pieces(self, max_tokens: int, *, prompts_first: bool = False) -> Iterator[Piece]:
        """Yield pieces of at most `max_tokens` tokens of one kind.

        `prompts_first`: then a row's tokens go by in the order of their positions.
        """
        num_tokens = len(self.layout.token_ids)
        kinds = ((0, self.num_generated, False), (self.num_generated, num_tokens, True))
        for start, stop, is_prompt in reversed(kinds) if prompts_first else kinds:
            for first in range(start, stop, max_tokens):
                yield Piece(first, min(first + max_tokens, stop), is_prompt)


def sort_tokens(layout: TokenLayout, prompt_lens: Int32Array | None) -> SortedTokens:
    """Return the tokens of a step, those at positions below their row's `prompt_lens` [S] last.

    None: all tokens are computed alike.
    """
    if prompt_lens is None:
        return SortedTokens(layout, len(layout.token_ids), None)
    is_prompt = layout.positions < prompt_lens[layout.token_rows]
    num_generated = len(is_prompt) - int(np.count_nonzero(is_prompt))
    if not is_prompt[:num_generated].any():
        return SortedTokens(layout, num_generated, None)
    order = np.argsort(is_prompt, kind="stable")
    moved = replace(
        layout,
        token_ids=layout.token_ids[order],
        positions=layout.positions[order],
        token_rows=layout.token_rows[order],
        kv_slots=layout.kv_slots[order],
    )
    return SortedTokens(moved, num_generated, order)
