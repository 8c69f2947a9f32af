"""What a constrained sample may say next, as the scheduler sees it.

Who knows grammars stands behind these protocols (`control_plane.structured`). The scheduler tells a
constraint every token that it appends to the constraint's sample, when it appends it, until the
sample ends, and nothing else: so it always stands where the tokens of its sample end, whatever
befalls the sequence that computes them. Asked for drafts, it stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Draft(NamedTuple):
    """A token that is likely to come, and what may follow it: `allowed_tokens` of a constraint.

    It ends nothing: not only an end may follow.
    """

    token_id: int
    allowed_tokens: bytes


class Constraint(Protocol):
    """What one sample may say; used by one thread at a time."""

    @property
    def allowed_tokens(self) -> bytes:
        """A bit for each token that may come next, as `RowConstraint` of the wire has it.

        At least one is set; those of end tokens are where the text may end. Means nothing once it
        is complete or has an error.
        """
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing but an end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        ...

    @property
    def constrainer(self) -> Constrainer:
        """Who can advance it."""
        ...

    def draft(self, most: int) -> Sequence[Draft]:
        """Return what is likely to come, at most `most` tokens, each behind those before it."""
        ...


class Constrainer(Protocol):
    """Works on many constraints together."""

    def advance(self, taken: Sequence[tuple[Constraint, Sequence[int]]]) -> None:
        """Take in new tokens, at least one each, of which none but the last may end its text.

        Raises nothing: what goes wrong is the constraint's `error`.
        """
        ...
