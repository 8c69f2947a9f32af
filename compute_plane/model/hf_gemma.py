"""What a Gemma 2 or 3 is beside other decoders, as its config.json has it."""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np

from compute_plane.model.caps import LOGITS_CAP, OF_GEMMA2, SCORES_CAP, checked_cap
from compute_plane.model.errors import ModelFileError, UnsupportedModelError
from compute_plane.model.hf_model_types import GEMMA2
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


def with_gemma(config: JsonObject, spec: ModelSpec, local_layers: frozenset[int]) -> ModelSpec:
    """Return the spec of a Gemma 2 or 3; `spec`: as other decoders', of its global layers.

    Rows of the embedding are multiplied by √hidden, rounded as transformers rounds it, to the type
    that the configuration names. Scores are multiplied by 1/√query_pre_attn_scalar; they and logits
    have caps in Gemma 2. `local_layers`: those with windows, which have a base of their own in
    Gemma 3. Raises ModelFileError, UnsupportedModelError. Numbers that no model has are left as
    they are: they are refused with the others.
    """
    if faults_of(spec):
        return spec
    if config.boolean("use_bidirectional_attention"):
        raise UnsupportedModelError(
            config.path, "use_bidirectional_attention = true is not supported"
        )
    spec = with_multipliers(config.path, spec, _multipliers(config, spec))
    if spec.architecture == GEMMA2:
        return _with_caps(config, spec)
    for key in OF_GEMMA2:  # no model has one, and transformers leaves that of scores out
        if config.raw(key) is not None:
            raise UnsupportedModelError(config.path, f"{key} is not supported")
    local = of_layer_type(config, SLIDING_ATTENTION)
    if rope_scaling(local, spec.context_length) is not None:
        raise UnsupportedModelError(
            config.path, "RoPE scaling of layers with windows is not supported"
        )
    return dataclasses.replace(
        spec,
        local_rope_theta=rope_theta(local, LOCAL_THETA),
        layers_with_local_rope=local_layers,
    )


def _multipliers(config: JsonObject, spec: ModelSpec) -> Multipliers:
    scalar = config.number("query_pre_attn_scalar", QUERY_SCALAR)
    if scalar <= 0:
        raise ModelFileError(
            config.path, f"query_pre_attn_scalar must be greater than 0, got {scalar}"
        )
    return Multipliers(embedding=embedding_scale(config, spec.hidden_size), attention=scalar**-0.5)


def _with_caps(config: JsonObject, spec: ModelSpec) -> ModelSpec:
    """Return the spec with the caps that a configuration has; null: none."""

    def cap(key: str) -> float | None:
        if not config.has(key):
            return OF_GEMMA2[key]
        given = None if config.raw(key) is None else config.number(key)
        return checked_cap(config.path, key, given)

    return dataclasses.replace(spec, scores_cap=cap(SCORES_CAP), logits_cap=cap(LOGITS_CAP))


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
