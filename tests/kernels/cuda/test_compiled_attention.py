"""What the compiler made of the attention kernels, executed: right, what it may not do, counts.

Counts of what is moved are taken on shapes without ragged ends; they are counts, not times.
"""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.cases import attention_decode, attention_prefill, draw_cases
from kernels.cuda.attention_chunks import TILE_TOKENS
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from kernels.cuda.attention_variant import HEAD_SIZES_WITH_CAPS, MOST_GROUPS, every_group
from kernels.cuda.build import link
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.ptx import Fault, InFlight, Meter, Race, launch
from tests.ptx.launcher import read_program
from tests.ptx.loops import instructions_for_a_product, loop_of, machine_loop, traffic_of

PREFILL, DECODE = PrefillVariant("bfloat16", 64, 3, 16), DecodeVariant("bfloat16", 64, 3, 16)
WIDE_DECODE = DecodeVariant("bfloat16", 256, 4, 16, None, True)
WINDOWS = [  # kernels with windows, of all kinds that read a pool in ways of their own
    PrefillVariant("bfloat16", 64, 3, 16, None, True),
    DecodeVariant("bfloat16", 64, 3, 16, None, True),
    *(
        pytest.param(kind(dtype, 64, 3, 32, kv_dtype, True), marks=pytest.mark.slow)
        for kind in (PrefillVariant, DecodeVariant)
        for dtype, kv_dtype in (("float32", None), ("float16", "int8"), ("bfloat16", "float8"))
    ),
]
CAPPED_DECODE = DecodeVariant("bfloat16", 256, 2, 16, None, True, has_cap=True)
CAPPED_PREFILL = PrefillVariant("bfloat16", 128, 2, 16, has_cap=True)
CAPS = [
    CAPPED_DECODE,
    CAPPED_PREFILL,
    *(
        pytest.param(kind(dtype, 128, 2, 32, kv_dtype, has_cap=True), marks=pytest.mark.slow)
        for kind in (PrefillVariant, DecodeVariant)
        for dtype, kv_dtype in (("float32", None), ("float16", "int8"), ("bfloat16", "float8"))
    ),
]

# Of HMMA m16n8k16 a scheduler starts one in 8 cycles or more, 13 at 250 TFLOP/s: so many
# instructions may go with one, itself included. At head size 256 what is widened of 8 bits serves
# one tile of rows, not two: up to 16.7 were counted, which would still let 190 TFLOP/s through.
MOST_FOR_A_PRODUCT = 13
MOST_WITH_8_BITS_AT_256 = 17


def most_for_a_product(variant):
    is_wide = variant.head_size == 256 and variant.kv_dtype is not None
    return MOST_WITH_8_BITS_AT_256 if is_wide else MOST_FOR_A_PRODUCT


