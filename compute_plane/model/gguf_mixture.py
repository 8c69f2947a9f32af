"""The mixture of experts that a GGUF file describes (`mixture`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from compute_plane.model import expert_layout, layout, stored_names
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.gguf_header import GgufFile, TensorEntry
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.mixture import checked
from compute_plane.model.spec import Mixture, Scores

CORRECTION: Final = expert_layout.CORRECTION, layout.BIAS
SOFTMAX, SIGMOID = 1, 2
SCORES: Final[dict[int, Scores]] = {SOFTMAX: "softmax", SIGMOID: "sigmoid"}
"""GGUF's numbers for functions of the router."""
UNSUPPORTED_COUNTS: Final = {"interleave_moe_layer_step": 1}
"""Keys of GGUF files, and the largest number that changes nothing."""
UNSHARED_COUNTS: Final = {
    "expert_group_count": 1,
    "expert_shared_count": 0,
    "expert_shared_feed_forward_length": 0,
    "leading_dense_block_count": 0,
}
"""The same, of architectures that share no experts."""


@dataclass(frozen=True, slots=True)
class _Sharing:
    """What GGUF files of an architecture with shared experts mean where they say nothing.

    `scores`: what they must be; None: what is said, and where nothing is, sigmoids if there are
    corrections. `normalises`: whether weights are normalised whatever is said; None: if it is said.
    """

    scores: Scores | None = "softmax"
    normalises: bool | None = None
    gates_shared: bool = False


SHARING: Final = {
    "qwen2moe": _Sharing(normalises=False, gates_shared=True),
    "qwen3next": _Sharing(normalises=True, gates_shared=True),
    "qwen35moe": _Sharing(normalises=True, gates_shared=True),
    "glm4moe": _Sharing("sigmoid"),
    "dots1": _Sharing("sigmoid"),
    "exaone-moe": _Sharing("sigmoid"),
    "olmoe": _Sharing(normalises=False),
    "minimax-m2": _Sharing("sigmoid", normalises=True),
    "ernie4_5-moe": _Sharing(normalises=True),
    "granitehybrid": _Sharing(normalises=True),
    "lfm2moe": _Sharing("sigmoid", normalises=True),
    "deepseek2": _Sharing(None),
    "nemotron_h_moe": _Sharing("sigmoid"),
}


def gguf_mixture(
    file: GgufFile, keys: GgufMetadata, prefix: str, mlp_size: int = 0
) -> Mixture | None:
    """Return the mixture of a GGUF file, None where it has none.

    `prefix`: of the architecture's keys. `mlp_size`: of the MLP beside the experts of Gemma 4.
    Raises ModelFileError, UnsupportedModelError.
    """
    path, architecture = file.path, prefix.removesuffix(".")
    count = keys.integer(prefix + "expert_count")
    experts = ARCHITECTURES[architecture].experts
    if not count and experts != "always":
        return None
    if experts == "never":
        raise UnsupportedModelError(path, "mixtures of experts are not supported")
    sharing = SHARING.get(architecture)
    unsupported = UNSUPPORTED_COUNTS | (UNSHARED_COUNTS if sharing is None else {})
    for key, most in unsupported.items():
        given = keys.integer(prefix + key)
        if given is not None and given > most:
            raise UnsupportedModelError(path, f"{prefix}{key} = {given} is not supported")
    function = keys.integer(prefix + "expert_gating_func")
    scores: Scores | None = "softmax" if sharing is None else sharing.scores
    if scores is None:
        scores = _said_scores(file, keys, prefix)
    if function and SCORES.get(function) != scores:
        taken = SCORES if sharing is not None and sharing.scores is None else {}
        known = taken or {number: name for number, name in SCORES.items() if name == scores}
        numbers = " or ".join(f"{number} ({name})" for number, name in known.items())
        raise UnsupportedModelError(
            path, f"{prefix}expert_gating_func must be {numbers}, got {function}"
        )
    scale = keys.number(prefix + "expert_weights_scale") or 1.0
    if sharing is None and scale != 1.0:
        raise UnsupportedModelError(path, f"{prefix}expert_weights_scale is not supported")
    said = keys.boolean(prefix + "expert_weights_norm")
    is_of_gemma4 = architecture == expert_layout.GEMMA4
    gate_up = f"{expert_layout.EXPERTS}.gate_{expert_layout.UP}"
    mixture = Mixture(
        keys.require_integer(prefix + "expert_count"),
        keys.require_integer(prefix + "expert_used_count"),
        normalises_weights=said is not False,
        scores=scores,
        weight_scale=scale,
        shared_size=mlp_size,
        has_own_norms=is_of_gemma4,
        is_fused_in_gguf=is_of_gemma4 and _entry(file, keys, prefix, gate_up) is not None,
    )
    if sharing is not None:
        mixture = _shared_in_gguf(file, keys, prefix, mixture, sharing)
    return checked(path, mixture)


def _said_scores(file: GgufFile, keys: GgufMetadata, prefix: str) -> Scores:
    """Return what the router's logits become; older files of DeepSeek do not say it."""
    function = keys.integer(prefix + "expert_gating_func")
    if function:
        return SCORES.get(function, "softmax")
    return "softmax" if _entry(file, keys, prefix, *CORRECTION) is None else "sigmoid"


def _entry(
    file: GgufFile, keys: GgufMetadata, prefix: str, role: str, part: str = layout.WEIGHT
) -> TensorEntry | None:
    """Return a tensor of the first layer with experts, if it is there."""
    layer = keys.integer(prefix + "leading_dense_block_count") or 0
    return file.tensors.get(stored_names.gguf_name(layout.layer_tensor(layer, role, part)))


def _shared_in_gguf(
    file: GgufFile, keys: GgufMetadata, prefix: str, mixture: Mixture, sharing: _Sharing
) -> Mixture:
    """Return what a file with shared experts says besides; how wide those are, its tensors say."""
    dense_layers = keys.integer(prefix + "leading_dense_block_count") or 0
    shared = _entry(file, keys, prefix, f"{expert_layout.SHARED}.{expert_layout.GATE}")
    normalises = sharing.normalises
    if normalises is None:
        normalises = bool(keys.boolean(prefix + "expert_weights_norm"))
    return dataclasses.replace(
        mixture,
        normalises_weights=normalises,
        corrects_choice=_entry(file, keys, prefix, *CORRECTION) is not None,
        shared_size=0 if shared is None else shared.shape[0],
        gates_shared=sharing.gates_shared and shared is not None,
        dense_layers=dense_layers,
        dense_size=keys.require_integer(prefix + "feed_forward_length") if dense_layers else 0,
        num_groups=keys.integer(prefix + "expert_group_count") or 1,
        groups_per_token=keys.integer(prefix + "expert_group_used_count") or 1,
    )


def gguf_intermediate_size(keys: GgufMetadata, prefix: str, mixture: Mixture | None) -> int:
    """Return the width of an MLP, or of an expert: files of some name it apart.

    Older ones of Qwen2-MoE and GLM-4.5 say what the experts of a token have together.
    """
    of_experts = keys.integer(prefix + "expert_feed_forward_length")
    if mixture is not None and of_experts:
        return of_experts
    width = keys.require_integer(prefix + "feed_forward_length")
    if mixture is not None and prefix in ("qwen2moe.", "glm4moe."):
        return width // mixture.experts_per_token
    return width
