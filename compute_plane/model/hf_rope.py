"""The rotary positions of a model in a Hugging Face directory, as its config.json has them."""

from __future__ import annotations

from compute_plane.model.errors import UnsupportedModelError, printable
from compute_plane.model.hf_windows import FULL_ATTENTION, SLIDING_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.rope_scaling import (
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    LinearScaling,
    Llama3Scaling,
    LongContexts,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    long_rope_attention_factor,
    yarn_attention_factor,
)

SUPPORTED = "default, linear, llama3, yarn and longrope"
MAX_DIVISORS = 1 << 12
GROWTH = "llama_4_scaling_beta"
"""Of queries from the original length of a context on; 0: none."""
OF_MINISTRAL3 = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    GROWTH: 0.1,
}
"""What a Ministral 3 means that says nothing of its rotary positions."""
OF_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The same of gpt-oss."""


def of_layer_type(config: JsonObject, kind: str) -> JsonObject:
    """Return a configuration as layers of one type have it, where types differ in their positions.

    Newer ones have an object for each type in `rope_parameters`, older ones a base of their own for
    layers with windows, which no scaling holds for. Raises UnsupportedModelError for
    `rope_parameters` that say for no type what they say: transformers does not look at them then.
    """
    parameters = config.member("rope_parameters")
    types = FULL_ATTENTION, SLIDING_ATTENTION
    if parameters is not None and parameters.keys and not any(map(parameters.has, types)):
        raise UnsupportedModelError(
            config.path,
            f"rope_parameters must have an object for {' and '.join(types)}, "
            f"got {printable(', '.join(parameters.keys))}",
        )
    of_kind = None if parameters is None else parameters.raw(kind)
    members: dict[str, object] = {"rope_parameters": of_kind}
    if kind == SLIDING_ATTENTION:
        members |= {"rope_scaling": None, "rope_theta": config.raw("rope_local_base_freq")}
    return config.changed(members)


def with_defaults(config: JsonObject, defaults: dict[str, object]) -> JsonObject:
    """Return a configuration that says so of its rotary positions if it says nothing itself."""
    return config if _parameters(config) else config.changed({"rope_parameters": defaults})


def rope_theta(config: JsonObject, default: float) -> float:
    """Return the base; newer configurations keep it in `rope_parameters`, older ones at the top."""
    for parameters in _parameters(config):
        if parameters.has("rope_theta"):
            return parameters.number("rope_theta")
    return config.number("rope_theta", default)


def rotary_share(config: JsonObject, default: float) -> float:
    """Return which share of a head's elements turn."""
    for parameters in _parameters(config):
        if parameters.has("partial_rotary_factor"):
            return parameters.number("partial_rotary_factor")
    return config.number("partial_rotary_factor", default)


def rope_scaling(
    config: JsonObject,
    context_length: int,
    *,
    yarn_is_longrope: bool = False,
    queries_may_grow: bool = False,
) -> RopeScaling | None:
    """Return the scaling; `context_length`: the configuration's own.

    `yarn_is_longrope`: configurations of this model call LongRoPE so, or "su", as older ones of
    Phi-3 do. `queries_may_grow`: the model is one whose queries do where it says so.

    Where there are both, `rope_scaling` holds before `rope_parameters`, as in transformers: it is
    the older one, and the one that people add by hand. Raises ModelFileError for a missing or wrong
    number, UnsupportedModelError for another scaling.
    """
    parameters = next(iter(_parameters(config)), None)
    if parameters is None:
        return None
    if any(isinstance(parameters.raw(key), dict) for key in parameters.keys):
        raise UnsupportedModelError(
            config.path, "rotary positions that differ from layer to layer are not supported"
        )
    kind = parameters.text("rope_type") or parameters.text("type") or "default"
    growth = parameters.number(GROWTH, 0.0) if queries_may_grow else 0.0
    if kind != "yarn" and growth:
        raise UnsupportedModelError(
            config.path, f"{GROWTH} with RoPE scaling {printable(kind)} is not supported"
        )
    if kind == "su" or (yarn_is_longrope and kind == "yarn"):
        kind = "longrope"
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(parameters.number("factor"))
    if kind not in ("llama3", "yarn", "longrope"):
        reason = ""
        if kind == "dynamic":
            # Keys are rotated when they are written, by the frequencies of that time.
            reason = ": its frequencies change as a text grows, and the keys in the cache would not"
        raise UnsupportedModelError(
            config.path,
            f"RoPE scaling {printable(kind)} is not supported{reason}; supported are {SUPPORTED}",
        )
    original = config.optional_integer("original_max_position_embeddings")
    if original is None:
        original = parameters.integer("original_max_position_embeddings", context_length)
    if kind == "longrope":
        return _long_rope(parameters, context_length, original)
    if kind == "yarn":
        return _yarn(parameters, context_length, original, growth)
    return Llama3Scaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_context_length=original,
    )


def yarn_multiplier(config: JsonObject) -> float:
    """Return YaRN's `mscale_all_dim`, by which scores over latents grow; 0: they do not."""
    parameters = next(iter(_parameters(config)), None)
    return 0.0 if parameters is None else parameters.number("mscale_all_dim", 0.0)


def _parameters(config: JsonObject) -> list[JsonObject]:
    """Return the objects that say something of rotary positions, the one that holds first."""
    members = [config.member(key) for key in ("rope_scaling", "rope_parameters")]
    return [member for member in members if member is not None and member.keys]


def _long_rope(parameters: JsonObject, context_length: int, original: int) -> LongRopeScaling:
    """Return the scaling of contexts up to the original length, and what longer ones have."""
    factor = parameters.number("factor", context_length / original if original > 0 else None)
    attention = parameters.number("attention_factor", long_rope_attention_factor(factor, original))
    short, long = parameters.numbers("short_factor", MAX_DIVISORS), None
    if parameters.has("long_factor"):
        long = LongContexts(parameters.numbers("long_factor", MAX_DIVISORS), context_length)
    return LongRopeScaling(short, original, attention, long)


def _yarn(parameters: JsonObject, context_length: int, original: int, growth: float) -> YarnScaling:
    factor = parameters.number("factor", context_length / original if original > 0 else None)
    attention = parameters.number(
        "attention_factor",
        yarn_attention_factor(
            factor, parameters.number("mscale", 0.0), parameters.number("mscale_all_dim", 0.0)
        ),
    )
    truncate = parameters.boolean("truncate")
    return YarnScaling(
        factor=factor,
        original_context_length=original,
        attention_factor=attention,
        # 0 and nothing mean the same.
        beta_fast=parameters.number("beta_fast", 0.0) or YARN_BETA_FAST,
        beta_slow=parameters.number("beta_slow", 0.0) or YARN_BETA_SLOW,
        truncate=truncate is not False,
        query_growth=growth,
    )
