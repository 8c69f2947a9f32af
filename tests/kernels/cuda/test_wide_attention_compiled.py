"""What the compiler made of attention with heads of 512, executed: its order, what it moves."""

from __future__ import annotations

import numpy as np
import pytest

from bench.gpu.cases.attention_decode import draw_case as draw_decode
from bench.gpu.cases.attention_prefill import draw_case as draw_prefill
from kernels.cuda.attention_wide import WideDecodeVariant, WidePrefillVariant
from tests.kernels.cuda.compiled import run_compiled, text_of, without
from tests.ptx import Fault, Meter
from tests.ptx.launcher import read_program
from tests.ptx.loops import instructions_for_a_product, loop_of, traffic_of

DECODE = WideDecodeVariant("bfloat16", 512, 8, 16)
PREFILL = WidePrefillVariant("bfloat16", 512, 8, 16)
FLOAT32 = WideDecodeVariant("float32", 512, 4, 16)
PREFILL_FLOAT32 = WidePrefillVariant("float32", 512, 4, 16)
LENGTHS = (290, 0, 1, 133)
"""Of three chunks, none, one, two."""
PROMPTS = ((9, 41), (0, 5), (1, 1))


def small_case(variant):
    if isinstance(variant, WideDecodeVariant):
        return draw_decode(variant, LENGTHS, num_kv_heads=1, splits=2, alone=0, splits_alone=3)
    return draw_prefill(variant, PROMPTS, num_kv_heads=2, alone=(0, 3))


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        *(DECODE, PREFILL, FLOAT32, PREFILL_FLOAT32),
        WideDecodeVariant("float16", 512, 2, 32),
        pytest.param(WideDecodeVariant("bfloat16", 512, 16, 32), marks=pytest.mark.slow),
        pytest.param(WideDecodeVariant("float32", 512, 9, 32), marks=pytest.mark.slow),
        pytest.param(WidePrefillVariant("float16", 512, 3, 32), marks=pytest.mark.slow),
        pytest.param(WidePrefillVariant("bfloat16", 512, 16, 16), marks=pytest.mark.slow),
        pytest.param(WidePrefillVariant("float32", 512, 1, 32), marks=pytest.mark.slow),
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
        # Of the first keys; in the loop of values and of keys, or of nothing.
        (DECODE, "cp.async.commit_group", 4),
        (PREFILL, "bar.sync", 3),
        (PREFILL, "cp.async.commit_group", 4),
        (PREFILL, "cp.async.wait_group", 2),
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
    ("variant", "most_for_a_product"), [(DECODE, 12), (PREFILL, 10)], ids=["decode", "prompts"]
)
def test_no_access_of_shared_memory_meets_another_in_its_bank(variant, most_for_a_product):
    meter = Meter()
    if isinstance(variant, WideDecodeVariant):
        case = draw_decode(variant, (256,), num_kv_heads=1)
    else:
        case = draw_prefill(variant, ((4, 256),), num_kv_heads=1)

    assert case.faults(run_compiled(case, meters={variant.name: meter})) == []

    program = read_program(text_of(variant))
    in_shared = traffic_of(program, meter, "shared", None)
    assert in_shared.units == in_shared.least > 0
    from_pool = traffic_of(program, meter, "global", set(loop_of(program)))
    assert from_pool.units == from_pool.least > 0
    assert instructions_for_a_product(program, meter) < most_for_a_product
