"""Paged decode attention: one query token a sequence against its keys and values in the block pool.

    out[s, h] = Σ_t softmax_t(scale · query[s, h] · K[t]) · V[t],   t = 0 … seq_lens[s] - 1

With a window of W tokens t begins at max(0, seq_lens[s] - W), and what lies before it is not read.
With a cap c, c · tanh(score / c) stands in the place of each scaled score (Gemma 2).
Token t of row s lies in block `block_tables[s, t // B]` at slot t % B. The pool is
[N blocks, L layers, K|V, G kv heads, B slots, D]; a kernel sees one layer of it through three
numbers, all counted in elements:

    block b of the pool
    ├─ layer 0 ── K ─┬─ kv head 0 ─┬─ slot 0    D elements
    │                │             └─ slot B-1  D elements
    │                └─ kv head 1 ─ …
    │             V ─ …
    └─ layer l ── K                               key_offset   = 2·l · G·B·D
                  V                               value_offset = (2·l + 1) · G·B·D
    block b + 1                                   block_stride = 2·L · G·B·D

The `group` = H / G query heads of a kv head are attended together (grouped-query attention,
Ainslie et al. 2023), so that each key and value is read from memory once. This file is the face;
what does the work:

    attention_decode_tensor     16-bit floats, tensor cores
    attention_decode_float32    float32, ordinary cores
    attention_decode_pool       how the former read a pool of 16 bits, or of 8
    attention_decode_masks      how it leaves tokens out, behind the row and before a window
    attention_caps              what a cap makes of a score
    attention_decode_layout     how its sums lie in lanes and warps
    attention_decode_room       where it keeps queries, and what it computes anew to have registers
    attention_chunks            who computes which tokens, what a row's bits depend on, the plan
    attention_partials          how results of warps and chunks merge
    attention_merge             how the last block merges a row whose chunks are split over blocks

Softmax is online (Milakov and Gimelshein 2018), everything is accumulated in float32. The grid is
(U units, splits, planes): a block of threads owns one *unit* of one row, which is a kv head (for
float32, up to four query heads of one, three at D 256), and where the row is split, of its chunks
(`attention_chunks`) every `splits`-th. The first rows are split, all, some or none:

    plane of the grid   0          1          …   split_rows              + 1
    rows                0, split   1, split   …   `splits` of them whole  as many more

so that blocks of split rows begin first, and units of a row, whose keys are neighbours, together.

How to launch it:

    plan = variant.plan(num_rows, num_kv_heads, longest, num_multiprocessors)
    launch at plan.grid with plan.split_rows

with room for `plan.num_partials` float32 in `partials` and zeros in `tickets`, which are zeros
again when the launch is over: one array serves all launches that come one after the other, those of
a graph too. Unsplit, neither is touched. The number of splits never changes a bit of the output,
nor does another row: see `attention_chunks`. The grid does not depend on the rows' lengths: a graph
may be captured once for a number of rows. A row of length 0 (padding of a graph) gives zeros. Slots
past a row's end may hold anything, NaN included.

The pool may have eight bits a number (`kv_dtype`; drawn in `quantized_kv`): then it is bytes, the
last three numbers count them, and half as much is read. Scores and sums are otherwise the same.

The ladder:
  v1  scalar loads, a lane for every 32nd dimension, four tokens in flight a warp, five shuffles a
      score, ordinary cores for every dtype, no split: 8 rows would have used 64 multiprocessors.
  v2  Reads of 16 bytes from the pool to the registers of tensor cores, no shared memory in
      the loop; keys and values of the next tile under way while one is computed with; three
      shuffles for 16 tokens and 2 heads; splits with a merge, and bits that do not depend on them.
  v3  The block of a tile is looked up a tile earlier: the assembler had moved the lookup down to
      its use, so that the reads of keys waited for it.
  v4  Peaks follow scores only where they must: an eighth of the instructions of a tile left
      out, which counts where a pool of eight bits leaves few cycles for each.
  v5  Bytes are placed, not widened, and what that leaves wrong is taken off scores and sums;
      score, scale and peak in one fused step; the row's end in a branch of its own; places by one
      multiply-add each; sums of warps merged 16 bytes at a time, outputs written 8 (4 at D 96).
      A tile's instructions fall by a third to two fifths with eight bits, by a tenth to a fifth
      with 16.
  v6  The last block of a row to finish merges its chunks, where a kernel of its own did:
      one launch a layer less where rows are split. An H200 takes 8.7 µs for one row of 1024 tokens,
      8 kv heads, D 128, in chunks of 256: of which the reading is 1 µs.
  v7  A row below 2048 tokens has 8 chunks: of 1024 tokens 64 blocks instead of 32, and two
      tiles a warp, one after the other, instead of four. Not with pools of eight bits.
  v8  Where whole rows leave a last wave of few blocks, some rows are split: an H200 had 0.87 of a
      copy's bandwidth at 64 × 4096 where without such a wave it had all of it.
  v9  A row's length and the block of a warp's first tile are looked up before the wait for
      the launch ahead, and the tile is fetched meanwhile (16-bit floats): two ways to memory fewer
      behind the wait.
  v10 this. Heads of 256 (no other kernel has changed): queries in shared memory, what only the end
      of a chunk needs computed there, so that a whole tile is under way as at other sizes.
All compiled and simulated; gains are stated where they have been measured (`make gpu`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kernels.cuda.attention_chunks import (
    BYTES_FOR_BANDWIDTH,
    SHARERS,
    TILE_TOKENS,
    least_chunk_tiles,
    most_chunks,
    most_tokens_read,
    plan_splits,
    plan_tail,
)
from kernels.cuda.attention_decode_float32 import (
    WARP_BYTES_IN_FLIGHT,
    float32_layout,
    make_float32_decode,
)
from kernels.cuda.attention_decode_layout import HEADS_OF_TILE, tensor_layout
from kernels.cuda.attention_decode_tensor import make_tensor_decode
from kernels.cuda.attention_partials import THREADS, PartialLayout
from kernels.cuda.attention_variant import AttentionVariant, every_shape
from kernels.cuda.variant import Expectation

# Of the float32 kernel, on a multiprocessor of capability 9.0. The compiler is not told: for 8.0,
# where it keeps a second copy of loops, it would spill.
FLOAT32_BLOCKS = 3

# Arguments of the kernels, by position.
BLOCK_TABLES, SEQ_LENS = 3, 4


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How to launch.

    The first `split_rows` rows are split over `splits` blocks of threads for each unit.
    `num_partials`: float32 that there must be room for, 0 if nothing is split.
    """

    grid: tuple[int, int, int]
    splits: int
    split_rows: int
    num_partials: int


