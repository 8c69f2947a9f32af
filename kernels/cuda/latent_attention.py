"""Paged attention over latents: every head reads the same row of each token, decode and prompts.

    out[t, h] = Σ_k softmax_k(scale · queries[t, h] · row[k]) · row[k][: R],   k = 0 … position of t

Specification: `kernels.reference.latent_attention.latent_attention`, which says where this comes
from. Token k of row s of a batch lies in block `block_tables[s, k // B]` at slot k % B. The pool is
[N blocks, L layers, 1, 1, B slots, R + P]; a kernel sees one layer of it through two numbers,
counted in elements:

    block b of the pool
    ├─ layer 0 ── slot 0    R + P elements: the latent, then what turns
    │             slot B-1
    └─ layer l ── …                                 layer_offset = l · B·(R + P)
    block b + 1                                     block_stride = L · B·(R + P)

This file is the face; what does the work:

    latent_attention_tensor     16-bit floats, tensor cores: the kernels
    latent_attention_layout     what there is
    attention_shared_tile       what those kernels make of a tile of tokens
    attention_shared_float32    float32, ordinary cores (attention_shared_float32_tile)
    attention_shared_layout     heads as rows of a matrix, blocks of threads, where sums lie
    attention_shared_results    results of chunks, and what is written
    attention_chunks, _partials, _merge, _tiles    as in the other attention

Those of `attention_` serve `attention_wide` as well.

Softmax is online (Milakov and Gimelshein 2018), everything is accumulated in float32.

*Decode*, one query token a row. The grid is (units, splits, planes) as in `attention_decode`, and
so is the plan: where there are few blocks, the chunks of a row are split over several.

    plan = variant.plan(num_rows, longest, num_multiprocessors)
    launch at plan.grid with plan.split_rows

with room for `plan.num_partials` float32 in `partials` and zeros in `tickets`, which are zeros
again when the launch is over. A row's bits follow from its query, what its tokens left and its
length, from dtype, R and P; neither from other rows, nor from splits, the grid, which blocks the
row has, or the block size. The grid does not depend on the rows' lengths. A row of length 0
(padding of a graph) gives zeros.

*Prompts*, rows of several query tokens, which are the last of each row's tokens. The grid is
(entries of the tile list, units): where heads are many a tile has one token, and no axis but the
first holds more than 65 535.

    tiles = plan_tiles(query_lens, seq_lens, variant.tile_tokens, capacity=…)    attention_tiles
    launch at variant.grid(len(tiles.rows))

A token's bits follow from its query, what tokens 0 to its own left, from dtype, R and P; neither
from other rows, nor from the tile list, the blocks, the block size, or how the prompt was cut into
chunks, with the exceptions of `attention_prefill`. They need not be those of decode.

Slots past a row's end may hold anything, NaN included.

What limits it (arguments, not measurements), at R 512 and P 64 in 16 bits. A token leaves 1152
bytes, a tile of 16 tokens is 18 KB. A multiprocessor's share of 4.8 TB/s brings that in 900 cycles.
What a block needs for it, in cycles:

                                                                       decode      prompts
                                                                      16 places   32 places
    shared memory   4 warps · 27 or 37 reads and writes of 512 bytes,
                    and 18 KB copied                                    ~ 580       ~ 740
    tensor cores    4 · 35 or 70 products; mma.sync does about 62 %
                    of 4096 flop a cycle                                ~ 230       ~ 450
    copies          of one tile are on the way, of two blocks of a multiprocessor 37 KB; 25 KB are
                    needed

So where H ≤ 16, decode should be limited by memory. With H = 128, eight units read each tile, from
the second cache for the most part, and shared memory is what limits: 8 · 580 cycles a tile. Prompts
have at most 32 · 35 products in 740 cycles, 1550 flop a cycle, 360 TFLOP/s on 132 multiprocessors
at 1.75 GHz, and 60 flop for a byte from the second cache, of which 5 TB/s would let 300 through.

The ladder:
  v1  this: four warps that share out the sums of 16 places, of prompts 32; two stages of 16 tokens
      in 48 KB. Compiled and simulated; nothing of it has been measured.
  v2  64 places a block where H ≥ 64: each tile is read from the second cache a quarter as often in
      decode, half as often for prompts. Their queries, 72 KB, and the stages want more shared
      memory than arrays may take whose sizes are in the code, so launches that ask for it.
  v3  wgmma, which reads shared memory itself (9.0).
  v4  chunks merged by more than one block of threads: one reads 35 KB of each of up to 64 now.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from kernels.cuda.attention_chunks import (
    BYTES_FOR_BANDWIDTH,
    TILE_TOKENS,
    least_chunk_tiles,
    most_chunks,
    plan_splits,
    plan_tail,
)
from kernels.cuda.attention_decode import DecodePlan
from kernels.cuda.attention_shared_float32 import (
    make_float32_latent_decode,
    make_float32_latent_prefill,
)
from kernels.cuda.attention_shared_float32_tile import AT_ONCE
from kernels.cuda.latent_attention_layout import PLACES, LatentAttentionVariant
from kernels.cuda.latent_attention_tensor import (
    make_tensor_latent_decode,
    make_tensor_latent_prefill,
)
from kernels.cuda.variant import Expectation, Variant

READ_EARLY: Final = (3, 4)
"""Of the arguments of decode: block_tables, seq_lens."""
TENSOR_INSTRUCTIONS: Final = ("LDGSTS.128", "LDSM", "HMMA", "LDS.128", "SHFL", "MUFU")
FLOAT32_INSTRUCTIONS: Final = ("LDG.128", "FFMA", "SHFL", "MUFU")
FLOAT32_EXPECTATION: Final = 168
FLOAT32_BLOCKS: Final = 3
"""On a multiprocessor of capability 9.0."""


@dataclass(frozen=True, slots=True)
class LatentDecodeVariant(LatentAttentionVariant):
    """The compile-time parameters of a decode kernel: see `LatentAttentionVariant`.

    The kernel's arguments:

        out              [S, H, R], dense
        queries          [S, H, R + P], rows `query_stride` elements apart
        pool             as drawn above
        block_tables     int32 [S, table_width], read up to the block of the row's last token
        seq_lens         int32 [S]
        partials         float32, `num_partials` of them; not touched where no row is split
        tickets          int32, zeros, one for each unit of each split row
        split_rows       int32, how many of the first rows are split; behind them is a multiple of
                         the splits
        scale_log2e      softmax scale · log2(e), so that powers of two do; above zero
        query_stride, table_width, block_stride, layer_offset
    """

    OPERATION: ClassVar[str] = "latent_decode"
    ROW_TILES: ClassVar[int] = 1
    UNITS_ARE_SECOND: ClassVar[bool] = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (*self.tensors, "float32*", "int32*", "int32", *PLACES)

    @property
    def expectation(self) -> Expectation:
        """Registers for two blocks on a multiprocessor at R 512, for three at 256."""
        if self.is_float32:
            return Expectation(FLOAT32_EXPECTATION, FLOAT32_INSTRUCTIONS, begins_early=True)
        return Expectation(
            255 if self.rank == 512 else 168,
            TENSOR_INSTRUCTIONS,
            resident_blocks=self.resident_blocks,
            begins_early=True,
            reads_early=READ_EARLY,
        )

    @property
    def resident_blocks(self) -> int:
        """Blocks of threads that are at work on a multiprocessor at a time."""
        if self.is_float32:
            return FLOAT32_BLOCKS
        return 2 if self.rank == 512 else 3

    @property
    def least_blocks(self) -> int:
        """Blocks of threads that have enough bytes in flight for a multiprocessor, if so many fit.

        A block has a tile on the way, in float32 each warp some tokens, the same ones for the most
        part.
        """
        tokens, element_bytes = (AT_ONCE[self.rank], 4) if self.is_float32 else (TILE_TOKENS, 2)
        in_flight = tokens * self.row_elements * element_bytes
        return min(self.resident_blocks, -(-BYTES_FOR_BANDWIDTH // in_flight))

    def plan(self, num_rows: int, longest: int, num_multiprocessors: int) -> DecodePlan:
        """Return how to launch, for rows of up to `longest` tokens: `DecodeVariant.plan`."""
        size = (num_rows, self.units, longest, num_multiprocessors)
        least = self.least_blocks, least_chunk_tiles(None)
        if num_rows * self.units > self.resident_blocks * num_multiprocessors:
            splits, split_rows = plan_tail(*size, self.resident_blocks, *least)
        else:
            splits, split_rows = plan_splits(*size, *least), num_rows
        return self.plan_of(num_rows, longest, splits, split_rows)

    def plan_of(
        self, num_rows: int, longest: int, splits: int = 1, split_rows: int | None = None
    ) -> DecodePlan:
        """Return the plan that splits the first `split_rows` rows, all if that is None."""
        if split_rows is None or splits == 1:
            split_rows = num_rows if splits > 1 else 0
        planes, left = divmod(num_rows - split_rows, splits)
        assert left == 0, "whole rows are a multiple of the splits"
        num_partials = self.num_partials(split_rows, longest)
        return DecodePlan(
            (self.units, splits, split_rows + planes), splits, split_rows, num_partials
        )

    def num_partials(self, split_rows: int, longest: int) -> int:
        """Return how many float32 so many split rows need in `partials`."""
        chunks = most_chunks(longest, least_chunk_tiles(None))
        return self.layout.num_partials(split_rows, 1, chunks)

    def most_partials(self, num_rows: int, longest: int, num_multiprocessors: int) -> int:
        """Return the most `num_partials` that a plan of up to so many rows and tokens has.

        More units than are at work at a time are never split (`plan`). Every chunk of a split one
        leaves 34 KB at R 512, over however many blocks it is split, so a unit 2.1 MiB at the most.
        """
        most_units = self.resident_blocks * num_multiprocessors
        return self.num_partials(min(num_rows, most_units // self.units), longest)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        make = make_float32_latent_decode if self.is_float32 else make_tensor_latent_decode
        return make(self)


@dataclass(frozen=True, slots=True)
class LatentPrefillVariant(LatentAttentionVariant):
    """The compile-time parameters of a kernel for prompts: see `LatentAttentionVariant`.

    The kernel's arguments:

        out             [T, H, R], dense; only rows of query tokens are written
        queries         [T, H, R + P], tokens `query_stride` elements apart
        pool            as drawn above
        block_tables    int32 [S, table_width], read up to the block of the row's last token
        seq_lens        int32 [S]
        cu_query_lens   int32 [S + 1]: row s has the tokens cu_query_lens[s] to …[s + 1] - 1
        tile_rows       int32 [tiles], see `attention_tiles`; -1: nothing to do
        tile_tokens     int32 [tiles]: the first query token of the tile, counted in its row
        scale_log2e     softmax scale · log2(e), so that powers of two do; above zero
        query_stride, table_width, block_stride, layer_offset
    """

    OPERATION: ClassVar[str] = "latent_prefill"
    ROW_TILES: ClassVar[int] = 2
    UNITS_ARE_SECOND: ClassVar[bool] = True

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (*self.tensors, "int32*", "int32*", "int32*", *PLACES)

    @property
    def expectation(self) -> Expectation:
        """Registers for two blocks on a multiprocessor at R 512, for three at 256."""
        if self.is_float32:
            return Expectation(FLOAT32_EXPECTATION, FLOAT32_INSTRUCTIONS)
        registers, blocks = (255, 2) if self.rank == 512 else (168, 3)
        return Expectation(registers, TENSOR_INSTRUCTIONS, resident_blocks=blocks)

    def grid(self, num_tiles: int) -> tuple[int, int, int]:
        """Return the launch grid for a tile list of `num_tiles` entries."""
        return (num_tiles, self.units, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        make = make_float32_latent_prefill if self.is_float32 else make_tensor_latent_prefill
        return make(self)


def variants(*, every: bool) -> list[Variant]:
    """Return a spread of the variants, or those of the models known to us and some others."""
    shapes = [
        ("bfloat16", 16, 512, 64, 16),  # DeepSeek-V2-Lite
        ("float16", 20, 256, 32, 32),
        ("float32", 4, 256, 32, 16),
    ]
    if every:
        shapes += [
            (dtype, num_heads, rank, turning, block_size)
            for dtype in ("bfloat16", "float16", "float32")
            for num_heads, block_size in ((128, 16), (1, 32), (40, 16))
            for rank in (256, 512)
            for turning in (32, 64)
        ]
    kinds = (LatentDecodeVariant, LatentPrefillVariant)
    return [kind(*shape) for kind in kinds for shape in shapes]
