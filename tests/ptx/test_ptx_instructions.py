"""What an instruction gives, worked out by hand from the manual or exactly by whole numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.program import SIZES
from tests.ptx.texts import compute
from tests.simt import twins

F32_NAN, INF = np.float32(np.nan), np.inf
TINY = np.float32(2.0**-140)  # subnormal


@pytest.mark.parametrize(
    ("opcode", "result", "operands", "expected"),
    [
        # Shifts clamp: all bits out is zero, or all sign.
        ("shl.b32", "b32", [("b32", [1, 1, 1, 7]), ("u32", [0, 31, 32, 2**31])], [1, 2**31, 0, 0]),
        ("shl.b64", "b64", [("b64", [1, 1, 1]), ("u32", [32, 63, 64])], [2**32, 2**63, 0]),
        ("shr.u32", "u32", [("u32", [2**31] * 3), ("u32", [31, 32, 99])], [1, 0, 0]),
        ("shr.s32", "s32", [("s32", [-8, -8, 8]), ("u32", [1, 32, 40])], [-4, -1, 0]),
        ("shr.s64", "s64", [("s64", [-8, -8]), ("u32", [1, 2**32 - 1])], [-4, -1]),
        ("mul.wide.s32", "s64", [("s32", [-3, 2**31 - 1]), ("s32", [2, 4])], [-6, 2**33 - 4]),
        ("mul.wide.u32", "u64", [("u32", [2**32 - 1]), ("u32", [2**32 - 1])], [(2**32 - 1) ** 2]),
        ("mul.hi.u32", "u32", [("u32", [2**31]), ("u32", [6])], [3]),
        ("mul.lo.s64", "s64", [("s64", [2**62, -5]), ("s64", [4, 7])], [0, -35]),
        ("mad.lo.s32", "s32", [("s32", [2**31 - 1]), ("s32", [2]), ("s32", [5])], [3]),
        ("div.s64", "s64", [("s64", [7, -7, 7, -7]), ("s64", [2, 2, -2, -2])], [3, -3, -3, 3]),
        ("rem.s32", "s32", [("s32", [7, -7, 7]), ("s32", [2, 2, -2])], [1, -1, 1]),
        ("div.u32", "u32", [("u32", [2**32 - 1]), ("u32", [2**31])], [1]),
        ("popc.b64", "u32", [("b64", [0, 2**64 - 1, 2**63 + 1])], [0, 64, 2]),
        ("clz.b64", "u32", [("b64", [0, 1, 2**63, 2**32])], [64, 63, 0, 31]),
        ("clz.b32", "u32", [("b32", [0, 1, 2**31, 0x00F0_0000])], [32, 31, 0, 8]),
        ("not.b32", "b32", [("b32", [0])], [2**32 - 1]),
        # bfi: a's low bits into b, at a position, of a length; what sticks out is lost.
        (
            "bfi.b32", "b32",
            [("b32", [5, 5, 0xFF, 7]), ("b32", [0xFFFF_FFFF, 0, 0, 9]), ("u32", [4, 29, 30, 3]),
             ("u32", [4, 3, 8, 0])],
            [0xFFFF_FF5F, 5 << 29, 3 << 30, 9],
        ),
        (
            "bfi.b64", "b64", [("b64", [3]), ("b64", [1]), ("u32", [32]), ("u32", [32])],
            [3 << 32 | 1],
        ),
        ("bfe.u32", "u32", [("u32", [0xABCD]), ("u32", [4]), ("u32", [8])], [0xBC]),
        ("bfe.s32", "s32", [("s32", [0xF0, 0xF0]), ("u32", [4, 4]), ("u32", [4, 5])], [-1, 15]),
        # shf: of b:a. With both the same it rotates.
        (
            "shf.r.wrap.b32", "b32",
            [("b32", [0x80000001, 0xF, 0xF]), ("b32", [0x80000001, 0xA0, 0xA0]),
             ("u32", [1, 4, 36])],
            [0xC0000000, 0, 0],
        ),
        (
            "shf.r.wrap.b32", "b32",
            [("b32", [0x12345678, 0x12345678]), ("b32", [0x9ABCDEF0, 0x9ABCDEF0]),
             ("u32", [0, 28])],
            [0x12345678, 0xABCDEF01],
        ),
        # prmt: bytes 0 … 3 are a's, 4 … 7 b's; the fourth bit of a selector spreads the sign.
        (
            "prmt.b32", "b32",
            [("b32", [0x33221100] * 4), ("b32", [0x77E65544] * 4),
             ("b32", [0x5410, 0x7632, 0x0123, 0xE8F6])],
            [0x55441100, 0x77E63322, 0x00112233, 0xFF0000E6],
        ),
        # Conversions to integers: half to even, towards zero, clamped, NaN.
        (
            "cvt.rni.s32.f32", "s32", [("f32", [0.5, 1.5, -2.5, 3e9, -3e9, F32_NAN])],
            [0, 2, -2, 2**31 - 1, -(2**31), 0],
        ),
        (
            "cvt.rzi.s64.f64", "s64", [("f64", [-1.9, 1.9, 1e30, -1e30, np.nan])],
            [-1, 1, 2**63 - 1, -(2**63), -(2**63)],
        ),
        ("cvt.rzi.u64.f64", "u64", [("f64", [-1.0, 1e30, np.nan])], [0, 2**64 - 1, 2**63]),
        ("cvt.rn.f32.s64", "f32", [("s64", [2**24 + 1, 2**24 + 3, -1])], [2**24, 2**24 + 4, -1]),
        ("cvt.rn.f64.u64", "f64", [("u64", [2**64 - 1, 2**53 + 1])], [2.0**64, 2.0**53]),
        ("cvt.s64.s32", "s64", [("s32", [-5])], [-5]),
        ("cvt.u64.u32", "u64", [("u32", [2**32 - 5])], [2**32 - 5]),
        ("cvt.u32.u64", "u32", [("u64", [2**40 + 7])], [7]),
        # Extremes: the number beats NaN, +0 is above -0.
        (
            "max.f32", "f32", [("f32", [1, F32_NAN, -0.0, 0.0]), ("f32", [F32_NAN, 2, 0.0, -0.0])],
            [1, 2, 0.0, 0.0],
        ),
        (
            "min.f32", "f32", [("f32", [1, F32_NAN, -0.0, 0.0]), ("f32", [F32_NAN, 2, 0.0, -0.0])],
            [1, 2, -0.0, -0.0],
        ),
        ("max.s64", "s64", [("s64", [-1, 3]), ("s64", [-2, 4])], [-1, 4]),
        # Subnormal numbers stay, but for .ftz.
        ("mul.f32", "f32", [("f32", [TINY]), ("f32", [2])], [2 * TINY]),
        ("ex2.approx.ftz.f32", "f32", [("f32", [-INF, INF, 3, -140, -0.0])], [0, INF, 8, 0, 1]),
        ("rcp.approx.ftz.f32", "f32", [("f32", [0.0, -0.0, 4, -TINY])], [INF, -INF, 0.25, -INF]),
        ("rsqrt.approx.ftz.f32", "f32", [("f32", [4, 0.0, INF])], [0.5, INF, 0]),
        # 16-bit floats: ties to even, the first operand above.
        (
            "cvt.rn.bf16.f32", "b16", [("f32", [1 + 2**-8, 1 + 3 * 2**-8, F32_NAN, 3.4e38])],
            [0x3F80, 0x3F82, 0x7FFF, 0x7F80],
        ),
        ("cvt.rn.bf16x2.f32", "b32", [("f32", [1.0]), ("f32", [-2.0])], [0x3F80_C000]),
        ("cvt.rn.f16x2.f32", "b32", [("f32", [1.0]), ("f32", [1e6])], [0x3C00_7C00]),
        ("cvt.rn.f16.f32", "b16", [("f32", [1 + 2**-11, 2.0**-25, F32_NAN])], [0x3C00, 0, 0x7FFF]),
        ("add.f16", "b16", [("b16", [0x3C00, 0x3C00, 0x7BFF])] * 2, [0x4000, 0x4000, 0x7C00]),
        ("add.f16", "b16", [("b16", [0x3C00]), ("b16", [0x1001])], [0x3C01]),  # above the tie
        ("cvt.f32.f16", "f32", [("b16", [0x3C00, 0x0001, 0xFC00])], [1, 2.0**-24, -INF]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_instruction_gives_what_the_manual_says(opcode, result, operands, expected):
    found = compute(opcode, result, *operands)

    bits = f"u{SIZES[result]}"
    wanted = np.array(expected).astype(found.dtype) if result[0] == "f" else None
    if wanted is None:
        wanted = np.array([int(x) & (1 << 8 * SIZES[result]) - 1 for x in expected], bits)
    np.testing.assert_array_equal(found.view(bits), wanted.view(bits))


@pytest.mark.parametrize(
    ("comparison", "of_numbers", "of_nan"),
    [
        ("eq", [0, 1, 0], 0), ("ne", [1, 0, 1], 0), ("lt", [1, 0, 0], 0), ("ge", [0, 1, 1], 0),
        ("neu", [1, 0, 1], 1), ("ltu", [1, 0, 0], 1), ("gtu", [0, 0, 1], 1), ("geu", [0, 1, 1], 1),
        ("num", [1, 1, 1], 0), ("nan", [0, 0, 0], 1),
    ],
)  # fmt: skip
def test_comparisons_of_nan_are_ordered_or_not(comparison, of_numbers, of_nan):
    found = compute(
        f"setp.{comparison}.f32", "pred",
        ("f32", [1, 2, 3, F32_NAN, 2]), ("f32", [2, 2, 2, 2, F32_NAN]),
    )  # fmt: skip

    assert found.tolist() == [*of_numbers, of_nan, of_nan]


@pytest.mark.parametrize("table", [0xEA, 0x96, 0x00, 0xFF, 0xCA, 0x1B])
def test_lop3_looks_every_bit_up(table):
    a, b, c = np.array([0xF0], np.uint32), np.array([0xCC], np.uint32), np.array([0xAA], np.uint32)

    found = compute("lop3.b32", "b32", ("b32", a), ("b32", b), ("b32", c), tail=f", {table}")

    assert found[0] & 0xFF == table


def test_the_upper_half_of_a_product_of_64_bits_is_exact():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-(2**63), 2**63, (2, 64))
    a[:2], b[:2] = [-(2**63), -(2**63)], [-(2**63), 2**63 - 1]

    found = compute("mul.hi.s64", "s64", ("s64", a), ("s64", b))

    assert found.tolist() == [int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]


def rounded(value: Fraction, fraction_bits: int, least_exponent: int) -> Fraction:
    """Round to nearest, ties to even, in a format of so many bits behind the leading one."""
    if value == 0:
        return value
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, least_exponent) - fraction_bits)
    return round(value / unit) * unit


def hard_sums(rng, draw, count):
    """Return products and addends whose sums lie at ties, next to them, far apart, or cancel."""
    a, b = draw(count), draw(count)
    c = -(a.astype(np.float64) * b).astype(a.dtype)
    c[1::4] = draw(count)[1::4]
    c[2::4] *= a.dtype.type(2.0**-13)
    c[3::4] = a[3::4] * a.dtype.type(2.0 ** int(rng.integers(8, 12)))
    return a, b, c


def test_a_fused_multiply_add_is_rounded_once():
    rng = np.random.default_rng(1)

    def draw(count):
        whole = rng.integers(2**23, 2**24, count).astype(np.float32)
        return whole * np.float32(2.0) ** rng.integers(-30, -10, count).astype(np.float32)

    a, b, c = hard_sums(rng, draw, 4096)
    # The product is a tie of float32 but for the addend, far below.
    a[0], b[0], c[0] = 1 + 2**-12, 1 - 2**-13, 2**-80
    a[1], b[1], c[1] = 2.0**-75, 3 * 2.0**-75, 2.0**-149  # subnormal

    found = compute("fma.rn.f32", "f32", ("f32", a), ("f32", b), ("f32", c))

    for x, y, z, result in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        assert Fraction(float(result)) == rounded(exact, 23, -126)


@pytest.mark.parametrize(
    ("kind", "bits", "least", "widen"),
    [
        ("bf16x2", 7, -126, lambda h: (h.astype(np.uint32) << 16).view(np.float32)),
        ("f16x2", 10, -14, lambda h: h.view(np.float16)),
    ],
)
def test_a_fused_multiply_add_of_pairs_is_rounded_once(kind, bits, least, widen):
    rng = np.random.default_rng(2)
    exponents = {"bf16x2": (100 << 7, 150 << 7), "f16x2": (0, 24 << 10)}[kind]
    halves = rng.integers(*exponents, (3, 4096)).astype(np.uint16)
    halves |= rng.integers(0, 2, halves.shape).astype(np.uint16) << 15

    found = compute(f"fma.rn.{kind}", "b32", *(("b32", row.view(np.uint32)) for row in halves))

    a, b, c = (widen(row).astype(np.float64) for row in halves)
    for x, y, z, result in zip(a, b, c, widen(found.view(np.uint16)), strict=True):
        exact = rounded(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)), bits, least)
        if abs(exact) < Fraction(65520):
            assert Fraction(float(result)) == exact


def test_the_simulators_twins_round_alike():
    rng = np.random.default_rng(3)
    words = rng.integers(0, 2**32, 512, np.uint32)
    values = words.view(np.float32)
    other = rng.permutation(values)

    def twin(function, *columns):
        with np.errstate(all="ignore"):
            return [function(*row) for row in zip(*columns, strict=True)]

    for opcode, function in (
        ("cvt.rn.bf16.f32", twins._narrow_bfloat16),
        ("cvt.rn.f16.f32", twins._narrow_float16),
    ):
        found = compute(opcode, "b16", ("f32", values))
        mine = np.where(np.isnan(values), 0, found)
        theirs = np.where(np.isnan(values), 0, twin(function, values))
        np.testing.assert_array_equal(mine, theirs)
    found = compute("max.f32", "f32", ("f32", values), ("f32", other))
    np.testing.assert_array_equal(found, twin(twins._maximum, values, other))
    chosen = compute(
        "prmt.b32", "b32", ("b32", words), ("b32", words[::-1]), ("b32", words & 0x7777)
    )
    theirs = twin(twins._choose_bytes, words, words[::-1], words & 0x7777)
    np.testing.assert_array_equal(chosen, theirs)
