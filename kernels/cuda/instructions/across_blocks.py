"""What one block of threads leaves in memory for another of the same launch.

    block that leaves something          block that takes it
    writes
    syncthreads                          take_ticket     (it has seen the other's ticket)
    fence                                fence
    take_ticket                          syncthreads
                                         load_fresh_words

The barrier hands the writes of all threads to the one that fences, the fence makes them seen by
whoever sees what it writes after it, and so the other way round (PTX memory model: causality order
is handed on by barriers, by fences and what is read between them). The first cache of a
multiprocessor knows nothing of other multiprocessors' writes, so the reads go past it. Behind the
second fence, which empties that cache, ordinary ones would do as well; those marked as constant
(`.nc`) never would.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import I32, Emitter, Intrinsic, Value, instruction

_VOID = ir.VoidType()


def _fence(at: Emitter) -> Value:
    at.assembly("fence.acq_rel.gpu;", "~{memory}", _VOID, [], has_effects=True)
    return at.nothing()


def _take_ticket(at: Emitter) -> Value:
    return at.assembly(
        "atom.relaxed.gpu.global.inc.u32 $0, [$1], $2;",
        "=r,l,r,~{memory}",
        I32,
        [at.global_address(0, 1), at.arguments[2]],
        has_effects=True,
    )


def _load_fresh(num_words: int) -> Intrinsic:
    vector = {1: "", 2: ".v2", 4: ".v4"}[num_words]
    names = ", ".join(f"${i}" for i in range(num_words))
    target = f"{{{names}}}" if num_words > 1 else names
    result = ir.LiteralStructType([I32] * num_words) if num_words > 1 else I32

    def emit(at: Emitter) -> Value:
        found = at.assembly(
            f"ld.relaxed.gpu.global{vector}.u32 {target}, [${num_words}];",
            f"{'=r,' * num_words}l,~{{memory}}",
            result,
            [at.global_address(2, 3)],
            has_effects=True,
        )
        for i, register in enumerate(at.row(0, 1, 4)[:num_words]):
            word = at.builder.extract_value(found, i) if num_words > 1 else found
            at.builder.store(word, register)
        return at.nothing()

    return instruction(types.void, [None] * 4, emit)


# fence(): what this thread has written, or has seen written, is seen by every thread of the device
# that sees what it writes later; and it sees what was fenced before what it has read.
fence = instruction(types.void, [], _fence)

# take_ticket(tickets, element, last): the number, from 0 on, that tickets[element] (int32, global)
# held, which is one larger afterwards, or 0 again after `last`.
take_ticket = instruction(types.int32, [None, None, types.int32], _take_ticket)

# load_fresh_words(words, i, source, element): words[i, 0 … n - 1] = n words of global memory at
# `source[element]`, a multiple of 4·n bytes, which threads of other blocks may have written.
LOAD_FRESH_WORDS: dict[int, Intrinsic] = {n: _load_fresh(n) for n in (1, 2, 4)}
