"""What attention over latents is run on: scattered and shared blocks, rows of all lengths.

All that is nobody's is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.block_pool import LAYER, NO_BLOCK, RISE_AT, draw_pool
from kernels.cuda.attention_chunks import CHUNK_TILES, TILE_TOKENS
from kernels.cuda.attention_tiles import plan_tiles
from kernels.cuda.attention_variant import LOG2_E
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from kernels.cuda.latent_attention_layout import LatentAttentionVariant
from kernels.reference.latent_attention import latent_attention

SCALE = 192**-0.5  # DeepSeek-V2's, of heads of 128 and 64 elements
RISE = {"float32": 1.0, "float16": 16.0, "bfloat16": 16.0}
"""What turns of rows from token RISE_AT on is so much longer: scores rise, what is given does not.

In float32 it would cost the digits that are tested."""
CHUNK_TOKENS = CHUNK_TILES * TILE_TOKENS
SPARE_TILES = 2  # entries of the tile list that do nothing


def draw_decode_cases(variant: LatentDecodeVariant, seed: int = 0) -> list[Case]:
    """Return cases whole and split, of all lengths; one row of each alone is its part."""
    size = variant.block_size
    lengths = (size, 2 * size + 3, 1, 0, size - 1, size + 1, 2 * CHUNK_TOKENS + 5 * size + 5)
    of_split = (2 * CHUNK_TOKENS + 1, CHUNK_TOKENS, 0, 3, size + 2, CHUNK_TOKENS + 1)
    return [
        draw_decode(variant, lengths, seed=seed, alone=len(lengths) - 1, splits_alone=3),
        draw_decode(variant, of_split, seed=seed, alone=0, splits=2, split_rows=4),
    ]


def draw_prefill_cases(variant: LatentPrefillVariant, seed: int = 0) -> list[Case]:
    """Return a case of prompts, whole, behind others and empty; the last of one are its part."""
    size = variant.block_size
    rows = ((50, 4 * size + 145), (0, 2 * size), (1, 1), (1, 5 * size + 2), (size, size), (0, 0))
    return [draw_prefill(variant, rows, seed=seed, alone=(0, 21))]


@dataclass(frozen=True, slots=True)
class LatentRows:
    """`pool` [N, L, B, R + P] as stored; `tables` [S, M]; `seq_lens` [S] tokens."""

    pool: Array
    tables: Array
    seq_lens: Array

    def of(self, row: int) -> LatentRows:
        """Return one of them."""
        one = slice(row, row + 1)
        return dataclasses.replace(self, tables=self.tables[one], seq_lens=self.seq_lens[one])


def draw_rows(
    rng: np.random.Generator, variant: LatentAttentionVariant, seq_lens: Sequence[int]
) -> LatentRows:
    """Draw rows in scattered and shared blocks, NaN in all that is nobody's."""
    pool = draw_pool(
        rng, variant.dtype, seq_lens,
        num_kv_heads=1, block_size=variant.block_size, head_size=variant.row_elements,
    )  # fmt: skip
    values = pool.exact[:, :, 0, 0]
    first = RISE_AT // variant.block_size
    for row, seq_len in enumerate(seq_lens):
        end = -(-seq_len // variant.block_size)
        values[pool.tables[row, first:end], LAYER, :, variant.rank :] *= RISE[variant.dtype]
    return LatentRows(to_stored(variant.dtype, values), pool.tables, pool.seq_lens)


def draw_queries(
    rng: np.random.Generator, variant: LatentAttentionVariant, num_tokens: int
) -> Array:
    """Draw queries [T, H + 1, R + P], of which a kernel is given the first H of each token."""
    shape = (num_tokens, variant.num_heads + 1, variant.row_elements)
    return to_stored(variant.dtype, rng.standard_normal(shape))


def draw_decode(
    variant: LatentDecodeVariant,
    seq_lens: Sequence[int],
    *,
    seed: int = 0,
    splits: int = 1,
    split_rows: int | None = None,
    alone: int | None = None,
    splits_alone: int = 1,
) -> Case:
    """Draw a case; row `alone`, if given, is its part."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, variant, seq_lens)
    queries = draw_queries(rng, variant, len(seq_lens))
    case = decode_case(variant, queries, rows, splits=splits, split_rows=split_rows)
    if alone is None:
        return case
    row = slice(alone, alone + 1)
    part = decode_case(variant, queries[row], rows.of(alone), splits=splits_alone)
    return dataclasses.replace(case, part=(part, lambda outputs: {"out": outputs["out"][row]}))


def decode_case(
    variant: LatentDecodeVariant,
    queries: Array,
    rows: LatentRows,
    *,
    splits: int = 1,
    split_rows: int | None = None,
) -> Case:
    """Return the case of some queries and rows; `tickets` must hold zeros again."""
    num_rows = len(rows.seq_lens)
    plan = variant.plan_of(num_rows, int(rows.seq_lens.max()), splits, split_rows)
    tickets = np.zeros(plan.split_rows * plan.grid[0], np.int32)
    token_rows = np.arange(num_rows, dtype=np.int32)
    return Case(
        variant.name,
        {
            "out": poison(variant.dtype, (num_rows, variant.num_heads, variant.rank)),
            "queries": queries,
            "pool": rows.pool,
            "block_tables": rows.tables,
            "seq_lens": rows.seq_lens,
            "partials": poison("float32", (plan.num_partials,)),
            "tickets": tickets,
        },
        (
            Launch(
                variant,
                plan.grid,
                (
                    "out", "queries", "pool", "block_tables", "seq_lens", "partials", "tickets",
                    plan.split_rows, *_scalars(queries, rows),
                ),
            ),
        ),
        {
            "out": _expected(variant, queries, rows, token_rows, rows.seq_lens - 1),
            **({"tickets": Expected("int32", np.zeros_like(tickets), 0.0)} if len(tickets) else {}),
        },
        scratch=("partials",),
    )  # fmt: skip


def draw_prefill(
    variant: LatentPrefillVariant,
    rows: Sequence[tuple[int, int]],
    *,
    seed: int = 0,
    alone: tuple[int, int] | None = None,
) -> Case:
    """Draw a case of rows (query tokens, tokens).

    `alone` (row, n), if given, makes the last n query tokens of a row, as a batch of their own, its
    part.
    """
    rng = np.random.default_rng(seed)
    query_lens = np.array([query_len for query_len, _ in rows], np.int32)
    latents = draw_rows(rng, variant, [seq_len for _, seq_len in rows])
    queries = draw_queries(rng, variant, int(query_lens.sum()))
    case = prefill_case(variant, queries, query_lens, latents)
    if alone is None:
        return case
    row, chunk = alone
    end = int(query_lens[: row + 1].sum())
    tokens = slice(end - chunk, end)
    part = prefill_case(variant, queries[tokens], np.array([chunk], np.int32), latents.of(row))
    return dataclasses.replace(case, part=(part, lambda outputs: {"out": outputs["out"][tokens]}))


def prefill_case(
    variant: LatentPrefillVariant, queries: Array, query_lens: Array, rows: LatentRows
) -> Case:
    """Return the case of some queries and rows."""
    num_tiles = plan_tiles(query_lens, rows.seq_lens, variant.tile_tokens).num_tiles
    tiles = plan_tiles(
        query_lens, rows.seq_lens, variant.tile_tokens, capacity=num_tiles + SPARE_TILES
    )
    tiles.tokens[num_tiles:] = NO_BLOCK
    token_rows = np.repeat(np.arange(len(query_lens), dtype=np.int32), query_lens)
    positions = np.concatenate(
        [np.arange(s - q, s) for q, s in zip(query_lens, rows.seq_lens, strict=True)]
    )
    return Case(
        variant.name,
        {
            "out": poison(variant.dtype, (len(queries), variant.num_heads, variant.rank)),
            "queries": queries,
            "pool": rows.pool,
            "block_tables": rows.tables,
            "seq_lens": rows.seq_lens,
            "cu_query_lens": np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
            "tile_rows": tiles.rows,
            "tile_tokens": tiles.tokens,
        },
        (
            Launch(
                variant,
                variant.grid(len(tiles.rows)),
                (
                    "out", "queries", "pool", "block_tables", "seq_lens", "cu_query_lens",
                    "tile_rows", "tile_tokens", *_scalars(queries, rows),
                ),
            ),
        ),
        {"out": _expected(variant, queries, rows, token_rows, positions)},
    )  # fmt: skip


def _scalars(queries: Array, rows: LatentRows) -> tuple[float, ...]:
    block, layer = rows.pool[0].size, rows.pool[0, 0].size
    return SCALE * LOG2_E, queries[0].size, rows.tables.shape[1], block, LAYER * layer


def _expected(
    variant: LatentAttentionVariant,
    queries: Array,
    rows: LatentRows,
    token_rows: Array,
    positions: Array,
) -> Expected:
    """Return the specification's answer in float64; zeros for a token of an empty row."""
    exact = to_float64(variant.dtype, queries)[:, : variant.num_heads]
    is_any = positions >= 0
    out = np.zeros((len(queries), variant.num_heads, variant.rank))
    attended: Array = out[is_any]
    latent_attention(
        exact[is_any], to_float64(variant.dtype, rows.pool), LAYER, rows.tables,
        token_rows[is_any], positions[is_any], SCALE, attended,
    )  # fmt: skip
    out[is_any] = attended
    return Expected(variant.dtype, out, TOLERANCES[variant.dtype])
