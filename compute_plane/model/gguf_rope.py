"""The rotary positions of a model in a GGUF file."""

from __future__ import annotations

import math

import numpy as np

from compute_plane.model import stored_names
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.rope_scaling import (
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    FrequencyDivisors,
    LinearScaling,
    LongContexts,
    LongRopeScaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from compute_plane.model.tensor import TensorFormat

SUPPORTED = "none, linear, yarn and longrope"
LONG_ROPE = "longrope"
MINISTRAL3 = "mistral3."
GPT_OSS = "gpt-oss."
"""Its files do not say that the pairs between which YaRN interpolates are no whole ones."""
LOG_MULTIPLIER = "yarn_log_multiplier"
"""`mscale_all_dim` of directories, beside an `mscale` of 1."""
GROWTH = "attention.temperature_scale"
"""Of a Ministral 3's queries, from the original length of a context on; 0: none."""

YARN_WHOLE = "yarn_attn_factor"
"""Converters write what a directory calls `attention_factor`, all that turned rows are multiplied
by. llama.cpp reads it of one architecture only, so it must be what follows from the factor."""
OLMO2 = "olmo2."
DEEPSEEK2 = "deepseek2."
"""Of its files the logarithm's multiplier is of scores alone (`gguf_latents`)."""
OLDER_WHOLE = "attn_factor"
"""What the converters that came with OLMo 3 called it."""

# What these stand for where they are there; other values change the arithmetic.
PLAIN = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
}


def read_rope_scaling(
    file: GgufFile, keys: GgufMetadata, prefix: str, context_length: int
) -> RopeScaling | None:
    """Return the scaling. Llama 3's and LongRoPE's are tensors of divisors, the others are keys.

    As in llama.cpp a factor without a type is linear, and older files keep it in
    `rope.scale_linear`. Raises ModelFileError for a missing or wrong number, UnsupportedModelError
    for another scaling.
    """
    long_rope = _long_rope(file, keys, prefix, context_length)
    if long_rope is not None:
        return long_rope
    scaling = _of_keys(file, keys, prefix, context_length)
    divisors = _divisors(file, stored_names.GGUF_ROPE_DIVISORS)
    if scaling is not None and divisors is not None:
        raise UnsupportedModelError(
            file.path,
            f"RoPE scaling by {prefix}rope.scaling.type and by tensor "
            f"{stored_names.GGUF_ROPE_DIVISORS} together is not supported",
        )
    return scaling or (None if divisors is None else FrequencyDivisors(divisors))


def _long_rope(
    file: GgufFile, keys: GgufMetadata, prefix: str, context_length: int
) -> LongRopeScaling | None:
    """Return LongRoPE's scaling, which its tensors say rather than its type."""
    names = stored_names.GGUF_SHORT_DIVISORS, stored_names.GGUF_LONG_DIVISORS
    scaling = prefix + "rope.scaling."
    kind = keys.text(scaling + "type")
    if kind != LONG_ROPE and not any(name in file.tensors for name in names):
        return None
    if kind not in (None, "none", LONG_ROPE) or stored_names.GGUF_ROPE_DIVISORS in file.tensors:
        raise UnsupportedModelError(
            file.path, f"RoPE scaling by tensor {names[0]} and another one together"
        )
    short, long = (_divisors(file, name) for name in names)
    attention = keys.number(scaling + "attn_factor")
    if short is None:
        raise ModelFileError(file.path, f"missing tensors: {names[0]}")
    return LongRopeScaling(
        divisors=short,
        original_context_length=keys.require_integer(scaling + "original_context_length"),
        attention_factor=1.0 if attention is None else attention,
        long=None if long is None else LongContexts(long, context_length),
    )


def _of_keys(
    file: GgufFile, keys: GgufMetadata, prefix: str, context_length: int
) -> LinearScaling | YarnScaling | None:
    scaling = prefix + "rope.scaling."
    kind = keys.text(scaling + "type") or "linear"
    factor = keys.number(scaling + "factor")
    if factor is None:
        factor = keys.number(prefix + "rope.scale_linear")
    growth = keys.number(prefix + GROWTH) or 0.0 if prefix == MINISTRAL3 else 0.0
    if growth and kind != "yarn":
        raise UnsupportedModelError(
            file.path, f"{prefix}{GROWTH} with RoPE scaling {printable(kind)} is not supported"
        )
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            file.path, f"RoPE scaling {printable(kind)} is not supported; supported are {SUPPORTED}"
        )
    multiplier = keys.number(scaling + LOG_MULTIPLIER) or 0.0
    plain = PLAIN if prefix in (MINISTRAL3, DEEPSEEK2) else {**PLAIN, LOG_MULTIPLIER: 0.0}
    whole = yarn_attention_factor(1.0 if factor is None else factor, 1.0, multiplier)
    if prefix == DEEPSEEK2 and multiplier:  # scores grow instead
        whole = 1.0
    says_whole = {YARN_WHOLE, OLDER_WHOLE} if prefix == OLMO2 else {YARN_WHOLE}
    for name, value in plain.items():
        given = keys.number(scaling + name)
        if (
            kind == "yarn"
            and name in says_whole
            and math.isclose(given or 0.0, whole, rel_tol=1e-6)
        ):
            continue
        if given not in (None, value):
            raise UnsupportedModelError(file.path, f"{scaling}{name} = {given} is not supported")
    if kind == "linear":
        return None if factor in (None, 0.0, 1.0) else LinearScaling(factor)
    if factor is None:
        raise ModelFileError(file.path, f"key {scaling}factor is missing")
    original = keys.integer(scaling + "original_context_length")
    fast, slow = (keys.number(f"{scaling}yarn_beta_{name}") for name in ("fast", "slow"))
    return YarnScaling(
        factor=factor,
        original_context_length=context_length if original is None else original,
        attention_factor=whole,
        beta_fast=YARN_BETA_FAST if fast is None else fast,
        beta_slow=YARN_BETA_SLOW if slow is None else slow,
        truncate=prefix != GPT_OSS,
        query_growth=growth,
    )


def _divisors(file: GgufFile, name: str) -> tuple[float, ...] | None:
    entry = file.tensors.get(name)
    if entry is None:
        return None
    if entry.format is not TensorFormat.F32 or len(entry.shape) != 1 or entry.shape[0] > 1 << 12:
        raise ModelFileError(
            file.path,
            f"tensor {name} must be F32 with one dimension, "
            f"got {entry.format.label} {list(entry.shape)}",
        )
    divisors = np.frombuffer(entry.buffer, "<f4", entry.shape[0], entry.offset)
    return tuple(divisors.tolist())
