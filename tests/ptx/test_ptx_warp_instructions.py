"""Instructions of a whole warp: shuffles, votes, tiles for tensor cores."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ptx.launcher import launch
from tests.ptx.texts import kernel_text

LANES = np.arange(32, dtype=np.uint32)
# %rd10 … %rd13 = where a lane's word lies in the kernel's arrays.
PLACES = """
mul.wide.s32 %rd20, %r0, 4;
add.s64 %rd10, %rd1, %rd20;
add.s64 %rd11, %rd2, %rd20;
"""


def run(body, *arrays, **options):
    """Run lines on words of lanes; %r1 is the lane's of the second array, %r2 the result."""
    out = np.zeros(32, np.uint32)
    text = kernel_text(
        f"{PLACES}\nld.global.u32 %r1, [%rd11];\n{body}\nst.global.u32 [%rd10], %r2;",
        parameters=1 + len(arrays),
        **options,
    )
    launch(text, (1, 1, 1), [out, *arrays])
    return out


@pytest.mark.parametrize(
    ("mode", "b", "c", "source"),
    [
        ("bfly", 5, 31, lambda lane: lane ^ 5),
        ("idx", 7, 31, lambda lane: 7 + 0 * lane),
        ("idx", 3, 31 | (31 & ~7) << 8, lambda lane: lane & ~7 | 3),  # groups of eight
        ("up", 3, 0, lambda lane: lane - 3 if lane >= 3 else lane),
        ("up", 3, 24 << 8, lambda lane: lane - 3 if lane % 8 >= 3 else lane),
        ("down", 4, 31, lambda lane: lane + 4 if lane + 4 < 32 else lane),
        ("down", 1, 31 | 16 << 8, lambda lane: lane + 1 if lane % 16 < 15 else lane),
        # Beyond its clamp a lane keeps its own.
        ("bfly", 16, 15, lambda lane: lane % 16),
    ],
)
def test_a_shuffle_takes_from_the_lane_it_names(mode, b, c, source):
    values = LANES * 11 + 1

    found = run(f"shfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;", values)

    assert found.tolist() == [values[source(lane)] for lane in range(32)]


def test_a_shuffles_predicate_says_whether_the_lane_was_in_range():
    found = run(
        "shfl.sync.down.b32 %r3|%p1, %r1, 4, 31, -1;\nselp.u32 %r2, 1, 0, %p1;", LANES.copy()
    )

    assert found.tolist() == [1] * 28 + [0] * 4


def test_a_ballot_has_a_bit_for_every_lane():
    found = run("setp.gt.s32 %p1, %r1, 4;\nvote.sync.ballot.b32 %r2, %p1, -1;", LANES % 7)

    assert (found == sum(1 << lane for lane in range(32) if lane % 7 > 4)).all()


