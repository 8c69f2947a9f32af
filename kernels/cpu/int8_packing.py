"""How quantised matrices lie in memory: panels of 16 columns, made of tiles 32 deep.

A matrix has N output columns (rows of the file) of K inputs, K a multiple of the file's blocks.
Sixteen columns are a *panel*, 32 k's of a panel a *tile*; a panel is its K/32 tiles, k running
down, and the panels follow each other, so a product reads a panel from front to back and nothing
else. A tile holds the bits of 16 columns, all that the file has, in the order in which processors
multiply: four k's of column 0, four k's of column 1, … are a vector of 64 bytes, one 32-bit lane a
column.

    Q4_1   k 0–3 │ k 16–19   c0: 4 bytes │ c1: 4 bytes │ … │ c15: 4 bytes     64 bytes
    320    k 4–7 │ k 20–23   c0          │ c1          │ …                    64
    bytes  k 8–11│ k 24–27                                                    64
           k 12–15│k 28–31                                                    64
           d       c0: float16 │ c1: float16 │ … │ c15: float16               32
           m       c0: float16 │ …                                            32
           A byte's low half is one of the left k's, its high half one of the right ones.
           value = q · d + m

    Q4_0   The same without m: 288 bytes. value = (q − 8) · d

    Q4_F   The same as Q4_0, but that a nibble stands for a float of four bits: value = CODES[q] · d
    IQ4_NL The same with other CODES, −127 to 113

    Q8_0   k 0–3             c0: 4 int8 │ c1: 4 int8 │ … │ c15: 4 int8        64 bytes
    544    k 4–7             …                                                64
    bytes  … 8 vectors, to k 28–31
           d                 c0: float16 │ … │ c15: float16                   32
           value = q · d

    Q5_1   As Q4_1, with a vector of fifth bits behind the four of nibbles: 384 bytes. Bit v of byte
           j of a lane belongs to k = 4 · v + j, v from 0 to 7.
    Q5_0   The same without m: 352 bytes. value = (q − 16) · d

Scales of *shared* formats (the "K-quants") are small integers, times a float16 that 256 k's have in
common. There the tiles hold weights alone, and behind a panel's last one lies a record for each 256
k's of it, eight tiles:

    Q4_K   Tile: the four vectors of Q4_1, 256 bytes. value = q · (d · s) − dmin · n
    record tile t: s's low 4 bits │ n's low 4 bits      16 bytes, a column each; 8 tiles     128
    256    tiles 2·t and 2·t + 1: 2 bits of s, 2 of n, the upper ones; then the odd tile's    64
    bytes  d │ dmin          float16 [16] each                                                64
    Q5_K   The same with the fifth bits of Q5_1: tiles of 320 bytes.

    Q6_K   Tile: the four vectors, and two of upper bits: of k 0–15 the first, of k 16–31 the other.
    record Bits 2·v and 2·v + 1 of byte j belong to k = 4 · v + j, v from 0 to 3. 384 bytes.
    288    s                 int8 [16 runs of 16 k's][16 columns]                            256
    bytes  d                 float16 [16]                                                     32
           value = (q − 32) · (d · s): a scale holds for 16 k's.

    IQ4_XS Tile: the four vectors of Q4_0, 256 bytes. value = CODES[q] · (d · (s − 32))
    record tiles 2·t and 2·t + 1: s's low 4 bits, the odd tile's above     16 bytes; 4 pairs  64
    128    tiles 4·t … 4·t + 3: its upper 2 bits, from the lowest ones on  16 bytes; 2 fours  32
    bytes  d                 float16 [16]                                                     32

A panel ends at a multiple of 32 bytes, one of a shared format of 64. The last panel of a matrix
whose N is no multiple of 16 is filled up with zero bytes.

How rows of a file are turned into tiles: `int8_turning`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kernels.reference import four_bit_floats, uneven_nibbles

PANEL_COLUMNS: Final = 16
GROUP: Final = 32
"""k's of a tile."""
SHARED_GROUPS: Final = 8
"""Tiles whose scales share a float16, in shared formats."""
VECTOR_BYTES: Final = 64
_SCALE_BYTES: Final = 2 * PANEL_COLUMNS


class Scales(Enum):
    """What the scales of a tile are."""

    OWN = "d"
    OWN_WITH_MINIMUM = "d, m"
    SHARED = "d · s"
    SHARED_SIX_BITS = "d · (s − 32)"
    SHARED_WITH_MINIMUM = "d · s, dmin · n"


