"""Normalisation, gates, rotation, embedding and block copies, thread by thread."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.cases import rope_write_kv as rope_cases
from bench.gpu.numerics import check_case
from kernels.cuda import (
    copy_blocks,
    embedding,
    gate_apart,
    gate_mul,
    head_norms,
    head_scales,
    lanes,
    relu2,
    rms_norm,
    rope_write_kv,
)
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

MODULES = (copy_blocks, embedding, gate_apart, gate_mul, relu2, rms_norm, rope_write_kv)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [
        CopyBlocksVariant(),
        EmbeddingVariant("float32"),
        EmbeddingVariant("bfloat16"),
        RmsNormVariant("bfloat16", 576),
        RmsNormVariant("float16", 64, adds_residual=False),
        RmsNormVariant("float32", 2056),
        RmsNormVariant("bfloat16", 576, num_parts=2),
        RmsNormVariant("float16", 72, num_parts=4),
        RmsNormVariant("bfloat16", 72, norms_added=True, has_float32_weights=True),
        RmsNormVariant("float16", 4160, num_parts=2, norms_added=True),
        RmsNormVariant("float32", 64, norms_added=True),
        RmsNormVariant("float16", 64, adds_residual=False, has_float32_weights=True),
        RmsNormVariant("bfloat16", 256, norms_added=True, scales_sums=True),
        RmsNormVariant("float16", 128, scales_sums=True),
        RmsNormVariant("float16", 72, num_parts=4, scales_sums=True),
        RmsNormVariant("bfloat16", 2816, num_parts=2, norms_added=True, scales_sums=True),
        RmsNormVariant("float32", 1536, norms_added=True),
        RopeWriteKvVariant("bfloat16", 64, 16),
        RopeWriteKvVariant("float16", 96, 32),
        RopeWriteKvVariant("float32", 128, 16),
        RopeWriteKvVariant("bfloat16", 64, 16, "int8"),
        RopeWriteKvVariant("float16", 96, 32, "float8"),
        RopeWriteKvVariant("bfloat16", 64, 16, has_bias=True),
        RopeWriteKvVariant("float16", 96, 32, "int8", has_bias=True),
        RopeWriteKvVariant("float16", 96, 16, has_head_norms=True),
        RopeWriteKvVariant("float32", 128, 16, has_head_norms=True),
        RopeWriteKvVariant("bfloat16", 64, 16, "int8", has_head_norms=True),
        RopeWriteKvVariant("float32", 64, 16, has_bias=True, has_head_norms=True),
        RopeWriteKvVariant("bfloat16", 256, 16, None, False, True, has_float32_norms=True),
        RopeWriteKvVariant("float16", 256, 32, "float8", False, True, has_float32_norms=True),
        RopeWriteKvVariant("float32", 256, 32),
        RopeWriteKvVariant("bfloat16", 128, 16, queries_grow=True),
        RopeWriteKvVariant("float16", 96, 32, "int8", queries_grow=True),
        RopeWriteKvVariant("float32", 512, 16),
        RopeWriteKvVariant("bfloat16", 512, 32, has_bias=True, has_head_norms=True),
        RopeWriteKvVariant("float16", 512, 16, has_head_norms=True, norms_values=True),
        RopeWriteKvVariant("float32", 512, 32, has_head_norms=True, norms_values=True),
        RopeWriteKvVariant("bfloat16", 512, 16, "int8", has_head_norms=True, norms_values=True),
        RopeWriteKvVariant("float16", 96, 16, "float8", has_head_norms=True, norms_values=True),
        GateApartVariant("bfloat16", "gelu"),
        GateApartVariant("float32", "gelu"),
        GateApartVariant("float16", "clamped"),
        GateMulVariant("bfloat16"),
        GateMulVariant("float16"),
        GateMulVariant("float32"),
        GateMulVariant("float16", in_turns=True),
        GateMulVariant("bfloat16", activation="gelu"),
        GateMulVariant("float32", in_turns=True, activation="gelu"),
        Relu2Variant("bfloat16"),
        Relu2Variant("float32"),
    ],
    ids=lambda variant: variant.name,
)
def test_a_row_kernel_is_right_and_a_rows_bits_are_its_own(variant):
    for case in draw_cases(variant):
        assert check_case(case, simulate).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [variant for module in MODULES for variant in module.variants(every=True)],
    ids=lambda variant: variant.name,
)
def test_every_row_kernel_is_right(variant):
    for case in draw_cases(variant, seed=1):
        assert check_case(case, simulate).faults == ()


NORM = RmsNormVariant("float32", 256)
NORM_SOURCE = Source(rms_norm, "make_rms_norm", NORM)
NORMED = RmsNormVariant("bfloat16", 520, norms_added=True, has_float32_weights=True)
NORMED_SOURCE = Source(rms_norm, "make_rms_norm", NORMED)


@pytest.mark.parametrize(("source", "variant"), [(NORM_SOURCE, NORM), (NORMED_SOURCE, NORMED)])
def test_the_norms_barrier_can_not_be_left_out(source, variant):
    barrier, _ = source.synchronisations()
    (case,) = draw_cases(variant)

    assert case.faults(simulate(case, kernels=source.unbroken())) == []
    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(case, kernels=source.without(barrier), seed=seed)


TWO_WARPS = RopeWriteKvVariant("float32", 512, 16, has_head_norms=True, norms_values=True)
TWO_WARPS_NORMS = Source(rope_write_kv, "make_rope_write_kv", TWO_WARPS, library=head_norms)


def test_the_barrier_of_heads_of_two_warps_can_not_be_left_out():
    (barrier,) = TWO_WARPS_NORMS.synchronisations()
    case = draw_cases(TWO_WARPS)[0]

    assert case.faults(simulate(case, kernels=TWO_WARPS_NORMS.unbroken())) == []
    for seed in range(3):
        with pytest.raises(Race, match="shared memory"):
            simulate(case, kernels=TWO_WARPS_NORMS.without(barrier), seed=seed)


def test_only_heads_of_two_warps_meet_in_shared_memory():
    assert "BAR" in TWO_WARPS.expectation.instructions
    others = [one for one in rope_write_kv.variants(every=True) if one.head_threads <= 32]
    assert len(others) > 100
    assert all("BAR" not in one.expectation.instructions for one in others)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        RopeWriteKvVariant("float16", 96, 32),
        RopeWriteKvVariant("bfloat16", 64, 16, "int8", has_head_norms=True),
        RopeWriteKvVariant("bfloat16", 512, 16, has_head_norms=True, norms_values=True),
        TWO_WARPS,
    ],
    ids=lambda variant: variant.name,
)
def test_a_layer_without_keys_of_its_own_touches_nothing_of_the_pool(variant):
    case = rope_cases.draw_case(variant, 0, num_kv_heads=0)
    assert check_case(case, simulate).faults == ()
    # What is not expected is read-only, and a pool of nothing is out of bounds wherever it is read.
    nothing = case.arrays["pool"].ravel()[:0]
    only_out = dataclasses.replace(
        case,
        arrays={**case.arrays, "pool": nothing, "key_norm": case.arrays["key_norm"][:0]},
        expected={"out": case.expected["out"]},
    )

    np.testing.assert_array_equal(simulate(only_out)["out"], simulate(case)["out"])


PARTS = RmsNormVariant("bfloat16", 64, num_parts=2)
PARTS_SOURCE = Source(rms_norm, "make_rms_norm", PARTS)
ROUNDS = RmsNormVariant("float32", 2056, norms_added=True)
ROUNDS_SOURCE = Source(rms_norm, "make_rms_norm", ROUNDS)
GATE = GateMulVariant("float32")
ROPE = RopeWriteKvVariant("float32", 64, 16)
COPY = CopyBlocksVariant()
NORM_LANES = Source(rms_norm, "make_rms_norm", NORM, library=lanes)
GATE_SOURCE = Source(gate_mul, "make_gate_mul", GATE)
INT8 = RopeWriteKvVariant("float16", 96, 16, "int8")
INT8_SOURCE = Source(rope_write_kv, "make_rope_write_kv", INT8)
INT8_SCALES = Source(rope_write_kv, "make_rope_write_kv", INT8, library=head_scales)
SCALED = RmsNormVariant("float16", 128, scales_sums=True)
SCALED_SOURCE = Source(rms_norm, "make_rms_norm", SCALED)
APART = GateApartVariant("float32", "gelu")
APART_SOURCE = Source(gate_apart, "make_gate_apart", APART)
ROPE_SOURCE = Source(rope_write_kv, "make_rope_write_kv", ROPE)
CHANGED = RopeWriteKvVariant("float16", 96, 16, has_bias=True, has_head_norms=True)
CHANGED_SOURCE = Source(rope_write_kv, "make_rope_write_kv", CHANGED)
CHANGED_NORMS = Source(rope_write_kv, "make_rope_write_kv", CHANGED, library=head_norms)
GROWN = RopeWriteKvVariant("float16", 64, 16, queries_grow=True)
GROWN_SOURCE = Source(rope_write_kv, "make_rope_write_kv", GROWN)
FLOAT32 = RopeWriteKvVariant("bfloat16", 64, 16, None, False, True, has_float32_norms=True)
FLOAT32_NORMS = Source(rope_write_kv, "make_rope_write_kv", FLOAT32, library=head_norms)
COPY_SOURCE = Source(copy_blocks, "make_copy_blocks", COPY)


def test_what_is_normalised_is_the_rounded_sum_times_the_factor():
    (case,) = draw_cases(SCALED)
    alone = dataclasses.replace(SCALED, adds_residual=False, scales_sums=False)
    (plain,) = draw_cases(alone)

    def are_alike(kernels) -> bool:
        outputs = simulate(case, kernels=kernels)
        arrays = {**case.arrays, "x": outputs["residual"]}
        normed = simulate(dataclasses.replace(plain, arrays=arrays))
        return bool((normed["out"] == outputs["out"]).all())

    assert are_alike(SCALED_SOURCE.unbroken())
    assert not are_alike(SCALED_SOURCE.with_replaced("to_float32(from_float32(total))", "total"))


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("source", "variant", "old", "new"),
    [
        (NORM_LANES, NORM, "value += cuda.shfl_xor_sync(FULL_WARP, value, 16 >> step)",
         "value += cuda.shfl_xor_sync(FULL_WARP, value, 8 >> step)"),
        (NORM_SOURCE, NORM, "total / float32(hidden_size)", "total / float32(hidden_size - 1)"),
        (NORM_SOURCE, NORM, "store_floats(residual, at, values, r)", "pass"),
        (PARTS_SOURCE, PARTS, "p * part_size + first", "first"),
        (PARTS_SOURCE, PARTS, "int64(cuda.gridDim.x) * hidden_size", "int64(cuda.gridDim.x)"),
        (NORMED_SOURCE, NORMED, "added_weights, r, added_weight", "added_weights, r, weight"),
        (NORMED_SOURCE, NORMED, "weight, first + i * weight_length", "weight, first"),
        (NORMED_SOURCE, NORMED, "eps)\n            squares = float32(0)", "eps)"),
        (ROUNDS_SOURCE, ROUNDS, "others, r, residual", "others, 0, residual"),
        (NORMED_SOURCE, NORMED, "scale(values, r, factor, added_weights)", "pass"),
        (PARTS_SOURCE, PARTS, "q * part_length + i] +=", "i] +="),
        (SCALED_SOURCE, SCALED, "total = total * sums_factor", "pass"),
        (SCALED_SOURCE, SCALED, "total = total * sums_factor",
         "total = to_float32(from_float32(total)) * sums_factor"),
        (NORM_SOURCE, NORM, "if scales_sums:", "if True:"),
        (GATE_SOURCE, GATE, "token * 2 * num", "token * num"),
        (GATE_SOURCE, GATE, "feature < num_features", "True"),
        (APART_SOURCE, APART, "feature < num_features", "True"),
        (APART_SOURCE, APART, "token * up_stride", "token * num_features"),
        (APART_SOURCE, APART, "+ up_first + feature", "+ feature"),
        (APART_SOURCE, APART, "gated(values[0, i], values[1, i])",
         "gated(values[1, i], values[0, i])"),
        (ROPE_SOURCE, ROPE, "low * cos - high", "low * cos + high"),
        (ROPE_SOURCE, ROPE, "and slot >= 0:", "and slot >= -99:"),
        (ROPE_SOURCE, ROPE, "offset = value_offset", "pass"),
        (INT8_SCALES, INT8, "largest, 1 << step", "largest, 1"),
        (INT8_SCALES, INT8, "largest = max(largest, int32(", "largest = max(0, int32("),
        (INT8_SOURCE, INT8, "is_mine and dim < half", "is_mine"),
        (INT8_SOURCE, INT8, "% block_size * SCALE_BYTES", "% 8 * SCALE_BYTES"),
        (CHANGED_SOURCE, CHANGED, "bias, head * head_size + dim)", "bias, dim)"),
        (CHANGED_NORMS, CHANGED, "FULL_WARP, value, 1 << step", "FULL_WARP, value, 1"),
        (CHANGED_NORMS, CHANGED, "squares / float32(head_size)", "squares / float32(half)"),
        (CHANGED_NORMS, CHANGED, "weights, key_norm, dim", "weights, query_norm, dim"),
        (CHANGED_NORMS, CHANGED, "elif norms_values:", "else:"),
        (FLOAT32_NORMS, FLOAT32, "j * half + i * norm_length", "j * half"),
        (FLOAT32_NORMS, FLOAT32, "dim + j * half + i", "dim + i"),
        (TWO_WARPS_NORMS, TWO_WARPS, "elif norms_values:", "elif False:"),
        (TWO_WARPS_NORMS, TWO_WARPS, "values[j, i] *= factor", "values[0, i] *= factor"),
        (TWO_WARPS_NORMS, TWO_WARPS, "of_warps[first + other]", "of_warps[first]"),
        (TWO_WARPS_NORMS, TWO_WARPS, "warp // warps * warps", "0"),
        (TWO_WARPS_NORMS, TWO_WARPS, "else warps_sum", "else lanes_sum"),
        (GROWN_SOURCE, GROWN, "growth[position // growth_length]", "growth[0]"),
        (GROWN_SOURCE, GROWN, "values[j, i] *= grown", "values[0, i] *= grown"),
        (COPY_SOURCE, COPY, "if source_block >= 0", "if True"),
        (COPY_SOURCE, COPY, "target_block * block_words + word", "word"),
    ],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_broken_row_kernel_is_noticed(source, variant, old, new):
    case = draw_cases(variant)[0]

    try:
        outputs = simulate(case, kernels=source.with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RmsNormVariant("int8", 64), "dtype must be one of float32, float16, bfloat16"),
        (lambda: RmsNormVariant("bfloat16", 64, num_parts=3), "num_parts must be one of 2, 4"),
        (lambda: RmsNormVariant("bfloat16", 68), "hidden_size must be a multiple of 8 up to 16384"),
        (lambda: RmsNormVariant("float32", 0), "hidden_size must be a multiple of 4 up to 16384"),
        (lambda: RopeWriteKvVariant("float32", 80, 16), "head_size must be one of 64, 96, 128"),
        (lambda: RopeWriteKvVariant("float32", 1024, 16), "one of 64, 96, 128, 256, 512, got 1024"),
        (
            lambda: RopeWriteKvVariant("float32", 512, 16, norms_values=True),
            "has_head_norms must be one of True, got False",
        ),
        (
            lambda: RmsNormVariant("float32", 256, adds_residual=False, scales_sums=True),
            "adds_residual must be one of True, got False",
        ),
        (lambda: GateApartVariant("float64", "gelu"), "dtype must be one of float32"),
        (lambda: GateApartVariant("float32", "tanh"), "activation must be one of silu, gelu"),
        (lambda: APART.grid(1, 6), "num_features must be a multiple of 4, got 6"),
        (lambda: RopeWriteKvVariant("float32", 64, 8), "block_size must be one of 16, 32"),
        (lambda: RopeWriteKvVariant("float16", 64, 16, "fp8"), "kv_dtype must be one of int8, fl"),
        (lambda: GateMulVariant("float64"), "dtype must be one of float32"),
        (lambda: GateMulVariant("bfloat16").grid(1, 12), "num_features must be a multiple of 8"),
        (
            lambda: GateMulVariant("bfloat16", in_turns=True).grid(1, 24),
            "num_features must be a multiple of 16",
        ),
        (lambda: EmbeddingVariant("int4"), "dtype must be one of float32"),
        (lambda: EmbeddingVariant("float32").grid(1, 6), "hidden_size must be a multiple of 4"),
        (lambda: CopyBlocksVariant().grid(1, 6), "block_words must be a multiple of 4, got 6"),
    ],
)
def test_a_shape_no_kernel_is_written_for_is_refused_by_name(make, message):
    with pytest.raises(UnsupportedVariantError, match=message):
        make()
