"""The attention over latents that a GGUF file describes; letters: `compute_plane.model.latents`.

attention.kv_lora_rank      R        attention.q_lora_rank             of queries, if they have one
rope.dimension_count        P        rope.scaling.yarn_log_multiplier  mscale_all_dim / 10
attention.key_length_mla    N + P    attention.value_length_mla        V
In older files, which have the matrices of keys and values in one, the last two are called
attention.key_length        N + P    attention.value_length            V
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.gguf_rope import GROWTH, LOG_MULTIPLIER
from compute_plane.model.latents import Latents, latent_score_scale
from compute_plane.model.rope_scaling import RopeScaling, YarnScaling

DEEPSEEK2: Final = "deepseek2"
KEY_LENGTH: Final = "attention.key_length_mla"
OF_MULTIPLIER: Final = 10.0
"""What the logarithm's multiplier is times less in these files than `mscale_all_dim`."""


def gguf_latents(
    path: Path, keys: GgufMetadata, prefix: str, scaling: RopeScaling | None
) -> Latents | None:
    """Return the numbers; None of an architecture without latents. `scaling`: of its positions.

    `prefix`: of the architecture's keys. Raises ModelFileError, UnsupportedModelError.
    """
    if prefix != f"{DEEPSEEK2}.":
        return None
    if keys.number(prefix + GROWTH):
        raise UnsupportedModelError(path, f"{prefix}{GROWTH} is not supported")
    is_split = keys.has(prefix + KEY_LENGTH)
    head_size, value_size = (
        keys.require_integer(f"{prefix}attention.{name}{'_mla' if is_split else ''}")
        for name in ("key_length", "value_length")
    )
    turning = keys.require_integer(prefix + "rope.dimension_count")
    factor = scaling.factor if isinstance(scaling, YarnScaling) else 1.0
    multiplier = keys.number(f"{prefix}rope.scaling.{LOG_MULTIPLIER}") or 0.0
    return Latents(
        rank=keys.require_integer(prefix + "attention.kv_lora_rank"),
        turning=turning,
        plain=head_size - turning,
        value_size=value_size,
        query_rank=keys.integer(prefix + "attention.q_lora_rank") or 0,
        score_scale=latent_score_scale(head_size, factor, multiplier * OF_MULTIPLIER),
        joins_keys_values=not is_split,
    )
