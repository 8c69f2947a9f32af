"""16-byte reads and writes: four words a thread in one instruction.

A *vector* is 16 bytes at a multiple of 16: eight 16-bit elements, or four of 32 bits. In registers
it is a row of a local array of uint32 [n, 4]:

    words[i, 0]   elements 0, 1 of the vector (16-bit; the first in the lower half), or element 0
    words[i, 1]   elements 2, 3                                                      or element 1
    words[i, 2]   elements 4, 5                                                      or element 2
    words[i, 3]   elements 6, 7                                                      or element 3

A warp whose lanes read neighbouring vectors reads 512 bytes at once, the widest access there is.
Scalar reads beside each other are not merged into these by the compiler.
"""

from __future__ import annotations

from llvmlite import ir
from numba import uint32
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction


def _load(num_words: int, *, is_constant: bool) -> Intrinsic:
    kind = ir.VectorType(I32, num_words)

    def emit(at: Emitter) -> Value:
        address = at.builder.bitcast(at.element(2, 3), kind.as_pointer())
        vector = at.builder.load(address, align=4 * num_words)
        if is_constant:
            vector.set_metadata("invariant.load", at.builder.module.add_metadata([]))
        for i, register in enumerate(at.row(0, 1, 4)[:num_words]):
            at.builder.store(at.builder.extract_element(vector, ir.Constant(I32, i)), register)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


def _load_streamed(at: Emitter) -> Value:
    words = at.assembly(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {$0,$1,$2,$3}, [$4];",
        "=r,=r,=r,=r,l",
        ir.LiteralStructType([I32] * 4),
        [at.global_address(2, 3)],
    )
    for i, register in enumerate(at.row(0, 1, 4)):
        at.builder.store(at.builder.extract_value(words, i), register)
    return at.nothing()


def _store(num_words: int) -> Intrinsic:
    kind = ir.VectorType(I32, num_words)

    def emit(at: Emitter) -> Value:
        vector = ir.Constant(kind, ir.Undefined)
        for i, register in enumerate(at.row(2, 3, 4)[:num_words]):
            word = at.builder.load(register)
            vector = at.builder.insert_element(vector, word, ir.Constant(I32, i))
        address = at.builder.bitcast(at.element(0, 1), kind.as_pointer())
        at.builder.store(vector, address, align=4 * num_words)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


def _load_word(at: Emitter) -> Value:
    return at.builder.load(at.builder.bitcast(at.element(0, 1), I32.as_pointer()), align=4)


def _store_word(at: Emitter) -> Value:
    address = at.builder.bitcast(at.element(0, 1), I32.as_pointer())
    at.builder.store(at.arguments[2], address, align=4)
    return at.nothing()


# load_vector(words, i, source, element): words[i, :] = the vector at `source[element]`, global or
# shared.
load_vector = _load(4, is_constant=False)

# The same of one, two or four words: words[i, 0 … n - 1], at a multiple of 4·n bytes.
LOAD_WORDS: dict[int, Intrinsic] = {
    1: _load(1, is_constant=False), 2: _load(2, is_constant=False), 4: load_vector,
}  # fmt: skip

# The same from global memory that nobody writes while the kernel runs: the read may be moved over
# any write and goes by the read-only path.
load_constant_vector = _load(4, is_constant=True)

# load_streamed_vector(words, i, source, element): the same of what is read once, by lanes of which
# some read 64 bytes of a line and soon the other 64: past the first cache, and whole lines into the
# second. (H200, 2026-11-26: a matrix of 235 MB is read in 59.1 µs instead of 61.2.)
load_streamed_vector = instruction(types.void, [None] * 4, _load_streamed)

# load_constant_pair(words, i, source, element), load_constant_word: the same of half a vector and
# of a quarter, at a multiple of eight bytes or four; words[i, 0 … 1] or words[i, 0] are written,
# the others stay.
load_constant_pair = _load(2, is_constant=True)
load_constant_word = _load(1, is_constant=True)

# store_vector(target, element, words, i): the vector at `target[element]` = words[i, :].
store_vector = _store(4)

# The same of one, two or four words.
STORE_WORDS: dict[int, Intrinsic] = {1: _store(1), 2: _store(2), 4: store_vector}

# load_word(source, element): the four bytes at `source[element]`, a multiple of four, as a uint32.
load_word = instruction(uint32, [None] * 2, _load_word)

# store_word(target, element, word): the four bytes at `target[element]` = word, a uint32.
store_word = instruction(types.void, [None, None, uint32], _store_word)
