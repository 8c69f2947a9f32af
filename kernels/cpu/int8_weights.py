"""How products read a panel of quantised weights: a tile's weights and its scales, as LLVM IR.

`kernels.cpu.int8_packing` says where they lie. Every factor is exact in float32: d has 11 bits, s
and n have 6 or 8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from numba import types

from kernels.cpu.byte_tables import look_up
from kernels.cpu.emitted import emitted
from kernels.cpu.float_tile import f16_to_float32
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import (
    GROUP,
    PANEL_COLUMNS,
    SHARED_GROUPS,
    VECTOR_BYTES,
    Int8Format,
    Scales,
)
from kernels.cpu.vector_ir import (
    BYTES,
    F32X,
    I8X,
    I16X,
    I32X,
    Builder,
    Value,
    broadcast,
    constant,
    i64,
    load,
    offset,
    prefetch,
)

BIAS: Final = 12582912.0
BIAS_BITS: Final = 0x4B400000
BEGINS_OFFSET: Final = 8
"""For weights stored so much greater than they are, as Q4_0's, rows hold where sums begin."""


@dataclass(frozen=True, slots=True)
class PanelFactors:
    """What sums of a panel are multiplied with: d, −BIAS · d and m (None without)."""

    d: Value
    bias: Value
    m: Value | None


def with_bias(builder: Builder, d: Value, m: Value | None) -> PanelFactors:
    """Return what goes with a scale and a minimum."""
    return PanelFactors(d, builder.fmul(d, constant(F32X, -BIAS)), m)


@dataclass(frozen=True, slots=True)
class Tile:
    """A tile of a panel. `address`: of its weights; `record`: of its shared scales, or None.

    `place`: which of the record's tiles it is, int64.
    """

    fmt: Int8Format
    address: Value
    record: Value | None
    place: Value | None


def tile_of(builder: Builder, fmt: Int8Format, panel: Value, groups: Value, group: Value) -> Tile:
    """Return tile `group` of a panel of `groups` tiles."""
    address = offset(builder, panel, builder.mul(group, i64(fmt.tile_bytes)))
    if not fmt.is_shared:
        return Tile(fmt, address, None, None)
    records = offset(builder, panel, builder.mul(groups, i64(fmt.tile_bytes)))
    number = builder.lshr(group, i64(3))
    record = offset(builder, records, builder.mul(number, i64(fmt.record_bytes)))
    return Tile(fmt, address, record, builder.and_(group, i64(SHARED_GROUPS - 1)))


def panel_bytes_of(builder: Builder, fmt: Int8Format, groups: Value) -> Value:
    """Return the bytes of a panel of `groups` tiles, int64: `int8_panel_bytes`."""
    tiles = builder.mul(groups, i64(fmt.tile_bytes))
    if not fmt.is_shared:
        return tiles
    records = builder.mul(builder.lshr(groups, i64(3)), i64(fmt.record_bytes))
    filled = builder.and_(builder.add(records, i64(VECTOR_BYTES - 1)), i64(-VECTOR_BYTES))
    return builder.add(tiles, filled)


def panel_sizer(fmt: Int8Format) -> Any:  # noqa: ANN401 - Numba's objects
    """Return int64(groups), `panel_bytes_of` as kernels call it."""

    def size(builder: Builder, groups: Value) -> Value:
        return panel_bytes_of(builder, fmt, groups)

    size.__name__ = f"panel_bytes_{fmt.label}".lower()
    return emitted(types.int64, types.int64)(size)


