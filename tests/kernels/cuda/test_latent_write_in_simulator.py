"""Latents normalised and written, and what turns: thread by thread, and as compiled."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from bench.gpu.case import Array, Case, Expected, Launch, poison, to_float64
from bench.gpu.cases.block_pool import LAYER
from bench.gpu.cases.latent_write import EPS, draw_case, draw_cases, draw_row
from bench.gpu.numerics import check_case
from kernels.cuda import block_reductions, latent_write
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.fetched_weights import NOTHING
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.rms_norm import RmsNormVariant
from tests import ptx
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race, TooEarly
from tests.simt.memory import Spread

USUAL = LatentWriteVariant("bfloat16", 512, 64, 16)
SMALL = LatentWriteVariant("float16", 256, 32, 32)  # half of a block's threads have no latent
WIDE = LatentWriteVariant("float32", 512, 64, 16)
EVERY = latent_write.variants(every=True)
UNIT = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Of a result, relative: half a unit in the last place; of float32 some roundings more."""
FAR_BLOCK = 2**31 - 2**12  # elements; where the third begins is not of 32 bits with a sign


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [USUAL, SMALL, WIDE, *(one for one in EVERY if one not in (USUAL, SMALL, WIDE))],
    ids=lambda variant: variant.name,
)
def test_a_kernel_gives_what_the_specification_says_and_a_tokens_bits_are_its_own(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("variant", EVERY, ids=lambda variant: variant.name)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_variant_gives_it_whatever_order_threads_have(variant, seed):
    (case,) = draw_cases(variant, seed)
    assert case.faults(simulate(case, seed=seed)) == []
    assert check_case(case, run_compiled).faults == ()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "num_tokens", "num_heads"),
    [(USUAL, 2, 1), (SMALL, 5, 40), (USUAL, 40, 16), (USUAL, 1, 128), (WIDE, 19, 5), (SMALL, 0, 2)],
    ids=lambda value: getattr(value, "name", value),
)
def test_rows_go_to_slots_of_blocks_that_lie_anywhere(variant, num_tokens, num_heads):
    for seed in range(2):
        case = draw_row(variant, num_tokens, num_heads, seed)
        assert case.faults(simulate(case, seed=seed)) == []


@pytest.mark.parametrize("variant", [USUAL, SMALL, WIDE], ids=lambda variant: variant.name)
def test_what_is_written_was_rounded_once(variant):
    case = draw_case(variant, (3, 20, 7, 50), 2)
    outputs = simulate(case)
    for name in ("queries", "pool"):
        exact = case.expected[name].values
        error = np.abs(to_float64(variant.dtype, outputs[name]) - exact)
        assert not (error > UNIT[variant.dtype] * np.abs(exact) + 1e-6).any()


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", [USUAL, WIDE], ids=lambda variant: variant.name)
def test_blocks_may_lie_far_apart(variant):
    case = draw_case(variant, (2 * variant.block_size + 5, 3 * variant.block_size), 1)
    pool = case.arrays["pool"]
    far = Spread(pool, tuple(FAR_BLOCK * i for i in range(len(pool))))
    (one,) = case.launches
    strides = (FAR_BLOCK, *one.arguments[12:])
    launch = dataclasses.replace(one, arguments=(*one.arguments[:11], *strides))
    case = dataclasses.replace(case, arrays={**case.arrays, "pool": far}, launches=(launch,))
    outputs = simulate(case)
    assert case.faults({**outputs, "pool": outputs["pool"].values}) == []


# --- beside the norm of any row -------------------------------------------------------------------


def normed_rows(case: Case, variant: LatentWriteVariant, run) -> Array:
    """Return what `rms_norm` makes of a case's latents."""
    norm = RmsNormVariant(variant.dtype, variant.rank, adds_residual=False)
    latents = case.arrays["inputs"][:, : variant.rank].copy()
    nothing = poison(variant.dtype, latents.shape)
    arrays = {
        "out": nothing, "residual": nothing, "x": latents, "weight": case.arrays["weight"],
    }  # fmt: skip
    weights = "weight", "weight"
    given = ("out", "residual", "x", *weights, EPS, 1.0, "weight", *NOTHING.arguments)
    launch = Launch(norm, norm.grid(len(latents)), given)
    expected = {"out": Expected(variant.dtype, np.zeros(latents.shape), np.inf)}
    return run(Case(norm.name, arrays, (launch,), expected))["out"]


