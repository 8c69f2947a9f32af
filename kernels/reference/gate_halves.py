"""Where the gates of rows lie, and what they gate."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


def gate_and_up(gate_up: Array, turn: int | None = None) -> tuple[Array, Array]:
    """Return both, [T, F] each. `gate_up`: [T, 2·F]: F gate values, then F up values of each token.

    With a `turn`, so many of each one after the other.
    """
    num_tokens, both = gate_up.shape
    num_features = both // 2
    width = turn or num_features
    halves = gate_up.reshape(num_tokens, num_features // width, 2, width)
    gate, up = (halves[:, :, which].reshape(num_tokens, num_features) for which in (0, 1))
    return gate, up
