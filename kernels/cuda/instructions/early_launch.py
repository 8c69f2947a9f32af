"""A launch that begins while the one before it on the stream still runs.

    launch n        ████████████████████▒▒▒     ▒ its last blocks; the others' places are free
    launch n + 1                     ░░░░░│████████████████     ░ begun: what waits for nobody
                                          └ wait_for_previous: n has ended, its writes are seen

From capability 9.0 on a launch may say that it begins early (`kernels.cuda.launch`). The kernel
before it allows that with `let_next_begin`, and has to be there with all of its blocks: so none of
them waits for a place that the next one holds. A kernel that begins early

- writes nothing before its wait, and reads nothing but what a step is given: lengths, block tables,
  positions. Copies have put those there before the step's first launch, which no kernel of a step
  is ahead of: that one begins when they have ended, and no kernel writes them. The variant says
  which arguments they are (`Expectation.reads_early`), and both simulators hold it to that.
- may have anything fetched before it. What is still written meanwhile is newest in that very cache.
- waits with every thread, also those that have nothing to do. A launch ends when its threads have,
  and one that ended without having waited could do so before the one ahead of it, which the next
  one then would not wait for.
- reads what others wrote by ordinary reads: those marked as constant (`.nc`) may be moved over the
  wait by the compiler, and by the assembler.

Fetching into the second cache and not into registers: those are taken by what comes behind the
wait, and would have to be kept across it. What remains is that cache's latency.

All of it does nothing in a launch that begins when the one before has ended, but for the fetching,
which then comes just before the reads. Earlier devices lack it: `fitted_ptx`
takes it out.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from kernels.cuda.instructions.emit import Emitter, Value, instruction

_VOID = ir.VoidType()


def _let_next_begin(at: Emitter) -> Value:
    at.assembly("griddepcontrol.launch_dependents;", "", _VOID, [], has_effects=True)
    return at.nothing()


def _wait_for_previous(at: Emitter) -> Value:
    at.assembly("griddepcontrol.wait;", "~{memory}", _VOID, [], has_effects=True)
    return at.nothing()


def _fetch_ahead(at: Emitter) -> Value:
    at.assembly(
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        _VOID,
        [at.global_address(0, 1), at.arguments[2]],
        has_effects=True,
    )
    return at.nothing()


# let_next_begin(): the next launch may begin, if it is one that begins early, as soon as every
# block of this one has come by here or has ended.
let_next_begin = instruction(types.void, [], _let_next_begin)

# wait_for_previous(): every launch ahead of this one has ended, and what it wrote is seen. As long
# as every kernel that begins early waits: it is the one right ahead that is waited for.
wait_for_previous = instruction(types.void, [], _wait_for_previous)

# fetch_ahead(source, element, num_bytes): begin to read `num_bytes` (uint32) of global memory at
# `source[element]` into the second cache; both multiples of 16.
fetch_ahead = instruction(types.void, [None, None, types.uint32], _fetch_ahead)
