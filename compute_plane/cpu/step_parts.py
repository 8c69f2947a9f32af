"""What a step is made of: pieces, each of one kind, and groups of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from compute_plane.cpu.pieces import PieceKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cpu.pieces import Piece
    from compute_plane.cpu.step_headers import PieceArrays


class Parts(NamedTuple):
    """What a step is made of: which kinds its pieces are, and groups of logits.

    `late`: the same of pieces of tokens that go on alone; None: all do.
    """

    kinds: tuple[PieceKind, ...]
    late: tuple[PieceKind, ...] | None
    num_groups: int = 0

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return len(self.kinds) + len(self.late or ())


def kinds_of(pieces: Sequence[Piece], arrays: Sequence[PieceArrays]) -> tuple[PieceKind, ...]:
    """Return the kinds of some pieces."""
    return tuple(
        PieceKind.of(is_prompt=piece.is_prompt, is_adapted=len(of_piece.adapter_runs) > 0)
        for piece, of_piece in zip(pieces, arrays, strict=True)
    )
