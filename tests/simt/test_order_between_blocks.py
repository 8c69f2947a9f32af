"""What one block leaves for another: which steps order it, and that the simulator knows them."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, int32, uint32

from kernels.cuda.instructions.across_blocks import LOAD_FRESH_WORDS, fence, take_ticket
from tests.simt import Race, launch

load_fresh = LOAD_FRESH_WORDS[1]

THREADS, BLOCKS = 64, 3
LAST = BLOCKS - 1

# Each block writes a row; the one that draws the last ticket adds up what all of them wrote. What
# the others know is handed on from ticket to ticket.
KERNEL = """
def adds_up_what_all_blocks_wrote(sums, rows, tickets):
    number = cuda.shared.array(1, int32)
    words = cuda.local.array((1, 4), uint32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    rows[block * THREADS + thread] = uint32(100 * block + thread)
    cuda.syncthreads()
    if thread == 0:
        fence()
        number[0] = take_ticket(tickets, 0, LAST)
        fence()
    cuda.syncthreads()
    if number[0] == LAST:
        total = 0
        for other in range(BLOCKS):
            load_fresh(words, 0, rows, other * THREADS + THREADS - 1 - thread)
            total += words[0, 0]
        sums[thread] = total
"""

PLACE = "other * THREADS + THREADS - 1 - thread"
TICKET = "        number[0] = take_ticket(tickets, 0, LAST)\n"


def kernel_with(old: str = "", new: str = ""):
    assert not old or KERNEL.count(old) == 1
    names = dict(globals())
    exec(KERNEL.replace(old, new), names)
    return names["adds_up_what_all_blocks_wrote"]


def run(kernel, seed):
    """Return the sums and the tickets of two launches with the same tickets."""
    sums, tickets = np.zeros(THREADS, np.uint32), np.zeros(1, np.int32)
    for turn in range(2):
        rows = np.zeros(BLOCKS * THREADS, np.uint32)
        arguments = (sums, rows, tickets)
        launch(kernel, (BLOCKS, 1, 1), THREADS, arguments, written=(0, 1, 2), seed=seed + turn)
    return sums, tickets


@pytest.mark.parametrize("seed", range(6))
def test_the_last_block_sees_what_all_others_wrote_and_leaves_no_ticket(seed):
    sums, tickets = run(kernel_with(), seed)

    assert sums.tolist() == [300 + 3 * (THREADS - 1 - thread) for thread in range(THREADS)]
    assert tickets.tolist() == [0]


@pytest.mark.parametrize("seed", range(6))
def test_what_a_thread_wrote_itself_needs_no_barrier_before_its_fence(seed):
    of_all = "    rows[block * THREADS + thread] = uint32(100 * block + thread)\n"
    of_one = "            rows[block * THREADS + i] = uint32(100 * block + i)\n"
    barrier, started = "    cuda.syncthreads()\n", "    if thread == 0:\n"
    loop = "        for i in range(THREADS):\n" + of_one
    kernel = kernel_with(of_all + barrier + started, started + loop)

    assert run(kernel, seed)[0].tolist() == run(kernel_with(), seed)[0].tolist()


def hands_on_what_it_was_handed(sums, rows, tickets):
    """Blocks 0 and 1 draw at one place; the last of them, and block 2, at another."""
    number = cuda.shared.array(1, int32)
    words = cuda.local.array((1, 4), uint32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    rows[block * THREADS + thread] = uint32(100 * block + thread)
    cuda.syncthreads()
    if thread == 0:
        fence()
        number[0] = 0
        if block == 2 or take_ticket(tickets, 0, 1) == 1:
            fence()
            number[0] = take_ticket(tickets, 1, 1)
            fence()
    cuda.syncthreads()
    if number[0] == 1:
        total = 0
        for other in range(BLOCKS):
            load_fresh(words, 0, rows, other * THREADS + THREADS - 1 - thread)
            total += words[0, 0]
        sums[thread] = total


@pytest.mark.parametrize("seed", range(6))
def test_what_a_block_knows_of_another_is_handed_on_to_a_third(seed):
    sums, rows = np.zeros(THREADS, np.uint32), np.zeros(BLOCKS * THREADS, np.uint32)
    arguments = (sums, rows, np.zeros(2, np.int32))

    launch(
        hands_on_what_it_was_handed, (BLOCKS, 1, 1), THREADS, arguments,
        written=(0, 1, 2), seed=seed,
    )  # fmt: skip

    assert sums.tolist() == [300 + 3 * (THREADS - 1 - thread) for thread in range(THREADS)]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("old", "new"),
    [
        # A step is missing.
        ("    cuda.syncthreads()\n    if thread", "    if thread"),
        ("        fence()\n" + TICKET, TICKET),
        (TICKET + "        fence()\n", TICKET),
        ("    cuda.syncthreads()\n    if number", "    if number"),
        # It is there, but in the wrong order.
        (
            "    cuda.syncthreads()\n    if thread == 0:\n        fence()\n",
            "    fence()\n    cuda.syncthreads()\n    if thread == 0:\n",
        ),
        (TICKET + "        fence()\n", "        fence()\n" + TICKET),
        ("        fence()\n" + TICKET, TICKET + "        fence()\n"),
        # Another thread does it, of the same block or of the same warp.
        ("        fence()\n" + TICKET, "        pass\n    if thread == 32:\n" + TICKET),
        (
            TICKET + "        fence()\n    cuda.syncthreads()\n",
            TICKET + "    cuda.syncthreads()\n    if thread == 1:\n        fence()\n",
        ),
        # Each thread for itself, where only one has drawn.
        (
            TICKET + "        fence()\n    cuda.syncthreads()\n",
            TICKET + "    cuda.syncthreads()\n    fence()\n",
        ),
        # On a place of its own that nobody else draws from.
        ("take_ticket(tickets, 0, LAST)", "LAST"),
    ],
)
def test_a_step_that_is_missing_misplaced_or_another_thread_s_is_a_race(old, new, seed):
    with pytest.raises(Race):
        run(kernel_with(old, new), seed)


def test_an_ordered_read_by_way_of_the_first_cache_is_refused():
    with pytest.raises(Race, match="first cache"):
        run(kernel_with(f"load_fresh(words, 0, rows, {PLACE})", f"words[0, 0] = rows[{PLACE}]"), 0)
