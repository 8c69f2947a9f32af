"""How quantised matrices lie in the device's memory: panels of 32 rows, made of tiles 32 deep.

A matrix W has N rows (outputs of the product) of K weights, K a multiple of 32. Thirty-two rows are
a *panel*, 32 k's of a panel a *tile*; a panel is its K/32 tiles, k running down, and the panels
follow each other. A tile is what a warp multiplies at a time. It holds all bits of 32 blocks of a
model file, in the order in which the tensor cores take them (`instructions.tiles`): with `group` =
lane // 4 and `quad` = lane % 4, lane 4·group + quad holds

    k             0 … 7    8 … 15   16 … 23   24 … 31
    row group     quad 0   quad 1   quad 2    quad 3      i = 0   ┐ rows of the first A tile
    row group+8   quad 0   quad 1   quad 2    quad 3      i = 1   ┘
    row group+16  quad 0   …                              i = 2   ┐ of the second
    row group+24  quad 0   …                              i = 3   ┘

that is, of each of four rows the eight neighbouring weights k = 8·quad + e, e = 0 … 7. The order of
k is free as long as x has the same: the B fragment of these k's is the one vector of 16 bytes at
x[row, 32·tile + 8·quad].

    Q4_0   weights  512 bytes: lane 0 │ lane 1 │ … │ lane 31, a vector of 16 bytes each,
    576             word i the row i above:
    bytes           bit   0    4    8    12   16   20   24   28
                    e     0    2    4    6    1    3    5    7      so that (word >> 4·j) & 0xF000F
           scales   64 bytes: group 0 │ … │ group 7,                is the pair e = 2·j, 2·j + 1
                    float16 d of i = 0 … 3 each
           value = (q − 8) · d

    Q4_1   The same, but behind the four d's of a group its four minima m: 640 bytes.
           value = q · d + m

    Q8_0   weights  1024 bytes: twice 512, for rows i = 0, 1 and for i = 2, 3;
    1088            a lane's words are (i, e = 0 … 3), (i, e = 4 … 7), (i + 1, …), (i + 1, …),
    bytes           bytes 0 1 2 3 of a word being e = 0 2 1 3: halves of 16 bits are pairs again
           scales   as Q4_0
           value = q · d

Scales are float16, as in model files. A format with a scale for 64, 128 or all k's of a row is laid
out by repeating it: the values are the same, the memory is not (4.5 bits a weight instead of 4.1).
The last panel of a matrix whose N is no multiple of 32 is filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.cuda.errors import UnsupportedVariantError

UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Array = npt.NDArray[Any]

PANEL_ROWS: Final = 32
GROUP: Final = 32
"""k's of a tile, and of a block of a model file."""
VECTOR_BYTES: Final = 512
"""Of a warp: 16 bytes a lane."""
PACKED_AT_ONCE: Final = 1 << 18
"""Weights turned at a time: what lies between file and device stays in the caches."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A quantised format: `bits` a weight, less `offset`; `has_minimum` says whether m is there."""

    label: str
    bits: int
    offset: int
    has_minimum: bool

    @property
    def num_vectors(self) -> int:
        """Vectors of 16 bytes a lane in a tile."""
        return self.bits // 4

    @property
    def scales_at(self) -> int:
        """Bytes from the start of a tile to its scales."""
        return self.num_vectors * VECTOR_BYTES

    @property
    def group_bytes(self) -> int:
        """Bytes of the scales and minima of the four rows of a lane."""
        return 16 if self.has_minimum else 8

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of 32 rows and 32 k's."""
        return self.scales_at + 8 * self.group_bytes


FORMATS: Final[Mapping[str, WeightFormat]] = {
    fmt.label: fmt
    for fmt in (
        WeightFormat("Q8_0", 8, 0, has_minimum=False),
        WeightFormat("Q4_0", 4, 8, has_minimum=False),
        WeightFormat("Q4_1", 4, 0, has_minimum=True),
    )
}
"""By the format's name in model files."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix taken apart, as `kernels.reference.quantized_matmul` wants it.

    `quants`: [N, K], int8, the offset taken off. `scales`: float16 [N, K / group]. `minima`: the
    same shape, or None where the format has none.
    """

    quants: Array
    scales: Array
    minima: Array | None


