"""Paged attention with heads of 512 elements, as Gemma 4's layers without windows have them.

What is computed, the pool and the launch are those of `attention_decode` and `attention_prefill`,
and so are the arguments of the kernels, windows, sinks and caps among them, which these ignore:
whoever launches those variants launches these. What differs is who computes what. There a warp has
tokens of its own and the sums of all heads, 512 elements of which find no room in registers; here
the four warps of a block share a tile of tokens and share out what is summed, as in
`latent_attention`:

    attention_wide_tensor       16-bit floats, tensor cores: the kernels
    attention_shared_tile       what those make of a tile of tokens
    attention_shared_float32    float32, ordinary cores (attention_shared_float32_tile)
    attention_shared_layout     heads as rows of a matrix, blocks of threads, where sums lie
    attention_shared_results    results of chunks, and what is written
    attention_chunks, _partials, _merge, _tiles    as in the other attention

A unit is a kv head of a row; in float32 four of its query heads. The grid of decode is the other
one's. That of prompts has the tiles first: they are of 32 // group tokens (in float32 of one, of
groups below four of 4 // group), and no axis but the first holds more than 65 535. So blocks of a
kv head begin together, and read the same keys and values at about the same time.

What bits depend on is said there, too. Slots past a row's end may hold anything, NaN included.

What limits it (arguments, not measurements), in 16 bits. A kv head's token is 2 KB, a tile of 16
tokens 32 KB. A multiprocessor's share of 4.8 TB/s brings that in 1580 cycles. What a block needs
for it, in cycles:

                                                                       decode      prompts
                                                                      16 places   32 places
    shared memory   4 warps · 26 or 36 reads and writes of 512 bytes,
                    and 32 KB copied                                    ~ 670       ~ 830
    tensor cores    4 · 33 or 66 products; mma.sync does about 62 %
                    of 4096 flop a cycle                                ~ 210       ~ 430
    copies          16 to 32 KB of a block are on the way, of two blocks of a multiprocessor 32 to
                    64, of three 48 to 96; 25 KB are needed

Decode of groups up to eight has three blocks on a multiprocessor, else there are two. So it should
be limited by memory, but for the merge: where one row of 32768 tokens is split, each kv head leaves
64 chunks of 17 KB (35 of groups above eight), 1.1 MB which one block reads two chunks at a time,
some 30 µs beside 56 of reading the keys and values of four kv heads.

Prompts do a million flop for a tile in 830 cycles at the least, 290 TFLOP/s on 132 multiprocessors
at 1.75 GHz. But that is 32 flop for a byte from the second cache, of which 5 TB/s let 160 TFLOP/s
through: that is the limit. Latents, which are keys and values at once, have twice as many.

The ladder:
  v1  this: four warps that share out the sums of 16 places, of prompts 32; a tile of keys and one
      of values in 48 KB. Groups up to eight keep the results of eight places: half the partials,
      and registers for a third block. Compiled and simulated; nothing of it has been measured.
  v2  64 places a block for prompts, in 256 threads: half as many bytes from the second cache. Parts
      of scores and both tiles then want more shared memory than arrays may take whose sizes are in
      the code, so launches that ask for it.
  v3  wgmma, which reads shared memory itself (9.0).
  v4  chunks merged by more than one block of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

from kernels.cuda.attention_chunks import BYTES_FOR_BANDWIDTH, TILE_TOKENS
from kernels.cuda.attention_decode import BLOCK_TABLES, SEQ_LENS, DecodeVariant
from kernels.cuda.attention_partials import PartialLayout
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_shared_float32 import (
    make_float32_wide_decode,
    make_float32_wide_prefill,
)
from kernels.cuda.attention_shared_float32_tile import AT_ONCE
from kernels.cuda.attention_shared_layout import SharedTileVariant
from kernels.cuda.attention_variant import BLOCK_SIZES, DTYPES
from kernels.cuda.attention_wide_tensor import make_tensor_wide_decode, make_tensor_wide_prefill
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.variant import Expectation, require_between, require_one_of

WIDE_HEAD_SIZE: Final = 512
MOST_GROUP: Final = 16
"""Query heads per kv head, at most."""
FEW_HEADS: Final = 8
"""So many have one slot in decode, and its registers."""
TENSOR_INSTRUCTIONS: Final = ("LDGSTS.128", "LDSM", "HMMA", "LDS.128", "SHFL", "MUFU")
FLOAT32_INSTRUCTIONS: Final = ("LDG.128", "FFMA", "SHFL", "MUFU")


class _Wide(SharedTileVariant):
    """What both kinds have."""

    __slots__ = ()

    HAS_KV_HEADS: ClassVar[bool] = True

    head_size: int
    group: int
    kv_dtype: str | None
    has_window: bool
    has_sinks: bool
    has_cap: bool

    def __post_init__(self) -> None:
        require_one_of("dtype", DTYPES, self.dtype)
        require_one_of("head_size", (WIDE_HEAD_SIZE,), self.head_size)
        require_between("group", 1, MOST_GROUP, self.group)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)
        if self.kv_dtype is not None:
            allowed = f"the model's own at head_size {WIDE_HEAD_SIZE}"
            raise UnsupportedVariantError("kv_dtype", allowed, self.kv_dtype)
        for field in ("has_window", "has_sinks", "has_cap"):
            if getattr(self, field):
                raise UnsupportedVariantError(field, f"False at head_size {WIDE_HEAD_SIZE}", True)

    @property
    def heads(self) -> int:
        """Those of a kv head."""
        return self.group

    @property
    def row_elements(self) -> int:
        """Elements of a query head, and of a key."""
        return self.head_size

    @property
    def sum_elements(self) -> int:
        """Elements of a value."""
        return self.head_size


@dataclass(frozen=True, slots=True)
class WideDecodeVariant(_Wide, DecodeVariant):
    """The compile-time parameters of a decode kernel: see `DecodeVariant`, arguments as well.

    It has no window, no sinks, no cap, and a pool of its own dtype.
    """

    OPERATION: ClassVar[str] = "wide_decode"
    ROW_TILES: ClassVar[int] = 1
    UNITS_ARE_SECOND: ClassVar[bool] = False

    @property
    def slots(self) -> int:
        """Places that a thread keeps sums of: of groups up to eight the second is nobody's."""
        return 1 if self.is_float32 or self.group <= FEW_HEADS else 2

    @property
    def expectation(self) -> Expectation:
        """Registers for three blocks on a multiprocessor, of groups above eight for two."""
        if self.is_float32:
            return Expectation(168, FLOAT32_INSTRUCTIONS, begins_early=True)
        registers, blocks = (168, 3) if self.group <= FEW_HEADS else (255, 2)
        return Expectation(
            registers,
            TENSOR_INSTRUCTIONS,
            resident_blocks=blocks,
            begins_early=True,
            reads_early=(BLOCK_TABLES, SEQ_LENS),
        )

    @property
    def least_blocks(self) -> int:
        """Blocks of threads that have enough bytes in flight for a multiprocessor, if so many fit.

        A block has a tile of keys or one of values on the way, in float32 each warp some tokens,
        the same ones for the most part.
        """
        tokens, rows, element_bytes = TILE_TOKENS, 1, 2
        if self.is_float32:
            tokens, rows, element_bytes = AT_ONCE[self.head_size], 2, 4
        in_flight = tokens * rows * self.head_size * element_bytes
        return min(self.resident_blocks, -(-BYTES_FOR_BANDWIDTH // in_flight))

    @property
    def _layout(self) -> PartialLayout:
        return self.layout

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        make = make_float32_wide_decode if self.is_float32 else make_tensor_wide_decode
        return make(self)


@dataclass(frozen=True, slots=True)
class WidePrefillVariant(_Wide, PrefillVariant):
    """The compile-time parameters of a kernel for prompts: see `PrefillVariant`, arguments as well.

    It has no window, no sinks, no cap, and a pool of its own dtype.
    """

    OPERATION: ClassVar[str] = "wide_prefill"
    ROW_TILES: ClassVar[int] = 2
    UNITS_ARE_SECOND: ClassVar[bool] = True

    @property
    def expectation(self) -> Expectation:
        """Registers for two blocks on a multiprocessor, in float32 for three."""
        if self.is_float32:
            return Expectation(168, FLOAT32_INSTRUCTIONS)
        return Expectation(255, TENSOR_INSTRUCTIONS, resident_blocks=2)

    def grid(self, num_kv_heads: int, num_tiles: int) -> tuple[int, int, int]:
        """Return the launch grid for a tile list of `num_tiles` entries."""
        return (num_tiles, num_kv_heads * self.parts, 1)

    def kernel(self) -> Callable[..., None]:
        """Make the plain kernel function."""
        make = make_float32_wide_prefill if self.is_float32 else make_tensor_wide_prefill
        return make(self)


def variants(*, every: bool) -> list[WideDecodeVariant | WidePrefillVariant]:
    """Return a spread of the variants, or every one there is."""
    shapes = [
        ("bfloat16", WIDE_HEAD_SIZE, 8, 16),  # Gemma 4 31B
        ("float16", WIDE_HEAD_SIZE, 2, 32),
        ("float32", WIDE_HEAD_SIZE, 4, 16),
    ]
    if every:
        shapes = [
            (dtype, WIDE_HEAD_SIZE, group, block_size)
            for dtype in DTYPES
            for group in range(1, MOST_GROUP + 1)
            for block_size in BLOCK_SIZES
        ]
    return [kind(*shape) for kind in (WideDecodeVariant, WidePrefillVariant) for shape in shapes]
