"""What the machine refuses, and that it names the line; and where lanes part and meet."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx import machine
from tests.ptx.faults import (
    Divergence,
    Endless,
    InFlight,
    Misaligned,
    OutOfBounds,
    Race,
    Undefined,
    Uninitialised,
    Unsupported,
)
from tests.ptx.launcher import launch
from tests.ptx.texts import kernel_text

# %rd10 = the lane's word of the first array, %rd11 of the second, %rd12 of a shared one.
PLACES = """
mul.wide.s32 %rd20, %r0, 4;
add.s64 %rd10, %rd1, %rd20;
add.s64 %rd11, %rd2, %rd20;
mov.u64 %rd21, tile0;
add.s64 %rd12, %rd21, %rd20;
cvt.u32.u64 %r30, %rd12;
"""


def run(body, *, threads=64, blocks=1, words=64):
    out, source = np.zeros(words, np.uint32), np.arange(words, dtype=np.uint32)
    text = kernel_text(PLACES + body, parameters=2, shared=[1024], threads=threads)
    launch(text, (blocks, 1, 1), [out, source])
    return out


NEIGHBOUR = "xor.b32 %r1, %r0, 32;\nmul.wide.s32 %rd22, %r1, 4;\nadd.s64 %rd13, %rd21, %rd22;"
EXCHANGE = f"""
ld.global.u32 %r2, [%rd11];
st.shared.u32 [%rd12], %r2;
bar.sync 0;
{NEIGHBOUR}
ld.shared.u32 %r3, [%rd13];
st.global.u32 [%rd10], %r3;"""
COPY = f"""
cp.async.ca.shared.global [%r30], [%rd11], 4, 4;
cp.async.commit_group;
cp.async.wait_group 0;
bar.sync 0;
{NEIGHBOUR}
ld.shared.u32 %r3, [%rd13];
st.global.u32 [%rd10], %r3;"""


@pytest.mark.parametrize("body", [EXCHANGE, COPY])
def test_threads_exchange_words_through_shared_memory(body):
    assert run(body).tolist() == [lane ^ 32 for lane in range(64)]


@pytest.mark.parametrize(
    ("body", "fault", "message"),
    [
        (
            EXCHANGE.replace("bar.sync 0;", ""),
            Race,
            r"ld.shared.u32 %r3.* byte 128 of tile0 is read by lane 0 .*written by lane 32",
        ),
        (
            EXCHANGE + "\nst.shared.u32 [%rd12], 0;",
            Race,
            "st.shared.u32.*is written by lane 0 .*read by lane 32",
        ),
        ("st.shared.u32 [tile0], %r0;", Race, "written by .* written by"),
        ("ld.shared.u32 %r1, [%rd12];", Uninitialised, "byte 0 of tile0"),
        ("add.s32 %r1, %r2, 1;", Uninitialised, "%r2 was never written"),
        ("ld.global.u32 %r1, [%rd11+4];", OutOfBounds, "byte 256 of argument 1 .256 bytes. by"),
        ("ld.global.u32 %r1, [%rd11+-4];", OutOfBounds, "byte -4 of argument 1"),
        ("ld.shared.u32 %r1, [%rd12+1024];", OutOfBounds, "of tile0 .1024 bytes"),
        ("st.global.u32 [%rd11], %r0;", OutOfBounds, "argument 1 .* may not be written"),
        ("ld.global.u64 %rd30, [%rd11];", Misaligned, "8 bytes at .* by lane 1 "),
        ("cvt.u32.u64 %r1, %rd11;\ncvt.u64.u32 %rd30, %r1;\nld.global.u32 %r2, [%rd30];",
         OutOfBounds, "argument 0"),
        (
            "st.global.u32 [%rd10], 1;\nld.global.nc.u32 %r1, [%rd10];",
            Race,
            "ld.global.nc.u32.*is read",
        ),
        (COPY.replace("cp.async.wait_group 0;", ""), InFlight, "ld.shared.*copy of lane 32"),
        (COPY.replace("cp.async.wait_group 0;", "cp.async.wait_group 1;"), InFlight, "ld.shared"),
        (COPY.replace("cp.async.commit_group;", ""), InFlight, "ld.shared"),
        (COPY.replace("bar.sync 0;", ""), Race, "ld.shared.u32 %r3"),
        (COPY.split("bar.sync")[0].replace("cp.async.wait_group 0;", ""), InFlight, "never waited"),
        ("setp.lt.s32 %p1, %r0, 40;\n@%p1 bra $skip;\nbar.sync 0;\n$skip:", Divergence,
         "24 lanes wait .*bar.sync 0"),
        ("setp.lt.s32 %p1, %r0, 40;\n@%p1 bra $skip;\nbar.sync 0;\nbra $end;\n$skip:\nbar.sync 0;\n"
         "$end:", Divergence, "64 lanes wait"),
        ("setp.lt.s32 %p1, %r0, 40;\n@%p1 ret;\nshfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;",
         Divergence, "24 lanes wait"),
        ("and.b32 %r1, %r0, 1;\nsetp.eq.s32 %p1, %r1, 0;\n@%p1 bra $skip;\n"
         "shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xAAAAAAAA;\n$skip:", Undefined, "not there"),
        ("shfl.sync.bfly.b32 %r1, %r0, 1, 31, 0xFFFF;", Divergence, "its own mask leaves out"),
        ("sub.s32 %r1, %r0, 5;\ndiv.s32 %r2, %r0, %r1;", Undefined, "division by zero"),
        ("$again:\nbra $again;", Endless, "bra .again"),
        ("add.s32.sat %r1, %r0, %r0;", Unsupported, "line .*add.s32.sat"),
        ("add.f32 %f1, %r0, %r0;\nadd.s64 %rd30, %r0, %rd1;", Unsupported, "%r0 as .s64"),
        ("ld.local.u32 %r1, [%rd1];", Unsupported, "ld.local"),
        (".local .align 4 .b8 stack[16];", Unsupported, "line .*.local"),
        ("bra $nowhere;", Unsupported, "bra .nowhere"),
    ],
)  # fmt: skip
def test_what_is_not_allowed_is_refused_by_its_line(monkeypatch, body, fault, message):
    monkeypatch.setattr(machine, "MOST_STEPS", 10_000)

    with pytest.raises(fault, match=message):
        run(body)


def test_threads_of_different_blocks_are_not_ordered():
    body = """
        mul.wide.s32 %rd22, %r0, 4;
        st.global.u32 [%rd10], %r0;
        bar.sync 0;"""

    run(body)
    with pytest.raises(Race, match=r"argument 0 is written by lane .* written by lane"):
        run(body, blocks=2)


def test_lanes_that_part_meet_again():
    body = """
        and.b32 %r1, %r0, 3;
        mov.u32 %r2, 0;
        setp.eq.s32 %p1, %r1, 0;
        @%p1 bra $done;
        $again:
        add.s32 %r2, %r2, %r1;
        add.s32 %r1, %r1, -1;
        setp.gt.s32 %p2, %r1, 0;
        @%p2 bra $again;
        $done:
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        bar.sync 0;
        @!%p1 add.s32 %r3, %r3, 100;
        st.global.u32 [%rd10], %r3;"""

    found = run(body)

    sums = [sum(range(lane % 4 + 1)) for lane in range(64)]
    expected = [sums[lane ^ 1] + 100 * (lane % 4 != 0) for lane in range(64)]
    assert found.tolist() == expected


def test_lanes_that_come_to_a_barrier_of_the_warp_by_different_ways_wait_for_each_other():
    body = """
        setp.lt.s32 %p1, %r0, 7;
        mov.u32 %r1, 1;
        @%p1 bra $far;
        $join:
        shfl.sync.idx.b32 %r2, %r1, 0, 31, -1;
        st.global.u32 [%rd10], %r2;
        ret;
        $far:
        mov.u32 %r1, 2;
        bra $join;"""

    assert run(body).tolist() == [2] * 32 + [1] * 32


def test_a_barrier_of_the_warp_orders_its_lanes_and_no_others():
    body = """
        st.shared.u32 [%rd12], %r0;
        bar.warp.sync -1;
        xor.b32 %r1, %r0, {lane};
        mul.wide.s32 %rd22, %r1, 4;
        add.s64 %rd13, %rd21, %rd22;
        ld.shared.u32 %r3, [%rd13];
        st.global.u32 [%rd10], %r3;"""

    assert run(body.replace("{lane}", "3")).tolist() == [lane ^ 3 for lane in range(64)]
    with pytest.raises((Race, Uninitialised)):
        run(body.replace("{lane}", "32"))


def test_many_blocks_run_in_several_crowds_with_shared_memory_of_their_own(monkeypatch):
    monkeypatch.setattr("tests.ptx.launcher.LANES_AT_ONCE", 128)
    body = f"""
        mov.u32 %r5, %ctaid.x;
        shl.b32 %r6, %r5, 6;
        mul.wide.s32 %rd25, %r6, 4;
        add.s64 %rd10, %rd10, %rd25;
        add.s64 %rd11, %rd11, %rd25;
        {EXCHANGE}"""

    found = run(body, blocks=5, words=320)

    assert found.tolist() == [64 * block + (lane ^ 32) for block in range(5) for lane in range(64)]
