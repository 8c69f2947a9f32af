"""What a Gemma 2 or 3 is beside other decoders, as its GGUF files have it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Final

from compute_plane.model.caps import LOGITS_CAP, OF_GEMMA2, SCORES_CAP, checked_cap
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of

LOCAL_BASE: Final = "rope.freq_base_swa"
LOCAL_THETA: Final = 10000.0
"""What a file means that does not say it."""
GEMMA2: Final = "gemma2"
LAYERS_OF_27B: Final = {GEMMA2: 46, "gemma3": 62}
"""Of the models whose scores are multiplied by √(heads / hidden); their files do not say so."""


def with_gemma(
    path: Path, keys: GgufMetadata, prefix: str, spec: ModelSpec, local_layers: frozenset[int]
) -> ModelSpec:
    """Return the spec of a Gemma 2 or 3; `spec`: as other decoders', of its global layers.

    Rows of the embedding are multiplied by √hidden, and scores by 1/√D; these and logits have caps
    in Gemma 2. `local_layers`: those with windows, which have a base of their own and no scaling in
    Gemma 3. Raises ModelFileError. Numbers that no model has are left as they are: they are refused
    with the others.
    """
    if faults_of(spec):
        return spec
    attention = None
    if spec.num_layers == LAYERS_OF_27B[spec.architecture]:
        attention = math.sqrt(spec.num_heads / spec.hidden_size)
    multipliers = Multipliers(embedding=math.sqrt(spec.hidden_size), attention=attention)
    spec = with_multipliers(path, spec, multipliers)
    if spec.architecture == GEMMA2:
        return _with_caps(path, keys, prefix, spec)
    theta = keys.number(prefix + LOCAL_BASE)
    return dataclasses.replace(
        spec,
        local_rope_theta=LOCAL_THETA if theta is None else theta,
        layers_with_local_rope=local_layers,
    )


def _with_caps(path: Path, keys: GgufMetadata, prefix: str, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the caps that a file has; 0: none."""

    def cap(key: str) -> float | None:
        given = keys.number(prefix + key)
        if given is None:
            return OF_GEMMA2[key]
        return checked_cap(path, prefix + key, given or None)

    return dataclasses.replace(spec, scores_cap=cap(SCORES_CAP), logits_cap=cap(LOGITS_CAP))
