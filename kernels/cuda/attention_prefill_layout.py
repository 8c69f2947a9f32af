"""How prefill attention on tensor cores divides its rows among warps, and its shared memory.

What a thread holds throughout the loop, in registers; what a block takes of shared memory; and how
many blocks the registers of a multiprocessor hold:

    D      rows of a warp    sums   queries   scores   keys of a tile   stages   parked    blocks
    64     32, 4 warps         72        32       64         64          32 KB       –        2
    96     32                 104        48       32         32          24 KB       –        2
    128    32                 136        32       32         32          32 KB    16 KB       2
    256    16, 8 warps        132        64        8         16          32 KB       –        1

A pool of 8 bits halves the stages, and its kernel for D 128 has 8 registers of queries and 28 KB of
them parked.

*A warp* has two tiles of 16 rows where they find room, for then it reads each key and value from
shared memory for both. At D 256 their sums would be 264 registers of the 255 that a thread may
have. So a warp has one tile there, and a block twice the warps: 128 places, as ever, are what a
block reads keys and values for from the second cache; 64 would read them twice as often.

*A tile of keys* is what two stages of find room in 48 KB, all that arrays may take whose sizes are
in the code. At D 256, 32 keys would be 64 KB in 16 bits; in 8 bits their scores and what is widened
for them would not find room in registers.

*Queries* without room in registers are parked in shared memory, in vectors of each thread, and read
again for every tile of keys.

*The argument at D 256*, counted as in `attention_prefill_tensor` (not a measurement). For a tile of
16 keys a warp has 65 products. What eight warps need, two on each scheduler, in cycles:

    tensor cores    2 · 65 products                                          ~ 840
    shared memory   8 · 32 ldmatrix · 512 bytes at 128 bytes a cycle          1024
    powers of two   2 · 10 instructions of 8 cycles                            160
    issue           2 · (65 products + 32 reads + about 190 others)          ~ 570

The limit is shared memory, by a fifth, where it is the tensor cores with two tiles of rows: 2080
flop a cycle, 480 TFLOP/s on 132 multiprocessors at 1.75 GHz, if all else hid behind it. A parked
step of 16 dimensions would add 32 cycles: there is none. The eight warps of the one block all wait
at one barrier, once in those 1024 cycles.

With 8 bits half the reads are left, but what is widened serves one tile of rows, not two: issue is
the limit then, with 2 · about 750 cycles for int8 and 2 · about 900 for float8, 1400 and 1200 flop
a cycle. Better would be to widen a tile once for all eight warps, into shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
"""Places of a block of threads."""


@dataclass(frozen=True, slots=True)
class PrefillLayout:
    """What depends on the head size.

    `row_tiles`: of 16 rows, of a warp. `keys`: of a tile of keys. `parked`: how many of the
    queries' steps of 16 dimensions lie in shared memory, the last ones; `parked_8_bits`: beside a
    pool of 8 bits, for widening keys and values takes registers, too.
    """

    row_tiles: int
    keys: int
    parked: int = 0
    parked_8_bits: int = 0

    @property
    def warp_rows(self) -> int:
        """Places of a warp."""
        return 16 * self.row_tiles

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return TILE_ROWS // self.warp_rows * 32

    @property
    def resident_blocks(self) -> int:
        """How many blocks find room among the 64 K registers of a multiprocessor."""
        return 65536 // (256 * self.threads)


LAYOUTS = {
    64: PrefillLayout(2, 64),
    96: PrefillLayout(2, 32),
    128: PrefillLayout(2, 32, parked=4, parked_8_bits=7),
    256: PrefillLayout(1, 16),
}
"""By head size."""