def fetched_lines(builder: Builder, tile: Tile) -> list[Value]:
    """Return an address in each cache line of a tile, and of its part of the record."""
    lines = range(0, tile.fmt.tile_bytes, VECTOR_BYTES)
    found = [offset(builder, tile.address, line) for line in lines]
    if tile.record is not None:
        part = builder.mul(tile.place, i64(tile.fmt.record_bytes // SHARED_GROUPS))
        found.append(offset(builder, tile.record, part))
    return found


def fetch_ahead(builder: Builder, tile: Tile, ahead: Value, locality: int) -> None:
    """Ask for the tile, and its part of the record, that lie so many bytes ahead."""
    for line in fetched_lines(builder, tile):
        prefetch(builder, offset(builder, line, ahead), locality)


def panel_factors(
    builder: Builder, tile: Tile, chosen: InstructionSet, part: int = 0
) -> PanelFactors:
    """Load the scales and minima of a tile, or of a part of its k's, as float32."""
    fmt = tile.fmt

    def widened(base: Value, at: int) -> Value:
        return f16_to_float32(builder, load(builder, offset(builder, base, at), I16X), chosen)

    if not fmt.is_shared:
        d = widened(tile.address, fmt.scales_at)
        m = widened(tile.address, fmt.minima_at) if fmt.has_minimum else None
        return with_bias(builder, d, m)
    assert tile.record is not None
    d = widened(tile.record, fmt.shared_at)
    if fmt.scales is Scales.SHARED:
        first = builder.mul(tile.place, i64(fmt.parts * PANEL_COLUMNS))
        scale_at = offset(builder, tile.record, first, part * PANEL_COLUMNS)
        scale = builder.sext(load(builder, scale_at, I8X), I32X)
        return with_bias(builder, builder.fmul(d, builder.sitofp(scale, F32X)), None)
    if fmt.scales is Scales.SHARED_SIX_BITS:
        s = builder.sitofp(_signed_six_bits(builder, tile), F32X)
        return with_bias(builder, builder.fmul(d, s), None)
    s, n = (builder.uitofp(x, F32X) for x in _six_bits(builder, tile))
    dmin = widened(tile.record, fmt.shared_at + 2 * PANEL_COLUMNS)
    return with_bias(builder, builder.fmul(d, s), builder.fneg(builder.fmul(dmin, n)))


def _six_bits(builder: Builder, tile: Tile) -> tuple[Value, Value]:
    """Return s and n of a tile, int32 lanes."""
    low_at = builder.mul(tile.place, i64(PANEL_COLUMNS))
    high_at = builder.mul(builder.lshr(tile.place, i64(1)), i64(PANEL_COLUMNS))
    low, high = (
        builder.zext(load(builder, offset(builder, tile.record, at, first), I8X), I32X)
        for at, first in ((low_at, 0), (high_at, SHARED_GROUPS * PANEL_COLUMNS))
    )
    odd = builder.shl(builder.and_(tile.place, i64(1)), i64(2))
    high = builder.lshr(high, broadcast(builder, builder.trunc(odd, I32X.element)))

    def joined(low_bits: Value, high_bits: Value) -> Value:
        return builder.or_(low_bits, builder.and_(high_bits, constant(I32X, 0x30)))

    s = joined(builder.and_(low, constant(I32X, 15)), builder.shl(high, constant(I32X, 4)))
    n = joined(builder.lshr(low, constant(I32X, 4)), builder.shl(high, constant(I32X, 2)))
    return s, n


def _signed_six_bits(builder: Builder, tile: Tile) -> Value:
    """Return s − 32 of a tile, int32 lanes."""

    def bits(first: int, tiles: int, count: int) -> Value:
        """Return `count` bits of each byte, `tiles` of which have theirs in one."""
        turn = tiles.bit_length() - 1
        down = builder.mul(builder.lshr(tile.place, i64(turn)), i64(PANEL_COLUMNS))
        stored = load(builder, offset(builder, tile.record, down, first), I8X)
        right = builder.mul(builder.and_(tile.place, i64(tiles - 1)), i64(count))
        shift = broadcast(builder, builder.trunc(right, I32X.element))
        lanes = builder.lshr(builder.zext(stored, I32X), shift)
        return builder.and_(lanes, constant(I32X, (1 << count) - 1))

    low = bits(0, 2, 4)
    upper = bits(SHARED_GROUPS // 2 * PANEL_COLUMNS, 4, 2)
    s = builder.or_(low, builder.shl(upper, constant(I32X, 4)))
    return builder.sub(s, constant(I32X, 32))


def weights_of_tiles(
    builder: Builder, tiles: list[Tile], part: int, chosen: InstructionSet, above: int = 0
) -> Iterator[tuple[int, list[Value]]]:
    """Yield the first k of each four of a part of the k's, and their weights in each tile.

    As they are stored: unsigned, `offset` not taken off, or signed bytes; those that are looked up
    greater by `above`. They are loaded when they are asked for.
    """
    fmt = tiles[0].fmt
    at = [tile.address for tile in tiles]

    def vectors(index: int) -> list[Value]:
        return [load(builder, offset(builder, a, VECTOR_BYTES * index), BYTES) for a in at]

    if not fmt.is_nibbles:
        yield from ((4 * v, vectors(v)) for v in range(fmt.low_vectors))
        return
    high_vectors = range(fmt.high_bits) if fmt.parts == 1 else [part]
    upper = [vectors(fmt.low_vectors + index) for index in high_vectors]
    for v in range(fmt.low_vectors):
        stored = vectors(v)
        for is_second in (False, True):
            if fmt.parts == 2 and is_second != (part == 1):
                continue
            weights = [_nibbles(builder, s, is_second=is_second) for s in stored]
            if fmt.codes is not None:
                table = [code + fmt.offset + above for code in fmt.codes]
                weights = [look_up(builder, table, nibbles, chosen) for nibbles in weights]
            if upper:
                turn = v + (fmt.low_vectors if is_second and fmt.parts == 1 else 0)
                weights = [
                    builder.or_(low, _upper_bits(builder, fmt, high, turn))
                    for low, high in zip(weights, upper[0], strict=True)
                ]
            yield 4 * v + (GROUP // 2 if is_second else 0), weights


def _nibbles(builder: Builder, stored: Value, *, is_second: bool) -> Value:
    return builder.and_(_shifted(builder, stored, 4 if is_second else 0), constant(BYTES, 15))


def _upper_bits(builder: Builder, fmt: Int8Format, stored: Value, turn: int) -> Value:
    """Return the upper bits that stand at place `turn` of a vector's bytes, above the nibble."""
    mask = ((1 << fmt.high_bits) - 1) << fmt.low_bits
    right = fmt.high_bits * turn - fmt.low_bits
    return builder.and_(_shifted(builder, stored, right), constant(BYTES, mask))


def _shifted(builder: Builder, stored: Value, right: int) -> Value:
    """Return bytes shifted to the right, or to the left; what comes in must be masked.

    There is no shift of bytes: it is one of wider lanes.
    """
    if right == 0:
        return stored
    lanes = builder.bitcast(stored, I32X)
    shift = builder.lshr if right > 0 else builder.shl
    return builder.bitcast(shift(lanes, constant(I32X, abs(right))), BYTES)
