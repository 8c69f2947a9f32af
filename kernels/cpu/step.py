"""Walking through a step's operations with several threads, without a barrier.

All workers walk the same list of *entries* (operation record, step header). For each they claim
chunks until none is left, and go on once all chunks are *completed*: a thread that the operating
system has stopped delays the others by the one chunk it holds, not by a whole step as it would at a
barrier. Workers with an even number claim from the front, odd ones from the back, so a worker meets
the same weights in every step as long as nobody is late; the slower one's share shrinks by itself.

Where a record gives the number of chunks itself (products: the chunks are alike), several may be
claimed at once: a 2·W-th of what is left, W workers. So the first are large, with few beginnings
and ends, and the last are small, and nobody waits long. Chunks that are claimed together are handed
to the kernel as one chunk of fewer. A worker that is alone does everything as one chunk.

Each entry has a progress line of 64 bytes:

    word 0   generation << 24 | first unclaimed chunk << 12 | end of the unclaimed chunks
    word 1   generation << 24 | completed chunks

A line of an older generation counts as untouched, so nothing is cleared between steps. Late workers
do no harm: one that wakes up after its step is over finds no chunk left in any of that step's lines
(every line a step has passed carries its generation or a newer one, and an empty range), and leaves
when it sees that the board's generation has moved on. It may still *read* entries, records, headers
and lines by then, so those must stay mapped for good.

The *board* is where a team meets (`BoardWord`): one cache line for the step at hand, then one line
a worker for its sleep. Workers spin a little for the next step, then
sleep in read(2) on their pipe.
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir
from numba import types

from kernels.cpu.atomics import (
    atomic_load,
    atomic_store,
    compare_and_swap,
    fence,
    pause,
    read_descriptor,
    write_descriptor,
    yield_processor,
)
from kernels.cpu.board import (
    ASLEEP,
    COUNT_BITS,
    COUNT_MASK,
    ENTRY_WORDS,
    LEAVE,
    LINE_BYTES,
    READ_END,
    WAKE_BYTE,
    WRITE_END,
    BoardWord,
)
from kernels.cpu.compiled import inlined, operation, word
from kernels.cpu.emitted import emitted
from kernels.cpu.operation import CHUNKS, FETCH, FETCH_BYTES, KERNEL
from kernels.cpu.vector_ir import I64, VOID, Builder, Value, prefetch

TAG_SHIFT: Final = 2 * COUNT_BITS
TAGGED_MASK: Final = (1 << TAG_SHIFT) - 1

SPINS_BEFORE_YIELD: Final = 400
"""Looks at a line others work on before the processor is offered to another thread: ≈ 20 µs."""


FEWEST_TO_JOIN: Final = 4
"""Chunks a worker, from which on several may be claimed at once."""
MOST_LINES_FETCHED: Final = 2048
"""Cache lines a waiting thread fetches ahead at most: 128 KiB, a part of its second-level cache."""
LINES_A_LOOK: Final = 2


@emitted(types.void, *[types.int64] * 6)
def invoke(
    builder: Builder,
    kernel: Value,
    record: Value,
    header: Value,
    chunk: Value,
    num_chunks: Value,
    worker: Value,
) -> None:
    """Call the kernel at an address (`kernels.cpu.operation`)."""
    kind = ir.FunctionType(VOID, [I64] * 5)
    function = builder.inttoptr(kernel, kind.as_pointer())
    builder.call(function, [record, header, chunk, num_chunks, worker])


@inlined()
def even_chunks(num_chunks: int, workers: int) -> int:
    """Return the number's two highest bits, if chunks are many: it can be halved often."""
    if num_chunks < FEWEST_TO_JOIN * workers:
        return num_chunks
    unit = 1
    while 4 * unit <= num_chunks:
        unit *= 2
    return num_chunks // unit * unit


@inlined()
def claim(line: int, generation: int, num_chunks: int, worker: int, joined: int) -> tuple[int, int]:
    """Return a run of chunks that are now this worker's: the first, and how many.

    None if none is left (or the step is over). `joined`: 0, one chunk at a time; else up to
    1 / `joined` of the chunks that are left, a power of two that divides the number of the first
    and of all, so that the run is one chunk of fewer.
    """
    while True:
        claimed = atomic_load(line)
        first, end = (claimed >> COUNT_BITS) & COUNT_MASK, claimed & COUNT_MASK
        tag = claimed >> TAG_SHIFT
        if tag < generation:
            first, end = 0, num_chunks  # nobody has been here in this step
        elif tag > generation or first >= end:
            return -1, 0
        chunk, count = first, min(1, end - first)
        edges = (end if worker & 1 else first) | num_chunks
        while joined * count > 0 and 2 * joined * count <= end - first and edges & count == 0:
            count *= 2
        if worker & 1:
            end -= count
            chunk = end
        else:
            first += count
        marked = (generation << TAG_SHIFT) | (first << COUNT_BITS) | end
        if compare_and_swap(line, claimed, marked):
            return chunk, count


@inlined()
def complete(line: int, generation: int, num_done: int) -> None:
    """Count claimed chunks as done."""
    while True:
        done = atomic_load(line + 8)
        count = done & TAGGED_MASK if done >> TAG_SHIFT == generation else 0
        if compare_and_swap(line + 8, done, (generation << TAG_SHIFT) | (count + num_done)):
            return


@emitted(types.void, types.int64)
def fetch_line(builder: Builder, address: Value) -> None:
    """Ask for a cache line to come into the second-level cache."""
    prefetch(builder, address, locality=2)


