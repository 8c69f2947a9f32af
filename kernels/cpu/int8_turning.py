"""Rows of quantised blocks, as model files store them, turned into panels (`int8_packing`).

Nothing is computed but places: every bit of the file is in the panel once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kernels.cpu.int8_packing import (
    GROUP,
    INT8_FORMATS,
    PANEL_COLUMNS,
    SHARED_GROUPS,
    Int8Format,
    Scales,
    int8_panel_bytes,
)

UInt8Array = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[Any]
Fields: TypeAlias = Mapping[str, AnyArray]
"""By name: what tiles or records hold of each row, [rows, tiles or records, …]."""

PACKED_AT_ONCE: Final = 1 << 18
"""Bytes turned at a time: source and result stay in the processor's cache."""
HALF_GROUP: Final = GROUP // 2
ONE, THREE, FOUR, LOW_HALF, HIGH_HALF = (np.uint8(number) for number in (1, 3, 4, 0x0F, 0xF0))
"""Shifts and masks that keep bytes bytes."""


def pack_int8_rows(label: str, rows: UInt8Array, k: int, out: UInt8Array) -> None:
    """Pack rows of blocks as model files store them, uint8 [n, bytes of k elements], into `out`.

    `out`: uint8 [packed_int8_bytes(label, n, k)], C-contiguous; all of it is written. Several
    matrices become one, a column of the product for each row, by concatenating their rows.
    """
    fmt = INT8_FORMATS[label]
    n = len(rows)
    panels = out.reshape(-(-n // PANEL_COLUMNS), int8_panel_bytes(label, k))
    whole = n // PANEL_COLUMNS
    step = max(1, PACKED_AT_ONCE // max(1, panels.shape[1]))
    for first in range(0, whole, step):
        end = min(first + step, whole)
        _turn(fmt, rows[first * PANEL_COLUMNS : end * PANEL_COLUMNS], k, panels[first:end])
    if whole < len(panels):
        last = rows[whole * PANEL_COLUMNS :]
        _turn(fmt, np.pad(last, ((0, PANEL_COLUMNS - len(last)), (0, 0))), k, panels[whole:])


def _turn(fmt: Int8Format, rows: UInt8Array, k: int, panels: UInt8Array) -> None:
    """Write whole panels: rows [16 · panels, bytes], panels [panels, bytes]."""
    blocks = np.ascontiguousarray(rows).reshape(len(rows), k // fmt.block_elements, -1)
    end = k // GROUP * fmt.tile_bytes
    tiles = panels[:, :end].view(_tile_type(fmt))
    if not fmt.is_shared:
        _write(_own_tiles(fmt, blocks), tiles)
        return
    records_end = end + blocks.shape[1] * fmt.record_bytes
    _write({"q": _SHARED_TILES[fmt.label](blocks)}, tiles)
    _write(_RECORDS[fmt.scales](blocks), panels[:, end:records_end].view(_record_type(fmt)))
    panels[:, records_end:] = 0


def _write(fields: Fields, target: AnyArray) -> None:
    """Write fields to tiles or records [panels, …], in which columns are the last axis."""
    for name, values in fields.items():
        columns = values.reshape(len(target), PANEL_COLUMNS, *values.shape[1:])
        target[name] = np.moveaxis(columns, 1, -1)


def _tile_type(fmt: Int8Format) -> np.dtype[np.void]:
    """Return a tile: vectors of words, one a column, then d and m of each column."""
    scales = [(name, "<u2", (PANEL_COLUMNS,)) for name in _own_scales(fmt)]
    return np.dtype([("q", "<u4", (fmt.num_vectors, PANEL_COLUMNS)), *scales])


def _own_scales(fmt: Int8Format) -> tuple[str, ...]:
    return {Scales.OWN: ("d",), Scales.OWN_WITH_MINIMUM: ("d", "m")}.get(fmt.scales, ())


def _record_type(fmt: Int8Format) -> np.dtype[np.void]:
    """Return a record of shared scales, a column's numbers in each place of 16."""
    column = (PANEL_COLUMNS,)
    if fmt.scales is Scales.SHARED:
        return np.dtype([("s", "u1", (2 * SHARED_GROUPS, *column)), ("d", "<u2", column)])
    # Six bits for each tile, or twice as many: a minimum is beside the scale.
    shared = ("d", "dmin") if fmt.has_minimum else ("d",)
    low = SHARED_GROUPS // 2 * len(shared)
    return np.dtype(
        [
            ("low", "u1", (low, *column)),
            ("high", "u1", (low // 2, *column)),
            *((name, "<u2", column) for name in shared),
        ]
    )


def _own_tiles(fmt: Int8Format, blocks: UInt8Array) -> Fields:
    """Return what tiles hold of blocks that are 32 elements of a row: d, m, h and words."""
    scales = [(name, "<u2") for name in _own_scales(fmt)]
    high = [("h", "<u4")] if fmt.high_bits else []
    words = [("q", "<u4", (fmt.low_vectors,))]
    stored = blocks.view(np.dtype([*scales, *high, *words]))[..., 0]
    fields = {name: stored[name] for name in _own_scales(fmt)}
    if not fmt.high_bits:
        return {**fields, "q": stored["q"]}
    # Bit k of h is the fifth bit of element k.
    bits = np.ascontiguousarray(stored["h"])[..., None].view(np.uint8)
    fifth = _in_fours(np.unpackbits(bits, axis=-1, bitorder="little"), 1)
    return {**fields, "q": np.concatenate((stored["q"], fifth), axis=-1)}


def _in_fours(values: UInt8Array, bits: int) -> npt.NDArray[np.uint32]:
    """Return the upper bits of groups, uint8 [..., 32], as words [..., `bits`].

    Byte j of a word has those of elements 4 · v + j, v counted from the word's first element.
    """
    turns = 8 // bits
    parts = values.reshape(*values.shape[:-1], bits, turns, 4)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    words = np.bitwise_or.reduce(parts << shifts, axis=-2)
    return np.ascontiguousarray(words).view("<u4")[..., 0]


def _in_halves(stored: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """Return 32 bytes, [..., 32], that hold a group in the low halves and one in the high ones.

    Each as 16 bytes, [..., 16], of its elements k and k + 16.
    """
    first, second = stored[..., :HALF_GROUP], stored[..., HALF_GROUP:]
    low: UInt8Array = first & LOW_HALF | second << FOUR
    high: UInt8Array = first >> FOUR | second & HIGH_HALF
    return low, high


def _nibble_words(blocks: UInt8Array, at: int) -> npt.NDArray[np.uint32]:
    """Return the nibbles of Q4_K or Q5_K blocks, whose 128 bytes begin at byte `at`."""
    pairs = blocks[..., at : at + 128].reshape(*blocks.shape[:2], SHARED_GROUPS // 2, GROUP)
    groups = np.stack(_in_halves(pairs), axis=-2)
    return _tiles_of(groups.view("<u4"))


def _tiles_of(words: AnyArray) -> AnyArray:
    """Return words [rows, blocks, …, words of a tile] as [rows, tiles, words of a tile]."""
    return words.reshape(words.shape[0], -1, words.shape[-1])


def _q4_k_tiles(blocks: UInt8Array) -> AnyArray:
    return _nibble_words(blocks, 16)


def _q5_k_tiles(blocks: UInt8Array) -> AnyArray:
    """Bit g of byte k of h is the fifth bit of element k of group g."""
    turns = np.arange(SHARED_GROUPS, dtype=np.uint8)[:, None]
    bits = blocks[..., None, 16:48] >> turns & ONE
    return np.concatenate((_nibble_words(blocks, 48), _tiles_of(_in_fours(bits, 1))), axis=-1)


def _q6_k_tiles(blocks: UInt8Array) -> AnyArray:
    """Of 128 elements, 64 bytes hold groups 0 and 1 in the low halves, 2 and 3 in the high ones.

    Bits 2 · g and 2 · g + 1 of byte k of h are the upper bits of element k of group g of them.
    """
    halves = blocks[..., :128].reshape(*blocks.shape[:2], 2, 2, GROUP)
    low = np.stack(_in_halves(halves), axis=-3)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, GROUP)
    upper = high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & THREE
    words = _tiles_of(np.ascontiguousarray(low).view("<u4")), _tiles_of(_in_fours(upper, 2))
    return np.concatenate(words, axis=-1)


def _iq4_xs_tiles(blocks: UInt8Array) -> AnyArray:
    """Take groups as they lie, each as a tile has it."""
    words = np.ascontiguousarray(blocks[..., 8:136]).view("<u4")
    return words.reshape(len(words), -1, 4)


def _record_with_minima(blocks: UInt8Array) -> Fields:
    """Return the scales of Q4_K or Q5_K blocks: 6 bits of s and of n for each group.

    Bytes 0–3 hold s of groups 0–3 in their low 6 bits, bytes 4–7 n of groups 0–3; byte 8 + i the
    low 4 bits of s and n of group 4 + i, whose upper 2 bits are those of bytes i and 4 + i.
    """
    s, n, rest = (blocks[..., at : at + 4] for at in (4, 8, 12))
    low = np.concatenate((s & 15 | n << 4, rest), axis=-1)
    upper = np.concatenate((s >> 4 & 3 | n >> 2 & 12, s >> 6 | n >> 4 & 12), axis=-1)
    high = upper[..., ::2] | upper[..., 1::2] << 4
    return {"low": low, "high": high, "d": _float16_at(blocks, 0), "dmin": _float16_at(blocks, 2)}


def _record_of_q6_k(blocks: UInt8Array) -> Fields:
    return {"s": blocks[..., 192:208], "d": _float16_at(blocks, 208)}


def _record_of_iq4_xs(blocks: UInt8Array) -> Fields:
    return {"low": blocks[..., 4:8], "high": blocks[..., 2:4], "d": _float16_at(blocks, 0)}


def _float16_at(blocks: UInt8Array, at: int) -> AnyArray:
    """Return the bits of a float16 of each block, uint16 [rows, blocks]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<u2")[..., 0]


_SHARED_TILES: Final[Mapping[str, Callable[[UInt8Array], AnyArray]]] = {
    "Q4_K": _q4_k_tiles,
    "Q5_K": _q5_k_tiles,
    "Q6_K": _q6_k_tiles,
    "IQ4_XS": _iq4_xs_tiles,
}
"""From blocks, uint8 [rows, blocks, bytes], to words of tiles [rows, tiles, num_vectors]."""
_RECORDS: Final[Mapping[Scales, Callable[[UInt8Array], Fields]]] = {
    Scales.SHARED_WITH_MINIMUM: _record_with_minima,
    Scales.SHARED: _record_of_q6_k,
    Scales.SHARED_SIX_BITS: _record_of_iq4_xs,
}
