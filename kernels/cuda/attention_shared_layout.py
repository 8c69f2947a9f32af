"""How query heads that share a tile of tokens become blocks of threads, and sums lie in threads.

Some query heads read the same rows of each token: all H of attention over latents, the `group` of a
kv head of `attention_wide`. So these *heads* stand beside each other as the rows of a matrix, and
where there are few of them, heads of several tokens. A block of threads has so many *places*: a
tile of 16 on tensor cores in decode, two for prompts; in float32 one of each warp. A *unit* is what
fills them, and heads have as many *parts* as they fill units:

    20 heads    token t     places 0 … 15 │ 16 … 19, 12 empty      two units of 16 for a token
    4 heads     tokens t … t + 3          │ 0 … 15                 one unit for four tokens

Place p of a tile of tokens is head p % heads of its token p // heads, counted from the tile's first
token. Decode has one token of a row, so a tile of tokens is one there.

The four warps of a block have all places and share out what is summed (16 bits), or have a place
each (float32). Either way a thread holds rows of four numbers, `sums[n, 0 … 3]`, for each tile of
places, and these are of `slots` places; S elements of a row are summed:

    16 bits    warp w has S/4 elements of 16 places         lane (i, q) of them, row n
               columns  S/4 · w + 8n + 2q, + 1              0, 1 of place i     2, 3 of place i + 8
    float32    warp w has place w                           lane l, row n
               columns  128n + 4l … + 3                     0 … 3 of the place

With i = lane // 4 and q = lane % 4, as in `instructions.tiles`. Of places that are nobody's
whatever the number of heads nothing need be kept: a variant may have fewer slots than are drawn.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar, Final

from numba import cuda, int32

from kernels.cuda.attention_partials import THREADS, PartialLayout
from kernels.cuda.variant import DeviceFunction, Scalar, Scalars

WARPS: Final = THREADS // 32
VECTOR: Final = 4
"""Words of a vector of 16 bytes."""
TENSOR_PLACES: Final = 16
"""Rows of a tensor core's tile."""


class SharedTileVariant:
    """What kernels ask of a variant whose warps share a tile of tokens.

    `ROW_TILES`: of 16 places, that a warp of the tensor cores' kernel has. `UNITS_ARE_SECOND`: of
    the grid's axes; else the first. `HAS_KV_HEADS`: units are counted through the kv heads, and
    each has `parts`; else there is one.
    """

    __slots__ = ()

    ROW_TILES: ClassVar[int]
    UNITS_ARE_SECOND: ClassVar[bool]
    HAS_KV_HEADS: ClassVar[bool]

    dtype: str
    block_size: int

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return THREADS

    @property
    def is_float32(self) -> bool:
        """Whether it runs on ordinary cores."""
        return self.dtype == "float32"

    @property
    def heads(self) -> int:
        """Query heads that read the same rows."""
        raise NotImplementedError

    @property
    def row_elements(self) -> int:
        """Elements of a query head, and of what a token has for scores."""
        raise NotImplementedError

    @property
    def sum_elements(self) -> int:
        """Elements that are summed, of a token's row for scores or of one of its own."""
        raise NotImplementedError

    @property
    def block_places(self) -> int:
        """Of a block of threads."""
        return WARPS if self.is_float32 else TENSOR_PLACES * self.ROW_TILES

    @property
    def parts(self) -> int:
        """Units of the heads of a tile of tokens."""
        return -(-self.heads // self.block_places)

    @property
    def tile_tokens(self) -> int:
        """Query tokens that a block of threads has together, of a prompt."""
        return max(1, self.block_places // self.heads)

    @property
    def slots(self) -> int:
        """Places that a thread has sums of: on tensor cores lane // 4, + 8, + 16, + 24."""
        return 1 if self.is_float32 else 2 * self.ROW_TILES

    @property
    def columns(self) -> int:
        """Rows of four numbers that a thread's sums of one tile of places are."""
        return self.sum_elements // (32 * VECTOR if self.is_float32 else 32)

    @property
    def own(self) -> int:
        """Numbers of such a row that are of one slot."""
        return VECTOR if self.is_float32 else 2

    @property
    def layout(self) -> PartialLayout:
        """How results lie in a block, for `attention_merge`: the places of a thread in order."""
        entries = self.slots * self.own * self.columns
        return _layout(self.parts, self.block_places, entries, self.slots)


@cache  # plans of launches ask for its numbers
def _layout(parts: int, places: int, entries: int, slots: int) -> PartialLayout:
    # Warps have nothing to merge among themselves, and what would say how is not asked.
    return PartialLayout(
        parts=parts,
        heads=places,
        entries=entries,
        slots=slots,
        heads_of_slot=1,
        width=VECTOR,
        are_beside=False,
        find=None,
        place=None,
    )


def make_find_place(variant: SharedTileVariant) -> DeviceFunction:
    """Return what says which query a place is, in a kernel.

    find_place(place, num_tokens) gives the token, counted from the tile's first, its head, and
    whether there is such a place in a tile of so many tokens. If not, it is the last there is.
    """
    heads = variant.heads

    @cuda.jit(device=True, inline="always")
    def find_place(place: Scalar, num_tokens: Scalar) -> Scalars:
        num_places = int32(num_tokens * heads)
        found = min(int32(place), int32(num_places - 1))
        return found // heads, found % heads, place < num_places

    return find_place
