"""What the compiler made of each kernel, executed: it gives what the specification says.

The cases are those of `make gpu`. Attention has a file of its own.
"""

from __future__ import annotations

import dataclasses

import pytest

from bench.gpu.cases import draw_cases
from bench.gpu.numerics import check_case
from kernels.cuda.adjust_logits import AdjustLogitsVariant
from kernels.cuda.cap_logits import CapLogitsVariant
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.largest_logits import LargestLogitsVariant
from kernels.cuda.operations import OPERATIONS
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_rows import QuantizedRowsVariant
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.route_experts import RouteExpertsVariant
from tests.kernels.cuda.compiled import replaced, run_compiled, text_of, without
from tests.ptx import Fault, Race

NORM, ROPE = RmsNormVariant("bfloat16", 576), RopeWriteKvVariant("float16", 96, 16, "float8")
TWO_WARPS = RopeWriteKvVariant("float32", 512, 16, has_head_norms=True, norms_values=True)
ROWS, PRODUCT = (
    QuantizedRowsVariant("Q4_1", "bfloat16"),
    QuantizedMatmulVariant("Q4_0", "bfloat16", 16),
)
FLOATS = QuantizedRowsVariant("MXFP4", "bfloat16")
DENSE = DenseMatmulVariant("bfloat16", 8, "gated", normalises=True)


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    "variant",
    [
        AdjustLogitsVariant(),
        CapLogitsVariant(),
        CopyBlocksVariant(),
        DENSE,
        EmbeddingVariant("bfloat16"),
        PRODUCT,
        ROWS,
        FLOATS,
        dataclasses.replace(FLOATS, dtype="float16"),
        NORM,
        RopeWriteKvVariant("bfloat16", 64, 16),
        ROPE,
        TWO_WARPS,
        RmsNormVariant("bfloat16", 256, norms_added=True, scales_sums=True),
        GateApartVariant("bfloat16", "gelu"),
        GateMulVariant("bfloat16"),
        Relu2Variant("bfloat16"),
        RouteExpertsVariant(8, 2),
        RouteExpertsVariant(8, 2, has_factors=True),
        dataclasses.replace(DENSE, normalises=False, of_experts=True),
        pytest.param(LargestLogitsVariant(), marks=pytest.mark.slow),  # and all that sample
    ],
    ids=lambda variant: variant.name,
)
def test_a_compiled_kernel_gives_what_the_specification_says(variant):
    case = draw_cases(variant)[0]

    assert case.faults(run_compiled(case)) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant",
    [
        variant
        for name, module in OPERATIONS.items()
        for variant in module.variants(every=not name.startswith("attention"))
    ],
    ids=lambda variant: variant.name,
)
def test_every_compiled_kernel_is_right_and_a_rows_bits_are_its_own(variant):
    for case in draw_cases(variant, seed=1):
        assert check_case(case, run_compiled).faults == ()


@pytest.mark.parametrize(
    ("variant", "kind"),
    [(NORM, "bar.sync"), (TWO_WARPS, "bar.sync"), (PRODUCT, "bar.sync"), (DENSE, "bar.sync")],
)
def test_no_barrier_can_be_left_out(variant, kind):
    case, texts = draw_cases(variant)[0], list(without(text_of(variant), kind))
    assert texts

    for text in texts:
        with pytest.raises(Race, match="line "):
            run_compiled(case, texts={variant.name: text})


@pytest.mark.parametrize(
    ("variant", "pattern", "replacement"),
    [
        (NORM, r"rsqrt\.approx\.ftz", "rcp.approx.ftz"),
        (NORM, r"(cvt\.rn\.bf16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
        (ROPE, r"(st\.global\.v2\.u32.*), \{(.*), (.*)\}", r"\1, {\3, \2}"),
        (ROWS, r"(fma\.rn\.bf16x2 %r\d+, %r\d+), (%r\d+), (%r\d+)", r"\1, \3, \2"),
        (ROWS, r"(lop3\.b32 .*), 0xEA", r"\1, 0xEC"),
        (FLOATS, r"(shf\.r\.wrap\.b32 .*), %r\d+;", r"\1, 5;"),
        (FLOATS, r"fma\.rn\.bf16x2", "fma.rn.f16x2"),
        (PRODUCT, r"(lop3\.b32 .*), 0xEA", r"\1, 0xEC"),
        (DENSE, r"(cvt\.rn\.bf16x2\.f32 %r\d+), (%f\d+), (%f\d+)", r"\1, \3, \2"),
        (DENSE, r"(mma\.\S+ \{[^}]*\}), \{(%r\d+),(%r\d+),", r"\1, {\3,\2,"),
        (DENSE, r"rsqrt\.approx\.ftz", "rcp.approx.ftz"),
        (PRODUCT, r"(mma\.\S+ \{[^}]*\}, \{[^}]*\}), \{(%r\d+),(%r\d+)\}", r"\1, {\3,\2}"),
    ],
)
def test_a_changed_instruction_is_noticed(variant, pattern, replacement):
    case = draw_cases(variant)[0]

    try:
        outputs = run_compiled(case, texts=replaced(variant, pattern, replacement))
    except Fault:
        return
    assert case.faults(outputs)