@dataclass(frozen=True, slots=True)
class DecodeVariant(AttentionVariant):
    """The compile-time parameters of one decode attention kernel: see `AttentionVariant`.

    The kernel's arguments:

        out, query       [S, H, D]; rows of `query` are `query_stride` elements apart
        pool             as drawn above
        block_tables     int32 [S, table_width], read up to the block of the row's last token,
                         from that on in which a window begins
        seq_lens         int32 [S]
        partials         float32, `num_partials` of them; not touched where no row is split
        tickets          int32, zeros, one for each unit of each split row
        split_rows       how many of the first rows are split; behind them is a multiple of splits
        scale_log2e      softmax scale · log2(e), so that powers of two do
        query_stride, table_width, block_stride, key_offset, value_offset
        window           of a variant that has one: tokens that a query sees, at least 1
        sinks            float32 [H], of a variant that has them
        cap              float32, c · log2(e), of a variant that has one
    """

    OPERATION: ClassVar[str] = "attention_decode"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the kernel's parameters."""
        return (*self.tensors, "float32*", "int32*", "int32", *self.places)

    @property
    def expectation(self) -> Expectation:
        """Registers for three blocks on a multiprocessor, at D 64 four; at D 256 two.

        Beyond eight heads two as well.
        """
        if self.is_float32:
            return Expectation(168, ("LDG.128", "FFMA", "SHFL"), begins_early=True)
        registers, resident_blocks = 255, 2
        if self.group <= HEADS_OF_TILE and self.head_size < 256:
            registers, resident_blocks = (128, 4) if self.head_size == 64 else (168, 3)
        return Expectation(
            registers,
            ("LDG.128", "HMMA", "MOVM", "SHFL"),
            resident_blocks=resident_blocks,
            begins_early=True,
            reads_early=(BLOCK_TABLES, SEQ_LENS),
        )

    def plan(
        self,
        num_rows: int,
        num_kv_heads: int,
        longest: int,
        num_multiprocessors: int,
        window: int | None = None,
    ) -> DecodePlan:
        """Return how to launch, for rows of up to `longest` tokens of which `window` are seen.

        Of what is at work all at once, all rows are split or none (`attention_chunks.plan_splits`);
        of more, those that the last wave would be left with (`plan_tail`).
        """
        longest = most_tokens_read(longest, window)
        units = num_kv_heads * self._layout.parts
        size = (num_rows, units, longest, num_multiprocessors)
        least = self.least_blocks, least_chunk_tiles(self.kv_dtype)
        if num_rows * units > self.resident_blocks * num_multiprocessors:
            splits, split_rows = plan_tail(*size, self.resident_blocks, *least)
        else:
            splits, split_rows = plan_splits(*size, *least), num_rows
        return self.plan_of(num_rows, num_kv_heads, longest, splits, split_rows)

    def plan_of(
        self,
        num_rows: int,
        num_kv_heads: int,
        longest: int,
        splits: int = 1,
        split_rows: int | None = None,
    ) -> DecodePlan:
        """Return the plan that splits the first `split_rows` rows, all if that is None, like that.

        `longest`: as `attention_chunks.most_tokens_read` has it, and so below.
        """
        if split_rows is None or splits == 1:
            split_rows = num_rows if splits > 1 else 0
        planes, left = divmod(num_rows - split_rows, splits)
        assert left == 0, "whole rows are a multiple of the splits"
        return DecodePlan(
            (num_kv_heads * self._layout.parts, splits, split_rows + planes),
            splits,
            split_rows,
            self.num_partials(split_rows, num_kv_heads, longest),
        )

    @property
    def least_blocks(self) -> int:
        """Blocks of threads that have enough bytes in flight for a multiprocessor, if so many fit.

        A warp of the tensor cores' kernel has a tile of keys and one of values on the way.
        """
        in_flight = SHARERS * WARP_BYTES_IN_FLIGHT
        if not self.is_float32:
            element_bytes = 2 if self.kv_dtype is None else 1
            in_flight = SHARERS * 2 * TILE_TOKENS * self.head_size * element_bytes
        return min(self.resident_blocks, -(-BYTES_FOR_BANDWIDTH // in_flight))

    @property
    def resident_blocks(self) -> int:
        """Blocks of threads that are at work on a multiprocessor at a time."""
        return self.expectation.resident_blocks or FLOAT32_BLOCKS

    def num_partials(self, split_rows: int, num_kv_heads: int, longest: int) -> int:
        """Return how many float32 so many split rows need in `partials`."""
        chunks = most_chunks(longest, least_chunk_tiles(self.kv_dtype))
        return self._layout.num_partials(split_rows, num_kv_heads, chunks)

    def most_partials(
        self,
        num_rows: int,
        num_kv_heads: int,
        longest: int,
        num_multiprocessors: int,
        window: int | None = None,
    ) -> int:
        """Return the most `num_partials` that a plan of up to so many rows and tokens has.

        More units than are at work at a time are never split (`plan`).
        """
        units = num_kv_heads * self._layout.parts
        split_rows = min(num_rows, self.resident_blocks * num_multiprocessors // units)
        return self.num_partials(split_rows, num_kv_heads, most_tokens_read(longest, window))

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        if self.is_float32:
            return make_float32_decode(
                self.head_size,
                self.group,
                self.block_size,
                has_window=self.has_window,
                has_sinks=self.has_sinks,
                has_cap=self.has_cap,
            )
        return make_tensor_decode(
            self.dtype,
            self.head_size,
            self.group,
            self.block_size,
            self.kv_dtype,
            has_window=self.has_window,
            has_sinks=self.has_sinks,
            has_cap=self.has_cap,
        )

    @property
    def _layout(self) -> PartialLayout:
        if self.is_float32:
            return float32_layout(self.head_size, self.group)
        return tensor_layout(self.head_size, self.group)


def variants(*, every: bool) -> list[DecodeVariant]:
    """Return a spread of the variants, or every one there is."""
    if every:
        return [DecodeVariant(*shape) for shape in every_shape()]
    return [
        DecodeVariant("bfloat16", 64, 3, 16),
        DecodeVariant("bfloat16", 128, 4, 16),
        DecodeVariant("float16", 96, 9, 32, "int8"),
        DecodeVariant("float32", 64, 12, 16),
        DecodeVariant("bfloat16", 128, 4, 16, None, True),
        DecodeVariant("float32", 96, 3, 16, None, True),
        DecodeVariant("bfloat16", 256, 4, 16, None, True),
        DecodeVariant("float16", 256, 8, 32, "int8", True),
        DecodeVariant("bfloat16", 64, 8, 16, None, True, True),
        DecodeVariant("float16", 64, 12, 32, "float8", has_sinks=True),
        DecodeVariant("float32", 64, 3, 16, None, False, True),
        DecodeVariant("bfloat16", 256, 2, 16, None, True, has_cap=True),
        DecodeVariant("float32", 128, 2, 16, has_cap=True),
    ]