def written_rows(case: Case, variant: LatentWriteVariant, run) -> Array:
    blocks, offsets = np.divmod(case.arrays["kv_slots"], variant.block_size)
    return run(case)["pool"][blocks, LAYER, 0, 0, offsets, : variant.rank]


@pytest.mark.parametrize("variant", [USUAL, SMALL, WIDE], ids=lambda variant: variant.name)
def test_latents_are_normalised_as_rows_are(variant):
    case = draw_case(variant, (3, 20, 7, 50), 1)
    ours, others = written_rows(case, variant, simulate), normed_rows(case, variant, simulate)
    if variant is WIDE:
        np.testing.assert_allclose(ours, others, rtol=1e-6)
    else:  # the simulator rounds what the device joins: seldom it is just another 16 bits
        ours, others = ours.astype(np.int32), others.astype(np.int32)
        assert np.abs(ours - others).max() <= 1
        assert (ours == others).mean() > 0.99


@pytest.mark.wide
@pytest.mark.parametrize("variant", [USUAL, SMALL, WIDE], ids=lambda variant: variant.name)
def test_as_compiled_they_have_the_very_bits(variant):
    case = draw_case(variant, (3, 20, 7, 50), 1)
    ours = written_rows(case, variant, run_compiled)
    np.testing.assert_array_equal(ours, normed_rows(case, variant, run_compiled))


# --- as compiled ----------------------------------------------------------------------------------


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", [USUAL, SMALL, WIDE], ids=lambda variant: variant.name)
def test_a_compiled_kernel_gives_it_too(variant):
    for case in draw_cases(variant):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.parametrize(
    ("opcode", "fault"), [("bar.sync", ptx.Race), ("griddepcontrol.wait", ptx.TooEarly)]
)
def test_nothing_that_orders_what_is_compiled_can_be_left_out(opcode, fault):
    case = draw_case(USUAL, (3, -1), 2)
    (broken,) = without(text_of(USUAL), opcode)
    with pytest.raises(fault):
        run_compiled(case, texts={USUAL.name: broken})


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"rsqrt\.approx\.ftz", "rcp.approx.ftz"),
        (r"(cvt\.rn\.bf16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
        (r"(st\.global\.v4\.\w+ .*), \{(.*), (.*), (.*), (.*)\}", r"\1, {\3, \2, \4, \5}"),
    ],
)
def test_a_changed_instruction_is_noticed(pattern, replacement):
    case = draw_case(USUAL, (3, 20), 2)
    assert case.faults(run_compiled(case)) == []
    assert case.faults(run_compiled(case, texts=replaced(USUAL, pattern, replacement)))


# --- broken on purpose ----------------------------------------------------------------------------

SMALL_SOURCE = Source(latent_write, "make_latent_write", SMALL)
WIDE_SOURCE = Source(latent_write, "make_latent_write", WIDE)
SUM = Source(latent_write, "make_latent_write", WIDE, library=block_reductions)
WAIT = "wait_for_previous()\n\n"

MUTATIONS = [
    ("if slot < 0:", "if slot < -1:"),
    ("low * cos - high * sin", "low * cos + high * sin"),
    ("high * cos + low * sin", "high * cos - low * sin"),
    ("first + half)", "first + length)"),
    ("at + half,", "at + length,"),
    (", sine[n // 4, n % 4]", ", sine[0, n % 4]"),
    ("int64(position) * half + dim", "int64(position) * half"),
    ("int64(position) * half", "int64(token) * half"),
    (", sines, angle + 4 * i", ", sines, angle"),
    ("1) * threads", "1) * 32"),
    ("int32(num_heads * pairs)", "int32(num_heads)"),
    ("pair % pairs * length", "pair % pairs * 4"),
    ("* width + rank + dim\n", "* width + dim\n"),
    ("(token * num_heads + head) * width", "(token * num_heads + head) * rank"),
    ("token * token_stride", "token * num_heads * head_stride"),
    ("head * head_stride", "head * half"),
    ("if pair < num_pairs:\n                at", "if True:\n                at"),
    ("is_of_row and element < rank", "is_of_row"),
    ("weight, element", "weight, 0"),
    ("token * input_stride", "token * width"),
    ("slot // block_size * block_stride", "slot // block_size * (block_stride - width)"),
    ("+ layer_offset + slot", "+ slot"),
    ("slot % block_size * width", "slot % 16 // 2 * width"),
    ("inputs, row + rank + dim", "inputs, row + dim"),
    ("pool, place + rank + dim", "pool, place + rank"),
    ("values[0, n], values[0, n], squares", "values[0, n], values[0, n], values[0, n]"),
    ("float32(1 / rank)", "float32(1 / width)"),
    ("total, inverse_rank, eps", "total, inverse_rank, float32(0)"),
    ("normed, weights[0, n]", "normed, float32(1)"),
    ("pool, place + element", "pool, place"),
]  # fmt: skip


