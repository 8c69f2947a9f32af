"""How quantised matrices lie in memory: panels of 16 columns, made of tiles 32 deep.

A matrix has N output columns (rows of the file) of K inputs, K a multiple of 32. Sixteen columns
are a *panel*, 32 k's of a panel a *tile*; a panel is its K/32 tiles, k running down, and the
panels follow each other, so a product reads a panel from front to back and nothing else. A tile
holds 16 blocks of the file, all their bits kept, in the order in which processors multiply: four
k's of column 0, four k's of column 1, … are a vector of 64 bytes, one 32-bit lane a column.

    Q4_1   k 0–3 │ k 16–19   c0: 4 bytes │ c1: 4 bytes │ … │ c15: 4 bytes     64 bytes
    320    k 4–7 │ k 20–23   c0          │ c1          │ …                    64
    bytes  k 8–11│ k 24–27                                                    64
           k 12–15│k 28–31                                                    64
           d       c0: float16 │ c1: float16 │ … │ c15: float16               32
           m       c0: float16 │ …                                            32
           A byte's low half is one of the left k's, its high half one of the right ones, as in
           the file: byte j of a block of the file holds k = j and k = j + 16.
           value = q · d + m

    Q4_0   The same without m: 288 bytes. value = (q − 8) · d

    Q8_0   k 0–3             c0: 4 int8 │ c1: 4 int8 │ … │ c15: 4 int8        64 bytes
    544    k 4–7             …                                                64
    bytes  … 8 vectors, to k 28–31
           d                 c0: float16 │ … │ c15: float16                   32
           value = q · d

The last panel of a matrix whose N is no multiple of 16 is filled up with zero bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UInt8Array = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]

PANEL_COLUMNS: Final = 16
GROUP: Final = 32
"""k's of a tile, and of a block of the file."""
VECTOR_BYTES: Final = 64
PACKED_AT_ONCE: Final = 1 << 18
"""Bytes turned at a time: source and result stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Int8Format:
    """A quantised format of weights.

    `offset`: what is taken from a stored weight to get the one that is multiplied. `has_minimum`:
    whether there is an m beside d. `is_nibbles`: whether two weights share a byte.
    """

    label: str
    offset: int
    has_minimum: bool
    is_nibbles: bool

    @property
    def num_vectors(self) -> int:
        """Vectors of 64 bytes of weights in a tile."""
        return 4 if self.is_nibbles else 8

    @property
    def scales_at(self) -> int:
        """Bytes from the start of a tile to d."""
        return self.num_vectors * VECTOR_BYTES

    @property
    def minima_at(self) -> int:
        """Bytes from the start of a tile to m."""
        return self.scales_at + 2 * PANEL_COLUMNS

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of 16 columns and 32 k's."""
        return self.minima_at + (2 * PANEL_COLUMNS if self.has_minimum else 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the file, 32 k's of one column."""
        return self.tile_bytes // PANEL_COLUMNS


Q4_1: Final = Int8Format("Q4_1", offset=0, has_minimum=True, is_nibbles=True)
Q4_0: Final = Int8Format("Q4_0", offset=8, has_minimum=False, is_nibbles=True)
Q8_0: Final = Int8Format("Q8_0", offset=0, has_minimum=False, is_nibbles=False)

INT8_FORMATS: Final[Mapping[str, Int8Format]] = {f.label: f for f in (Q4_1, Q4_0, Q8_0)}
"""By the format's name in model files."""


def int8_panel_bytes(label: str, k: int) -> int:
    """Return the bytes of a panel of `k` inputs, a multiple of 32."""
    return k // GROUP * INT8_FORMATS[label].tile_bytes


def packed_int8_bytes(label: str, n: int, k: int) -> int:
    """Return the bytes of a packed matrix [n, k], k a multiple of 32."""
    return -(-n // PANEL_COLUMNS) * int8_panel_bytes(label, k)


def pack_int8_rows(label: str, rows: UInt8Array, k: int, out: UInt8Array) -> None:
    """Pack rows of blocks as model files store them, uint8 [n, bytes of k elements], into `out`.

    `out`: uint8 [packed_int8_bytes(label, n, k)], C-contiguous; all of it is written. Several
    matrices become one, a column of the product for each row, by concatenating their rows.
    """
    fmt = INT8_FORMATS[label]
    n = len(rows)
    groups = k // GROUP
    tiles = out.view(_tile_type(fmt)).reshape(-(-n // PANEL_COLUMNS), groups)
    whole = n // PANEL_COLUMNS
    step = max(1, PACKED_AT_ONCE // max(1, groups * fmt.tile_bytes))
    for first in range(0, whole, step):
        end = min(first + step, whole)
        _turn(fmt, rows[first * PANEL_COLUMNS : end * PANEL_COLUMNS], tiles[first:end])
    if whole < len(tiles):
        last = rows[whole * PANEL_COLUMNS :]
        _turn(fmt, np.pad(last, ((0, PANEL_COLUMNS - len(last)), (0, 0))), tiles[whole:])


def unpack_int8_rows(label: str, packed: UInt8Array, n: int, k: int) -> UInt8Array:
    """Return the rows that were packed, uint8 [n, bytes of k elements]: the inverse."""
    fmt = INT8_FORMATS[label]
    groups = k // GROUP
    num_panels = -(-n // PANEL_COLUMNS)
    tiles = packed.view(_tile_type(fmt)).reshape(num_panels, groups)
    blocks = np.empty((num_panels, PANEL_COLUMNS, groups), _block_type(fmt))
    for name in _fields(fmt):
        blocks[name] = np.moveaxis(tiles[name], -1, 1)
    return blocks.view(np.uint8).reshape(num_panels * PANEL_COLUMNS, -1)[:n]


def _turn(fmt: Int8Format, rows: UInt8Array, tiles: AnyArray) -> None:
    """Write whole panels: rows [16 · panels, bytes], tiles [panels, groups]."""
    num_panels, groups = tiles.shape
    blocks = np.ascontiguousarray(rows).view(_block_type(fmt))
    blocks = blocks.reshape(num_panels, PANEL_COLUMNS, groups)
    for name in _fields(fmt):
        tiles[name] = np.moveaxis(blocks[name], 1, -1)


def _fields(fmt: Int8Format) -> tuple[str, ...]:
    return ("d", "m", "q") if fmt.has_minimum else ("d", "q")


def _block_type(fmt: Int8Format) -> np.dtype[np.void]:
    """Return a block of the file: d, m if there is one, and the weights in words of four bytes."""
    scales = [(name, "<u2") for name in _fields(fmt)[:-1]]
    return np.dtype([*scales, ("q", "<u4", (fmt.num_vectors,))])


def _tile_type(fmt: Int8Format) -> np.dtype[np.void]:
    """Return a tile: vectors of words, one a column, then d and m of each column."""
    scales = [(name, "<u2", (PANEL_COLUMNS,)) for name in _fields(fmt)[:-1]]
    return np.dtype([("q", "<u4", (fmt.num_vectors, PANEL_COLUMNS)), *scales])
