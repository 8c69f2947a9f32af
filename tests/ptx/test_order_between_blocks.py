"""What one block leaves for another: which steps of PTX order it, and that the machine knows."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.faults import Race, Unsupported
from tests.ptx.launcher import launch
from tests.ptx.texts import kernel_text

THREADS, BLOCKS = 64, 3

# Each block writes a row; the one that draws the last ticket adds up what all of them wrote.
WRITE = "st.global.u32 [%rd10], %r2;"
BARRIER = "bar.sync 0;"
FENCE = "fence.acq_rel.gpu;"
DRAW = "atom.relaxed.gpu.global.inc.u32 %r3, [%rd3], 2;"
ONE_THREAD = "setp.ne.s32 %p1, %r0, 0;\n@%p1 bra $others;"
TOLD = "st.shared.u32 [tile0], %r3;\n$others:"
STEPS = "\n".join([WRITE, BARRIER, ONE_THREAD, FENCE, DRAW, FENCE, TOLD, BARRIER])
BEFORE = """
mov.u32 %r1, %ctaid.x;
shl.b32 %r2, %r1, 6;
add.s32 %r2, %r2, %r0;
mul.wide.s32 %rd10, %r2, 4;
add.s64 %rd10, %rd2, %rd10;
"""
BEHIND = """
ld.shared.u32 %r4, [tile0];
setp.ne.s32 %p2, %r4, 2;
@%p2 bra $end;
sub.s32 %r5, 63, %r0;
mul.wide.s32 %rd11, %r5, 4;
add.s64 %rd11, %rd2, %rd11;
ld.relaxed.gpu.global.u32 %r6, [%rd11];
ld.relaxed.gpu.global.u32 %r7, [%rd11+256];
ld.relaxed.gpu.global.u32 %r8, [%rd11+512];
add.s32 %r6, %r6, %r7;
add.s32 %r6, %r6, %r8;
mul.wide.s32 %rd12, %r0, 4;
add.s64 %rd12, %rd1, %rd12;
st.global.u32 [%rd12], %r6;
$end:"""


def run(steps=STEPS, behind=BEHIND):
    """Return the sums and the tickets of two launches with the same tickets."""
    sums, tickets = np.zeros(THREADS, np.uint32), np.zeros(1, np.uint32)
    text = kernel_text(BEFORE + steps + behind, parameters=3, shared=[16], threads=THREADS)
    for _ in range(2):
        rows = np.zeros(THREADS * BLOCKS, np.uint32)
        launch(text, (BLOCKS, 1, 1), [sums, rows, tickets], written=(0, 1, 2))
    return sums, tickets


def test_the_last_block_sees_what_all_others_wrote_and_leaves_no_ticket():
    sums, tickets = run()

    assert sums.tolist() == [64 * 3 + 3 * (THREADS - 1 - thread) for thread in range(THREADS)]
    assert tickets.tolist() == [0]


@pytest.mark.parametrize(
    "steps",
    [
        # A step is missing.
        [WRITE, ONE_THREAD, FENCE, DRAW, FENCE, TOLD, BARRIER],
        [WRITE, BARRIER, ONE_THREAD, DRAW, FENCE, TOLD, BARRIER],
        [WRITE, BARRIER, ONE_THREAD, FENCE, DRAW, TOLD, BARRIER],
        [WRITE, BARRIER, ONE_THREAD, FENCE, DRAW, FENCE, TOLD],
        # It is there, but in the wrong order.
        [BARRIER, WRITE, ONE_THREAD, FENCE, DRAW, FENCE, TOLD, BARRIER],
        [WRITE, FENCE, BARRIER, ONE_THREAD, DRAW, FENCE, TOLD, BARRIER],
        [WRITE, BARRIER, ONE_THREAD, FENCE, FENCE, DRAW, TOLD, BARRIER],
        [WRITE, BARRIER, ONE_THREAD, DRAW, FENCE, FENCE, TOLD, BARRIER],
        # Each thread for itself, where only one has drawn.
        [WRITE, BARRIER, ONE_THREAD, FENCE, DRAW, TOLD, BARRIER, FENCE],
    ],
)
def test_a_step_that_is_missing_or_misplaced_is_a_race(steps):
    with pytest.raises(Race, match="line "):
        run("\n".join(steps))


@pytest.mark.parametrize("read", ["ld.global.u32", "ld.global.nc.u32"])
def test_an_ordered_read_by_way_of_the_first_cache_is_refused(read):
    with pytest.raises(Race, match="line "):
        run(behind=BEHIND.replace("ld.relaxed.gpu.global.u32", read))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("fence.acq_rel.gpu", "fence.acq_rel.cta"),
        ("atom.relaxed.gpu.global", "atom.relaxed.cta.global"),
    ],
)
def test_steps_that_order_within_a_block_only_are_refused(old, new):
    with pytest.raises(Unsupported):
        run(STEPS.replace(old, new))


def test_a_read_that_sees_only_its_own_block_is_refused():
    with pytest.raises(Unsupported):
        run(behind=BEHIND.replace("ld.relaxed.gpu", "ld.relaxed.cta"))
