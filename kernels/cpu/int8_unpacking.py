"""Panels unpacked for rows that meet them in several tiles: scales, and weights of more bits.

To take a shared scale from its record costs as much as two rows' products with its weights, and to
put upper bits to their nibbles as much again. Few rows meet each weight once and take it as it is;
for more (`unpacked_from`) a group of panels is first unpacked into scratch memory, which for the
usual K is the second-level cache. To look weights up costs so little in vectors of 512 bits that
unpacking them never pays there (Zen 4, 9 and 12 rows: 1.2 times as long); in shorter ones it does.

    tile      d │ m                                     float32 [16] each; or
              d of k 0–15 │ d of k 16–31
              and where weights are unpacked too (`unpacks_weights`):
              k 0–3 │ k 4–7 │ … │ k 28–31               64 bytes each, ready to be multiplied
    panel 0: tile 0, tile 1, …  │ panel 1: tile 0, …
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from numba import types

from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.int8_packing import GROUP, PANEL_COLUMNS, VECTOR_BYTES, Int8Format
from kernels.cpu.int8_weights import (
    PanelFactors,
    Tile,
    panel_factors,
    tile_of,
    weights_of_tiles,
    with_bias,
)
from kernels.cpu.integer_dot import integer_dot
from kernels.cpu.vector_ir import (
    BYTES,
    F32X,
    Builder,
    Value,
    counted_loop,
    i64,
    load,
    offset,
    store,
)

MINIMUM_AT: Final = VECTOR_BYTES
WEIGHTS_AT: Final = 2 * VECTOR_BYTES


def unpacks_weights(fmt: Int8Format, chosen: InstructionSet) -> bool:
    """Tell whether it pays to unpack not only scales."""
    return fmt.high_bits > 0 or (fmt.codes is not None and chosen.vector_bits != 512)


def unpacked_from(fmt: Int8Format, chosen: InstructionSet) -> int:
    """Return the number of rows from which it pays for a format; 0: it never does."""
    if unpacks_weights(fmt, chosen):
        # Without an instruction that looks up, it takes longer than two rows' products.
        return 2 if fmt.codes is not None and chosen.name == "generic" else 9
    return 3 if fmt.is_shared else 0


def unpacked_tile_bytes(fmt: Int8Format, chosen: InstructionSet) -> int:
    """Return the bytes of an unpacked tile."""
    return WEIGHTS_AT + (GROUP * PANEL_COLUMNS if unpacks_weights(fmt, chosen) else 0)


def unpacker(fmt: Int8Format, panels: int, chosen: InstructionSet) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(weights, second, groups, unpacked): unpack so many panels.

    `weights`, `second`: as in `int8_tile.int8_tiles`.
    """

    def unpack(
        builder: Builder, weights: Value, second: Value, groups: Value, unpacked: Value
    ) -> None:
        def body(group: Value) -> None:
            for p in range(panels):
                panel = offset(builder, weights, builder.mul(second, i64(p)))
                tile = tile_of(builder, fmt, panel, groups, group)
                size = unpacked_tile_bytes(fmt, chosen)
                first = panel_at(builder, size, unpacked, groups, p)
                _unpack_tile(builder, tile, chosen, unpacked_tile(builder, size, first, group))

        counted_loop(builder, groups, body)

    unpack.__name__ = f"unpack_{fmt.label}".lower()
    return emitted(types.void, *[types.int64] * 4)(unpack)


def _unpack_tile(builder: Builder, tile: Tile, chosen: InstructionSet, out: Value) -> None:
    for part in range(tile.fmt.parts):
        factors = panel_factors(builder, tile, chosen, part)
        store(builder, factors.d, offset(builder, out, part * VECTOR_BYTES))
        if factors.m is not None:
            store(builder, factors.m, offset(builder, out, MINIMUM_AT))
        if unpacks_weights(tile.fmt, chosen):
            # All are loaded before the first is stored, which might be where others lie.
            above = integer_dot(chosen, tile.fmt).weight_offset
            for k, [weights] in list(weights_of_tiles(builder, [tile], part, chosen, above)):
                store(builder, weights, offset(builder, out, WEIGHTS_AT + k * PANEL_COLUMNS))


def panel_at(builder: Builder, size: int, unpacked: Value, groups: Value, p: int) -> Value:
    """Return where panel `p` begins; `size`: `unpacked_tile_bytes`."""
    return offset(builder, unpacked, builder.mul(groups, i64(p * size)))


def unpacked_tile(builder: Builder, size: int, panel: Value, group: Value) -> Value:
    """Return where a tile of an unpacked panel begins."""
    return offset(builder, panel, builder.mul(group, i64(size)))


def unpacked_factors(builder: Builder, fmt: Int8Format, tile: Value, part: int) -> PanelFactors:
    """Load the factors of a part of an unpacked tile."""
    d = load(builder, offset(builder, tile, part * VECTOR_BYTES), F32X)
    m = load(builder, offset(builder, tile, MINIMUM_AT), F32X) if fmt.has_minimum else None
    return with_bias(builder, d, m)


def unpacked_weights(
    builder: Builder, fmt: Int8Format, tiles: list[Value], part: int
) -> Iterator[tuple[int, list[Value]]]:
    """Yield what `weights_of_tiles` does, of unpacked tiles."""
    for k in range(part * fmt.depth, (part + 1) * fmt.depth, 4):
        place = WEIGHTS_AT + k * PANEL_COLUMNS
        yield k, [load(builder, offset(builder, tile, place), BYTES) for tile in tiles]
