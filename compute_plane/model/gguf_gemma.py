"""What a Gemma 3 is beside other decoders, as its GGUF files have it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Final

from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of

LOCAL_BASE: Final = "rope.freq_base_swa"
LOCAL_THETA: Final = 10000.0
"""What a file means that does not say it."""
LAYERS_OF_27B: Final = 62
"""Of the one model whose scores are multiplied by √(heads / hidden); its files do not say so."""


def with_gemma(
    path: Path, keys: GgufMetadata, prefix: str, spec: ModelSpec, local_layers: frozenset[int]
) -> ModelSpec:
    """Return the spec of a Gemma 3; `spec`: as other decoders', of its global layers.

    Rows of the embedding are multiplied by √hidden, and scores by 1/√D. `local_layers`: those with
    windows, which have a base of their own and no scaling. Raises ModelFileError. Numbers that no
    model has are left as they are: they are refused with the others.
    """
    if faults_of(spec):
        return spec
    attention = None
    if spec.num_layers == LAYERS_OF_27B:
        attention = math.sqrt(spec.num_heads / spec.hidden_size)
    theta = keys.number(prefix + LOCAL_BASE)
    multipliers = Multipliers(embedding=math.sqrt(spec.hidden_size), attention=attention)
    return dataclasses.replace(
        with_multipliers(path, spec, multipliers),
        local_rope_theta=LOCAL_THETA if theta is None else theta,
        layers_with_local_rope=local_layers,
    )
