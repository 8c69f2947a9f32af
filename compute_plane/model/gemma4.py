"""What a Gemma 4 is beside other decoders, whatever its files are.

Layers with windows ("local") and without ("global") have heads of different sizes and numbers, and
turn by bases of their own; of global ones the first pairs alone turn. Scores are q · k, without a
factor. Values are normalised; in global layers of some models they are what the product of keys
gives. In E2B and E4B the last layers attend to the keys and values of the last layer of their kind
before them, and each layer has a gated part of a second embedding added (`layer_inputs_layout`).

Source: `Gemma4TextModel` in transformers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from compute_plane.model.caps import LOGITS_CAP, checked_cap
from compute_plane.model.errors import ModelFileError
from compute_plane.model.heads import Heads
from compute_plane.model.multipliers import Multipliers, with_multipliers
from compute_plane.model.rope import of_heads
from compute_plane.model.rope_scaling import FrequencyDivisors
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of

NEVER_TURNS = 1e30
"""What the frequency of a pair that does not turn is divided by, as GGUF files have it."""
MAX_LAYER_INPUT_SIZE = 1 << 14


@dataclass(frozen=True, slots=True)
class Gemma4:
    """The numbers of a Gemma 4 that others do not have.

    `local_layers`: those with windows. `global_heads`, `global_theta`, `divisors`: of the others,
    `divisors` of their frequencies, None: none. `has_values`: global layers have a product for
    values. `num_sharing`: how many layers, the last ones, attend to earlier ones' keys and values;
    `sharing_mlp_size`: width of their MLP. `layer_input_size`, `logits_cap`: as in `ModelSpec`.
    `embedding_scale`: what rows of the embedding are multiplied by.
    """

    local_layers: frozenset[int]
    global_heads: Heads
    global_theta: float
    divisors: tuple[float, ...] | None
    has_values: bool
    num_sharing: int
    sharing_mlp_size: int
    layer_input_size: int
    logits_cap: float | None
    embedding_scale: float


def with_gemma4(path: Path, spec: ModelSpec, of: Gemma4) -> ModelSpec:
    """Return the spec of a Gemma 4; `spec`: as other decoders', of its local layers.

    Raises ModelFileError. Numbers that no model has are left as they are: they are refused with the
    others.
    """
    if faults_of(spec):
        return spec
    if not 0 <= of.layer_input_size <= MAX_LAYER_INPUT_SIZE:
        raise ModelFileError(
            path,
            f"inputs of layers must be 0 to {MAX_LAYER_INPUT_SIZE} wide, got {of.layer_input_size}",
        )
    checked_cap(path, LOGITS_CAP, of.logits_cap)
    others = frozenset(range(spec.num_layers)) - of.local_layers
    global_heads: Heads | None = of.global_heads
    if not others or of.global_heads == spec.heads:
        global_heads = None
    elif not of.local_layers:  # heads are of one kind, which is theirs
        spec, global_heads = of_heads(spec, of.global_heads), None
    sources = _kv_sources(path, spec.num_layers, of.num_sharing, of.local_layers)
    scaled = with_multipliers(path, spec, Multipliers(embedding=of.embedding_scale, attention=1.0))
    is_wide = sources and spec.mixture is None and of.sharing_mlp_size != spec.intermediate_size
    return dataclasses.replace(
        scaled,
        rope_theta=of.global_theta,
        rope_scaling=None if of.divisors is None else FrequencyDivisors(of.divisors),
        local_rope_theta=spec.rope_theta,
        layers_with_local_rope=of.local_layers,
        global_heads=global_heads,
        layers_with_global_heads=others,
        layers_without_values=frozenset()
        if of.has_values
        else frozenset(layer for layer in others if not sources or sources[layer] == layer),
        kv_sources=sources,
        late_mlp_size=of.sharing_mlp_size if is_wide else None,
        layer_input_size=of.layer_input_size,
        logits_cap=of.logits_cap,
    )


def check_sharing(path: Path, num_layers: int, num_sharing: int) -> None:
    """Raise ModelFileError if not so many layers can attend to those of earlier ones."""
    if not 0 <= num_sharing < max(num_layers, 1):
        raise ModelFileError(
            path,
            f"layers that share keys and values must be 0 to {num_layers - 1}, got {num_sharing}",
        )


def turning_divisors(head_dim: int, share: float, factor: float) -> tuple[float, ...]:
    """Return what frequencies are divided by where only the first `share` of the pairs turns."""
    num_turning = int(share * head_dim // 2)
    return (factor,) * num_turning + (NEVER_TURNS,) * (head_dim // 2 - num_turning)


def _kv_sources(
    path: Path, num_layers: int, num_sharing: int, local_layers: frozenset[int]
) -> tuple[int, ...]:
    """Return by layer whose keys and values it attends to; empty if all have their own."""
    check_sharing(path, num_layers, num_sharing)
    if not num_sharing:
        return ()
    own = range(num_layers - num_sharing)
    last = {layer in local_layers: layer for layer in own}
    sources = [*own]
    for layer in range(num_layers - num_sharing, num_layers):
        is_local = layer in local_layers
        if is_local not in last:
            kind = "with" if is_local else "without"
            raise ModelFileError(
                path,
                f"layer {layer} shares keys and values with an earlier layer {kind} a window, "
                "and there is none",
            )
        sources.append(last[is_local])
    return tuple(sources)
