"""Low-rank adapters (LoRA): small changes to some of a model's matrices, under a name of their own.

    y = W · x + scale · up · (down · x)        W [N, K], down [r, K], up [N, r]

A model is loaded once and computes with any of its adapters, row by row (Hu et al., LoRA,
arXiv:2106.09685).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from compute_plane.model import layout
from compute_plane.model.tensor import Float32Array

ROLES: Final = (
    layout.QUERY,
    layout.KEY,
    layout.VALUE,
    layout.OUTPUT,
    layout.GATE,
    layout.UP,
    layout.DOWN,
)
"""The matrices of a layer that adapters may change: those of attention and of its MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """What an adapter adds to a matrix [N, K] of the model, its rows in the model's order.

    `down`: [r, K]; `up`: [N, r], with the scale in it. C-contiguous.
    """

    down: Float32Array
    up: Float32Array

    @property
    def rank(self) -> int:
        """How many numbers there are between the two."""
        return len(self.down)

    @property
    def num_parameters(self) -> int:
        """Of both."""
        return self.down.size + self.up.size


class AdapterFacts(NamedTuple):
    """What is said of an adapter. `rank`: the largest of its pairs; 0: it changes nothing.

    `sha256`: of its file, or of what tells a directory's apart, hex.
    """

    name: str
    rank: int
    num_parameters: int
    sha256: str


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter by its name. `pairs`: by the canonical name of the tensor (`layout`) they change.

    `sha256`: as in `AdapterFacts`.
    """

    name: str
    pairs: Mapping[str, LowRankPair]
    sha256: str = ""

    @property
    def facts(self) -> AdapterFacts:
        """What is said of it."""
        pairs = self.pairs.values()
        return AdapterFacts(
            self.name,
            max((pair.rank for pair in pairs), default=0),
            sum(pair.num_parameters for pair in pairs),
            self.sha256,
        )
