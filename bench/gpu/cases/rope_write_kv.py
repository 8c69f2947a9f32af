"""Rotation and the write of K and V: scattered slots, padding tokens, far positions.

A pool of eight bits is judged by what it stands for. That must be what the specification makes of
the exact values, to the code: a rounding that goes the other way is an error of a whole step, so
there are no values so near to a tie that the kernel's float32 might (`_has_ties`). One head has an
infinity in its value, one is all zeros.
"""

from __future__ import annotations

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.block_pool import LAYER, LAYERS, layer_strides, to_pool, to_values
from kernels.cuda.quantized_kv import SCALE_BYTES
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.reference.rope import HeadChanges, rope_write_kv

NUM_HEADS, NUM_KV_HEADS = 6, 2
NUM_BLOCKS = 3
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
EPS = 1e-6
GROWTH, GROWTH_LENGTH = np.array([1.0, 1.25, 0.5, 2.0], np.float32), 300
MAGNITUDES = np.array([[1.0], [1.0], [30.0], [1e-3], [0.2]])
"""Of tokens whose heads are all normalised."""
NEAR = 1e-6
"""Relative: several roundings of float32."""
OTHER_SEED = 1 << 16


def draw_cases(variant: RopeWriteKvVariant, seed: int) -> list[Case]:
    """Return one case, and of models whose layers share keys another one of queries alone."""
    alone = [draw_case(variant, seed, num_kv_heads=0)] if variant.norms_values else []
    return [draw_case(variant, seed), *alone]


def draw_case(variant: RopeWriteKvVariant, seed: int, *, num_kv_heads: int = NUM_KV_HEADS) -> Case:
    """Draw a case; the pool's slots that no token has must keep their bits.

    Without key heads that is the whole pool, as large as with some.
    """
    rng = np.random.default_rng(seed)
    size, dim = variant.block_size, variant.head_size
    slots = np.array([2 * size + 5, -1, 0, size - 1, size], np.int64)
    positions = np.array([1000, 3, 0, 7, 511], np.int32)
    num_tokens = len(slots)
    width = (NUM_HEADS + 2 * num_kv_heads) * dim
    numbers = rng.standard_normal((num_tokens, width))
    if variant.norms_values:
        numbers *= MAGNITUDES
    qkv = to_stored(variant.dtype, numbers)
    shape = (NUM_BLOCKS, LAYERS, 2, NUM_KV_HEADS, size, dim)
    kv_dtype = variant.kv_dtype
    pool = to_pool(variant.dtype, kv_dtype, rng.standard_normal(shape))
    if kv_dtype is not None and num_kv_heads:
        heads = qkv.reshape(num_tokens, -1, dim)
        heads[0, -1, dim // 2] = INFINITY[variant.dtype]
        heads[2, NUM_HEADS] = 0
    bias = to_stored(variant.dtype, 0.5 * rng.standard_normal(width))
    norms = to_stored(variant.norm_dtype, rng.uniform(0.5, 1.5, (2, dim)))
    query_norm, key_norm = norms[0], norms[1].copy()
    exact_norms = to_float64(variant.norm_dtype, norms[0]), to_float64(variant.norm_dtype, norms[1])
    changes = HeadChanges(
        to_float64(variant.dtype, bias) if variant.has_bias else None,
        exact_norms if variant.has_head_norms else None,
        EPS,
        GROWTH[positions // GROWTH_LENGTH].astype(np.float64) if variant.queries_grow else None,
        norms_values=variant.norms_values,
    )
    frequencies = 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    angles = np.arange(positions.max() + 1)[:, None] * frequencies
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    exact_pool = to_values(variant.dtype, kv_dtype, dim, pool)
    exact_out: Array = np.empty((num_tokens, NUM_HEADS, dim))
    # The specification knows no padding: those tokens write into a block of their own.
    with_spare = np.concatenate([exact_pool, np.zeros_like(exact_pool[:1])])
    with np.errstate(invalid="ignore"):  # of the infinity, where values are normalised
        rope_write_kv(
            to_float64(variant.dtype, qkv), cosines[positions].astype(np.float64),
            sines[positions].astype(np.float64), with_spare[:, :, :, :num_kv_heads], LAYER,
            np.where(slots < 0, NUM_BLOCKS * size, slots), exact_out, changes,
        )  # fmt: skip
    if kv_dtype is not None and _has_ties(variant, with_spare[:-1]):
        return draw_case(variant, seed + OTHER_SEED, num_kv_heads=num_kv_heads)
    tolerance = TOLERANCES[variant.dtype]
    of_pool = tolerance if num_kv_heads else 0.0
    expected_pool = Expected(variant.dtype, with_spare[:-1], of_pool)
    if kv_dtype is not None:
        expected_pool = Expected(
            "uint8",
            to_values(
                variant.dtype, kv_dtype, dim, to_pool(variant.dtype, kv_dtype, with_spare[:-1])
            ),
            TOLERANCES["float32"],
            lambda stored: to_values(variant.dtype, kv_dtype, dim, stored),
        )
    return Case(
        variant.name if num_kv_heads else f"{variant.name} of queries alone",
        {
            "out": poison(variant.dtype, exact_out.shape),
            "pool": pool,
            "qkv": qkv,
            "cosines": cosines,
            "sines": sines,
            "positions": positions,
            "kv_slots": slots,
            "bias": bias,
            "query_norm": query_norm,
            "key_norm": key_norm,
            "growth": GROWTH,
        },
        (
            Launch(
                variant,
                variant.grid(num_tokens, NUM_HEADS, num_kv_heads),
                (
                    "out", "pool", "qkv", "cosines", "sines", "positions", "kv_slots",
                    NUM_HEADS, num_kv_heads, *layer_strides(pool.shape, LAYER),
                    "bias", "query_norm", "key_norm", EPS, "growth", GROWTH_LENGTH,
                ),
            ),
        ),
        {
            "out": Expected(variant.dtype, exact_out, tolerance),
            "pool": expected_pool,
        },
    )  # fmt: skip


def _has_ties(variant: RopeWriteKvVariant, values: Array) -> bool:
    """Whether a value's code may change by what float32 rounds; `values`: of the pool, exact."""

    def codes_of(moved: Array) -> Array:
        return to_pool(variant.dtype, variant.kv_dtype, moved)[..., : -SCALE_BYTES * size]

    size = variant.block_size
    signs = NEAR * np.where(np.indices(values.shape).sum(axis=0) % 2, 1.0, -1.0)
    codes = codes_of(values)
    return any((codes_of(values * (1 + moved)) != codes).any() for moved in (signs, -signs))
