"""How the sums of decode attention on tensor cores lie in lanes, and which warp owns which.

*Sums* (C): tile i of strip s, in words of a lane:

    c0  dim 64s + 8·quad_row + 2i,     head 2·quad       c1  the same dim, head 2·quad + 1
    c2  dim 64s + 8·quad_row + 2i + 1, head 2·quad       c3  the same dim, head 2·quad + 1

so the tiles of a strip hold neighbouring dimensions of two heads. When the four warps' sums are
merged (`attention_partials`), a warp gets one of the two heads, and the first or the second half of
the lane's dimensions in every strip: four that are neighbours, of which one access of 16 bytes is
made in shared memory and one of 8 in the output. At head size 96, with its strip of 32, two.
"""

from __future__ import annotations

from functools import cache

from numba import cuda

from kernels.cuda.attention_partials import PartialLayout
from kernels.cuda.variant import Scalar

HEADS_OF_TILE = 8  # columns of a tensor core's tile


@cache  # its functions take Numba 0.1 ms to make, and plans of launches ask for its numbers
def tensor_layout(head_size: int, group: int) -> PartialLayout:
    """Return how the sums of a block lie in its threads."""
    head_tiles, products = -(-group // HEADS_OF_TILE), head_size // 16

    @cuda.jit(device=True, inline="always")
    def find(r: Scalar, warp: Scalar) -> tuple[Scalar, Scalar]:
        """Return where a warp's number r is: of one of the two heads, half of a strip's tiles."""
        number = (warp & 1) + 2 * (r & 1)
        if products % 4 == 0:  # said so plainly that the compiler unrolls what asks
            return (r & ~3) + (warp & 2) + (r >> 1 & 1), number
        strip, t = r % products // 4, r % products % 4
        half_of_tiles = min(4, products - 4 * strip) // 2
        tile = 4 * strip + half_of_tiles * (warp // 2) + t // 2
        return r // products * products + tile, number

    @cuda.jit(device=True, inline="always")
    def place(r: Scalar, warp: Scalar, lane: Scalar) -> tuple[Scalar, Scalar]:
        """Return its head and dimension: of a strip, half of the lane's dimensions, in order."""
        head = r // products * HEADS_OF_TILE + lane % 4 * 2 + warp % 2
        strip, t = r % products // 4, r % products % 4
        half_of_dims = min(4, products - 4 * strip)
        return head, 64 * strip + (lane // 4 * 2 + warp // 2) * half_of_dims + t

    return PartialLayout(
        parts=1,
        heads=group,
        entries=head_tiles * products,
        slots=head_tiles,
        heads_of_slot=2,
        width=2 if head_size == 96 else 4,
        are_beside=True,
        find=find,
        place=place,
    )
