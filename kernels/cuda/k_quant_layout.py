"""How weights of five and six bits lie, and scales that the spans of a unit share.

`quantized_layout` draws what is the same for all formats. Eight weights that a lane has of a row
are four pairs, e = 2·j and 2·j + 1 in the two halves of a word. A half holds two pairs of six bits
or three of five whole, so that one mask gives them; what is left of its bits has a part of the last
pair, and the lane's words of the *rest* what is missing:

    half of word i         bit 0           5 or 6           10 or 12          15
    five bits, row i       j = 0 │ 5 bits  j = 1 │ 5 bits   j = 2 │ 5 bits    j = 3, bit 4
    six bits, row i        j = 0 │ 6 bits  j = 1 │ 6 bits   j = 3, bits 0 … 3

    half of the rest       bit 0               4                   8               12
    five bits, one word    j = 3, bits 0 … 3   the same of row 1   of row 2        of row 3
    six bits, two words    j = 2 of row 0 or 2, then bits 4 and 5  the same of row 1 or 3
                           of its j = 3
                           words: of rows 0 and 1, of rows 2 and 3

    five bits   640 bytes: 512 as four bits have them │ the rest: lane 0 │ … │ lane 31, a word each
    six bits    768 bytes: 512 │ lane 0 │ … │ lane 31, two words each

A scale of Q6_K is for a run of 16 k's, and tensor cores take four k's of each quad at a time. So
there a lane has e = 0 … 3 of the first run, k = 4·quad + e, and e = 4 … 7 of the second,
k = 16 + 4·quad + e − 4: x is read as two halves of a vector.

What spans share lies behind the last span of the panel, unit by unit:

    panel       │ tile 0 │ …  │ span 0 │ span 1 │ …  │ unit 0 │ unit 1 │ …  │ 0 … │
    Q4_K, Q5_K  a span: group 0 │ … │ group 7, 8 bytes: s of i = 0 … 3 │ n of i = 0 … 3: 64 bytes
                a unit: group 0 │ … │ group 7, 16 bytes: d of i = 0 … 3 │ m = −dmin: 128 bytes
    Q6_K        a span: the same, s + 128 of the first run │ of the second
                a unit: group 0 │ … │ group 7, d of i = 0 … 3: 64 bytes
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.quantized_formats import PANEL_ROWS, TILE_INPUTS, WeightFormat
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.reference import k_quants

UInt8Array = npt.NDArray[np.uint8]
UInt32Array = npt.NDArray[np.uint32]
Array = npt.NDArray[Any]

BLOCK_BYTES: Final = {"Q5_0": 22, "Q5_1": 24, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
"""Of a block of a model file, by kind: the kinds that are drawn above."""
RAISED: Final = 128
"""What is added to a scale that may be negative: a byte is none."""
LOW_NIBBLE, FOUR = np.uint16(15), np.uint16(4)


def matrix_of_rows(fmt: WeightFormat, rows: UInt8Array) -> QuantizedMatrix:
    """Take rows of blocks apart, uint8 [N, bytes of K elements], as model files store them."""
    num_rows = len(rows)
    blocks = rows.reshape(-1, BLOCK_BYTES[fmt.kind])

    def of_rows(numbers: Array) -> Array:
        return numbers.reshape(num_rows, -1)

    def half(at: int) -> Array:
        return of_rows(np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2"))

    if fmt.kind == "Q6_K":
        quants = of_rows(k_quants.quants_of_6_bits(blocks)).view(np.int8) - np.int8(fmt.offset)
        return QuantizedMatrix(
            quants, half(208), whole_scales=of_rows(blocks[:, 192:208]).view(np.int8)
        )
    if not fmt.shares:
        q = k_quants.quants_of_5_bits(blocks, 4 if fmt.has_minimum else 2)
        quants = of_rows(q).view(np.int8) - np.int8(fmt.offset)
        return QuantizedMatrix(quants, half(0), half(2) if fmt.has_minimum else None)
    scales, minima = k_quants.whole_scales_and_minima(blocks)
    take_apart = k_quants.quants_of_5_bits_k if fmt.bits == 5 else k_quants.quants_of_4_bits_k
    return QuantizedMatrix(
        of_rows(take_apart(blocks)).view(np.int8),
        half(0),
        -half(2),
        whole_scales=of_rows(scales),
        whole_minima=of_rows(minima),
    )


def in_whole_panels(fmt: WeightFormat, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix with rows behind its last one, up to a whole panel, that are stored as 0.

    Floats for more than a unit are repeated.
    """
    num_rows, num_inputs = matrix.quants.shape
    missing = -num_rows % PANEL_ROWS
    behind: dict[str, Array | None] = {}
    for name in ("quants", "scales", "minima", "whole_scales", "whole_minima"):
        values, fill = getattr(matrix, name), -fmt.offset if name == "quants" else 0
        if values is not None:
            if name in ("scales", "minima"):
                values = np.repeat(values, num_inputs // fmt.unit // values.shape[1], axis=1)
            values = np.pad(values, ((0, missing), (0, 0)), constant_values=fill)
        behind[name] = values
    return QuantizedMatrix(**behind)  # type: ignore[arg-type]


def span_type() -> np.dtype[Any]:
    """Return the integers of a span: [group, s | n, i], of Q6_K [group, run, i]."""
    return np.dtype(("u1", (8, 2, 4)))


def unit_type(fmt: WeightFormat) -> np.dtype[Any]:
    """Return what the spans of a unit share: [group, d | m, i]."""
    return np.dtype(("<f2", (8, 2 if fmt.has_minimum else 1, 4)))


def fill_shared(fmt: WeightFormat, matrix: QuantizedMatrix, spans: Array, units: Array) -> None:
    """Write the numbers of whole panels, [panels, spans or units of a panel, …]."""
    shape = (len(units), 4, 8, units.shape[1])  # panel, i, group, unit
    units[:, :, :, 0] = matrix.scales.reshape(shape).transpose(0, 3, 2, 1)
    if matrix.minima is not None:
        units[:, :, :, 1] = matrix.minima.reshape(shape).transpose(0, 3, 2, 1)
    assert matrix.whole_scales is not None
    shape = (len(spans), 4, 8, spans.shape[1])
    if fmt.runs == 2:
        runs = matrix.whole_scales.view(np.uint8) ^ np.uint8(RAISED)
        spans[:] = runs.reshape(*shape, 2).transpose(0, 3, 2, 4, 1)
        return
    assert matrix.whole_minima is not None
    for which, whole in enumerate((matrix.whole_scales, matrix.whole_minima)):
        spans[:, :, :, which] = whole.reshape(shape).transpose(0, 3, 2, 1)


def shared_numbers(fmt: WeightFormat, spans: Array, units: Array) -> dict[str, Array]:
    """Return the numbers of a matrix by their names, all rows of the panels."""
    num_rows = PANEL_ROWS * len(units)
    scales, *minima = units.transpose(3, 0, 4, 2, 1).reshape(-1, num_rows, units.shape[1])
    if fmt.runs == 2:  # panel, span, group, run, i
        in_rows = spans.transpose(0, 4, 2, 1, 3).reshape(num_rows, -1)
        return {"scales": scales, "whole_scales": (in_rows ^ np.uint8(RAISED)).view(np.int8)}
    whole = spans.transpose(3, 0, 4, 2, 1).reshape(2, num_rows, -1)
    return {
        "scales": scales, "minima": minima[0], "whole_scales": whole[0], "whole_minima": whole[1]
    }  # fmt: skip


def lanes_of(fmt: WeightFormat, stored: UInt8Array) -> tuple[UInt32Array, UInt32Array]:
    """Return the words and the rest of whole panels, from what is stored of five or six bits.

    `stored`: [N, K]. Words: [panel, tile, group, quad, i]; the rest: [panel, tile, group, quad,
    word].
    """
    shape = (-1, 4, 8, stored.shape[1] // TILE_INPUTS)  # panel, i, group, tile
    if fmt.runs == 2:
        in_quads = stored.reshape(*shape, 2, 4, 4).swapaxes(4, 5).reshape(*shape, 4, 4, 2)
    else:
        in_quads = stored.reshape(*shape, 4, 4, 2)
    # panel, i, group, tile, quad, weight of a pair; a pair j each
    first, second, third, last = (in_quads[..., j, :].astype(np.uint16) for j in range(4))
    if fmt.bits == 5:
        halves = first | second << 5 | third << 10 | (last >> FOUR) << 15
        last &= LOW_NIBBLE
        rest = last[:, :1] | last[:, 1:2] << 4 | last[:, 2:3] << 8 | last[:, 3:] << 12
    else:
        halves = first | second << 6 | (last & LOW_NIBBLE) << 12
        third |= (last >> FOUR) << 6
        rest = third[:, ::2] | third[:, 1::2] << 8
    return _words(halves).transpose(0, 3, 2, 4, 1), _words(rest).transpose(0, 3, 2, 4, 1)


def stored_of(fmt: WeightFormat, words: UInt32Array, rest: UInt32Array) -> UInt8Array:
    """Return what is stored, [N, K], all rows of the panels: the inverse of `lanes_of`."""
    halves, others = _halves(words), _halves(rest)
    if fmt.bits == 5:
        turns = np.arange(0, 16, 4, dtype=np.uint16)[:, None]
        last = others >> turns & LOW_NIBBLE | halves >> 15 << FOUR
        pairs = [halves & 31, halves >> 5 & 31, halves >> 10 & 31, last]
    else:
        turns = np.array([0, 8], np.uint16)[:, None]
        bytes_ = (others[..., None, :] >> turns & 255).reshape(halves.shape)
        pairs = [halves & 63, halves >> 6 & 63, bytes_ & 63, halves >> 12 | bytes_ >> 6 << FOUR]
    # panel, tile, group, quad, i, j, weight
    stored = np.stack(pairs, axis=5).astype(np.uint8).transpose(0, 4, 2, 1, 3, 5, 6)
    if fmt.runs == 2:
        stored = stored.reshape(*stored.shape[:5], 2, 4).swapaxes(4, 5)
    return stored.reshape(PANEL_ROWS * len(words), -1)


def check_whole(fmt: WeightFormat, matrix: QuantizedMatrix) -> None:
    """Check that integer scales and minima are there, and fit. Raises UnsupportedVariantError."""
    num_rows, num_inputs = matrix.quants.shape
    lowest, highest = (-128, 127) if fmt.runs == 2 else (0, 63)
    for name, whole, count in (
        ("whole_scales", matrix.whole_scales, fmt.runs if fmt.shares else 0),
        ("whole_minima", matrix.whole_minima, int(fmt.shares and fmt.has_minimum)),
    ):
        shape = (num_rows, num_inputs // fmt.span * count) if count else None
        if shape != (None if whole is None else whole.shape):
            given = None if whole is None else whole.shape
            raise UnsupportedVariantError(name, f"{shape or 'absent'} for {fmt.label}", given)
        if whole is not None and not lowest <= int(whole.min()) <= int(whole.max()) <= highest:
            given = int(whole.min()), int(whole.max())
            raise UnsupportedVariantError(name, f"between {lowest} and {highest}", given)


def _words(halves: Array) -> UInt32Array:
    """Return two halves, the last axis, as a word."""
    return np.ascontiguousarray(halves).view("<u4")[..., 0]


def _halves(words: UInt32Array) -> Array:
    """Return words as two halves, a new last axis."""
    return np.ascontiguousarray(words)[..., None].view("<u2")
