"""Tokens of a step that go through the last layers alone (`model_table.LateRecords`).

tokens of the step │ a b c d e f g h │           those of pieces, T of them
wanted             │     c         h │
buffers            │ a b c d e f g h │ c h       copies, behind all others
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from compute_plane.cpu.pieces import PIECE_TOKENS, Piece, SortedTokens
from compute_plane.executor.token_layout import Int64Array


@dataclass(frozen=True, slots=True)
class LateTokens:
    """`taken` [n]: which of the step's tokens they are, rising. `tokens`: they alone.

    `first`: where their rows begin in buffers that hold all tokens of a step.
    """

    taken: Int64Array
    tokens: SortedTokens
    first: int

    def places(self, places: Int64Array) -> Int64Array:
        """Return where tokens are that are among them, of which `places` says where they were."""
        return self.first + np.searchsorted(self.taken, places)

    def pieces(self) -> list[Piece]:
        """Return their pieces; `first` and `end` count among them."""
        return list(self.tokens.pieces(PIECE_TOKENS))


def late_tokens(tokens: SortedTokens, *wanted: Int64Array) -> LateTokens | None:
    """Return the tokens whose output is wanted; None if it is that of all.

    `wanted`: their places in `tokens`.
    """
    taken = np.unique(np.concatenate(wanted))
    layout, num_tokens = tokens.layout, len(tokens.layout.token_ids)
    if len(taken) == num_tokens:
        return None
    alone = replace(
        layout,
        token_ids=layout.token_ids[taken],
        positions=layout.positions[taken],
        token_rows=layout.token_rows[taken],
        kv_slots=layout.kv_slots[taken],
    )
    num_generated = int(np.searchsorted(taken, tokens.num_generated))
    return LateTokens(taken, SortedTokens(alone, num_generated, None), num_tokens)