def packed_bytes(label: str, num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a packed matrix [N, K]. Raises UnsupportedVariantError."""
    fmt = _format(label)
    if num_inputs <= 0 or num_inputs % GROUP:
        raise UnsupportedVariantError("num_inputs", f"a multiple of {GROUP}", num_inputs)
    return -(-num_outputs // PANEL_ROWS) * (num_inputs // GROUP) * fmt.tile_bytes


def pack_rows(label: str, rows: UInt8Array, num_inputs: int) -> UInt8Array:
    """Lay out rows of blocks as model files store them, uint8 [N, bytes of K elements].

    Returns uint8 [packed_bytes]. Several matrices become one, an output for each row, by
    concatenating their rows. Raises UnsupportedVariantError.
    """
    fmt = _format(label)
    packed = np.empty(packed_bytes(label, len(rows), num_inputs), np.uint8)
    row_bytes = num_inputs // GROUP * _block_type(fmt).itemsize
    if rows.shape[1] != row_bytes:
        raise UnsupportedVariantError("rows", f"of {row_bytes} bytes each", rows.shape[1])
    tiles = _tiles(fmt, packed, num_inputs)
    step = PANEL_ROWS * max(1, PACKED_AT_ONCE // (PANEL_ROWS * num_inputs))
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step])
        blocks = part.view(_block_type(fmt))
        _fill(blocks, tiles[first // PANEL_ROWS : (first + step) // PANEL_ROWS])
    return packed


def pack_matrix(label: str, matrix: QuantizedMatrix) -> UInt8Array:
    """Lay out a matrix whose groups of k's are 32 or a multiple of it, up to a whole row.

    Returns uint8 [packed_bytes]. Scales are rounded to float16; a matrix with whole zero points z
    has the minima −z · d. Raises UnsupportedVariantError.
    """
    fmt = _format(label)
    num_outputs, num_inputs = matrix.quants.shape
    packed = np.empty(packed_bytes(label, num_outputs, num_inputs), np.uint8)
    num_scales = matrix.scales.shape[1]
    if num_inputs % num_scales or num_inputs // num_scales % GROUP:
        allowed = f"one of {GROUP} weights or a multiple"
        raise UnsupportedVariantError("group", allowed, num_inputs / num_scales)
    if (matrix.minima is not None) != fmt.has_minimum:
        allowed = "given" if fmt.has_minimum else "absent"
        raise UnsupportedVariantError("minima", f"{allowed} for {label}", matrix.minima)
    lowest = -fmt.offset if fmt.bits == 4 else -128
    highest = lowest + 2**fmt.bits - 1
    if matrix.quants.min(initial=0) < lowest or matrix.quants.max(initial=0) > highest:
        given = int(matrix.quants.min()), int(matrix.quants.max())
        raise UnsupportedVariantError("quants", f"between {lowest} and {highest}", given)
    repeats = num_inputs // GROUP // num_scales
    blocks = np.empty((num_outputs, num_inputs // GROUP), _block_type(fmt))
    blocks["d"] = np.repeat(matrix.scales, repeats, axis=1)
    if matrix.minima is not None:
        blocks["m"] = np.repeat(matrix.minima, repeats, axis=1)
    stored = (matrix.quants.astype(np.int8) + np.int8(fmt.offset)).view(np.uint8)
    stored = stored.reshape(*blocks.shape, GROUP)
    if fmt.bits == 4:
        stored = stored[..., : GROUP // 2] | stored[..., GROUP // 2 :] << np.uint8(4)
    blocks["q"] = stored
    _fill(blocks, _tiles(fmt, packed, num_inputs))
    return packed


def unpack_matrix(
    label: str, packed: UInt8Array, num_outputs: int, num_inputs: int
) -> QuantizedMatrix:
    """Return the matrix that was packed, in groups of 32: the inverse of `pack_matrix`."""
    fmt = _format(label)
    tiles = _tiles(fmt, packed, num_inputs)
    if fmt.bits == 4:
        words = tiles["words"].transpose(0, 4, 2, 1, 3)  # panel, i, group, tile, quad
        stored = np.empty((*words.shape, 8), np.uint8)
        for e in range(8):
            stored[..., e] = words >> np.uint32(4 * (e // 2) + 16 * (e % 2)) & np.uint32(15)
    else:
        words = _swap_middle_bytes(tiles["words"])
        stored = np.ascontiguousarray(words.transpose(0, 2, 5, 3, 1, 4, 6)).view(np.uint8)
    quants = stored.reshape(-1, num_inputs)[:num_outputs].view(np.int8)
    scales = tiles["scales"].transpose(3, 0, 4, 2, 1)  # d | m, panel, i, group, g
    d, *m = scales.reshape(len(scales), -1, num_inputs // GROUP)[:, :num_outputs]
    return QuantizedMatrix(quants - np.int8(fmt.offset), d, m[0] if m else None)


def split_rows(label: str, rows: UInt8Array) -> QuantizedMatrix:
    """Take apart rows of blocks as model files store them, uint8 [N, bytes of K elements]."""
    fmt = _format(label)
    blocks = np.ascontiguousarray(rows).view(_block_type(fmt))  # [N, groups]
    stored = blocks["q"]
    if fmt.bits == 4:  # byte j of a block holds k = j in its low half, k = j + 16 in its high half
        stored = np.concatenate([stored & 15, stored >> 4], axis=-1)
    quants = stored.reshape(len(rows), -1).view(np.int8) - np.int8(fmt.offset)
    return QuantizedMatrix(quants, blocks["d"], blocks["m"] if fmt.has_minimum else None)


def _format(label: str) -> WeightFormat:
    if label not in FORMATS:
        raise UnsupportedVariantError("weights", f"one of {', '.join(FORMATS)}", label)
    return FORMATS[label]


def _block_type(fmt: WeightFormat) -> np.dtype[Any]:
    """Return a block of a model file: d, maybe m, and 32 weights."""
    minimum = [("m", "<f2")] if fmt.has_minimum else []
    return np.dtype([("d", "<f2"), *minimum, ("q", "u1", GROUP * fmt.bits // 8)])


def _tiles(fmt: WeightFormat, packed: UInt8Array, num_inputs: int) -> Array:
    """Return the packed bytes as tiles [panels, tiles of a panel].

    Axes of their words: of four bits [group, quad, i], of eight [i // 2, group, quad, i % 2, word].
    Axes of scales: [group, d | m, i].
    """
    words = (8, 4, 4) if fmt.bits == 4 else (2, 8, 4, 2, 2)
    scales = (8, 2 if fmt.has_minimum else 1, 4)
    tile = np.dtype([("words", "<u4", words), ("scales", "<f2", scales)])
    return packed.view(tile).reshape(-1, num_inputs // GROUP)


def _fill(blocks: Array, tiles: Array) -> None:
    """Write blocks of a model file [N, tiles of a panel] as whole panels, `tiles`.

    Rows that are missing at the end are zeros.
    """
    num_panels, num_tiles = tiles.shape
    missing = num_panels * PANEL_ROWS - len(blocks)
    if missing:
        blocks = np.concatenate([blocks, np.zeros((missing, num_tiles), blocks.dtype)])
    stored = np.ascontiguousarray(blocks["q"]).view("<u4")
    # Rows are panel, i, group; k's are tile, quad, and words of e.
    if stored.shape[-1] == 4:
        in_rows = _nibbles_of_lanes(stored).reshape(num_panels, 4, 8, num_tiles, 4)
        tiles["words"] = in_rows.transpose(0, 3, 2, 4, 1)
    else:
        in_rows = _swap_middle_bytes(stored).reshape(num_panels, 2, 2, 8, num_tiles, 4, 2)
        tiles["words"] = in_rows.transpose(0, 4, 1, 3, 5, 2, 6)
    for which, name in enumerate(("d", "m")[: tiles["scales"].shape[3]]):
        numbers = blocks[name].reshape(num_panels, 4, 8, num_tiles)
        tiles["scales"][:, :, :, which] = numbers.transpose(0, 3, 2, 1)


def _nibbles_of_lanes(stored: UInt32Array) -> UInt32Array:
    """Return the words of the quads of blocks of four bits, [..., 4 words] to [..., 4 quads].

    Byte j of a block holds k = j in its low half, k = j + 16 in its high half, so the low halves of
    two words are a quad's e = 0 … 3 and 4 … 7, and so are the high ones:

        a word & mask       0  e3 0  e2 0  e1 0  e0      four bits each, the highest first
        | itself >> 12      …  …  …  …  e3 e1 e2 e0      even ones in byte 0, odd ones in byte 1
        a quad's word       e7 e5 e3 e1 e6 e4 e2 e0      odd ones of both words, even ones of both
    """
    pairs = np.stack([stored, stored >> np.uint32(4)], axis=-2) & np.uint32(0x0F0F0F0F)
    pairs = pairs.reshape(*stored.shape[:-1], 4, 2)  # quad = 2 · half + word // 2; word % 2
    pairs |= pairs >> np.uint32(12)
    even, odd = pairs & np.uint32(0xFF), pairs & np.uint32(0xFF00)
    lanes: UInt32Array = even[..., 0] | even[..., 1] << np.uint32(8)
    lanes |= odd[..., 0] << np.uint32(8)
    lanes |= odd[..., 1] << np.uint32(16)
    return lanes


def _swap_middle_bytes(words: UInt32Array) -> UInt32Array:
    """Return words with bytes 1 and 2 in each other's place; its own inverse."""
    swapped: UInt32Array = words & np.uint32(0xFF0000FF)
    swapped |= words >> np.uint32(8) & np.uint32(0xFF00)
    swapped |= words << np.uint32(8) & np.uint32(0xFF0000)
    return swapped
