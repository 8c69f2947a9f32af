"""How quantised matrices lie in the device's memory: panels of 32 rows, made of tiles 32 deep.

A matrix W has N rows (outputs of the product) of K weights, K a multiple of its format's span
(`quantized_formats`). Thirty-two rows are a *panel*, 32 k's of a panel a *tile*. A panel is the
weights of its K/32 tiles, k running down, then the numbers beside them, those of its K/span spans
one behind the other, and nothing more but zeros to the next multiple of 128 bytes: so that reads
of weights are of whole lines. The panels follow each other.

    panel    │ tile 0 │ tile 1 │ …              │ span 0 │ span 1 │ …  │ 0 … │ the next panel
             │ 512 to 1024 bytes of weights each│ 32 to 128 bytes each│

Weights of five and six bits, and scales that eight spans share, are drawn in `k_quant_layout`.

A tile is what a warp multiplies at a time. It holds the weights of 32 blocks of a model file in the
order in which the tensor cores take them (`instructions.tiles`): with `group` = lane // 4 and
`quad` = lane % 4, lane 4·group + quad holds

    k             0 … 7    8 … 15   16 … 23   24 … 31
    row group     quad 0   quad 1   quad 2    quad 3      i = 0   ┐ rows of the first A tile
    row group+8   quad 0   quad 1   quad 2    quad 3      i = 1   ┘
    row group+16  quad 0   …                              i = 2   ┐ of the second
    row group+24  quad 0   …                              i = 3   ┘

that is, of each of four rows the eight neighbouring weights k = 8·quad + e, e = 0 … 7. The order of
k is free as long as x has the same: the B fragment of these k's is the one vector of 16 bytes at
x[row, 32·tile + 8·quad].

    4 bits   512 bytes: lane 0 │ lane 1 │ … │ lane 31, a vector of 16 bytes each, word i the row i
             above:
             bit   0    4    8    12   16   20   24   28
             e     0    2    4    6    1    3    5    7      so that (word >> 4·j) & 0xF000F
                                                             is the pair e = 2·j, 2·j + 1
    MXFP4    the same, but for where the bits of its codes stand (`four_bit_floats`)
    8 bits   1024 bytes: twice 512, for rows i = 0, 1 and for i = 2, 3;
             a lane's words are (i, e = 0 … 3), (i, e = 4 … 7), (i + 1, …), (i + 1, …),
             bytes 0 1 2 3 of a word being e = 0 2 1 3: halves of 16 bits are pairs again.
             So do the codes of FP8

    a span   64 bytes: group 0 │ … │ group 7, float16 d of i = 0 … 3 each;
    Q4_1     behind the four d's of a group its four minima m: 128 bytes
    Q4_Z     behind all d's 16 bytes: group 0 │ … │ group 7, 16 bits each, z of row i at bit 4·i
    Q8_Z     behind all d's 32 bytes: group 0 │ … │ group 7, a byte each for z of i = 0 … 3
    MXFP4    32 bytes: group 0 │ … │ group 7, a byte s of i = 0 … 3 each
    FP8      128 bytes: the same of float32

The last panel of a matrix whose N is no multiple of 32 is filled up with rows of zeros.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.cuda import eight_bit_floats, four_bit_floats, k_quant_layout
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import (
    PANEL_ROWS,
    TILE_INPUTS,
    WeightFormat,
    packed_bytes,
    weight_format,
)
from kernels.cuda.quantized_matrix import QuantizedMatrix

UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Array = npt.NDArray[Any]

PACKED_AT_ONCE: Final = 1 << 18
"""Weights turned at a time: what lies between file and device stays in the caches."""
_PLACES: Final = np.arange(0, 16, 4, dtype="<u2")
"""Of four zero points in 16 bits."""
_FLOAT_SCALES: Final = {"exponent": "u1", "float32": "<f4"}
"""Types of the scales of floats."""


def pack_rows(label: str, rows: UInt8Array, num_inputs: int) -> UInt8Array:
    """Lay out rows of blocks of 32 or 256 weights, uint8 [N, bytes of K elements].

    A block is as model files store it, d or s, maybe m and the weights; z, a byte, is where m is.
    Those of a span must all have the same numbers. Returns uint8 [packed_bytes]. Several matrices
    become one, an output for each row, by concatenating their rows. Raises UnsupportedVariantError.
    """
    fmt = weight_format(label)
    packed = np.empty(packed_bytes(label, len(rows), num_inputs), np.uint8)
    is_taken_apart = fmt.kind in k_quant_layout.BLOCK_BYTES
    if is_taken_apart:
        row_bytes = num_inputs // fmt.unit * k_quant_layout.BLOCK_BYTES[fmt.kind]
    else:
        row_bytes = num_inputs // TILE_INPUTS * _block_type(fmt).itemsize
    if rows.shape[1] != row_bytes:
        raise UnsupportedVariantError("rows", f"of {row_bytes} bytes each", rows.shape[1])
    panels = _panels(fmt, packed, num_inputs)
    step = PANEL_ROWS * max(1, PACKED_AT_ONCE // (PANEL_ROWS * num_inputs))
    for first in range(0, len(rows), step):
        part = np.ascontiguousarray(rows[first : first + step])
        own_panels = panels[first // PANEL_ROWS : (first + step) // PANEL_ROWS]
        if is_taken_apart:
            missing = len(own_panels) * PANEL_ROWS - len(part)
            whole = np.pad(part, ((0, missing), (0, 0))) if missing else part
            _fill_apart(fmt, k_quant_layout.matrix_of_rows(fmt, whole), own_panels)
        else:
            blocks = part.view(_block_type(fmt))
            _check_spans(fmt, blocks)
            _fill(fmt, blocks, own_panels)
    return packed


def pack_matrix(label: str, matrix: QuantizedMatrix) -> UInt8Array:
    """Lay out a matrix whose scales are each of a span, or of a multiple up to a whole row.

    Returns uint8 [packed_bytes]. Scales are rounded to what the format has. Raises
    UnsupportedVariantError.
    """
    fmt = weight_format(label)
    num_outputs, num_inputs = matrix.quants.shape
    packed = np.empty(packed_bytes(label, num_outputs, num_inputs), np.uint8)
    num_scales = matrix.scales.shape[1]
    if num_inputs % num_scales or num_inputs // num_scales % fmt.unit:
        allowed = f"one of {fmt.unit} weights or a multiple"
        raise UnsupportedVariantError("group", allowed, num_inputs / num_scales)
    for name, numbers, is_there in (
        ("minima", matrix.minima, fmt.has_minimum),
        ("zeros", matrix.zeros, fmt.has_zeros),
    ):
        if (numbers is not None) != is_there:
            allowed = f"{'given' if is_there else 'absent'} for {label}"
            raise UnsupportedVariantError(name, allowed, numbers)
    k_quant_layout.check_whole(fmt, matrix)
    if fmt.kind in k_quant_layout.BLOCK_BYTES:
        highest = 2**fmt.bits - 1 - fmt.offset
        _check_range("quants", matrix.quants, -fmt.offset, highest)
        whole = k_quant_layout.in_whole_panels(fmt, matrix)
        _fill_apart(fmt, whole, _panels(fmt, packed, num_inputs))
        return packed
    blocks = np.empty((num_outputs, num_inputs // TILE_INPUTS), _block_type(fmt))
    repeats = blocks.shape[1] // num_scales
    if fmt.is_float:
        scales, floats = matrix.scales, four_bit_floats if fmt.bits == 4 else eight_bit_floats
        if fmt.scale == "exponent":
            scales = four_bit_floats.exponents_of(scales)
        codes = floats.codes_of(matrix.quants).reshape(*blocks.shape, TILE_INPUTS)
        blocks["s"] = np.repeat(scales, repeats, axis=1)
        blocks["q"] = _in_nibbles(codes) if fmt.bits == 4 else codes
        _fill(fmt, blocks, _panels(fmt, packed, num_inputs))
        return packed
    lowest = -fmt.offset if fmt.bits == 4 else -128
    _check_range("quants", matrix.quants, lowest, lowest + 2**fmt.bits - 1)
    blocks["d"] = np.repeat(matrix.scales, repeats, axis=1)
    if matrix.minima is not None:
        blocks["m"] = np.repeat(matrix.minima, repeats, axis=1)
    if matrix.zeros is not None:
        _check_range("zeros", matrix.zeros, lowest, lowest + 2**fmt.bits - 1)
        blocks["z"] = np.repeat(matrix.zeros, repeats, axis=1).astype(np.int8)
    stored = (matrix.quants.astype(np.int8) + np.int8(fmt.offset)).view(np.uint8)
    stored = stored.reshape(*blocks.shape, TILE_INPUTS)
    blocks["q"] = _in_nibbles(stored) if fmt.bits == 4 else stored
    _fill(fmt, blocks, _panels(fmt, packed, num_inputs))
    return packed


def unpack_matrix(
    label: str, packed: UInt8Array, num_outputs: int, num_inputs: int
) -> QuantizedMatrix:
    """Return the matrix that was packed, its numbers span by span: the inverse of `pack_matrix`."""
    fmt = weight_format(label)
    panels = _panels(fmt, packed, num_inputs)
    tiles, spans = panels["tiles"], panels["spans"]
    if fmt.rest_words:
        stored = k_quant_layout.stored_of(fmt, tiles["words"], tiles["rest"])
    elif fmt.bits == 4:
        words = tiles["words"].transpose(0, 4, 2, 1, 3)  # panel, i, group, tile, quad
        if fmt.is_float:
            words = four_bit_floats.taken_up(words)
        stored = np.empty((*words.shape, 8), np.uint8)
        for e in range(8):
            stored[..., e] = words >> np.uint32(4 * (e // 2) + 16 * (e % 2)) & np.uint32(15)
    else:
        words = _swap_middle_bytes(tiles["words"])
        stored = np.ascontiguousarray(words.transpose(0, 2, 5, 3, 1, 4, 6)).view(np.uint8)
    stored = stored.reshape(-1, num_inputs)[:num_outputs]
    if fmt.is_float:
        scales = spans["numbers"].transpose(0, 3, 2, 1)  # panel, i, group, span
        scales = scales.reshape(-1, num_inputs // fmt.span)[:num_outputs]
        if fmt.bits == 8:
            return QuantizedMatrix(eight_bit_floats.VALUES[stored], scales)
        return QuantizedMatrix(four_bit_floats.DOUBLED[stored], four_bit_floats.half_scales(scales))
    quants = stored.view(np.int8)
    if fmt.shares:
        of_units = k_quant_layout.shared_numbers(fmt, spans, panels["units"])
        own = {name: numbers[:num_outputs] for name, numbers in of_units.items()}
        return QuantizedMatrix(quants - np.int8(fmt.offset), **own)
    numbers = spans["numbers"].transpose(3, 0, 4, 2, 1)  # d | m, panel, i, group, span
    d, *m = numbers.reshape(len(numbers), -1, num_inputs // fmt.span)[:, :num_outputs]
    zeros = None
    if fmt.has_zeros:
        zeros = spans["zeros"]  # panel, span, group; of eight bits: i
        if fmt.bits == 4:
            zeros = (zeros[..., None] >> _PLACES & 15).astype(np.int8)
        in_rows = zeros.transpose(0, 3, 2, 1)
        zeros = in_rows.reshape(-1, num_inputs // fmt.span)[:num_outputs]
    return QuantizedMatrix(quants - np.int8(fmt.offset), d, m[0] if m else None, zeros)


def _block_type(fmt: WeightFormat) -> np.dtype[Any]:
    """Return a block of 32 weights: d, maybe m or z, and q; of floats s and q."""
    minimum = [("m", "<f2")] if fmt.has_minimum else []
    zero = [("z", "i1")] if fmt.has_zeros else []
    weights = ("q", "u1", TILE_INPUTS * fmt.bits // 8)
    if fmt.is_float:
        return np.dtype([("s", _FLOAT_SCALES[fmt.scale]), weights])
    return np.dtype([("d", "<f2"), *minimum, *zero, weights])


def _panels(fmt: WeightFormat, packed: UInt8Array, num_inputs: int) -> Array:
    """Return the packed bytes as panels.

    Axes of their words: of four to six bits [tile, group, quad, i], of eight [tile, i // 2, group,
    quad, i % 2, word]; of the rest [tile, group, quad, word]. Of a span's numbers [group, d | m,
    i], of floats [group, i], of its zeros of four bits [group], of eight [group, i].
    """
    tile = [("words", "<u4", (2, 8, 4, 2, 2) if fmt.bits == 8 else (8, 4, 4))]
    if fmt.rest_words:
        tile.append(("rest", "<u4", (8, 4, fmt.rest_words)))
    span: list[Any] = [("numbers", "<f2", (8, 2 if fmt.has_minimum else 1, 4))]
    if fmt.is_float:
        span = [("numbers", _FLOAT_SCALES[fmt.scale], (8, 4))]
    if fmt.has_zeros:
        span.append(("zeros", "<u2", (8,)) if fmt.bits == 4 else ("zeros", "i1", (8, 4)))
    filled = fmt.scales_at(num_inputs) + fmt.numbers_bytes(num_inputs)
    fields: list[Any] = [
        ("tiles", np.dtype(tile), (num_inputs // TILE_INPUTS,)),
        ("spans", np.dtype(span), (num_inputs // fmt.span,)),
    ]
    if fmt.shares:
        fields[1] = ("spans", k_quant_layout.span_type(), (num_inputs // fmt.span,))
        fields.append(("units", k_quant_layout.unit_type(fmt), (num_inputs // fmt.unit,)))
    fields.append(("filling", "u1", (fmt.panel_bytes(num_inputs) - filled,)))
    return packed.view(np.dtype(fields))


def _check_spans(fmt: WeightFormat, blocks: Array) -> None:
    """Check that the blocks of each span have the same numbers, to the bit, and room for z."""
    for name in (blocks.dtype.names or ())[:-1]:  # but for q
        numbers = blocks[name].reshape(len(blocks), -1, fmt.span_tiles)
        bits = np.ascontiguousarray(numbers).view(f"u{numbers.dtype.itemsize}")
        differs = bits != bits[..., :1]
        if differs.any():
            row, span, tile = np.argwhere(differs)[0]
            given = numbers[row, span, 0].item(), numbers[row, span, tile].item()
            raise UnsupportedVariantError(name, f"one for a span of {fmt.span}", given)
    if fmt.has_zeros and fmt.bits == 4:
        _check_range("z", blocks["z"], 0, 15)


def _check_range(name: str, integers: Array, lowest: int, highest: int) -> None:
    if integers.min(initial=lowest) < lowest or integers.max(initial=lowest) > highest:
        given = int(integers.min()), int(integers.max())
        raise UnsupportedVariantError(name, f"between {lowest} and {highest}", given)


def _in_nibbles(stored: UInt8Array) -> UInt8Array:
    """Return blocks of 32 small integers as model files have them, 16 bytes each."""
    nibbles: UInt8Array = stored[..., : TILE_INPUTS // 2].copy()
    nibbles |= stored[..., TILE_INPUTS // 2 :] << np.uint8(4)
    return nibbles


def _fill_apart(fmt: WeightFormat, matrix: QuantizedMatrix, panels: Array) -> None:
    """Write a matrix of whole panels, of five or six bits or a shared format."""
    panels["filling"] = 0
    tiles, spans = panels["tiles"], panels["spans"]
    stored = (matrix.quants + np.int8(fmt.offset)).view(np.uint8)
    if fmt.rest_words:
        tiles["words"], tiles["rest"] = k_quant_layout.lanes_of(fmt, stored)
    else:
        in_blocks = stored.reshape(len(stored), -1, TILE_INPUTS)
        lanes = _nibbles_of_lanes(_in_nibbles(in_blocks).view("<u4"))
        tiles["words"] = lanes.reshape(len(panels), 4, 8, -1, 4).transpose(0, 3, 2, 4, 1)
    if fmt.shares:
        k_quant_layout.fill_shared(fmt, matrix, spans, panels["units"])
        return
    for which, numbers in enumerate((matrix.scales, matrix.minima)):
        if numbers is not None:
            in_rows = numbers.reshape(len(panels), 4, 8, -1)
            spans["numbers"][:, :, :, which] = in_rows.transpose(0, 3, 2, 1)


def _fill(fmt: WeightFormat, blocks: Array, panels: Array) -> None:
    """Write blocks [N, tiles of a panel] as whole panels. Rows missing at the end are zeros."""
    tiles = panels["tiles"]
    num_panels, num_tiles = tiles.shape
    missing = num_panels * PANEL_ROWS - len(blocks)
    if missing:
        blocks = np.concatenate([blocks, np.zeros((missing, num_tiles), blocks.dtype)])
    panels["filling"] = 0
    stored = np.ascontiguousarray(blocks["q"]).view("<u4")
    # Rows are panel, i, group; k's are tile, quad, and words of e.
    if stored.shape[-1] == 4:
        lanes = _nibbles_of_lanes(stored)
        if fmt.is_float:
            lanes = four_bit_floats.placed(lanes)
        in_rows = lanes.reshape(num_panels, 4, 8, num_tiles, 4)
        tiles["words"] = in_rows.transpose(0, 3, 2, 4, 1)
    else:
        in_rows = _swap_middle_bytes(stored).reshape(num_panels, 2, 2, 8, num_tiles, 4, 2)
        tiles["words"] = in_rows.transpose(0, 4, 1, 3, 5, 2, 6)
    spans = panels["spans"]
    num_spans = spans.shape[1]
    firsts = blocks[:, :: num_tiles // num_spans].reshape(num_panels, 4, 8, num_spans)
    firsts = firsts.transpose(0, 3, 2, 1)  # panel, span, group, i
    if fmt.is_float:
        spans["numbers"] = firsts["s"]
        return
    for which, name in enumerate(("d", "m")[: spans["numbers"].shape[3]]):
        spans["numbers"][:, :, :, which] = firsts[name]
    if "zeros" in (spans.dtype.names or ()):
        zeros = firsts["z"]
        if stored.shape[-1] == 4:
            zeros = np.bitwise_or.reduce(zeros.astype("<u2") << _PLACES, axis=-1)
        spans["zeros"] = zeros


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
