"""Operations that do one thing as fast as the processor can: read, multiply, or dot.

They have the form of all kernels (`kernels.cpu.operation`) and use the same instructions, so what
they reach is what a kernel could. Accumulators are as many as fit the registers, operands are
numbers of ordinary size (subnormal ones are slow), and one operand of the dot products comes from
the first-level cache, as in kernels, a new one for each few: nothing can be moved out of the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

from kernels.cpu.compiled import inlined, operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.instruction_set import InstructionSet, selected_instruction_set
from kernels.cpu.int8_packing import GROUP, Q4_0, Q8_0
from kernels.cpu.integer_dot import IntegerDot, integer_dot
from kernels.cpu.operation import FIRST_OPERAND, Operation
from kernels.cpu.vector_ir import (
    BF16_PAIRS,
    BYTES,
    F32X,
    I8,
    I32X,
    I64,
    VOID,
    Builder,
    Value,
    call,
    constant,
    counted_loop,
    fma,
    i64,
    load,
    offset,
    store,
)

SET: Final = selected_instruction_set()


class Roof(IntEnum):
    """The operand words of these operations."""

    COUNT = FIRST_OPERAND
    """Bytes to read, or else iterations: of all chunks, since a thread may take several as one."""
    OPERANDS = 3
    """Address: the bytes to read; else OPERAND_BYTES bytes, aligned to 64."""
    OUT = 4
    """Address: OUT_BYTES of each chunk, so that no work is for nothing."""
    TILES = 5
    """Address of the tile registers' configuration, `tile_configuration`."""


READ_AT_ONCE: Final = 16 * 64
"""Bytes; a chunk reads a multiple of it."""
OPERAND_BYTES: Final = 4096
WINDOW_BYTES: Final = 2048
"""In which the first operand of an iteration moves; the others follow it."""
TILE_BYTES: Final = 1024
NUM_TILES: Final = 4
OUT_BYTES: Final = NUM_TILES * TILE_BYTES

VECTOR_BYTES: Final = 64
KEPT: Final = 3 if SET.vector_bits == 512 else 1
"""Operands that stay in registers: each meets every vector from the cache, once."""
OPERAND_REGISTERS: Final = 4


def num_accumulators(chosen: InstructionSet) -> int:
    """Return how many vectors of 16 lanes fit the registers beside the operands."""
    return (chosen.vector_registers - OPERAND_REGISTERS) * chosen.vector_bits // 512


ACCUMULATORS: Final = num_accumulators(SET)

FMA_OPERATIONS: Final = 2 * 16 * ACCUMULATORS
DOT_STEPS: Final = GROUP // 4
"""Of an iteration: a group of weights, behind which AVX2 widens its sums of 16 bits. Those take
its registers; the sums of 32 bits are loaded and stored once in a group."""
DOT_OPERATIONS: Final = 2 * 64 * ACCUMULATORS * DOT_STEPS
BF16_DOT_OPERATIONS: Final = 2 * 32 * ACCUMULATORS
TILE_OPERATIONS: Final = 2 * 16 * 16 * NUM_TILES
"""Of one iteration, of tiles for each element along the sum; multiplying and adding are two."""

TILE_DEPTHS: Final = {"int8_tile": 64, "int8_half_tile": 32, "bf16_tile": 32}
"""Elements along the sum. Quantised weights have a scale for each 32, so half a tile of int8."""
TILE_DEPTH_BYTES: Final = {"int8_tile": 64, "int8_half_tile": 32, "bf16_tile": 64}


def tile_configuration(depth_bytes: int) -> npt.NDArray[np.uint8]:
    """Return what LDTILECFG reads: sums in registers 0 to 3, rows in 4, 5, weights in 6, 7.

    Byte 0: the palette; from 16, bytes of a row (uint16); from 48, rows (uint8).
    """
    configuration = np.zeros(64, np.uint8)
    configuration[0] = 1
    row_bytes, rows = configuration[16:48].view(np.uint16), configuration[48:]
    row_bytes[:8], rows[:8] = VECTOR_BYTES, 16
    row_bytes[4:6] = depth_bytes
    rows[6:8] = depth_bytes // 4
    return configuration


def _accumulators(builder: Builder, first: Value, count: int) -> list[Value]:
    places = []
    for _ in range(count):
        place = cgutils.alloca_once(builder, first.type)
        builder.store(first, place)
        places.append(place)
    return places


