"""Kernels that may be launched before what is ahead of them has ended: they wait for it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from bench.gpu.case import Case
from bench.gpu.cases import attention_decode as decode_cases
from bench.gpu.cases import delta_net as delta_net_cases
from bench.gpu.cases import dense_matmul as dense_cases
from bench.gpu.cases import gated_convolution as gated_convolution_cases
from bench.gpu.cases import latent_attention as latent_cases
from bench.gpu.cases import mamba2 as mamba2_cases
from bench.gpu.cases import quantized_matmul as quantized_cases
from bench.gpu.cases.state_rows import Row
from bench.gpu.numerics import draw_cases
from kernels.cuda import (
    add_experts,
    attention_decode_float32,
    attention_decode_tensor,
    attention_shared_float32,
    attention_wide_tensor,
    build,
    cap_logits,
    delta_rule,
    dense_matmul_tensor,
    gate_apart,
    gate_attended,
    gate_mul,
    gated_convolution,
    gated_norm,
    gated_row_norm,
    joint_norms,
    latent_attention_tensor,
    latent_write,
    mamba2_inputs,
    quantized_matmul_tensor,
    relu2,
    rms_norm,
    rope_write_kv,
    route_experts,
    router_logits,
    selective_scan,
    short_convolution,
)
from kernels.cuda.add_experts import AddExpertsVariant
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.cap_logits import CapLogitsVariant
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.disassembly import find_disassembler
from kernels.cuda.fitted_ptx import EARLY_LAUNCHES, fitted
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.gated_convolution import GatedConvolutionVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.latent_attention import LatentDecodeVariant
from kernels.cuda.latent_write import LatentWriteVariant
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.operations import all_variants
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.route_experts import RouteExpertsVariant
from kernels.cuda.router_logits import RouterLogitsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from kernels.cuda.short_convolution import ShortConvolutionVariant
from tests import ptx
from tests.kernels.cuda.compiled import run_compiled, text_of, without
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import TooEarly

GATED = DenseMatmulVariant("bfloat16", 8, "gated", normalises=True)
ADDED = DenseMatmulVariant("bfloat16", 8, "added", panel_rows=16)
MINIMA = QuantizedMatmulVariant("Q4_1", "bfloat16", 8)
DECODE = DecodeVariant("bfloat16", 64, 3, 16)
WIDE_DECODE = DecodeVariant("bfloat16", 256, 4, 16, None, True)
DECODE_OF_512 = WideDecodeVariant("bfloat16", 512, 2, 16)
CONVOLUTION = ShortConvolutionVariant("float16", 96, 64, 3)
DELTA_RULE = DeltaRuleVariant("float16", 96, 64, 3, True)
GATED_CONVOLUTION = GatedConvolutionVariant("bfloat16", 3)
JOINT_NORMS = JointNormsVariant("bfloat16", 5120, 1024)
LATENT_WRITE = LatentWriteVariant("bfloat16", 512, 64, 16)
MAMBA2_INPUTS = Mamba2InputsVariant("bfloat16", 4)
SELECTIVE_SCAN = SelectiveScanVariant(64, 128)
ROW_NORM = GatedRowNormVariant("bfloat16", 8192)
GATED_ROWS = GatedRowNormVariant("bfloat16", 3072, is_normed=False)
LATENT_DECODE = LatentDecodeVariant("bfloat16", 2, 256, 32, 16)
LATENT_FLOAT32 = LatentDecodeVariant("float32", 2, 256, 32, 16)
MODULES = {
    GATED: dense_matmul_tensor,
    ADDED: dense_matmul_tensor,
    MINIMA: quantized_matmul_tensor,
    RmsNormVariant("float32", 256): rms_norm,
    RopeWriteKvVariant("bfloat16", 64, 16): rope_write_kv,
    GateMulVariant("float32"): gate_mul,
    GateApartVariant("bfloat16", "gelu"): gate_apart,
    CapLogitsVariant(): cap_logits,
    Relu2Variant("float32"): relu2,
    RouterLogitsVariant("bfloat16", 8): router_logits,
    RouteExpertsVariant(8, 2): route_experts,
    AddExpertsVariant("float32", 2): add_experts,
    DenseMatmulVariant("bfloat16", 8, "gated", of_experts=True): dense_matmul_tensor,
    QuantizedMatmulVariant("Q4_1", "bfloat16", 8, of_experts=True): quantized_matmul_tensor,
    DECODE: attention_decode_tensor,
    WIDE_DECODE: attention_decode_tensor,
    DecodeVariant("float32", 64, 2, 16): attention_decode_float32,
    DECODE_OF_512: attention_wide_tensor,
    WideDecodeVariant("float32", 512, 2, 16): attention_shared_float32,
    CONVOLUTION: short_convolution,
    DELTA_RULE: delta_rule,
    GATED_CONVOLUTION: gated_convolution,
    GatedNormVariant("float32", 96): gated_norm,
    GateAttendedVariant("bfloat16"): gate_attended,
    JOINT_NORMS: joint_norms,
    LATENT_WRITE: latent_write,
    LATENT_DECODE: latent_attention_tensor,
    LATENT_FLOAT32: attention_shared_float32,
    MAMBA2_INPUTS: mamba2_inputs,
    SELECTIVE_SCAN: selective_scan,
    ROW_NORM: gated_row_norm,
    GATED_ROWS: gated_row_norm,
}
PRODUCTS = {
    GATED: Source(dense_matmul_tensor, "make_dense_matmul", GATED),
    ADDED: Source(dense_matmul_tensor, "make_dense_matmul", ADDED),
    MINIMA: Source(quantized_matmul_tensor, "make_quantized_matmul", MINIMA),
}
ROPE = RopeWriteKvVariant("bfloat16", 64, 16)
READS_EARLY = {
    DECODE: 2, WIDE_DECODE: 2, ROPE: 6, CONVOLUTION: 7, DELTA_RULE: 4, GATED_CONVOLUTION: 11,
    JOINT_NORMS: 4, MAMBA2_INPUTS: 19, SELECTIVE_SCAN: 5, ROW_NORM: 7, GATED_ROWS: 3,
    LATENT_WRITE: 7, LATENT_DECODE: 2, DECODE_OF_512: 2,
}  # fmt: skip
"""A row's length and its first tile's block; position, slot, and two vectors each of two angles; a
token's row, four numbers of that, a head's rate and bias; a row's numbers; a token's row, its
numbers, two vectors each of three weights; the same of four weights and a bias, or of a rate and a
bias; a row's numbers and its head's skip; a token's row, first and last, four vectors of weights,
or none;
position, slot, two vectors each of two angles, one of weights.
"""
LET, WAIT = "griddepcontrol.launch_dependents;", "griddepcontrol.wait;"


def small_case(variant) -> Case:
    """Some warps of a product have nothing to multiply."""
    if getattr(variant, "of_experts", False):
        return draw_cases(variant)[1]
    if isinstance(variant, DenseMatmulVariant):
        return dense_cases.draw_case(variant, 3, variant.panel_outputs + 5, 3, 1, alone=0)
    if isinstance(variant, QuantizedMatmulVariant):
        return quantized_cases.draw_case(variant, 3, 20, 3, 1, alone=0)
    if isinstance(variant, DecodeVariant):
        window = 17 if variant.has_window else None
        return decode_cases.draw_case(variant, (19, 0), num_kv_heads=1, window=window)
    if isinstance(variant, LatentDecodeVariant):
        return latent_cases.draw_decode(variant, (19, 0))
    if isinstance(variant, GatedConvolutionVariant):
        return gated_convolution_cases.draw_case(variant, (Row(3, False, 1, 0),), 64, seed=0)
    if isinstance(variant, Mamba2InputsVariant):
        return mamba2_cases.inputs_case(variant, (Row(3, False, 1, 0),), (8, 32, 32), 0)
    if isinstance(variant, SelectiveScanVariant):
        return mamba2_cases.scan_case(variant, (Row(3, False, 1, 0),), 1, 0)
    if isinstance(variant, DeltaRuleVariant):
        rows = (Row(3, False, 1, 0), Row(1, True, 0, 0))
        return delta_net_cases.layer_case(variant, rows, 0, heads=(1, 2))
    return draw_cases(variant)[0]


@pytest.mark.spread(4)
@pytest.mark.parametrize("variant", MODULES, ids=lambda variant: variant.name)
def test_the_wait_can_not_be_left_out(variant, monkeypatch):
    case = small_case(variant)
    assert case.faults(simulate(case)) == []

    monkeypatch.setattr(MODULES[variant], "wait_for_previous", lambda: None)
    with pytest.raises(TooEarly):
        simulate(case)


@pytest.mark.parametrize("variant", PRODUCTS, ids=lambda variant: variant.name)
def test_threads_that_multiply_nothing_wait_too(variant):
    broken = PRODUCTS[variant].with_replaced(
        "wait_for_previous()\n\n", "if tiles_left > 0:\n                wait_for_previous()\n\n"
    )
    with pytest.raises(TooEarly):
        simulate(small_case(variant), kernels=broken)


@pytest.mark.parametrize("variant", [GATED, MINIMA, ROPE, DECODE], ids=lambda one: one.name)
def test_what_the_compiler_makes_of_it_waits_too(variant):
    case, text = small_case(variant), text_of(variant)

    assert case.faults(run_compiled(case)) == []
    (broken,) = without(text, WAIT)
    with pytest.raises(ptx.TooEarly):
        run_compiled(case, texts={variant.name: broken})


@pytest.mark.wide  # each of them is compiled, where none was kept
def test_every_kernel_that_begins_early_lets_the_next_one_begin_and_waits_once():
    early = [one for one in all_variants(every=False) if one.expectation.begins_early]
    assert {type(one) for one in early} == {type(variant) for variant in MODULES}
    for variant in early:
        text = text_of(variant)
        assert (text.count(LET), text.count(WAIT)) == (1, 1), variant.name


@pytest.mark.spread(4)
@pytest.mark.parametrize("variant", MODULES, ids=lambda variant: variant.name)
def test_products_let_the_next_one_begin_in_their_last_round_and_others_at_once(variant):
    text = text_of(variant)
    assert (text.count(LET), text.count(WAIT)) == (1, 1)
    is_product = isinstance(variant, DenseMatmulVariant | QuantizedMatmulVariant)
    assert (text.index(LET) > text.index(WAIT)) == is_product


@pytest.mark.parametrize("variant", [GATED, MINIMA], ids=lambda variant: variant.name)
def test_a_warp_lets_the_next_one_begin_in_the_last_of_its_rounds(variant, monkeypatch):
    tiles_left = []

    def noted() -> None:
        tiles_left.append(sys._getframe(1).f_locals["tiles_left"])

    monkeypatch.setattr(MODULES[variant], "let_next_begin", noted)
    if variant is GATED:
        case = dense_cases.draw_case(
            variant, 1, variant.panel_outputs, 3 * variant.ring, 0, alone=0
        )
    else:
        spans = 3 * variant.round_spans
        case = quantized_cases.draw_case(variant, 1, variant.panel_outputs, spans, 0, alone=0)

    assert case.faults(simulate(case)) == []

    a_round = variant.ring if variant is GATED else spans * FORMATS["Q4_1"].span_tiles // 3
    assert tiles_left == [a_round] * 32  # one warp has tiles, three rounds of them


@pytest.mark.parametrize("variant", [GATED, MINIMA], ids=lambda variant: variant.name)
def test_text_is_fitted_to_what_the_device_has(variant):
    text = text_of(variant)
    for capability in ((8, 0), (8, 9)):
        without_it = fitted(text, capability)
        assert "griddepcontrol" not in without_it
        assert "prefetch" not in without_it
        assert ".target sm_80" in without_it
    for capability in ((9, 0), (10, 0)):
        with_it = fitted(text, capability)
        assert with_it.replace(".target sm_90", ".target sm_80") == text
    assert fitted(text.replace("griddepcontrol", "// "), (9, 0)).count(".target sm_90") == 1
    plain = "\n".join(line for line in text.splitlines() if "mov" in line)
    assert fitted(plain, (9, 0)) == plain


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        *(GATED, DECODE, WIDE_DECODE, ROPE, CONVOLUTION, DELTA_RULE, GATED_CONVOLUTION),
        *(MAMBA2_INPUTS, SELECTIVE_SCAN, ROW_NORM, LATENT_WRITE, LATENT_DECODE, DECODE_OF_512),
        pytest.param(MINIMA, marks=pytest.mark.slow),
    ],
    ids=lambda one: one.name,
)
def test_the_assembler_reads_nothing_before_the_wait_but_constants_and_what_a_step_is_given(
    variant, tmp_path
):
    if find_disassembler() is None:
        pytest.skip("no nvdisasm")
    cubin, _ = build.link(variant.name, text_of(variant), EARLY_LAUNCHES)
    (tmp_path / "cubin").write_bytes(cubin)
    command = [str(find_disassembler()), "-c", str(tmp_path / "cubin")]
    listing = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    before, wait, behind = listing.partition("ACQBULK")
    assert wait
    assert "PREEXIT" in (behind if variant in PRODUCTS else before)
    ordinary = [one for one in re.findall(r"LDG\S+", before) if "CONSTANT" not in one]
    assert len(ordinary) == READS_EARLY.get(variant, 0)
    assert not re.search(r"STG|ATOM|RED\.", before)
    assert re.search(r"LDG\.E\S*(?<!CONSTANT)\s", behind)  # x
