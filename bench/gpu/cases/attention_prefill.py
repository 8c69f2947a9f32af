"""Prefill attention: ragged rows of query tokens over longer rows of a hostile pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.block_pool import (
    CAP,
    LAYER,
    NO_BLOCK,
    BlockPool,
    before_hidden,
    draw_pool,
    draw_sinks,
    with_raised_keys,
)
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_tiles import plan_tiles
from kernels.cuda.attention_variant import LOG2_E, NO_CAP, NO_WINDOW
from kernels.reference.paged_attention import paged_attention

SPARE_TILES = 2  # entries of the tile list that do nothing

# A pool of eight bits: weights are rounded once more, by 2⁻⁹, after a value's scale was multiplied
# to them, and their sum is not of what the values were weighted with.
SCALED_TOLERANCE = 1.5 * TOLERANCES["bfloat16"]


def draw_cases(variant: PrefillVariant, seed: int) -> list[Case]:
    """Return the case with the lengths where mistakes live.

    Its part is the last chunk of the longest row, alone. Where there is a window, one case has a
    window of several tiles of keys, and one of less than a block.
    """
    size = variant.block_size
    # (query tokens, tokens): a chunk over two tiles and more, a row without queries, single tokens,
    # a whole prompt, edges of blocks and of tiles of keys, none at all.
    rows = (
        (150, 4 * size + 345), (0, 2 * size), (1, 1), (1, 5 * size + 2), (size, size),
        (129, 129), (3, 66), (0, 0), (33, 64), (31, 32 + 31), (2, 3 * size + 1),
    )  # fmt: skip
    if not variant.has_window:
        return [draw_case(variant, rows, seed=seed, alone=(0, 21))]
    return [
        draw_case(variant, rows, seed=seed, alone=(0, 21), window=window)
        for window in (6 * size + 5, size - 3)
    ]


def draw_case(
    variant: PrefillVariant,
    rows: Sequence[tuple[int, int]],
    *,
    num_kv_heads: int = 2,
    seed: int = 0,
    alone: tuple[int, int] | None = None,
    window: int | None = None,
    cap: float = CAP,
) -> Case:
    """Draw a case of rows (query tokens, tokens).

    `alone` (row, n), if given, makes the last n query tokens of a row, as a batch of their own, its
    part. `query` is [T, H + 1, D], of which the kernel is given the first H heads of each token, so
    that tokens do not follow each other densely. `out` is [T, H, D]. `window`, `cap`: of a variant
    that has one.
    """
    rng = np.random.default_rng(seed)
    query_lens = np.array([query_len for query_len, _ in rows], np.int32)
    pool = draw_pool(
        rng, variant.dtype, [seq_len for _, seq_len in rows],
        num_kv_heads=num_kv_heads, block_size=variant.block_size, head_size=variant.head_size,
        kv_dtype=variant.kv_dtype,
    )  # fmt: skip
    pool = with_raised_keys(pool)
    num_tokens, num_heads = int(query_lens.sum()), num_kv_heads * variant.group
    query = rng.standard_normal((num_tokens, num_heads + 1, variant.head_size))
    stored_query = to_stored(variant.dtype, query)
    case = make_case(variant, stored_query, query_lens, pool, window, cap)
    if alone is None:
        return case
    row, chunk = alone
    end = int(query_lens[: row + 1].sum())
    tokens = slice(end - chunk, end)
    one_row = slice(row, row + 1)
    part = make_case(
        variant,
        stored_query[tokens],
        np.array([chunk], np.int32),
        dataclasses.replace(pool, tables=pool.tables[one_row], seq_lens=pool.seq_lens[one_row]),
        window,
        cap,
    )
    return dataclasses.replace(case, part=(part, lambda outputs: {"out": outputs["out"][tokens]}))


def make_case(
    variant: PrefillVariant,
    query: Array,
    query_lens: Array,
    pool: BlockPool,
    window: int | None = None,
    cap: float = CAP,
) -> Case:
    """Return the case of some queries and rows.

    Where there is a window, all before that of a row's first query token is hidden.
    """
    if window is not None:
        contexts = pool.seq_lens - query_lens
        firsts = np.where(query_lens > 0, np.maximum(contexts + 1 - window, 0), pool.seq_lens)
        pool = before_hidden(pool, firsts.tolist())
    num_tokens, num_heads = query.shape[0], query.shape[1] - 1
    num_kv_heads = num_heads // variant.group
    scale = variant.head_size**-0.5
    num_tiles = plan_tiles(query_lens, pool.seq_lens, variant.tile_tokens).num_tiles
    tiles = plan_tiles(
        query_lens, pool.seq_lens, variant.tile_tokens, capacity=num_tiles + SPARE_TILES
    )
    tiles.tokens[num_tiles:] = NO_BLOCK
    scalars = (
        scale * LOG2_E, query[0].size, pool.tables.shape[1], *pool.strides,
        NO_WINDOW if window is None else window, "sinks" if variant.has_sinks else "out",
        cap * LOG2_E if variant.has_cap else NO_CAP,
    )  # fmt: skip
    sinks = draw_sinks(num_heads) if variant.has_sinks else None
    return Case(
        variant.name,
        {
            "out": poison(variant.dtype, (num_tokens, num_heads, variant.head_size)),
            "query": query,
            "pool": pool.pool,
            "block_tables": pool.tables,
            "seq_lens": pool.seq_lens,
            "cu_query_lens": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            "tile_rows": tiles.rows,
            "tile_tokens": tiles.tokens,
            **({} if sinks is None else {"sinks": sinks}),
        },
        (
            Launch(
                variant,
                variant.grid(num_kv_heads, len(tiles.rows)),
                (
                    "out", "query", "pool", "block_tables", "seq_lens", "cu_query_lens",
                    "tile_rows", "tile_tokens", *scalars,
                ),
            ),
        ),
        {
            "out": Expected(
                variant.dtype,
                attend_exactly(
                    to_float64(variant.dtype, query)[:, :num_heads], query_lens, pool, scale,
                    window, sinks, cap if variant.has_cap else None,
                ),
                SCALED_TOLERANCE if variant.kv_dtype else TOLERANCES[variant.dtype],
            )
        },
    )  # fmt: skip


def attend_exactly(
    query: Array,
    query_lens: Array,
    pool: BlockPool,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Return the specification's answer for queries [T, H, D] in float64."""
    token_rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
    positions = np.concatenate(
        [np.arange(s - q, s) for q, s in zip(query_lens, pool.seq_lens, strict=True)]
    ).astype(np.int32)
    out = np.empty_like(query)
    num_kv_heads = pool.pool.shape[3]
    paged_attention(
        query, pool.exact, LAYER, pool.tables, token_rows, positions, scale,
        0, len(query) * num_kv_heads, out, window, sinks, cap,
    )  # fmt: skip
    return out
