"""Norms of all query heads together, and of all key heads: thread by thread, and as compiled."""

from __future__ import annotations

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.numerics import check_case
from kernels.cuda import block_reductions, joint_norms
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.joint_norms import JointNormsVariant
from tests.kernels.cuda.compiled import run_compiled
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race, TooEarly

SMALL = JointNormsVariant("bfloat16", 96, 32)
WIDE = JointNormsVariant("float32", 2112, 64)  # two vectors a thread, not all of them
SPREAD = (SMALL, WIDE, JointNormsVariant("float16", 512, 512))


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_a_kernel_gives_what_the_specification_says_and_a_rows_bits_are_its_own(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


@pytest.mark.spread(1)
@pytest.mark.parametrize("variant", SPREAD, ids=lambda variant: variant.name)
def test_a_compiled_kernel_gives_it_too(variant):
    for case in draw_cases(variant):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", joint_norms.variants(every=True), ids=lambda variant: variant.name
)
def test_every_variant_gives_it(variant):
    for case in draw_cases(variant, seed=1):
        assert check_case(case, simulate).faults == ()


@pytest.mark.parametrize("sizes", [(90, 32), (96, 12), (96, 128), (32768, 64)], ids=str)
def test_sizes_that_the_kernel_does_not_take_are_refused(sizes):
    with pytest.raises(UnsupportedVariantError):
        JointNormsVariant("bfloat16", *sizes)


SOURCE = Source(joint_norms, "make_joint_norms", WIDE)
SUM = Source(joint_norms, "make_joint_norms", WIDE, library=block_reductions)
MUTATIONS = [
    ("row += query_size", "row += 0"),
    ("int32(key_size if is_of_keys else query_size)", "int32(query_size)"),
    ("inverse_key_size if is_of_keys else", "inverse_query_size if is_of_keys else"),
    ("load_vector(weights, r, key_norm, element)", "load_vector(weights, r, query_norm, element)"),
    ("multiply_add(total, inverse_size, eps)", "multiply_add(total, inverse_size, total)"),
    ("multiply_float32(normed, weights[r, n])", "normed"),
    ("cuda.blockIdx.x) * stride", "cuda.blockIdx.x) * (stride + 8)"),
    ("store_vector(qkv, row + element, values, r)", "store_vector(qkv, row, values, r)"),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize(("old", "new"), MUTATIONS, ids=[old[:30] for old, _ in MUTATIONS])
def test_a_broken_kernel_is_noticed(old, new):
    (case,) = draw_cases(WIDE)
    assert case.faults(simulate(case, kernels=SOURCE.unbroken())) == []
    try:
        faults = case.faults(simulate(case, kernels=SOURCE.with_replaced(old, new)))
    except Fault:
        return
    assert faults != []


def test_no_barrier_or_wait_can_be_left_out():
    (case,) = draw_cases(WIDE)
    broken = [(source, line) for source in (SOURCE, SUM) for line in source.synchronisations()]
    assert len(broken) >= 2
    num_noticed = 0
    for source, line in broken:
        if "block_max" in function_of(source.text, line):
            continue  # of another function
        with pytest.raises((Race, TooEarly)):
            simulate(case, kernels=source.without(line))
        num_noticed += 1
    assert num_noticed == 2  # the wait for the launch ahead, the barrier of the sum


def function_of(text: str, line: int) -> str:
    """Return the last `def` line above a line."""
    return next(row for row in reversed(text.splitlines()[:line]) if "def " in row)
