"""The multipliers of Granite models, as what is computed anyway.

A Granite model multiplies the rows of its embedding by e, what attention and MLP add to the hidden
states by r, and its scores by a instead of 1/√D, and divides its logits by l. Hidden states that
are 1/r of the model's have everything added to them as it is, and RMSNorm makes the same of them if
its epsilon is 1/r² of the model's. So the embedding is multiplied by e/r, and nothing else differs
within a layer; a is in the cosines and sines, 1/l in the weights of the last norm.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.spec import ModelSpec

LEAST: Final = 1e-4
MOST: Final = 1e4
"""Of a multiplier; published ones are 0.0078 to 78."""


@dataclass(frozen=True, slots=True)
class Multipliers:
    """What a model multiplies by.

    `embedding`: its rows. `residual`: what attention and MLP add. `attention`: scores; None: as
    usual. `logits`: what logits are divided by.
    """

    embedding: float = 1.0
    residual: float = 1.0
    attention: float | None = None
    logits: float = 1.0


def with_multipliers(path: Path, spec: ModelSpec, of: Multipliers) -> ModelSpec:
    """Return the spec of a model with these multipliers; `spec`: the same without them.

    Raises ModelFileError for one that is out of bounds.
    """
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if value is not None and not LEAST <= value <= MOST:
            raise ModelFileError(
                path, f"the multiplier of {field.name} must be {LEAST:g} to {MOST:g}, got {value}"
            )
    return dataclasses.replace(
        spec,
        embedding_scale=of.embedding / of.residual,
        score_scale=of.attention,
        logits_scale=1 / of.logits,
        rms_norm_eps=spec.rms_norm_eps / of.residual**2,
    )
