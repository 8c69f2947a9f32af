"""Decode attention: one query token a row over ragged rows of a hostile pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.block_pool import (
    CAP,
    LAYER,
    BlockPool,
    before_hidden,
    draw_pool,
    draw_sinks,
    with_raised_keys,
)
from kernels.cuda.attention_chunks import CHUNK_TILES, TILE_TOKENS, most_tokens_read
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_variant import LOG2_E, NO_CAP, NO_WINDOW
from kernels.reference.paged_attention import paged_attention

ROUNDED_TWICE = 2.0**-7
"""What a weight and the result lose in bfloat16 where one token has nearly all of the weight: with
its token's scale, as in a pool of 8 bits, it is not 1."""
CHUNK_TOKENS = CHUNK_TILES * TILE_TOKENS  # at most, of rows as short as these


def draw_cases(variant: DecodeVariant, seed: int) -> list[Case]:
    """Return the case with the lengths where mistakes live, unsplit, and one of split rows.

    Part of the first is its longest row, of some chunks, alone and split in three. The second has
    rows of some chunks, one, none, and fewer than blocks, and whole ones behind them. Where there
    is a window, rows have some chunks still; another case has windows that end within a block, and
    one of one token.
    """
    size = variant.block_size
    # One token, block edges, padding, chunks.
    lengths = (size, 2 * size + 3, 1, 0, size - 1, size + 1, 2, 2 * CHUNK_TOKENS + 5 * size + 5)
    of_split = (2 * CHUNK_TOKENS + 1, CHUNK_TOKENS, 0, 3, size + 2, CHUNK_TOKENS + 1)
    if not variant.has_window:
        return [
            draw_case(variant, lengths, seed=seed, alone=len(lengths) - 1, splits_alone=3),
            draw_case(variant, of_split, seed=seed, alone=0, splits=2, split_rows=4),
        ]
    longest, of_short = 2 * CHUNK_TOKENS + 9, (size + 3, 1, 0, 3 * size, 5 * size + 7)
    return [
        draw_case(
            variant, lengths, seed=seed, window=longest, alone=len(lengths) - 1, splits_alone=3
        ),
        draw_case(
            variant, of_split, seed=seed, window=CHUNK_TOKENS + 1, alone=0, splits=2, split_rows=4
        ),
        draw_case(variant, of_short, seed=seed, window=size - 5, alone=3, splits_alone=2),
        draw_case(variant, of_short, seed=seed, window=1),
    ]


def draw_case(  # noqa: PLR0913
    variant: DecodeVariant,
    seq_lens: Sequence[int],
    *,
    num_kv_heads: int = 2,
    seed: int = 0,
    splits: int = 1,
    split_rows: int | None = None,
    alone: int | None = None,
    splits_alone: int = 1,
    window: int | None = None,
    cap: float = CAP,
) -> Case:
    """Draw a case; row `alone`, if given, is its part. `window`, `cap`: of a variant that has one.

    `split_rows`: how many of the first rows are split, all if that is None.

    `query` is [S, H + 1, D], of which the kernel is given the first H heads of each row, so that
    rows do not follow each other densely. `out` is [S, H, D].
    """
    rng = np.random.default_rng(seed)
    pool = draw_pool(
        rng, variant.dtype, seq_lens,
        num_kv_heads=num_kv_heads, block_size=variant.block_size, head_size=variant.head_size,
        kv_dtype=variant.kv_dtype,
    )  # fmt: skip
    pool = with_raised_keys(pool)
    num_heads = num_kv_heads * variant.group
    query = rng.standard_normal((len(seq_lens), num_heads + 1, variant.head_size))
    stored_query = to_stored(variant.dtype, query)
    case = make_case(
        variant, stored_query, pool, splits=splits, split_rows=split_rows, window=window, cap=cap
    )
    if alone is None:
        return case
    row = slice(alone, alone + 1)
    part = make_case(
        variant,
        stored_query[row],
        dataclasses.replace(pool, tables=pool.tables[row], seq_lens=pool.seq_lens[row]),
        splits=splits_alone,
        window=window,
        cap=cap,
    )
    return dataclasses.replace(case, part=(part, lambda outputs: {"out": outputs["out"][row]}))


def make_case(
    variant: DecodeVariant,
    query: Array,
    pool: BlockPool,
    *,
    splits: int = 1,
    split_rows: int | None = None,
    window: int | None = None,
    cap: float = CAP,
) -> Case:
    """Return the case of some queries and rows: one launch.

    Split, `tickets` must hold zeros again. Where there is a window, all before it is hidden.
    """
    if window is not None:
        pool = before_hidden(pool, np.maximum(pool.seq_lens - window, 0).tolist())
    num_rows, num_heads = query.shape[0], query.shape[1] - 1
    num_kv_heads = num_heads // variant.group
    scale = variant.head_size**-0.5
    longest = most_tokens_read(int(pool.seq_lens.max()), window)
    plan = variant.plan_of(num_rows, num_kv_heads, longest, splits, split_rows)
    scalars = (
        plan.split_rows, scale * LOG2_E, query[0].size, pool.tables.shape[1], *pool.strides,
        NO_WINDOW if window is None else window, "sinks" if variant.has_sinks else "out",
        cap * LOG2_E if variant.has_cap else NO_CAP,
    )  # fmt: skip
    sinks = draw_sinks(num_heads) if variant.has_sinks else None
    out_shape = (num_rows, num_heads, variant.head_size)
    tickets = np.zeros(plan.split_rows * plan.grid[0], np.int32)
    decode = Launch(
        variant,
        plan.grid,
        ("out", "query", "pool", "block_tables", "seq_lens", "partials", "tickets", *scalars),
    )
    exact = attend_exactly(
        to_float64(variant.dtype, query)[:, :num_heads], pool, scale, window, sinks,
        cap if variant.has_cap else None,
    )  # fmt: skip
    tolerance = TOLERANCES[variant.dtype]
    if variant.kv_dtype is not None:
        tolerance = max(tolerance, ROUNDED_TWICE * float(np.abs(exact).max(initial=0.0)))
    return Case(
        variant.name,
        {
            "out": poison(variant.dtype, out_shape),
            "query": query,
            "pool": pool.pool,
            "block_tables": pool.tables,
            "seq_lens": pool.seq_lens,
            "partials": poison("float32", (plan.num_partials,)),
            "tickets": tickets,
            **({} if sinks is None else {"sinks": sinks}),
        },
        (decode,),
        {
            "out": Expected(variant.dtype, exact, tolerance),
            **({"tickets": Expected("int32", np.zeros_like(tickets), 0.0)} if len(tickets) else {}),
        },
        scratch=("partials",),
    )


def attend_exactly(
    query: Array,
    pool: BlockPool,
    scale: float,
    window: int | None = None,
    sinks: Array | None = None,
    cap: float | None = None,
) -> Array:
    """Return the specification's answer for queries [S, H, D] in float64; zeros for empty rows."""
    rows = np.flatnonzero(pool.seq_lens).astype(np.int32)
    out = np.zeros_like(query)
    attended = np.empty_like(query[rows])
    num_kv_heads = pool.pool.shape[3]
    paged_attention(
        query[rows], pool.exact, LAYER, pool.tables, rows, pool.seq_lens[rows] - 1, scale,
        0, len(rows) * num_kv_heads, attended, window, sinks, cap,
    )  # fmt: skip
    out[rows] = attended
    return out
