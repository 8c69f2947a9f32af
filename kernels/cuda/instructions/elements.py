"""Vectors of a tensor's elements, widened to float32 on the way in and rounded on the way out.

A vector is 16 bytes: four float32, or eight of a 16-bit type. In registers it is a row of a local
float32 array [n, VECTOR_LENGTHS[dtype]]. Element-wise kernels read and write nothing else, so that
their arithmetic is written once for all dtypes.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.conversions import round_halves, widen_halves
from kernels.cuda.instructions.emit import F32, I32, Emitter, Intrinsic, Value, instruction

# Elements of a 16-byte vector by dtype.
VECTOR_LENGTHS = {"float32": 4, "float16": 8, "bfloat16": 8}

_WORDS = ir.VectorType(I32, 4)


def _loads(dtype: str, *, is_constant: bool) -> Intrinsic:
    length = VECTOR_LENGTHS[dtype]

    def widen(at: Emitter, word: Value) -> list[Value]:
        if dtype == "float32":
            return [at.builder.bitcast(word, F32)]
        return widen_halves(at, dtype, word)

    def emit(at: Emitter) -> Value:
        address = at.builder.bitcast(at.element(2, 3), _WORDS.as_pointer())
        vector = at.builder.load(address, align=16)
        if is_constant:
            vector.set_metadata("invariant.load", at.builder.module.add_metadata([]))
        words = [at.builder.extract_element(vector, ir.Constant(I32, i)) for i in range(4)]
        values = [value for word in words for value in widen(at, word)]
        for value, register in zip(values, at.row(0, 1, length), strict=True):
            at.builder.store(value, register)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


def _stores(dtype: str) -> Intrinsic:
    length = VECTOR_LENGTHS[dtype]
    per_word = length // 4

    def rounded(at: Emitter, values: list[Value]) -> Value:
        if dtype == "float32":
            return at.builder.bitcast(values[0], I32)
        return round_halves(at, dtype, *values)

    def emit(at: Emitter) -> Value:
        values = [at.builder.load(register) for register in at.row(2, 3, length)]
        vector = ir.Constant(_WORDS, ir.Undefined)
        for i in range(4):
            word = rounded(at, values[per_word * i : per_word * (i + 1)])
            vector = at.builder.insert_element(vector, word, ir.Constant(I32, i))
        address = at.builder.bitcast(at.element(0, 1), _WORDS.as_pointer())
        at.builder.store(vector, address, align=16)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


# load_floats(values, i, source, element): values[i, :] = the vector at `source[element]`, exactly.
LOAD_FLOATS: dict[str, Intrinsic] = {
    dtype: _loads(dtype, is_constant=False) for dtype in VECTOR_LENGTHS
}

# The same from global memory that nobody writes while the kernel runs.
LOAD_CONSTANT_FLOATS: dict[str, Intrinsic] = {
    dtype: _loads(dtype, is_constant=True) for dtype in VECTOR_LENGTHS
}

# store_floats(target, element, values, i): the vector at `target[element]` = values[i, :], each
# rounded to nearest, ties to even.
STORE_FLOATS: dict[str, Intrinsic] = {dtype: _stores(dtype) for dtype in VECTOR_LENGTHS}
