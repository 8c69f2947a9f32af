"""The rotary positions of a model in a GGUF file."""

from __future__ import annotations

import numpy as np

from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gguf_header import GgufFile
from compute_plane.model.gguf_metadata import GgufMetadata
from compute_plane.model.spec import (
    YARN_BETA_FAST,
    YARN_BETA_SLOW,
    FrequencyDivisors,
    LinearScaling,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from compute_plane.model.tensor import TensorFormat

SUPPORTED = "none, linear and yarn"

# What these stand for where they are there; other values change the arithmetic.
PLAIN = {
    "attn_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_ext_factor": 1.0,
    "yarn_log_multiplier": 0.0,
}


def read_rope_scaling(
    file: GgufFile, keys: GgufMetadata, prefix: str, context_length: int
) -> RopeScaling | None:
    """Return the scaling. Llama 3's is a tensor of divisors, the others are keys.

    As in llama.cpp a factor without a type is linear, and older files keep it in
    `rope.scale_linear`. Raises ModelFileError for a missing or wrong number, UnsupportedModelError
    for another scaling.
    """
    scaling = _of_keys(file, keys, prefix, context_length)
    divisors = _divisors(file)
    if scaling is not None and divisors is not None:
        raise UnsupportedModelError(
            file.path,
            f"RoPE scaling by {prefix}rope.scaling.type and by tensor {layout.GGUF_ROPE_DIVISORS} "
            f"together is not supported",
        )
    return scaling or divisors


def _of_keys(
    file: GgufFile, keys: GgufMetadata, prefix: str, context_length: int
) -> LinearScaling | YarnScaling | None:
    scaling = prefix + "rope.scaling."
    kind = keys.text(scaling + "type") or "linear"
    factor = keys.number(scaling + "factor")
    if factor is None:
        factor = keys.number(prefix + "rope.scale_linear")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            file.path, f"RoPE scaling {printable(kind)} is not supported; supported are {SUPPORTED}"
        )
    for name, value in PLAIN.items():
        given = keys.number(scaling + name)
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
        attention_factor=yarn_attention_factor(factor),
        beta_fast=YARN_BETA_FAST if fast is None else fast,
        beta_slow=YARN_BETA_SLOW if slow is None else slow,
    )


def _divisors(file: GgufFile) -> FrequencyDivisors | None:
    entry = file.tensors.get(layout.GGUF_ROPE_DIVISORS)
    if entry is None:
        return None
    if entry.format is not TensorFormat.F32 or len(entry.shape) != 1 or entry.shape[0] > 1 << 12:
        raise ModelFileError(
            file.path,
            f"tensor {layout.GGUF_ROPE_DIVISORS} must be F32 with one dimension, "
            f"got {entry.format.label} {list(entry.shape)}",
        )
    divisors = np.frombuffer(file.buffer, "<f4", entry.shape[0], entry.offset)
    return FrequencyDivisors(tuple(divisors.tolist()))
