"""Bytes looked up in a table of 16, and intrinsics of vectors shorter than ours.

x86-64     PSHUFB, a table in each 16 bytes: 64 bytes at once, or halves of them
NEON       TBL, on quarters
generic    the table's entries, chosen one after the other
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from kernels.cpu.instruction_set import InstructionSet
from kernels.cpu.vector_ir import BYTES, I8, I32, LANES, Builder, Value, call, constant, i32

ENTRIES = 16


def look_up(
    builder: Builder, table: Sequence[int], indices: Value, chosen: InstructionSet
) -> Value:
    """Return table[i] for each byte i, 0 to 15, of a vector; BYTES. `table`: 16 bytes."""
    num_bytes = BYTES.count
    entries = ir.Constant(BYTES, [table[i % ENTRIES] for i in range(num_bytes)])
    if chosen.vector_bits == 512:
        return call(builder, "llvm.x86.avx512.pshuf.b.512", BYTES, [entries, indices])
    if chosen.vector_bits == 256:
        return in_parts(builder, "llvm.x86.avx2.pshuf.b", 2, I8, [entries, indices])
    if chosen.name == "neon":
        return in_parts(builder, "llvm.aarch64.neon.tbl1.v16i8", 4, I8, [entries, indices])
    found = constant(BYTES, table[0])
    for i in range(1, ENTRIES):
        is_this = builder.icmp_unsigned("==", indices, constant(BYTES, i))
        found = builder.select(is_this, constant(BYTES, table[i]), found)
    return found


def in_parts(
    builder: Builder, name: str, parts: int, element: ir.Type, operands: Sequence[Value]
) -> Value:
    """Call an intrinsic of shorter vectors on each part of the operands; join what it returns."""
    bits = 32 * LANES // parts
    result = ir.VectorType(element, bits // element.width)
    results = [
        call(builder, name, result, [_part(builder, operand, p, parts) for operand in operands])
        for p in range(parts)
    ]
    while len(results) > 1:
        results = [
            _join(builder, first, second)
            for first, second in zip(results[::2], results[1::2], strict=True)
        ]
    return results[0]


def _part(builder: Builder, vector: Value, index: int, parts: int) -> Value:
    count = vector.type.count // parts
    lanes = [i32(index * count + i) for i in range(count)]
    return _shuffled(builder, vector, vector, lanes)


def _join(builder: Builder, first: Value, second: Value) -> Value:
    return _shuffled(builder, first, second, [i32(i) for i in range(2 * first.type.count)])


def _shuffled(builder: Builder, first: Value, second: Value, lanes: list[ir.Constant]) -> Value:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)
