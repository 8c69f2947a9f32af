"""The PTX machine: a launch that begins early touches nothing before it has waited."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import Misaligned, OutOfBounds, TooEarly, launch
from tests.ptx.texts import kernel_text

# %rd10 = the lane's word of the first array, %rd11 of the second.
PLACES = """
mul.wide.s32 %rd20, %r0, 4;
add.s64 %rd10, %rd1, %rd20;
add.s64 %rd11, %rd2, %rd20;
"""
WAIT = "griddepcontrol.wait;"
READ, WRITE = "ld.global.u32 %r2, [%rd11];", "st.global.u32 [%rd10], %r2;"
HALF = "setp.ge.u32 %p1, %r0, 16;\n@%p1 bra $end;"


def fetch(size: int, offset: int = 0) -> str:
    return f"cp.async.bulk.prefetch.L2.global [%rd2+{offset}], {size};"


def run(*lines: str, begins_early: bool = True, reads_early: tuple[int, ...] = ()) -> list[int]:
    out, source = np.zeros(32, np.uint32), np.arange(32, dtype=np.uint32)
    text = kernel_text(PLACES + "\n".join(lines), parameters=2)
    launch(text, (1, 1, 1), [out, source], begins_early=begins_early, reads_early=reads_early)
    return out.tolist()


def test_what_comes_behind_the_wait_is_as_in_any_launch():
    let = "griddepcontrol.launch_dependents;"
    assert run(let, fetch(128), WAIT, READ, WRITE) == list(range(32))
    assert run(READ, WRITE, begins_early=False) == list(range(32))
    assert run(fetch(16, 112), WAIT) == [0] * 32


def test_what_a_step_is_given_may_be_read_before_the_wait_and_nothing_else():
    assert run(READ, WAIT, WRITE, reads_early=(1,)) == list(range(32))
    with pytest.raises(TooEarly, match=r"ld\.global"):
        run(READ, WAIT, WRITE, reads_early=(0,))
    with pytest.raises(OutOfBounds, match=r"st\.global.* may not be written"):
        run(READ, WRITE, WAIT, reads_early=(0, 1))


@pytest.mark.parametrize(
    ("lines", "fault", "message"),
    [
        ((READ, WAIT, WRITE), TooEarly, "ld.global.u32"),
        (("mov.u32 %r2, 1;", WRITE, WAIT), TooEarly, "st.global.u32"),
        ((fetch(128),), TooEarly, "never waited"),
        ((HALF, WAIT, "$end:"), TooEarly, "lane 16 of the launch has ended"),
        ((fetch(24), WAIT), Misaligned, "24 bytes"),
        ((fetch(16, 8), WAIT), Misaligned, "16 bytes at"),
        ((fetch(32, 112), WAIT), OutOfBounds, "byte 128 of argument 1"),
        ((fetch(0), WAIT), OutOfBounds, "nothing"),
    ],
)
def test_what_is_not_allowed_is_refused_by_its_line(lines, fault, message):
    with pytest.raises(fault, match=message):
        run(*lines)