@emitted(types.void, types.int64, types.int64, types.int64)
def read_all(builder: Builder, count: Value, address: Value, out: Value) -> None:
    """Read `count` times READ_AT_ONCE bytes."""
    places = _accumulators(builder, constant(I32X, 0), READ_AT_ONCE // VECTOR_BYTES)

    def body(index: Value) -> None:
        at = builder.add(address, builder.mul(index, i64(READ_AT_ONCE)))
        for number, place in enumerate(places):
            value = load(builder, offset(builder, at, VECTOR_BYTES * number), I32X, align=64)
            builder.store(builder.xor(builder.load(place), value), place)

    counted_loop(builder, count, body)
    for number, place in enumerate(places):
        store(builder, builder.load(place), offset(builder, out, VECTOR_BYTES * number))


@emitted(types.void, types.int64, types.int64, types.int64)
def multiply_and_add(builder: Builder, count: Value, operands: Value, out: Value) -> None:
    """Do a · x + y on every accumulator, `count` times."""
    x = load(builder, operands, F32X, align=64)
    y = load(builder, offset(builder, operands, VECTOR_BYTES), F32X, align=64)
    places = _accumulators(builder, y, ACCUMULATORS)

    def body(_: Value) -> None:
        for place in places:
            builder.store(fma(builder, builder.load(place), x, y), place)

    counted_loop(builder, count, body)
    for number, place in enumerate(places):
        store(builder, builder.load(place), offset(builder, out, VECTOR_BYTES * number))


def _dots(
    first: Callable[[Builder, Value], Any],
    zero: Value,
    start: Callable[[Value], Any],
    step: Callable[[Builder, Any, Any, Value], Any],
    finish: Callable[[Builder, Any, Value], Value],
    steps: int,
) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(count, operands, out): `count` times some dot products on every accumulator.

    first(builder, vector) → the operand in registers. start(accumulator) → sums; step(builder,
    sums, operand, vector) → sums; finish(builder, sums, accumulator) → accumulator.
    """

    def emit(builder: Builder, count: Value, operands: Value, out: Value) -> None:
        kept = [
            first(builder, load(builder, offset(builder, operands, VECTOR_BYTES * i), BYTES))
            for i in range(KEPT)
        ]
        places = _accumulators(builder, zero, ACCUMULATORS)

        def body(index: Value) -> None:
            befores = [builder.load(place) for place in places]
            sums = [start(before) for before in befores]
            for turn in range(steps):
                along = builder.add(builder.mul(index, i64(steps)), i64(turn))
                moved = builder.and_(builder.mul(along, i64(VECTOR_BYTES)), i64(WINDOW_BYTES - 1))
                at = builder.add(operands, moved)
                for number in range(ACCUMULATORS):
                    if number % KEPT == 0:
                        vector = load(builder, offset(builder, at, VECTOR_BYTES * number), BYTES)
                    sums[number] = step(builder, sums[number], kept[number % KEPT], vector)
            for place, before, total in zip(places, befores, sums, strict=True):
                builder.store(finish(builder, total, before), place)

        counted_loop(builder, count, body)
        for number, place in enumerate(places):
            store(builder, builder.load(place), offset(builder, out, VECTOR_BYTES * number))

    return emitted(types.void, types.int64, types.int64, types.int64)(emit)


def _integer_dots(dot: IntegerDot) -> Any:  # noqa: ANN401 - Numba's objects
    return _dots(
        dot.prepare,
        constant(I32X, 0),
        lambda before: dot.start(lambda: before),
        dot.step,
        lambda builder, sums, before: dot.finish(builder, sums, lambda: before),
        DOT_STEPS,
    )


def _bf16_step(builder: Builder, sums: Value, kept: Value, vector: Value) -> Value:
    arguments = [sums, kept, builder.bitcast(vector, BF16_PAIRS)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", F32X, arguments)


_nibble_dots = _integer_dots(integer_dot(SET, Q4_0))
_int8_dots = _integer_dots(integer_dot(SET, Q8_0))
_bf16_dots = _dots(
    lambda builder, vector: builder.bitcast(vector, BF16_PAIRS),
    constant(F32X, 0.0),
    lambda before: before,
    _bf16_step,
    lambda _, sums, __: sums,
    1,
)


def _tile_products(name: str) -> Any:  # noqa: ANN401 - Numba's objects
    """Return void(count, operands, out, configuration): `count` times four products of AMX tiles.

    Two tiles of rows (registers 4, 5) meet two of weights (6, 7); the sums stay in 0 to 3.
    """

    def register(number: int) -> ir.Constant:
        return ir.Constant(I8, number)

    def emit(
        builder: Builder, count: Value, operands: Value, out: Value, configuration: Value
    ) -> None:
        pointer = I8.as_pointer()
        stride = ir.Constant(I64, VECTOR_BYTES)
        call(builder, "llvm.x86.ldtilecfg", VOID, [builder.inttoptr(configuration, pointer)])
        for number in range(NUM_TILES):
            call(builder, "llvm.x86.tilezero", VOID, [register(number)])
            tile = builder.inttoptr(offset(builder, operands, number * TILE_BYTES), pointer)
            call(builder, "llvm.x86.tileloadd64", VOID, [register(4 + number), tile, stride])

        def body(_: Value) -> None:
            for number in range(NUM_TILES):
                registers = (number, 4 + number // 2, 6 + number % 2)
                call(builder, name, VOID, [register(r) for r in registers])

        counted_loop(builder, count, body)
        for number in range(NUM_TILES):
            tile = builder.inttoptr(offset(builder, out, number * TILE_BYTES), pointer)
            call(builder, "llvm.x86.tilestored64", VOID, [register(number), tile, stride])
        call(builder, "llvm.x86.tilerelease", VOID, [])

    return emitted(types.void, *[types.int64] * 4)(emit)


_int8_tiles = _tile_products("llvm.x86.tdpbssd")
_bf16_tiles = _tile_products("llvm.x86.tdpbf16ps")


@operation()
def roof_read(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Read a part of the bytes, all of them once."""
    pieces = word(record, Roof.COUNT) // READ_AT_ONCE
    first, end = pieces * chunk // num_chunks, pieces * (chunk + 1) // num_chunks
    address = word(record, Roof.OPERANDS) + first * READ_AT_ONCE
    read_all(end - first, address, word(record, Roof.OUT) + chunk * OUT_BYTES)


@inlined()
def iterations(record: int, chunk: int, num_chunks: int) -> int:
    """Return how many iterations are this chunk's, whatever the whole is cut into."""
    count: int = word(record, Roof.COUNT)
    return count * (chunk + 1) // num_chunks - count * chunk // num_chunks


@operation()
def roof_fma(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply and add float32."""
    out = word(record, Roof.OUT) + chunk * OUT_BYTES
    multiply_and_add(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out)


@operation()
def roof_nibble_dot(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Dot 4-bit weights with int8."""
    out = word(record, Roof.OUT) + chunk * OUT_BYTES
    _nibble_dots(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out)


@operation()
def roof_int8_dot(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Dot 8-bit weights with int8."""
    out = word(record, Roof.OUT) + chunk * OUT_BYTES
    _int8_dots(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out)


@operation()
def roof_bf16_dot(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Dot pairs of bfloat16 (VDPBF16PS)."""
    out = word(record, Roof.OUT) + chunk * OUT_BYTES
    _bf16_dots(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out)


@operation()
def roof_int8_tile(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply AMX tiles of int8."""
    out, tiles = word(record, Roof.OUT) + chunk * OUT_BYTES, word(record, Roof.TILES)
    _int8_tiles(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out, tiles)


@operation()
def roof_bf16_tile(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Multiply AMX tiles of bfloat16."""
    out, tiles = word(record, Roof.OUT) + chunk * OUT_BYTES, word(record, Roof.TILES)
    _bf16_tiles(iterations(record, chunk, num_chunks), word(record, Roof.OPERANDS), out, tiles)


def arithmetic_roofs(chosen: InstructionSet) -> Mapping[str, tuple[Operation, int]]:
    """Return the peaks a set of instructions has: name to operation and operations an iteration."""
    roofs = {
        "fma": (roof_fma, FMA_OPERATIONS),
        "nibble_dot": (roof_nibble_dot, DOT_OPERATIONS),
        "int8_dot": (roof_int8_dot, DOT_OPERATIONS),
    }
    if chosen.has_bf16_dot or chosen.has_amx:
        roofs["bf16_dot"] = (roof_bf16_dot, BF16_DOT_OPERATIONS)
    if chosen.has_amx:
        for name, depth in TILE_DEPTHS.items():
            product = roof_bf16_tile if name == "bf16_tile" else roof_int8_tile
            roofs[name] = (product, TILE_OPERATIONS * depth)
    return roofs
