"""How prefill attention on tensor cores divides its rows among warps, and its shared memory.

By head size: what a thread holds through the loop (words), what a block takes of shared memory, and
how many blocks a multiprocessor's registers hold:

    D     rows a warp     sums  queries  scores    keys a tile   two stages   parked     blocks
    64    32 in 4 warps     72       32      64        64            32 KB       –          2
    96    32                104      48      32        32            24 KB       –          2
    128   32                136      32      32        32            32 KB    4 of 8        2
    256   16 in 8 warps     132      64       8        16            32 KB       –          1

    8 bits, D 128           136       8      32        32            17 KB    7 of 8        2
            D 256           132      64      16        32            33 KB       –          1

*A warp* has two tiles of 16 rows where they find room, for then each key and value that it reads
from shared memory serves both. At D 256 the sums of two would be 264 registers of at most 255. So a
warp has one there, and a block twice the warps: its 128 places are what keys and values are read
for from the second cache, and 64 would read them twice as often.

*Shared memory.* Arrays whose sizes are in the code may take 48 KB of a block. At D 256 two stages
of 32 keys would be 64 KB in 16 bits; in 8 bits they are what 16 keys are in 16.

*Queries* that find no room in registers are parked in shared memory, vectors of each thread; every
read of one delays those of keys and values.

*The argument at D 256*, counted as in `attention_prefill_tensor` (not a measurement). What eight
warps, two on each scheduler, need for a tile of 16 keys, in cycles; 65 products a warp:

    tensor cores    2 · 65 products                                                    ~ 840
    shared memory   8 · 32 ldmatrix · 512 bytes at 128 bytes a cycle                    1024
    powers of two   2 · 10 instructions of 8 cycles                                      160
    issue           2 · (65 products + 32 reads + about 230 others)                    ~ 650

So shared memory is the limit, by a fifth, where it is the tensor cores with two tiles of rows: 2080
flop a cycle, 480 TFLOP/s on 132 multiprocessors at 1.75 GHz, if the rest hid behind it altogether.
Each step of 16 dimensions that were parked would add 32 cycles: none is. The eight warps wait at
the same barrier, once in these 1024 cycles; between two of them they may part by a tile. In 8 bits
a read serves twice the products, and what is left to limit it are tensor cores and issue.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
"""Places of a block of threads."""


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """What depends on the head size.

    `row_tiles`: of 16 rows, of a warp. `keys`: of a tile of keys. `parked`: how many of the
    queries' steps of 16 dimensions lie in shared memory, the last ones.
    """

    row_tiles: int
    keys: int
    parked: int

    @property
    def warp_rows(self) -> int:
        """Places of a warp."""
        return 16 * self.row_tiles

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return TILE_ROWS // self.warp_rows * 32


_OF_16_BITS = {
    64: PrefillLayout(2, 64, 0),
    96: PrefillLayout(2, 32, 0),
    128: PrefillLayout(2, 32, 4),
    256: PrefillLayout(1, 16, 0),
}
_OF_8_BITS = {  # widening keys and values takes registers, too
    64: PrefillLayout(2, 64, 0),
    96: PrefillLayout(2, 32, 0),
    128: PrefillLayout(2, 32, 7),
    256: PrefillLayout(1, 16, 0),
}


def prefill_layout(head_size: int, kv_dtype: str | None) -> PrefillLayout:
    """Return the layout for a pool of 16 bits, or of `kv_dtype`."""
    return (_OF_16_BITS if kv_dtype is None else _OF_8_BITS)[head_size]