@pytest.mark.parametrize(
    ("kind", "encode"),
    [
        ("bf16", lambda x: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)),
        ("f16", lambda x: x.astype(np.float16).view(np.uint16)),
    ],
)
def test_a_product_of_tiles_has_every_element_where_the_manual_draws_it(kind, encode):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, shape) for shape in ((16, 16), (16, 8), (16, 8)))
    lane = np.arange(32)
    group, quad = lane // 4, lane % 4

    def pair(low, high):
        return encode(low).astype(np.uint32) | encode(high).astype(np.uint32) << 16

    # The manual, element by element: a0 a1 | a2 a3 | a4 a5 | a6 a7, b0 b1 | b2 b3, c0 … c3.
    words_a = [
        pair(a[group + row, 2 * quad + k], a[group + row, 2 * quad + k + 1])
        for row, k in ((0, 0), (8, 0), (0, 8), (8, 8))
    ]
    words_b = [pair(b[2 * quad + k, group], b[2 * quad + k + 1, group]) for k in (0, 8)]
    words_c = [c[group + 8 * (i // 2), 2 * quad + i % 2].astype(np.float32) for i in range(4)]
    given = np.concatenate([*words_a, *words_b, *(x.view(np.uint32) for x in words_c)])
    out = np.zeros(128, np.float32)
    loads = "\n".join(f"ld.global.u32 %r{10 + i}, [%rd11+{128 * i}];" for i in range(6))
    loads += "\n" + "\n".join(f"ld.global.f32 %f{i}, [%rd11+{128 * (6 + i)}];" for i in range(4))
    stores = "\n".join(f"st.global.f32 [%rd10+{128 * i}], %f{4 + i};" for i in range(4))
    text = kernel_text(
        f"{PLACES}\n{loads}\n"
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f4,%f5,%f6,%f7}}, "
        f"{{%r10,%r11,%r12,%r13}}, {{%r14,%r15}}, {{%f0,%f1,%f2,%f3}};\n{stores}",
        parameters=2,
    )

    launch(text, (1, 1, 1), [out, given])

    found = np.zeros((16, 8))
    for i, row in enumerate(out.reshape(4, 32)):
        found[group + 8 * (i // 2), 2 * quad + i % 2] = row
    np.testing.assert_array_equal(found, a @ b + c)


@pytest.mark.parametrize("transposed", [False, True])
def test_tiles_from_shared_memory_are_spread_as_the_manual_draws_it(transposed):
    halves = np.arange(256, dtype=np.uint16)
    tiles = halves.reshape(4, 8, 8)
    out = np.zeros(128, np.uint32)
    modifier = ".trans" if transposed else ""
    stores = "\n".join(f"st.global.u32 [%rd10+{128 * i}], %r{10 + i};" for i in range(4))
    text = kernel_text(
        f"""{PLACES}
        mul.wide.s32 %rd21, %r0, 16;
        add.s64 %rd22, %rd2, %rd21;
        ld.global.v4.u32 {{%r1, %r2, %r3, %r4}}, [%rd22];
        mov.u64 %rd23, tile0;
        add.s64 %rd24, %rd23, %rd21;
        st.shared.v4.u32 [%rd24], {{%r1, %r2, %r3, %r4}};
        bar.sync 0;
        cvt.u32.u64 %r5, %rd24;
        ldmatrix.sync.aligned.m8n8.x4{modifier}.shared.b16 {{%r10,%r11,%r12,%r13}}, [%r5];
        {stores}""",
        parameters=2,
        shared=[512],
    )

    launch(text, (1, 1, 1), [out, halves])

    for i, words in enumerate(out.reshape(4, 32)):
        for lane, word in enumerate(words):
            row, column = lane // 4, 2 * (lane % 4)
            tile = tiles[i].T if transposed else tiles[i]
            assert (word & 0xFFFF, word >> 16) == (tile[row, column], tile[row, column + 1])


def test_a_tile_is_transposed_in_registers():
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)

    found = run("movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1;", tile.view(np.uint32).reshape(-1))

    np.testing.assert_array_equal(found.view(np.uint16).reshape(8, 8), tile.T)


def test_additions_by_many_lanes_carry_and_give_what_was_there():
    cells = np.zeros(3, np.uint32)
    found = np.zeros(32, np.uint32)
    text = kernel_text(
        """
        mul.wide.s32 %rd20, %r0, 4;
        add.s64 %rd11, %rd2, %rd20;
        rem.u32 %r1, %r0, 3;
        mul.wide.u32 %rd21, %r1, 4;
        add.s64 %rd22, %rd1, %rd21;
        atom.global.add.u32 %r2, [%rd22], %r0;
        st.global.u32 [%rd11], %r2;""",
        parameters=2,
    )

    launch(text, (1, 1, 1), [cells, found], written=(0, 1))

    assert cells.tolist() == [sum(range(i, 32, 3)) for i in range(3)]
    assert found.tolist() == [sum(range(lane % 3, lane, 3)) for lane in range(32)]
