"""The multipliers that a config.json has beside the weights."""

from __future__ import annotations

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.falcon_multipliers import with_falcon_multipliers
from compute_plane.model.hf_falcon_h1 import falcon_multipliers
from compute_plane.model.hf_model_types import FALCON_H1
from compute_plane.model.json_file import JsonObject
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.spec import ModelSpec


def with_config_multipliers(config: JsonObject, model_type: str, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the multipliers that its models have; `spec`: without any.

    Raises ModelFileError.
    """
    if model_type == FALCON_H1:
        return with_falcon_multipliers(config.path, spec, falcon_multipliers(config))
    if not ARCHITECTURES[spec.architecture].has_multipliers:
        return spec
    of_granite = Multipliers(
        embedding=config.number("embedding_multiplier", 1.0),
        residual=config.number("residual_multiplier", 1.0),
        attention=config.number("attention_multiplier", 1.0),
        logits=config.number("logits_scaling", 1.0),
    )
    return with_multipliers(config.path, spec, of_granite)
