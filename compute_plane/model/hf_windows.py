"""The windows of attention that a config.json describes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from compute_plane.model.errors import ModelFileError
from compute_plane.model.hf_model_types import (
    DOTS1,
    EXAONE4,
    EXAONE_MOE,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GPT_OSS,
    GRANITE_SWA,
    MINISTRAL3,
    MISTRAL,
    MIXTRAL,
    OLMO3,
    PHI3,
    QWEN2,
    QWEN2_MOE,
    QWEN3,
    QWEN3_MOE,
    SMOLLM3,
)
from compute_plane.model.json_file import JsonObject
from compute_plane.model.windows import layers_of_period

IN_ALL_LAYERS = (MISTRAL, MINISTRAL3, PHI3, MIXTRAL, QWEN3_MOE)
"""Model types with windows in all layers, where they have any."""
IF_USED = (QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, SMOLLM3)
"""Model types that have windows only if they say `use_sliding_window`."""
WINDOWS: Final = {
    MISTRAL: 4096,
    MINISTRAL3: None,
    PHI3: None,
    MIXTRAL: None,
    QWEN2: 4096,
    QWEN2_MOE: 4096,
    QWEN3: 4096,
    QWEN3_MOE: 4096,
    DOTS1: 4096,
    SMOLLM3: None,
    GEMMA2: 4096,
    GEMMA3: 4096,
    GEMMA4: 512,
    EXAONE4: 4096,
    EXAONE_MOE: 4096,
    OLMO3: 4096,
    GPT_OSS: 128,
    GRANITE_SWA: 128,
}
"""Model types that may have windows, and how long they are that do not say it; None: none."""
PERIODS: Final = {GEMMA2: 2, GEMMA3: 6, GEMMA4: 6, EXAONE4: 4, EXAONE_MOE: 4, OLMO3: 4, GPT_OSS: 2}
"""Of so many layers the last one has no window, where nothing is said."""
GRANITE_PERIOD: Final = 4
MAX_WINDOW_LAYERS: Final = {QWEN2: 28, QWEN2_MOE: 28, QWEN3: 28, DOTS1: 62}
"""From which layer on there are windows where nothing is said; of Qwen2-MoE up to which."""
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


def read_windows(
    config: JsonObject, model_type: str, num_layers: int, layers_without_rope: Collection[int]
) -> tuple[int | None, Collection[int]]:
    """Return how many positions a token sees, None for all, and the layers in which that is so.

    Where there are windows and not in all layers, they are in those of `layer_types`, or else in
    those of a pattern (`_layers_of_pattern`), or of a rule of the model type. Raises
    ModelFileError.
    """
    if model_type not in WINDOWS:
        return None, ()
    if model_type in IF_USED and not config.boolean("use_sliding_window"):
        return None, ()
    window = _window(config, WINDOWS[model_type])
    if model_type in IN_ALL_LAYERS:
        return window, range(num_layers)
    if model_type in (GEMMA2, GEMMA3, GEMMA4, EXAONE4, EXAONE_MOE, OLMO3):
        layers = _layers_of_pattern(config, PERIODS[model_type], num_layers)
        if model_type == GEMMA4:  # whose last layer sees all, whatever is said
            layers = [layer for layer in layers if layer != num_layers - 1]
        return window, layers
    named = layers_of_type(config, SLIDING_ATTENTION, num_layers)
    if named is not None:
        return window, named
    if model_type == GRANITE_SWA:  # of so many layers the first one sees all
        return window, [layer for layer in range(num_layers) if layer % GRANITE_PERIOD]
    if model_type == GPT_OSS:
        return window, layers_of_period(PERIODS[model_type], num_layers)
    if model_type == SMOLLM3:
        return window, layers_without_rope
    bound = max(config.integer("max_window_layers", MAX_WINDOW_LAYERS[model_type]), 0)
    if model_type == QWEN2_MOE:
        return window, range(0, min(bound, num_layers), 2)
    return window, range(bound, num_layers)


def layers_of_type(config: JsonObject, kind: str, num_layers: int) -> list[int] | None:
    """Return the layers that `layer_types` calls `kind`; None if it is not there."""
    kinds = config.raw("layer_types")
    if kinds is None:
        return None
    known = (FULL_ATTENTION, SLIDING_ATTENTION)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or any(each not in known for each in kinds)
    ):
        raise ModelFileError(
            config.path, f"layer_types must be {' or '.join(known)} for each of {num_layers} layers"
        )
    return [layer for layer, each in enumerate(kinds) if each == kind]


def _layers_of_pattern(config: JsonObject, period: int, num_layers: int) -> list[int]:
    """Return the layers that `layer_types` names, or else those of a pattern.

    A number: the last of so many has no window, `period` where nothing is said. Or letters, such as
    LLLG, G being a layer without; the last of all has none then.
    """
    named = layers_of_type(config, SLIDING_ATTENTION, num_layers)
    pattern = config.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        layers = [at for at in range(num_layers - 1) if pattern[at % len(pattern)] == "L"]
        return layers if named is None else named
    given = config.optional_integer("sliding_window_pattern")
    period = period if given is None else given
    if period < 1:
        raise ModelFileError(
            config.path, f"sliding_window_pattern must be at least 1, got {period}"
        )
    return layers_of_period(period, num_layers) if named is None else named


def _window(config: JsonObject, default: int | None) -> int | None:
    given = config.has("sliding_window")
    return config.optional_integer("sliding_window") if given else default
