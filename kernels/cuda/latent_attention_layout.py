"""How query heads of attention over latents become blocks of threads, and sums lie in threads.

All H heads of a token read the same rows, so heads stand beside each other as the rows of a matrix,
and where there are few of them, heads of several tokens. A block of threads has so many *places*: a
tile of 16 on tensor cores in decode, two for prompts; in float32 one of each warp. A *unit* is what
fills them:

    H = 20     token t     places 0 … 15 │ 16 … 19, 12 empty       two units of 16 for a token
    H = 4      tokens t … t + 3          │ 0 … 15                  one unit for four tokens

Place p of a tile of tokens is head p % H of its token p // H, counted from the tile's first token.
Decode has one token of a row, so a tile of tokens is one there.

The four warps of a block have all places and share out what is summed (16 bits), or have a place
each (float32). Either way a thread holds rows of four numbers, `sums[n, 0 … 3]`, for each tile of
places, and these are of `slots` places:

    16 bits    warp w has R/4 elements of 16 places         lane (i, q) of them, row n
               columns  R/4 · w + 8n + 2q, + 1              0, 1 of place i     2, 3 of place i + 8
    float32    warp w has place w                           lane l, row n
               columns  128n + 4l … + 3                     0 … 3 of the place

With i = lane // 4 and q = lane % 4, as in `instructions.tiles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

from numba import cuda, int32

from kernels.cuda.attention_partials import THREADS, PartialLayout
from kernels.cuda.attention_variant import BLOCK_SIZES
from kernels.cuda.variant import (
    STORAGE_TYPES,
    DeviceFunction,
    Scalar,
    Scalars,
    require_between,
    require_one_of,
)

RANKS: Final = (256, 512)
"""Elements of a latent."""
TURNING: Final = (32, 64)
"""Elements of a row that are rotated."""
MAX_HEADS: Final = 128
WARPS: Final = THREADS // 32
VECTOR: Final = 4
"""Words of a vector of 16 bytes."""
TENSOR_PLACES: Final = 16
"""Rows of a tensor core's tile."""
PLACES: Final = ("float32", *4 * ("int64",))
"""What parameters end with: scale_log2e, query_stride, table_width, block_stride, layer_offset."""


@dataclass(frozen=True, slots=True)
class LatentAttentionVariant:
    """The compile-time parameters of a kernel; decode and prompts have a class each.

    `dtype` of queries, out and the pool. `num_heads` H; `rank` R; `turning` P; `block_size` B.
    Raises UnsupportedVariantError for what the kernels are not written for.

    Every tensor begins at a multiple of 16 bytes; in float32 every row of queries does, in 16 bits
    at one of 4. The pool may be as large as a device's memory, and so may queries and out;
    S · table_width and the elements of a block stay below 2³¹.
    """

    OPERATION: ClassVar[str]  # how names of machine code begin
    ROW_TILES: ClassVar[int]  # of 16 places, that a warp of the tensor cores' kernel has
    UNITS_ARE_SECOND: ClassVar[bool]  # of the grid's axes; else the first

    dtype: str
    num_heads: int
    rank: int
    turning: int
    block_size: int

    def __post_init__(self) -> None:
        require_one_of("dtype", STORAGE_TYPES, self.dtype)
        require_between("num_heads", 1, MAX_HEADS, self.num_heads)
        require_one_of("rank", RANKS, self.rank)
        require_one_of("turning", TURNING, self.turning)
        require_one_of("block_size", BLOCK_SIZES, self.block_size)

    @property
    def name(self) -> str:
        """Entry point of the machine code."""
        shape = f"h{self.num_heads}_r{self.rank}_p{self.turning}_b{self.block_size}"
        return f"{self.OPERATION}_{self.dtype}_{shape}"

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def tensors(self) -> tuple[str, ...]:
        """Types of the pointers that parameters begin with.

        out, queries, pool, block_tables, seq_lens.
        """
        element = STORAGE_TYPES[self.dtype] + "*"
        return (element, element, element, "int32*", "int32*")

    @property
    def is_float32(self) -> bool:
        """Whether it runs on ordinary cores."""
        return self.dtype == "float32"

    @property
    def row_elements(self) -> int:
        """Elements of a token in the pool, and of a query head."""
        return self.rank + self.turning

    @property
    def places(self) -> int:
        """Of a block of threads."""
        return WARPS if self.is_float32 else TENSOR_PLACES * self.ROW_TILES

    @property
    def units(self) -> int:
        """Of a tile of tokens."""
        return -(-self.num_heads // self.places)

    @property
    def tile_tokens(self) -> int:
        """Query tokens that a block of threads has together, of a prompt."""
        return max(1, self.places // self.num_heads)

    @property
    def slots(self) -> int:
        """Places that a thread has sums of: on tensor cores lane // 4, + 8, + 16, + 24."""
        return 1 if self.is_float32 else 2 * self.ROW_TILES

    @property
    def columns(self) -> int:
        """Rows of four numbers that a thread's sums of one tile of places are."""
        return self.rank // (32 * VECTOR) if self.is_float32 else self.rank // 32

    @property
    def layout(self) -> PartialLayout:
        """How results lie in a block, for `attention_merge`: the places of a thread in order."""
        return _layout(self.units, self.places, 4 * self.columns, self.slots)


@cache  # plans of launches ask for its numbers
def _layout(units: int, places: int, entries: int, slots: int) -> PartialLayout:
    # Warps have nothing to merge among themselves, and what would say how is not asked.
    return PartialLayout(
        parts=units,
        heads=places,
        entries=entries,
        slots=slots,
        heads_of_slot=1,
        width=VECTOR,
        are_beside=False,
        find=None,
        place=None,
    )


def make_find_place(variant: LatentAttentionVariant) -> DeviceFunction:
    """Return what says which query a place is, in a kernel.

    find_place(place, num_tokens) gives the token, counted from the tile's first, its head, and
    whether there is such a place in a tile of so many tokens. If not, it is the last there is.
    """
    heads = variant.num_heads

    @cuda.jit(device=True, inline="always")
    def find_place(place: Scalar, num_tokens: Scalar) -> Scalars:
        num_places = int32(num_tokens * heads)
        found = min(int32(place), int32(num_places - 1))
        return found // heads, found % heads, place < num_places

    return find_place