@dataclass(frozen=True, slots=True)
class Int8Format:
    """A quantised format of weights.

    `offset`: what is taken from a stored weight to get the one that is multiplied. `low_bits`: 4,
    two weights share a byte, or 8. `high_bits`: those of a weight that stand in vectors of their
    own. `depth`: k's that have the same scale, 32 or 16. `codes`: of nibbles that are no numbers,
    what each stands for; that and `offset` is then the stored weight, which without may be signed.
    """

    label: str
    offset: int
    scales: Scales
    low_bits: int = 4
    high_bits: int = 0
    depth: int = GROUP
    codes: tuple[int, ...] | None = None

    @property
    def is_nibbles(self) -> bool:
        """Whether two weights share a byte."""
        return self.low_bits == 4

    @property
    def is_signed(self) -> bool:
        """Whether stored weights are signed bytes, of any size; others are unsigned and small."""
        return self.low_bits == 8 or (self.codes is not None and min(self.codes) + self.offset < 0)

    @property
    def bits(self) -> int:
        """Bits of a stored weight."""
        if self.is_signed:
            return 8
        if self.codes is not None:
            return (max(self.codes) + self.offset).bit_length()
        return self.low_bits + self.high_bits

    @property
    def values(self) -> tuple[int, ...]:
        """What each nibble stands for, where it has no bits more."""
        return self.codes or tuple(q - self.offset for q in range(16))

    @property
    def has_minimum(self) -> bool:
        """Whether there is an m, or a dmin · n, beside the scale."""
        return self.scales in (Scales.OWN_WITH_MINIMUM, Scales.SHARED_WITH_MINIMUM)

    @property
    def is_shared(self) -> bool:
        """Whether scales stand in records behind a panel's tiles."""
        return self.record_bytes > 0

    @property
    def block_elements(self) -> int:
        """K's of a block of the file, of which K is a multiple."""
        return GROUP * SHARED_GROUPS if self.is_shared else GROUP

    @property
    def low_vectors(self) -> int:
        """Vectors of a tile with the weights' low bits."""
        return self.low_bits

    @property
    def num_vectors(self) -> int:
        """Vectors of 64 bytes of weights in a tile."""
        return self.low_bits + self.high_bits

    @property
    def parts(self) -> int:
        """Scales of a column in a tile."""
        return GROUP // self.depth

    @property
    def scales_at(self) -> int:
        """Bytes from the start of a tile to d; of a shared format, its end."""
        return self.num_vectors * VECTOR_BYTES

    @property
    def minima_at(self) -> int:
        """Bytes from the start of a tile to m."""
        return self.scales_at + _SCALE_BYTES

    @property
    def tile_bytes(self) -> int:
        """Bytes from a tile of 16 columns and 32 k's to the next one."""
        numbers = {Scales.OWN: 1, Scales.OWN_WITH_MINIMUM: 2}.get(self.scales, 0)
        return self.scales_at + numbers * _SCALE_BYTES

    @property
    def record_bytes(self) -> int:
        """Bytes of a record of shared scales; 0 of other formats."""
        return {
            Scales.SHARED: 288,
            Scales.SHARED_SIX_BITS: 128,
            Scales.SHARED_WITH_MINIMUM: 256,
        }.get(self.scales, 0)

    @property
    def shared_at(self) -> int:
        """Bytes from the start of a record to d; dmin stands behind it."""
        return self.record_bytes - _SCALE_BYTES * (2 if self.has_minimum else 1)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the file, of one column."""
        tiles = self.block_elements // GROUP
        return (tiles * self.tile_bytes + self.record_bytes) // PANEL_COLUMNS


Q4_1: Final = Int8Format("Q4_1", 0, Scales.OWN_WITH_MINIMUM)
Q4_0: Final = Int8Format("Q4_0", 8, Scales.OWN)
Q4_F: Final = Int8Format("Q4_F", 16, Scales.OWN, codes=four_bit_floats.DOUBLED)
Q8_0: Final = Int8Format("Q8_0", 0, Scales.OWN, low_bits=8)
Q5_1: Final = Int8Format("Q5_1", 0, Scales.OWN_WITH_MINIMUM, high_bits=1)
Q5_0: Final = Int8Format("Q5_0", 16, Scales.OWN, high_bits=1)
Q4_K: Final = Int8Format("Q4_K", 0, Scales.SHARED_WITH_MINIMUM)
Q5_K: Final = Int8Format("Q5_K", 0, Scales.SHARED_WITH_MINIMUM, high_bits=1)
Q6_K: Final = Int8Format("Q6_K", 32, Scales.SHARED, high_bits=2, depth=GROUP // 2)
IQ4_NL: Final = Int8Format("IQ4_NL", 0, Scales.OWN, codes=uneven_nibbles.CODES)
IQ4_XS: Final = Int8Format("IQ4_XS", 0, Scales.SHARED_SIX_BITS, codes=uneven_nibbles.CODES)

INT8_FORMATS: Final[Mapping[str, Int8Format]] = {
    f.label: f for f in (Q4_1, Q4_0, Q4_F, Q8_0, Q5_1, Q5_0, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS)
}
"""By the format's name in model files."""


def int8_panel_bytes(label: str, k: int) -> int:
    """Return the bytes of a panel of `k` inputs, a multiple of the format's blocks."""
    fmt = INT8_FORMATS[label]
    groups = k // GROUP
    records = groups // SHARED_GROUPS * fmt.record_bytes
    return groups * fmt.tile_bytes + -(-records // VECTOR_BYTES) * VECTOR_BYTES


def packed_int8_bytes(label: str, n: int, k: int) -> int:
    """Return the bytes of a packed matrix [n, k], k a multiple of the format's blocks."""
    return -(-n // PANEL_COLUMNS) * int8_panel_bytes(label, k)