@pytest.fixture(scope="module")
def small_case() -> Case:
    size, num_heads = SMALL.block_size, SMALL.threads // SMALL.pairs + 1
    case = draw_case(SMALL, (2 * size + 21, -1, size - 1, 3 * size), num_heads)
    assert case.faults(simulate(case, kernels=SMALL_SOURCE.unbroken())) == []
    return case


@pytest.mark.spread(3)
@pytest.mark.parametrize(("old", "new"), MUTATIONS, ids=[old.strip()[:30] for old, _ in MUTATIONS])
def test_a_broken_kernel_is_noticed(old, new, small_case):
    try:
        faults = small_case.faults(
            simulate(small_case, kernels=SMALL_SOURCE.with_replaced(old, new))
        )
    except Fault:
        return
    assert faults != []


def test_no_barrier_or_wait_can_be_left_out():
    case = draw_case(WIDE, (3, -1), 2)
    assert case.faults(simulate(case, kernels=WIDE_SOURCE.unbroken())) == []
    (wait,) = WIDE_SOURCE.synchronisations()
    for seed in range(3):
        with pytest.raises(TooEarly):
            simulate(case, kernels=WIDE_SOURCE.without(wait), seed=seed)
        (barrier,) = lines_of(SUM, "make_block_sum")
        with pytest.raises(Race, match="shared memory"):
            simulate(case, kernels=SUM.without(barrier), seed=seed)


def lines_of(source: Source, function: str) -> list[int]:
    """Return the barriers of a function and of all behind it."""
    lines = source.text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"def {function}"))
    return [line for line in source.synchronisations() if line > first]


@pytest.mark.parametrize(
    "waiting",
    [
        f"if pair < num_pairs:\n            {WAIT}",  # threads that turn nothing
        f"if is_of_row and slot < 0:\n            return\n        {WAIT}",  # padding tokens
        f"if is_of_row:\n            {WAIT}",
    ],
    ids=["threads with nothing to do", "padding", "query heads"],
)
def test_whoever_writes_nothing_waits_too(waiting, small_case):
    with pytest.raises(TooEarly):
        simulate(small_case, kernels=SMALL_SOURCE.with_replaced(WAIT, waiting))


# --- what the kernel is not written for -----------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (("int8", 512, 64, 16), "dtype must be one of float32, float16, bfloat16"),
        (("bfloat16", 384, 64, 16), "rank must be one of 256, 512, got 384"),
        (("bfloat16", 512, 128, 16), "turning must be one of 32, 64, got 128"),
        (("bfloat16", 512, 64, 8), "block_size must be one of 16, 32, got 8"),
    ],
)
def test_a_shape_the_kernel_is_not_written_for_is_refused_by_name(parameters, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        LatentWriteVariant(*parameters)


def test_a_grid_has_a_block_for_each_row_and_those_of_its_heads():
    for variant, num_heads in itertools.product(EVERY, (1, 16, 17, 40, 128)):
        num_tokens, columns, _ = variant.grid(5, num_heads)
        of_heads = (columns - 1) * variant.threads
        assert num_tokens == 5
        assert of_heads - variant.threads < num_heads * variant.pairs <= of_heads


def test_names_say_every_parameter():
    assert len({variant.name for variant in EVERY}) == len(EVERY) == 24
