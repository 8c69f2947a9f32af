"""What config.json says of attention over latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.hf_model_types import (
    DEEPSEEK2,
    DEEPSEEK3,
    GLM4_MOE_LITE,
    KIMI_K2,
    YOUTU,
)
from compute_plane.model.hf_rope import yarn_multiplier
from compute_plane.model.json_file import JsonObject
from compute_plane.model.latents import Latents, latent_score_scale
from compute_plane.model.rope_scaling import RopeScaling, YarnScaling


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What a model type means where nothing is said; letters: `compute_plane.model.latents`."""

    query_rank: int = 1536
    plain: int = 128
    value_size: int = 128


RANK: Final = 512
TURNING: Final = 64
DEFAULTS: Final = {
    DEEPSEEK2: _Defaults(),
    DEEPSEEK3: _Defaults(),
    KIMI_K2: _Defaults(),
    YOUTU: _Defaults(),
    GLM4_MOE_LITE: _Defaults(query_rank=768, plain=192, value_size=256),
}


def config_latents(
    config: JsonObject, model_type: str, scaling: RopeScaling | None
) -> Latents | None:
    """Return the numbers; None for a model type without latents. `scaling`: of its positions.

    Raises ModelFileError, UnsupportedModelError.
    """
    if model_type not in DEFAULTS:
        return None
    meant = DEFAULTS[model_type]
    if config.boolean("rope_interleave") is False:
        raise UnsupportedModelError(config.path, "rope_interleave = false is not supported")
    if config.number("partial_rotary_factor", 1.0) != 1:
        raise UnsupportedModelError(config.path, "partial_rotary_factor is not supported")
    plain = config.integer("qk_nope_head_dim", meant.plain)
    turning = config.integer("qk_rope_head_dim", TURNING)
    # One that is null is none; one that is not there is the usual one.
    query_rank = config.optional_integer("q_lora_rank")
    if query_rank is None:
        query_rank = 0 if config.has("q_lora_rank") else meant.query_rank
    multiplier, factor = yarn_multiplier(config), 1.0
    if isinstance(scaling, YarnScaling):
        factor = scaling.factor
    elif multiplier and scaling is not None:
        raise UnsupportedModelError(
            config.path, "mscale_all_dim beside RoPE scaling other than yarn is not supported"
        )
    return Latents(
        rank=config.integer("kv_lora_rank", RANK),
        turning=turning,
        plain=plain,
        value_size=config.integer("v_head_dim", meant.value_size),
        query_rank=query_rank,
        score_scale=latent_score_scale(plain + turning, factor, multiplier),
    )
