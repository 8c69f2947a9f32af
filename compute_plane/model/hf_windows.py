"""The windows of attention that a config.json describes."""

from __future__ import annotations

from collections.abc import Collection

from compute_plane.model.errors import ModelFileError
from compute_plane.model.json_file import JsonObject
from compute_plane.model.mixture import QWEN3_MOE
from compute_plane.model.windows import layers_of_period

MISTRAL = "mistral"
PHI3 = "phi3"
MIXTRAL = "mixtral"
SMOLLM3 = "smollm3"
MINISTRAL3 = "ministral3"
GEMMA3 = "gemma3_text"
EXAONE4 = "exaone4"
EXAONE4_PERIOD = 4
"""Of which the last layer of an EXAONE 4 has no window that does not say it."""
GPT_OSS = "gpt_oss"
GPT_OSS_WINDOW = 128
GPT_OSS_PERIOD = 2
"""Of which the last layer of a gpt-oss has no window that does not say it."""
GEMMA3_PERIOD = 6
"""Of which the last layer of a Gemma 3 has no window that does not say it."""
OF_LAYERS = ("qwen2", "qwen3", SMOLLM3)
"""Model types whose layers have windows where the configuration says so."""
SLIDING_WINDOW = 4096
"""What Mistral, Qwen and Gemma mean where they have windows and do not say how long they are."""
MAX_WINDOW_LAYERS = 28
"""From which layer on a Qwen has windows that does not say so."""
FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"


def read_windows(
    config: JsonObject, model_type: str, num_layers: int, layers_without_rope: Collection[int]
) -> tuple[int | None, Collection[int]]:
    """Return how many positions a token sees, None for all, and the layers in which that is so.

    Mistral, Ministral 3, Phi-3 and Mixtral have windows in all layers, and so has Qwen3-MoE where
    it says `use_sliding_window`; Gemma 3, EXAONE 4 and gpt-oss in those of `layer_types`, or else
    the first two in all but every so many (`sliding_window_pattern`), gpt-oss in every other one.
    The others, if `use_sliding_window`, in those of `layer_types`; where there are none, SmolLM3 in
    those without rotary positions, Qwen from `max_window_layers` on. Raises ModelFileError.
    """
    if model_type == MISTRAL:
        return _window(config, SLIDING_WINDOW), range(num_layers)
    if model_type in (PHI3, MIXTRAL, MINISTRAL3):
        return _window(config, None), range(num_layers)
    if model_type == QWEN3_MOE and config.boolean("use_sliding_window"):
        return _window(config, SLIDING_WINDOW), range(num_layers)
    if model_type == GEMMA3:
        return _window(config, SLIDING_WINDOW), _layers_of_pattern(
            config, GEMMA3_PERIOD, num_layers
        )
    if model_type == GPT_OSS:
        named = layers_of_type(config, SLIDING_ATTENTION, num_layers)
        if named is None:
            named = layers_of_period(GPT_OSS_PERIOD, num_layers)
        return _window(config, GPT_OSS_WINDOW), named
    if model_type == EXAONE4:
        return _window(config, SLIDING_WINDOW), _layers_of_pattern(
            config, EXAONE4_PERIOD, num_layers
        )
    if model_type not in OF_LAYERS or not config.boolean("use_sliding_window"):
        return None, ()
    window = _window(config, None if model_type == SMOLLM3 else SLIDING_WINDOW)
    named = layers_of_type(config, SLIDING_ATTENTION, num_layers)
    if named is not None:
        return window, named
    if model_type == SMOLLM3:
        return window, layers_without_rope
    first = config.integer("max_window_layers", MAX_WINDOW_LAYERS)
    return window, range(max(first, 0), num_layers)


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
