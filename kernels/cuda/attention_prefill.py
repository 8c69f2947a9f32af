"""Paged prefill attention: the query tokens of ragged rows against all tokens before them.

    out[t, h] = Σ_k softmax_k(scale · query[t, h] · K[k]) · V[k],   k = 0 … position of token t

Row s of a batch has query_len[s] query tokens, maybe none, which are the last of its seq_len[s]
tokens. The keys and values of all of them lie in the block pool already, whether an earlier chunk,
another request with the same prefix or this very step wrote them:

    row s     tokens in the pool  ████████████████████▓▓▓▓▓▓▓▓▓▓▓▓     seq_len = 32
              query tokens                            ▓▓▓▓▓▓▓▓▓▓▓▓     query_len = 12
    flat      query, out [T, H, D]     … row s-1 │ cu_query_lens[s] … │ row s+1 …

With a window of W tokens k begins at max(0, position - W + 1), and what lies before the windows of
all query tokens is not read. With a cap c, c · tanh(score / c) stands in the place of each scaled
score (Gemma 2).

The pool is drawn in `attention_decode`; a kernel sees one layer of it through `block_stride`,
`key_offset` and `value_offset`. This file is the face; what does the work:

    attention_prefill_tensor     16-bit floats, tensor cores
    attention_prefill_layout     what of it depends on the head size
    attention_prefill_float32    float32, ordinary cores
    attention_prefill_pool       how the former reads a pool of 16 bits, or of 8
    attention_prefill_window     which keys both read and see
    attention_caps               what a cap makes of a score
    attention_tiles              which block of threads takes which tokens: the plan

The pool may have eight bits a number (`kv_dtype`; drawn in `quantized_kv`): then it is bytes, and
the last three numbers count them.

The grid is (G kv heads, entries of the tile list): a block of threads owns a tile of a row's query
tokens and the `group` = H / G query heads of one kv head (grouped-query attention, Ainslie et al.
2023). Tokens and heads together are the rows of one matrix product, so that each key and value is
read once for all of them. Softmax is online (Milakov and Gimelshein 2018; FlashAttention, Dao et
al. 2022, FlashAttention-2, Dao 2023), everything is accumulated in float32.

How to launch it:

    tiles = plan_tiles(query_lens, seq_lens, variant.tile_tokens, capacity=…)
    prefill  at variant.grid(num_kv_heads, len(tiles.rows))

What a token's bits depend on: its query, the keys and values of tokens 0 to its own, dtype and head
size. They do not depend on other rows, on the tile list, on which blocks the row has, on the block
size, nor on how the prompt was cut into chunks: keys are taken in groups that begin at the row's
first token, each query is masked by its own position, and a group that is masked altogether adds
exact zeros. (A last bit could differ only where a sum is -0.) One exception: 0 · NaN is NaN, so
a NaN or infinity among the values *of the row itself* may reach queries of the same row that stand
before it, or that it is out of the window of. Slots past a row's end and before the window of its
first query token, blocks of others and the table behind a row's last block or before that window
may hold anything.

Rows of a few query tokens leave most of a tile empty, and a long row of them is not split over
blocks of threads: single tokens are for `attention_decode`, which does both.

The ladder:
  v1  this: two tiles of 16 rows a warp, one for D 256, K and V by asynchronous copies in two
      stages, query fragments in registers, for D 128 half of them in shared memory. Compiled and
      simulated; `make gpu` measures it. The arguments for its speed are in
      `attention_prefill_tensor` and `attention_prefill_layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kernels.cuda import attention_prefill_float32 as float32_kernel
from kernels.cuda import attention_prefill_tensor as tensor_kernel
from kernels.cuda.attention_prefill_layout import LAYOUTS, TILE_ROWS
from kernels.cuda.attention_variant import AttentionVariant, every_shape
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.variant import Expectation

MAX_TILES = 65535  # what a grid's second axis holds


@dataclass(frozen=True, slots=True)
class PrefillVariant(AttentionVariant):
    """The compile-time parameters of one prefill attention kernel: see `AttentionVariant`.

    The kernel's arguments:

        out             [T, H, D], dense; only rows of query tokens are written
        query           [T, H, D], tokens `query_stride` elements apart
        pool            [N, L, K|V, G, B, D]
        block_tables    int32 [S, table_width], read up to the block of the row's last token; what
                        stands before that in which the first query token's window begins is of
                        no account
        seq_lens        int32 [S]
        cu_query_lens   int32 [S + 1]: row s has the tokens cu_query_lens[s] to …[s + 1] - 1
        tile_rows       int32 [tiles], see `attention_tiles`; -1: nothing to do
        tile_tokens     int32 [tiles]: the first query token of the tile, counted in its row
        scale_log2e     softmax scale · log2(e), so that powers of two do; above zero
        query_stride, table_width, block_stride, key_offset, value_offset
        window          of a variant that has one: tokens that a query sees, at least 1
        sinks           float32 [H], of a variant that has them
        cap             float32, c · log2(e), of a variant that has one
    """

    OPERATION: ClassVar[str] = "attention_prefill"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return float32_kernel.THREADS if self.is_float32 else LAYOUTS[self.head_size].threads

    @property
    def tile_tokens(self) -> int:
        """Query tokens of a tile, each with `group` heads."""
        rows = float32_kernel.tile_rows(self.head_size) if self.is_float32 else TILE_ROWS
        return rows // self.group

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (*self.tensors, "int32*", "int32*", "int32*", *self.places)

    @property
    def expectation(self) -> Expectation:
        """On a multiprocessor two blocks, or one of 256 threads; no register is left over."""
        if self.is_float32:
            return Expectation(168, ("LDGSTS.128", "LDS.128", "FFMA", "SHFL"), resident_blocks=2)
        blocks = LAYOUTS[self.head_size].resident_blocks
        return Expectation(255, ("LDGSTS.128", "LDSM", "HMMA", "MUFU"), resident_blocks=blocks)

    def grid(self, num_kv_heads: int, num_tiles: int) -> tuple[int, int, int]:
        """Return the launch grid for a tile list of `num_tiles` entries."""
        if num_tiles > MAX_TILES:
            raise UnsupportedVariantError("num_tiles", f"at most {MAX_TILES}", num_tiles)
        return (num_kv_heads, num_tiles, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        if self.is_float32:
            return float32_kernel.make_float32_prefill(
                self.head_size,
                self.group,
                self.block_size,
                has_window=self.has_window,
                has_sinks=self.has_sinks,
                has_cap=self.has_cap,
            )
        return tensor_kernel.make_tensor_prefill(
            self.dtype,
            self.head_size,
            self.group,
            self.block_size,
            self.kv_dtype,
            has_window=self.has_window,
            has_sinks=self.has_sinks,
            has_cap=self.has_cap,
        )


def variants(*, every: bool) -> list[PrefillVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [PrefillVariant(*shape) for shape in every_shape()]
    return [
        PrefillVariant("bfloat16", 64, 3, 16),
        PrefillVariant("bfloat16", 128, 4, 16),
        PrefillVariant("float16", 96, 1, 32, "float8"),
        PrefillVariant("float32", 128, 8, 32),
        PrefillVariant("bfloat16", 128, 4, 16, "int8"),
        PrefillVariant("bfloat16", 128, 4, 16, None, True),
        PrefillVariant("float16", 64, 2, 32, "float8", True),
        PrefillVariant("float32", 64, 3, 16, None, True),
        PrefillVariant("bfloat16", 256, 4, 16, None, True),
        PrefillVariant("float16", 256, 2, 32, "int8"),
        PrefillVariant("float32", 256, 4, 16),
        PrefillVariant("bfloat16", 64, 8, 16, None, True, True),
        PrefillVariant("float16", 64, 2, 32, "int8", has_sinks=True),
        PrefillVariant("float32", 64, 3, 16, None, False, True),
        PrefillVariant("bfloat16", 256, 2, 16, None, True, has_cap=True),
        PrefillVariant("float16", 128, 2, 32, "int8", has_cap=True),
    ]
