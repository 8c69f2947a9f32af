"""What config.json says of a Granite with windows: by which base each layer turns, or by none."""

from __future__ import annotations

import dataclasses
from typing import Final

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import ModelSpec

BASES: Final = "layer_rope_theta"


def with_own_bases(config: JsonObject, spec: ModelSpec) -> ModelSpec:
    """Return the spec of a model whose layers may have bases of their own; 0: they do not turn.

    `spec`: as if all had one. Raises ModelFileError, UnsupportedModelError for more than two bases.
    """
    if config.raw(BASES) is None:
        return spec
    bases = config.numbers(BASES, spec.num_layers)
    if len(bases) != spec.num_layers:
        raise ModelFileError(
            config.path, f"{BASES} must be a number for each of {spec.num_layers} layers"
        )
    found = sorted({base for base in bases if base}, reverse=True)
    still = frozenset(layer for layer, base in enumerate(bases) if not base)
    spec = dataclasses.replace(spec, layers_without_rope=still)
    if not found:
        return spec
    if len(found) > 2 or (len(found) == 2 and spec.rope_scaling is not None):
        raise UnsupportedModelError(
            config.path, f"{BASES}: more than two bases, or two and scaling, are not supported"
        )
    spec = dataclasses.replace(spec, rope_theta=found[0])
    if len(found) == 1:
        return spec
    local = frozenset(layer for layer, base in enumerate(bases) if base == found[1])
    return dataclasses.replace(spec, local_rope_theta=found[1], layers_with_local_rope=local)
