"""Proof that the simulated tests notice: the kernel is broken in one place after another."""

from __future__ import annotations

import pytest

from bench.gpu.cases.attention_decode import draw_case
from kernels.cuda import attention_decode
from kernels.cuda.attention_decode import DecodeVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, OutOfBounds, Race

# A group that two warps share unevenly, four splits, and rows that end inside a block.
VARIANT = DecodeVariant("float32", 64, 5, 16)
LENGTHS = (37, 16)
SOURCE = Source(attention_decode, "make_attention_decode", VARIANT)


def test_the_unbroken_source_passes():
    case = draw_case(VARIANT, LENGTHS)

    assert case.faults(simulate(case, kernels=SOURCE.unbroken())) == []


def test_there_is_a_barrier_to_delete():
    assert SOURCE.synchronisations()


@pytest.mark.parametrize("line", SOURCE.synchronisations())
def test_a_deleted_barrier_is_a_race_in_every_order_of_threads(line):
    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(draw_case(VARIANT, LENGTHS), kernels=SOURCE.without(line), seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(part * heads + h, group - 1)\n            if", "part * heads + h\n            if"),
        ("base = block * block_stride", "base = block * (2 * block_stride)"),
        ("table_width + block_index]", "table_width + block_index + 1]"),
    ],
    ids=["head past the group", "block past the pool", "entry past the row's blocks"],
)
def test_an_index_outside_an_array_is_out_of_bounds(old, new):
    with pytest.raises(OutOfBounds):
        simulate(draw_case(VARIANT, LENGTHS), kernels=SOURCE.with_replaced(old, new))


def test_a_shuffle_that_some_lanes_skip_is_a_fault():
    guarded = "if lane > 0: dot += cuda.shfl_xor_sync("
    kernels = SOURCE.with_replaced("dot += cuda.shfl_xor_sync(", guarded)

    with pytest.raises(Fault):
        simulate(draw_case(VARIANT, LENGTHS), kernels=kernels)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("token = min(first_token + t, num_tokens - 1)", "token = first_token + t"),
        ("scores[t] = dot if is_valid else MINUS_INFINITY", "scores[t] = dot"),
        ("num_blocks, splits)", "num_blocks, 2 * splits)"),
        ("mass[h] *= shrink\n", "mass[h] *= float32(1)\n"),
        ("total[h, i] *= shrink", "total[h, i] *= float32(1)"),
        ("numerator += share * split_total", "numerator += split_total"),
        ("key_offset + element", "value_offset + element"),
        ("16 >> step", "8 >> step"),
    ],
    ids=lambda text: text.strip()[:24],
)
def test_broken_arithmetic_gives_a_wrong_answer(old, new):
    case = draw_case(VARIANT, (70, 16), num_kv_heads=1)  # five blocks: split 0 takes two

    outputs = simulate(case, kernels=SOURCE.with_replaced(old, new))

    assert case.errors(outputs)["out"] > 100 * case.expected["out"].tolerance