@inlined()
def wait_until_done(
    board: int, line: int, generation: int, num_chunks: int, record: int, worker: int
) -> bool:
    """Wait until all chunks of an entry are completed; False if the step was over before.

    Fetches meanwhile what the record says: from its start if the worker claims from the front,
    else from its end.
    """
    wanted = (generation << TAG_SHIFT) | num_chunks
    spins = 0
    lines_left = min(word(record, FETCH_BYTES) // LINE_BYTES, MOST_LINES_FETCHED)
    at, stride = word(record, FETCH), LINE_BYTES
    if worker & 1:
        at, stride = at + word(record, FETCH_BYTES) - LINE_BYTES, -LINE_BYTES
    while atomic_load(line + 8) != wanted:
        if atomic_load(board + 8 * BoardWord.GENERATION) != generation:
            return False
        spins += 1
        if lines_left > 0:
            for _ in range(LINES_A_LOOK):
                fetch_line(at)
                at += stride
            lines_left -= LINES_A_LOOK
        elif spins > SPINS_BEFORE_YIELD:
            yield_processor()
        else:
            pause()
    return True


@inlined()
def walk(board: int, generation: int, worker: int) -> None:
    """Work on a step until it is finished."""
    entries = word(board, BoardWord.ENTRIES)
    num_entries = word(board, BoardWord.NUM_ENTRIES)
    line = word(board, BoardWord.PROGRESS)
    num_workers = word(board, BoardWord.NUM_WORKERS)
    is_alone = num_workers == 1
    fence()
    if atomic_load(board + 8 * BoardWord.GENERATION) != generation:
        return  # what was read may belong to another step
    for _ in range(num_entries):
        record, header = word(entries, 0), word(entries, 1)
        num_chunks, joined = word(record, CHUNKS), 0
        if num_chunks < 0:
            num_chunks = word(header, -num_chunks)
        elif not is_alone:
            num_chunks = even_chunks(num_chunks, num_workers)
            joined = 2 * num_workers
        if is_alone:
            if num_chunks:
                invoke(word(record, KERNEL), record, header, 0, 1, worker)
        else:
            chunk, count = claim(line, generation, num_chunks, worker, joined)
            while count > 0:
                invoke(
                    word(record, KERNEL), record, header, chunk // count, num_chunks // count,
                    worker,
                )  # fmt: skip
                complete(line, generation, count)
                chunk, count = claim(line, generation, num_chunks, worker, joined)
            if num_chunks and not wait_until_done(
                board, line, generation, num_chunks, record, worker
            ):
                return
        entries += ENTRY_WORDS * 8
        line += LINE_BYTES


@inlined()
def await_step(board: int, sleep: int, seen: int) -> int:
    """Return the generation of a step other than `seen`, or LEAVE: spin for a while, then sleep."""
    while True:
        for _ in range(word(board, BoardWord.SPINS)):
            generation: int = atomic_load(board + 8 * BoardWord.GENERATION)
            if is_call(generation, seen):
                return generation
            pause()
        # Whoever turns ASLEEP back to 0 decides: the leader, then its byte must be read; or this
        # worker, which has seen the call itself.
        compare_and_swap(sleep + 8 * ASLEEP, 0, 1)
        fence()  # one of the two sees what the other wrote, in `call` as here
        called = is_call(atomic_load(board + 8 * BoardWord.GENERATION), seen)
        if not (called and compare_and_swap(sleep + 8 * ASLEEP, 1, 0)):
            read_descriptor(types.int32(word(sleep, READ_END)), sleep + 8 * WAKE_BYTE, 1)


@inlined()
def is_call(generation: int, seen: int) -> bool:
    """Whether a generation is one to work on (a step under way, not seen yet) or to leave."""
    return generation == LEAVE or (generation & 1 == 1 and generation != seen)


@inlined()
def wake(sleep: int) -> None:
    """Wake a worker if it is asleep."""
    if compare_and_swap(sleep + 8 * ASLEEP, 1, 0):
        write_descriptor(types.int32(word(sleep, WRITE_END)), sleep + 8 * WAKE_BYTE + 4, 1)


@inlined()
def call(board: int, generation: int) -> None:
    """Show all workers a generation, and wake those that are asleep."""
    atomic_store(board + 8 * BoardWord.GENERATION, generation)
    fence()  # before looking at who is asleep
    for worker in range(1, word(board, BoardWord.NUM_WORKERS)):
        wake(board + 8 * BoardWord.SLEEP + worker * LINE_BYTES)


@operation(num_arguments=1)
def lead_step(board: int) -> None:
    """Run the step described on the board as worker 0; the others join in. Returns when done."""
    generation = word(board, BoardWord.GENERATION) + 1
    call(board, generation)
    walk(board, generation, 0)
    atomic_store(board + 8 * BoardWord.GENERATION, generation + 1)
    fence()  # no worker may see the next step's words on the board before it


@operation(num_arguments=1)
def dismiss(board: int) -> None:
    """Let all workers return from `work`."""
    call(board, LEAVE)


@operation(num_arguments=2)
def work(board: int, worker: int) -> None:
    """Join in every step from now on, until dismissed. Without the interpreter lock."""
    sleep = board + 8 * BoardWord.SLEEP + worker * LINE_BYTES
    seen = 0
    while True:
        generation = await_step(board, sleep, seen)
        if generation == LEAVE:
            return
        walk(board, generation, worker)
        seen = generation
