"""What `latent_write` is run on: scattered slots, padding tokens, far positions, wider products.

Whatever lies between the columns that are read is NaN, and all that a padding token has. Of the
pool every element counts that no token's row is: it must keep its bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.block_pool import LAYER, LAYERS
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.reference.latent_attention import write_latents

NUM_BLOCKS = 4
MAX_POSITION = 1000
BEFORE, BEHIND = 2, 3
"""Vectors of a query head ahead of what turns, and of a token behind all that is read."""
EPS = 1e-6
MAGNITUDES = (1.0, 1e-3, 0.0, 30.0)
"""Of latents, in turns; all that matters is what eps is among their squares."""


def draw_cases(variant: LatentWriteVariant, seed: int = 0) -> list[Case]:
    """Return a case whose query heads take two blocks of threads; its last token alone is a part.

    Slots are a block's first and its last, neighbours, one of no block, and the pool's last.
    """
    size, num_heads = variant.block_size, variant.threads // variant.pairs + 3
    slots = (2 * size + 5, -1, 0, size - 1, size, NUM_BLOCKS * size - 1)
    return [draw_case(variant, slots, num_heads, seed=seed)]


def draw_row(variant: LatentWriteVariant, num_tokens: int, num_heads: int, seed: int) -> Case:
    """Return a row's next tokens, whose blocks lie anywhere; two of padding are behind them."""
    size = variant.block_size
    blocks = np.random.default_rng(seed).permutation(NUM_BLOCKS)
    tokens = np.arange(5, 5 + num_tokens)
    slots = blocks[tokens // size] * size + tokens % size
    return draw_case(variant, (*slots, -1, -1), num_heads, seed=seed)


def draw_case(
    variant: LatentWriteVariant, slots: Sequence[int], num_heads: int, *, seed: int = 0
) -> Case:
    """Return tokens in these slots, no two in the same but for negative ones."""
    rng = np.random.default_rng(seed)
    dtype, rank, turning = variant.dtype, variant.rank, variant.turning
    num_tokens, width, length = len(slots), rank + turning, VECTOR_LENGTHS[variant.dtype]
    kv_slots = np.array(slots, np.int64)
    positions = rng.integers(0, MAX_POSITION, num_tokens).astype(np.int32)
    positions[0] = MAX_POSITION

    inputs = np.full((num_tokens, width + BEHIND * length), np.nan)
    inputs[:, :width] = rng.standard_normal((num_tokens, width))
    inputs[:, :rank] *= np.resize(MAGNITUDES, num_tokens)[:, None]
    inputs[kv_slots < 0] = np.nan
    head_size = BEFORE * length + turning
    heads = np.full((num_tokens, num_heads * head_size + BEHIND * length), np.nan)
    of_heads = heads[:, : num_heads * head_size].reshape(num_tokens, num_heads, head_size)
    of_heads[:, :, -turning:] = rng.standard_normal((num_tokens, num_heads, turning))
    heads[:, : num_heads * head_size] = of_heads.reshape(num_tokens, -1)
    frequencies = 10000.0 ** (-np.arange(turning // 2) / (turning // 2))
    angles = np.arange(MAX_POSITION + 1)[:, None] * frequencies
    arrays = {
        "queries": poison(dtype, (num_tokens, num_heads, width)),
        "pool": to_stored(
            dtype,
            rng.standard_normal((NUM_BLOCKS, LAYERS, 1, 1, variant.block_size, width)),
        ),
        "inputs": to_stored(dtype, inputs),
        "heads": to_stored(dtype, heads),
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
        "positions": positions,
        "kv_slots": kv_slots,
        "weight": to_stored(dtype, rng.uniform(0.5, 1.5, rank)),
    }
    case = _case(variant, arrays)
    alone = {
        name: arrays[name][-1:] for name in ("queries", "inputs", "heads", "positions", "kv_slots")
    }
    part = _case(variant, {**arrays, **alone})

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        written = _rows(variant, kv_slots[-1:])
        pool = np.where(written, outputs["pool"], arrays["pool"])
        return {"queries": outputs["queries"][-1:], "pool": pool}

    return Case(case.name, case.arrays, case.launches, case.expected, part=(part, select))


def _case(variant: LatentWriteVariant, arrays: Mapping[str, Array]) -> Case:
    dtype, rank = variant.dtype, variant.rank
    queries, pool, kv_slots, positions = (
        arrays[name] for name in ("queries", "pool", "kv_slots", "positions")
    )
    num_tokens, num_heads, width = queries.shape
    length = VECTOR_LENGTHS[dtype]
    head_size = BEFORE * length + variant.turning

    exact_heads = to_float64(dtype, arrays["heads"])[:, : num_heads * head_size]
    exact_queries = np.full(queries.shape, np.nan)
    # The specification knows no padding: those tokens write into a block of their own.
    spared = np.concatenate([to_float64(dtype, pool), np.zeros(pool.shape)[:1]])
    size = variant.block_size
    spare = NUM_BLOCKS * size + np.arange(num_tokens) % size
    write_latents(
        to_float64(dtype, arrays["inputs"])[:, :width],
        exact_heads.reshape(num_tokens, num_heads, -1)[:, :, -variant.turning :],
        arrays["cosines"][positions].astype(np.float64),
        arrays["sines"][positions].astype(np.float64),
        to_float64(dtype, arrays["weight"]), EPS,
        spared[:, :, 0, 0], LAYER, np.where(kv_slots < 0, spare, kv_slots), exact_queries,
    )  # fmt: skip
    assert np.isnan(exact_queries[:, :, :rank]).all()
    written = _rows(variant, kv_slots)

    def unless_others_changed(stored: Array) -> Array:
        return np.where(written | (stored == pool), to_float64(dtype, stored), np.inf)

    tolerance = TOLERANCES[dtype]
    launch = Launch(
        variant,
        variant.grid(num_tokens, num_heads),
        (
            "queries", "pool", "inputs", "turning", "cosines", "sines", "positions", "kv_slots",
            "weight", EPS, num_heads, math.prod(pool.shape[1:]), LAYER * size * width,
            arrays["inputs"].shape[1], arrays["heads"].shape[1], head_size,
        ),
    )  # fmt: skip
    turning = arrays["heads"].reshape(-1)[BEFORE * length :].copy()
    return Case(
        variant.name,
        {**arrays, "turning": turning},
        (launch,),
        {
            "queries": Expected(dtype, exact_queries, tolerance),
            "pool": Expected(dtype, spared[:-1], tolerance, unless_others_changed),
        },
    )


def _rows(variant: LatentWriteVariant, kv_slots: Array) -> Array:
    """Return where the rows of tokens are in the pool, to be broadcast over their elements."""
    rows = np.zeros((NUM_BLOCKS, LAYERS, 1, 1, variant.block_size, 1), np.bool_)
    blocks, offsets = np.divmod(kv_slots[kv_slots >= 0], variant.block_size)
    rows[blocks, LAYER, 0, 0, offsets] = True
    return rows
