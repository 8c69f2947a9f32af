"""What a Gemma 3 is beside other decoders, as its config.json has it."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np

from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_rope import of_layer_type, rope_scaling, rope_theta
from compute_plane.model.hf_windows import SLIDING_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.quantize import round_to_bf16
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of

LOCAL_THETA: Final = 10000.0
QUERY_SCALAR: Final = 256
"""What a configuration means that says nothing of them."""
SOFTCAPPING: Final = ("attn_logit_softcapping", "final_logit_softcapping")


def with_gemma(config: JsonObject, spec: ModelSpec, local_layers: frozenset[int]) -> ModelSpec:
    """Return the spec of a Gemma 3; `spec`: as other decoders', of its global layers.

    Rows of the embedding are multiplied by √hidden, rounded as transformers rounds it, to the type
    that the configuration names. Scores are multiplied by 1/√query_pre_attn_scalar. `local_layers`:
    those with windows, which have a base of their own. Raises ModelFileError,
    UnsupportedModelError. Numbers that no model has are left as they are: they are refused with the
    others.
    """
    if faults_of(spec):
        return spec
    for key in SOFTCAPPING:
        if config.raw(key) is not None:
            raise UnsupportedModelError(config.path, f"{key} is not supported")
    if config.boolean("use_bidirectional_attention"):
        raise UnsupportedModelError(
            config.path, "use_bidirectional_attention = true is not supported"
        )
    scalar = config.number("query_pre_attn_scalar", QUERY_SCALAR)
    if scalar <= 0:
        raise ModelFileError(
            config.path, f"query_pre_attn_scalar must be greater than 0, got {scalar}"
        )
    local = of_layer_type(config, SLIDING_ATTENTION)
    if rope_scaling(local, spec.context_length) is not None:
        raise UnsupportedModelError(
            config.path, "RoPE scaling of layers with windows is not supported"
        )
    multipliers = Multipliers(
        embedding=embedding_scale(config, spec.hidden_size), attention=scalar**-0.5
    )
    return dataclasses.replace(
        with_multipliers(config.path, spec, multipliers),
        local_rope_theta=rope_theta(local, LOCAL_THETA),
        layers_with_local_rope=local_layers,
    )


def embedding_scale(config: JsonObject, hidden_size: int) -> float:
    """Return √hidden in the type that the configuration says a model is in; none: float32."""
    scale = np.float32(math.sqrt(hidden_size))
    dtype = config.text("dtype") or config.text("torch_dtype")
    if dtype == "float16":
        return float(np.float16(scale))
    if dtype == "bfloat16":
        bits = round_to_bf16(np.array([scale])).astype(np.uint32) << np.uint32(16)
        return float(bits.view(np.float32)[0])
    return float(scale)
