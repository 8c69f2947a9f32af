"""What the compiler made of attention over latents, executed: what orders it, what it moves."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.cases.latent_attention import draw_decode, draw_prefill
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from tests.kernels.cuda.compiled import run_compiled, text_of, without
from tests.ptx import Fault, Meter
from tests.ptx.launcher import read_program
from tests.ptx.loops import instructions_for_a_product, loop_of, traffic_of

DECODE = LatentDecodeVariant("bfloat16", 16, 512, 64, 16)
PREFILL = LatentPrefillVariant("float16", 20, 256, 32, 32)
FLOAT32 = LatentDecodeVariant("float32", 4, 256, 32, 16)
PREFILL_FLOAT32 = LatentPrefillVariant("float32", 4, 256, 32, 16)
LENGTHS = (290, 0, 1, 133)
"""Of three chunks, none, one, two."""
PROMPTS = ((5, 37), (0, 5), (1, 1))


def small_case(variant):
    if isinstance(variant, LatentDecodeVariant):
        return draw_decode(variant, LENGTHS, splits=2, alone=0, splits_alone=3)
    return draw_prefill(variant, PROMPTS, alone=(0, 3))


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        *(DECODE, PREFILL, FLOAT32, PREFILL_FLOAT32),
        LatentDecodeVariant("float16", 20, 256, 32, 32),
        LatentPrefillVariant("bfloat16", 16, 512, 64, 16),
        pytest.param(LatentDecodeVariant("float32", 3, 512, 32, 32), marks=pytest.mark.slow),
        pytest.param(LatentDecodeVariant("bfloat16", 128, 512, 32, 16), marks=pytest.mark.slow),
        pytest.param(LatentPrefillVariant("bfloat16", 40, 256, 64, 16), marks=pytest.mark.slow),
    ],
    ids=lambda one: one.name,
)
def test_a_compiled_kernel_is_right_and_a_part_has_its_bits(variant):
    case = small_case(variant)
    part, select = case.part

    outputs = run_compiled(case)

    assert case.faults(outputs) == []
    np.testing.assert_array_equal(run_compiled(part)["out"], select(outputs)["out"])


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "opcode", "count"),
    [
        (DECODE, "fence", 2),
        (DECODE, "cp.async.commit_group", 2),  # the first tile's, and the next's in the loop
        (PREFILL, "bar.sync", 2),
        (PREFILL, "cp.async.commit_group", 2),
        (PREFILL, "cp.async.wait_group", 1),
        (FLOAT32, "bar.sync", 2),
        (FLOAT32, "fence", 2),
    ],
    ids=lambda one: getattr(one, "name", None) or str(one),
)
def test_nothing_that_orders_a_kernel_can_be_left_out(variant, opcode, count):
    case = small_case(variant)
    texts = list(without(text_of(variant), opcode))
    assert len(texts) == count

    for text in texts:
        with pytest.raises(Fault):
            run_compiled(case, texts={variant.name: text})


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "most_for_a_product"), [(DECODE, 11), (PREFILL, 14)], ids=["decode", "prompts"]
)
def test_no_access_of_shared_memory_meets_another_in_its_bank(variant, most_for_a_product):
    meter = Meter()
    is_decode = isinstance(variant, LatentDecodeVariant)
    case = draw_decode(variant, (256,)) if is_decode else draw_prefill(variant, ((2, 256),))

    assert case.faults(run_compiled(case, meters={variant.name: meter})) == []

    program = read_program(text_of(variant))
    in_shared = traffic_of(program, meter, "shared", None)
    assert in_shared.units == in_shared.least > 0
    from_pool = traffic_of(program, meter, "global", set(loop_of(program)))
    assert from_pool.units == from_pool.least > 0
    assert instructions_for_a_product(program, meter) < most_for_a_product
