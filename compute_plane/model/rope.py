"""The rotary frequencies of a model."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from compute_plane.model.heads import Heads
from compute_plane.model.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    YarnScaling,
)
from compute_plane.model.spec import ModelSpec

Float32Array = npt.NDArray[np.float32]


def local_rope(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the base of its layers with local rotary positions, for those alone."""
    theta = spec.rope_theta if spec.local_rope_theta is None else spec.local_rope_theta
    return dataclasses.replace(spec, rope_theta=theta, rope_scaling=None)


def of_heads(spec: ModelSpec, heads: Heads) -> ModelSpec:
    """Return the spec as if all layers had these heads."""
    return dataclasses.replace(
        spec,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        global_heads=None,
    )


def inverse_frequencies(spec: ModelSpec) -> Float32Array:
    """Return the angle per position of each pair of a head, float32 [D/2].

    Pair i of a head is its elements i and i + D/2; those behind the first `num_turning` / 2 do not
    turn, their angle is 0. The steps and their roundings to float32 are those of the Hugging Face
    implementation, because an error here grows with the position. What is left are units in the
    last place, where its float32 power is not correctly rounded.
    """
    turning = _of_turning_pairs(spec)
    frequencies = np.zeros(spec.head_dim // 2, dtype=np.float32)
    frequencies[: len(turning)] = turning
    return frequencies


def _of_turning_pairs(spec: ModelSpec) -> Float32Array:
    """Return the frequencies of the pairs that turn."""
    size = spec.num_turning
    exponents = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    # By way of float64 the float32 power is correctly rounded; NumPy's own float32 power is not.
    powers = np.power(spec.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    plain: Float32Array = (np.float32(1) / powers).astype(np.float32)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain
    if isinstance(scaling, YarnScaling):
        return _yarn(powers, scaling, spec)
    if isinstance(scaling, Llama3Scaling):
        return _llama3(plain, scaling)
    if isinstance(scaling, LongRopeScaling):
        short: Float32Array = np.asarray(scaling.divisors, dtype=np.float32)
        return np.float32(1) / (short * powers)
    by = scaling.factor if isinstance(scaling, LinearScaling) else scaling.divisors
    divisors: Float32Array = np.asarray(by, dtype=np.float32)
    return plain / divisors


def score_factor(spec: ModelSpec) -> np.float32:
    """Return what queries and keys are multiplied by when they turn, in layers without RoPE too.

    Attention multiplies their products by 1/√D: this makes `spec.score_scale` of it.
    """
    scale = spec.score_scale
    return np.float32(1.0 if scale is None else math.sqrt(scale * math.sqrt(spec.head_dim)))


def query_growth(spec: ModelSpec) -> tuple[Float32Array, int] | None:
    """Return by what queries are multiplied when they have turned, and for how many positions.

    Factor n, float32, is of positions n · length to (n + 1) · length − 1: 1 + β · ln(1 + n), up to
    the model's context length. None: they are not. Source: Ministral 3 in transformers,
    `get_llama_4_attn_scale`.
    """
    scaling = spec.rope_scaling
    if not isinstance(scaling, YarnScaling) or not scaling.query_growth:
        return None
    length = scaling.original_context_length
    times = np.arange(-(-spec.context_length // length), dtype=np.float64)
    return (1 + scaling.query_growth * np.log1p(times)).astype(np.float32), length


def attention_factors(spec: ModelSpec) -> Float32Array:
    """Return what cosines and sines of each pair are multiplied by, float32 [D/2].

    Scores are multiplied by its square; by that of a scaling but for what pairs that do not turn
    add to them.
    """
    factors = np.full(spec.head_dim // 2, score_factor(spec), dtype=np.float32)
    if isinstance(spec.rope_scaling, YarnScaling | LongRopeScaling):
        factors[: spec.num_turning // 2] *= np.float32(spec.rope_scaling.attention_factor)
    return factors


def _yarn(powers: Float32Array, scaling: YarnScaling, spec: ModelSpec) -> Float32Array:
    """Return scaled frequencies; `powers`: theta to the exponent of each pair, [D/2] to [D/2]."""
    one = np.float32(1)

    def pair_that_turns(times: float) -> float:
        """Return which pair turns so many times in the original context, as a real number."""
        wavelength = scaling.original_context_length / (times * 2 * math.pi)
        return spec.num_turning * math.log(wavelength) / (2 * math.log(spec.rope_theta))

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.num_turning - 1)
    span = last - first or 0.001
    pairs = np.arange(spec.num_turning // 2, dtype=np.float32)
    ramp = np.clip((pairs - np.float32(first)) / np.float32(span), 0, 1)
    kept = one - ramp.astype(np.float32)
    divided = one / (np.float32(scaling.factor) * powers)
    mixed: Float32Array = divided * (one - kept) + one / powers * kept
    return mixed


def _llama3(plain: Float32Array, scaling: Llama3Scaling) -> Float32Array:
    """Scale frequencies as Llama 3.1 does; [D/2] to [D/2]."""
    one = np.float32(1)
    factor = np.float32(scaling.factor)
    low = np.float32(scaling.low_freq_factor)
    span = np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
    length = np.float32(scaling.original_context_length)
    longest_kept = np.float32(scaling.original_context_length / scaling.high_freq_factor)
    shortest_divided = np.float32(scaling.original_context_length / scaling.low_freq_factor)

    # Multiplied by reciprocals, not divided: so does PyTorch with a number over a tensor.
    wavelength = (one / plain) * np.float32(2 * math.pi)
    smooth = ((one / wavelength) * length - low) / span
    between = (one - smooth) * plain / factor + smooth * plain
    scaled = np.where(wavelength > shortest_divided, plain / factor, between)
    return np.where(wavelength < longest_kept, plain, scaled).astype(np.float32)
