"""Copies from global to shared memory that run behind the arithmetic's back.

A thread starts copies of 16 bytes each, closes them into a group, goes on computing, and later
waits until at most the newest so many groups are still under way. Its copies are then visible to
itself; to the other threads after the next barrier:

    copy_async(…); copy_async(…); commit_copies()     group 0: tile 0
    for each tile:
        wait_for_copies()                             my copies have landed
        cuda.syncthreads()                            everybody's have; the old tile is free
        copy_async(…); commit_copies()                the next tile, while this one is computed with
        …
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction

_VOID = ir.VoidType()


def _copy(name: str, size: int) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        zero = ir.Constant(I32, 0)
        is_wanted = at.builder.icmp_signed("!=", at.integer(4), ir.Constant(ir.IntType(64), 0))
        num_bytes = at.builder.select(is_wanted, ir.Constant(I32, size), zero)
        at.assembly(
            f"{name} [$0], [$1], {size}, $2;",
            "r,l,r,~{memory}",
            _VOID,
            [at.shared_address(0, 1), at.global_address(2, 3), num_bytes],
            has_effects=True,
        )
        return at.nothing()

    return instruction(types.void, [None] * 5, emit)


def _statement(text: str) -> Intrinsic:
    def emit(at: Emitter) -> Value:
        at.assembly(text, "~{memory}", _VOID, [], has_effects=True)
        return at.nothing()

    return instruction(types.void, [], emit)


# copy_async(shared, element, source, source_element, is_wanted): start copying the vector at
# `source[source_element]` to `shared[element]`, both multiples of 16 bytes; zeros where `is_wanted`
# is false, and then the source is not read. Past the first cache, and 128 bytes into the second.
copy_async = _copy("cp.async.cg.shared.global.L2::128B", 16)

# copy_word_async(shared, element, source, source_element, is_wanted): the same of four bytes, both
# at multiples of four, for what lies too scattered for vectors.
copy_word_async = _copy("cp.async.ca.shared.global", 4)

# commit_copies(): close the copies started so far into a group.
commit_copies = _statement("cp.async.commit_group;")

# Wait until all groups have landed, or all but the newest one.
wait_for_copies = _statement("cp.async.wait_group 0;")
wait_for_copies_but_one = _statement("cp.async.wait_group 1;")
