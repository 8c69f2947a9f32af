"""Whether the numbers of a model are those of a model that can be computed."""

from __future__ import annotations

import math

from compute_plane.model.heads import Heads
from compute_plane.model.rope_scaling import MAX_CONTEXT_LENGTH, scaling_faults
from compute_plane.model.spec import (
    MAX_INTERMEDIATE_SIZE,
    MAX_LAYERS,
    MAX_VOCAB_SIZE,
    ModelSpec,
)


def faults_of(spec: ModelSpec) -> list[str]:
    """Return everything that makes these numbers no model, one line each; empty if sound."""
    limits = {
        "vocab_size": MAX_VOCAB_SIZE,
        "num_layers": MAX_LAYERS,
        "hidden_size": 1 << 20,
        "intermediate_size": MAX_INTERMEDIATE_SIZE,
        "context_length": MAX_CONTEXT_LENGTH,
    }
    faults = []
    for field, maximum in limits.items():
        value = getattr(spec, field)
        if not 1 <= value <= maximum:
            faults.append(f"{field} must be 1 to {maximum}, got {value}")
    for heads in spec.kinds_of_heads:
        faults += faults_of_heads(heads)
    turning = spec.rotary_dim
    if turning is not None and (turning % 2 or not 2 <= turning <= spec.head_dim):
        faults.append(
            f"rotary positions must turn an even number of elements, 2 to head_dim "
            f"({spec.head_dim}), got {turning}"
        )
    for name in ("rope_theta", "local_rope_theta"):
        theta = getattr(spec, name)
        if theta is not None and not (math.isfinite(theta) and theta >= 1):
            faults.append(f"{name} must be finite and at least 1, got {theta}")
    if not 0 < spec.rms_norm_eps < 1:
        faults.append(f"rms_norm_eps must be between 0 and 1, got {spec.rms_norm_eps}")
    mixture = spec.mixture
    is_strange = spec.has_output_norms or spec.activation == "gelu"
    if mixture is not None and is_strange and not mixture.has_own_norms:
        faults.append(f"mixtures of experts are not computed in {spec.architecture} models")
    if mixture is not None and not 0 <= mixture.dense_layers < spec.num_layers:
        faults.append(
            f"layers without experts must be 0 to {spec.num_layers - 1}, of {spec.num_layers} "
            f"layers, got {mixture.dense_layers}"
        )
    faults += [] if spec.recurrence is None else spec.recurrence.faults(spec.num_layers)
    if not faults and not spec.attending_layers():
        faults.append("at least one of the model's layers must attend")
    faults += [] if spec.latents is None else spec.latents.faults()
    turning_at_all = spec.num_turning if spec.global_heads is None else spec.global_heads.head_dim
    return faults + scaling_faults(spec.rope_scaling, turning_at_all, spec.rope_theta)


def faults_of_heads(heads: Heads) -> list[str]:
    """Return why there cannot be such heads."""
    faults = []
    limits = {"num_heads": 1 << 16, "num_kv_heads": 1 << 16, "head_dim": 1 << 12}
    for field, maximum in limits.items():
        value = getattr(heads, field)
        if not 1 <= value <= maximum:
            faults.append(f"{field} must be 1 to {maximum}, got {value}")
    if heads.head_dim % 2:
        faults.append(f"head_dim must be even for rotary positions, got {heads.head_dim}")
    if heads.num_kv_heads >= 1 and heads.num_heads % heads.num_kv_heads:
        faults.append(
            f"num_heads must be a multiple of num_kv_heads, "
            f"got {heads.num_heads} and {heads.num_kv_heads}"
        )
    return faults