@pytest.mark.wide
@pytest.mark.parametrize("variant", [DECODE, PREFILL, *WINDOWS, *CAPS], ids=lambda one: one.name)
def test_compiled_attention_gives_what_the_specification_says(variant):
    for case in draw_cases(variant):
        outputs = run_compiled(case)
        assert case.faults(outputs) == []
        if case.part is not None:
            part, select = case.part
            np.testing.assert_array_equal(run_compiled(part)["out"], select(outputs)["out"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [DecodeVariant, PrefillVariant])
@pytest.mark.parametrize("pool", ["16 bits", "float32", "int8", "float8"])
@pytest.mark.parametrize(("head_size", "group"), every_group())
def test_attention_of_every_group_is_right(kind, pool, head_size, group):
    # The dtype of 16 bits and the block size take turns.
    dtype = ("bfloat16", "float16")[(group + head_size // 32) % 2]
    dtype = "float32" if pool == "float32" else dtype
    kv_dtype = pool if pool in ("int8", "float8") else None
    variant = kind(dtype, head_size, group, (16, 32)[group // 2 % 2], kv_dtype)
    for case in draw_cases(variant, seed=group):
        assert case.faults(run_compiled(case)) == []


# --- what must be noticed -------------------------------------------------------------------------


def small_case(variant, splits=1):
    if variant == PREFILL:
        return attention_prefill.draw_case(PREFILL, ((3, 150), (0, 5)), num_kv_heads=1)
    window = 200 if variant.has_window else None
    return attention_decode.draw_case(
        variant, (260, 0, 31), num_kv_heads=1, splits=splits, window=window
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("variant", "splits", "kind", "count"),
    [
        (PREFILL, 1, "bar.sync", 1),
        (PREFILL, 1, "cp.async.commit_group", 1),
        (PREFILL, 1, "cp.async.wait_group", 1),
        (DECODE, 2, "bar.sync", 4),
        (DECODE, 2, "fence", 2),
        (WIDE_DECODE, 2, "bar.sync", 5),  # one more, for its queries
    ],
)
def test_no_barrier_commit_wait_or_fence_can_be_left_out(variant, splits, kind, count):
    texts = list(without(text_of(variant), kind))
    assert len(texts) == count
    case = small_case(variant, splits)

    for text in texts:
        with pytest.raises((Race, InFlight), match="line "):
            run_compiled(case, texts={variant.name: text})


@pytest.mark.wide
@pytest.mark.parametrize("read", ["ld.global", "ld.global.nc"])
def test_no_block_can_read_another_s_results_by_way_of_the_first_cache(read):
    texts = replaced(DECODE, r"ld\.relaxed\.gpu\.global", read)

    with pytest.raises(Race, match="line "):
        run_compiled(small_case(DECODE, 2), texts=texts)


def test_no_read_of_a_tile_can_move_before_the_barrier():
    # What the compiler would be free to do with assembly that does not say it reads memory.
    lines = text_of(PREFILL).splitlines()
    barrier = next(i for i, line in enumerate(lines) if "bar.sync" in line)
    read = next(i for i in range(barrier, len(lines)) if "ldmatrix" in lines[i])
    lines.insert(read + 1, lines.pop(barrier))

    with pytest.raises(Fault):
        run_compiled(small_case(PREFILL), texts={PREFILL.name: "\n".join(lines)})


MMA = r"(mma\.\S+ \{[^}]*\}, )\{(%r\d+),(%r\d+),(%r\d+),(%r\d+)\}, \{(%r\d+),(%r\d+)\}"


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "pattern", "replacement"),
    [
        (PREFILL, MMA, r"\1{\2,\4,\3,\5}, {\6,\7}"),  # the quarters of A in another order
        (PREFILL, MMA, r"\1{\2,\3,\4,\5}, {\7,\6}"),  # the halves of B
        (PREFILL, r"\.f32\.bf16\.bf16\.f32", ".f32.f16.f16.f32"),
        (PREFILL, r"(ldmatrix\S+)\.trans", r"\1"),
        (PREFILL, r"(ldmatrix\S+) \{(%r\d+),(%r\d+)", r"\1 {\3,\2"),
        (PREFILL, r"(cvt\.rn\.bf16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
        (PREFILL, r"(cp\.async\.cg\S+ \[%r\d+\], \[%rd\d+\], 16), %r\d+", r"\1, 0"),
        (PREFILL, r"(cp\.async\.cg\S+ \[%r\d+)\]", r"\1+16]"),
        (PREFILL, r"ex2\.approx\.ftz", "rcp.approx.ftz"),
        (DECODE, MMA, r"\1{\2,\4,\3,\5}, {\6,\7}"),
        (DECODE, MMA, r"\1{\2,\3,\4,\5}, {\7,\6}"),
        (DECODE, r"movmatrix\.sync\.aligned\.m8n8\.trans\.b16", "mov.b32"),
        (DECODE, r"(prmt\.b32 %r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
        (DECODE, r"shfl\.sync\.bfly", "shfl.sync.up"),
        (DECODE, r"max\.f32", "min.f32"),
        (DECODE, r"ld\.global\.v4\.u32 \t?\{(%r\d+), (%r\d+)", r"ld.global.v4.u32 {\2, \1"),
    ],
)
def test_a_changed_instruction_is_noticed(variant, pattern, replacement):
    case = small_case(variant)

    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.wide
def test_the_cases_of_these_pass_with_the_kernels_as_they_are():
    for variant in (PREFILL, DECODE, WIDE_DECODE):
        case = small_case(variant)
        assert case.faults(run_compiled(case)) == []


# --- what is moved --------------------------------------------------------------------------------

EVERY_KIND = [
    (kind, dtype, head_size, group, 16, kv_dtype)
    for kind in (DecodeVariant, PrefillVariant)
    for head_size, most_group in MOST_GROUPS.items()
    for dtype, kv_dtype in (("bfloat16", None), ("float16", "int8"), ("bfloat16", "float8"))
    for group in (3, most_group)
]
SLOW_KINDS = [pytest.param(x[0](*x[1:]), marks=pytest.mark.slow) for x in EVERY_KIND]


def even_case(variant):
    if isinstance(variant, DecodeVariant):
        return attention_decode.draw_case(variant, (512, 512), num_kv_heads=1)
    return attention_prefill.draw_case(variant, ((64, 512),), num_kv_heads=1)


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", [DECODE, PREFILL, *SLOW_KINDS], ids=lambda x: x.name)
def test_attention_moves_no_more_than_it_needs(variant):
    meter, case = Meter(), even_case(variant)
    assert case.faults(run_compiled(case, meters={variant.name: meter})) == []
    program = read_program(text_of(variant))
    loop = set(loop_of(program))

    from_pool = traffic_of(program, meter, "global", loop)
    in_shared = traffic_of(program, meter, "shared", None)

    assert from_pool.units == from_pool.least > 0
    assert in_shared.units == in_shared.least > 0  # no conflict of banks, in the loop or out of it
    if isinstance(variant, DecodeVariant):
        queries = traffic_of(program, meter, "shared", loop)
        # 4 KB a tile where they find no room in registers, of two rows of 512 tokens.
        wait_in_shared = variant.head_size == 256 and variant.kv_dtype is None
        assert queries.units == (2 * 512 // TILE_TOKENS * 32 if wait_in_shared else 0)
    else:
        assert instructions_for_a_product(program, meter) < most_for_a_product(variant)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        PREFILL,
        pytest.param(CAPPED_PREFILL, marks=pytest.mark.wide),
        *(one for one in SLOW_KINDS if isinstance(one.values[0], PrefillVariant)),
        *(
            pytest.param(PrefillVariant(*shape, has_cap=True), marks=pytest.mark.slow)
            for kind, *shape in EVERY_KIND
            if kind is PrefillVariant and shape[1] in HEAD_SIZES_WITH_CAPS
        ),
    ],
    ids=lambda x: x.name,
)
def test_the_machine_code_of_prefill_has_few_instructions_beside_its_products(variant):
    cubin, _ = link(variant.name, text_of(variant), (9, 0))

    loop = machine_loop(cubin, "sm_90")

    assert loop is not None
    assert loop.total() / loop["HMMA"] < most_for_a_product(variant)


def test_reads_that_begin_within_a_sector_are_counted():
    case = even_case(DECODE)
    (one,) = case.launches
    meter = Meter()
    arguments = [case.arrays[x].copy() if isinstance(x, str) else x for x in one.arguments]
    arguments[-5] += 8  # the keys' offset, by 16 bytes

    launch(text_of(DECODE), one.grid, arguments, written=(0, 5), meter=meter)

    program = read_program(text_of(DECODE))
    moved = traffic_of(program, meter, "global", set(loop_of(program)))
    assert moved.units > moved.least
