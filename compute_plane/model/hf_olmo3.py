"""What config.json says of an OLMo 3: no scaling of positions in layers with windows."""

from __future__ import annotations

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.hf_rope import of_layer_type, rope_scaling, rope_theta
from compute_plane.model.hf_windows import SLIDING_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import ModelSpec
from compute_plane.model.windows import turning_unscaled


def with_own_windows(
    config: JsonObject, spec: ModelSpec, local_layers: frozenset[int]
) -> ModelSpec:
    """Return the spec with the base that layers with windows have, and without scaling there.

    `spec`: as of the other layers. Raises ModelFileError, UnsupportedModelError.
    """
    local = of_layer_type(config, SLIDING_ATTENTION)
    if rope_scaling(local, spec.context_length) is not None:
        raise UnsupportedModelError(
            config.path, "RoPE scaling of layers with windows is not supported"
        )
    return turning_unscaled(spec, rope_theta(local, spec.rope_theta), local_layers)
