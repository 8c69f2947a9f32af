"""Weights of norms that are 1 more than what is stored: 16 bits would not hold their sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.weight_plan import QuantizedUses
from compute_plane.model.quantize import converted_tensor
from compute_plane.model.tensor import TensorFormat
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import raw_tensor

SPEC = replace(tiny_spec(), architecture="gemma3", head_dim=64, hidden_size=64)


def test_what_is_added_is_added_in_float32_whatever_the_formats_are():
    stored = np.array([2**-9, -(2**-9), 0.5, 3.0], dtype=np.float32)
    for kind, digits in ((TensorFormat.F32, 24), (TensorFormat.BF16, 8)):
        for held in (TensorFormat.F32, TensorFormat.BF16):
            tensor = replace(raw_tensor("norm", stored, held), added=1.0)
            rows = converted_tensor(tensor, kind)
            bits = rows.view("<u2").astype(np.uint32) << 16 if digits == 8 else rows.view("<u4")
            found = bits.reshape(-1).view(np.float32)
            np.testing.assert_allclose(found, stored + 1, rtol=2.0**-digits)
            if digits == 24:
                assert found.tolist() == (stored + 1).tolist()


def test_a_step_of_16_bits_has_them_in_float32_and_kernels_that_read_them_so():
    plan = tiny_plan(SPEC, torch.bfloat16)
    weights = plan.place(torch.device("cpu"))
    assert weights.dtype == torch.bfloat16
    (layer, *_) = weights.layers
    assert layer.output_norms is not None
    assert layer.mixer.head_norms is not None
    norms = (
        layer.attn_norm, layer.mlp_norm, weights.final_norm,
        *layer.output_norms, *layer.mixer.head_norms,
    )  # fmt: skip
    assert {norm.dtype for norm in norms} == {torch.float32}
    assert plan.num_bytes == weights.num_bytes

    operations = KernelOperations(SimulatedLauncher(runs=False), SPEC, "bfloat16", 16)
    variants = operations.variants
    of_norms = [v for v in variants if v.name.startswith("rms_norm")]
    assert {v.weight_dtype for v in of_norms} == {"float32"}
    assert [v.norm_dtype for v in variants if v.name.startswith("rope")] == ["float32"]


def test_whatever_gates_does_so_by_the_models_activation():
    uses = QuantizedUses(layers=frozenset({"Q8_0"}), gates=frozenset({"Q8_0"}))
    for spec, activation in ((SPEC, "gelu"), (replace(SPEC, architecture="qwen3"), "silu")):
        made = KernelOperations(SimulatedLauncher(runs=False), spec, "bfloat16", 16, uses)
        gating = [
            v for v in made.variants
            if hasattr(v, "activation") and getattr(v, "gates", hasattr(v, "in_turns"))
        ]  # fmt: skip
        kinds = {type(variant).__name__ for variant in gating}
        assert kinds == {"GateMulVariant", "DenseMatmulVariant", "QuantizedMatmulVariant"}
        assert {variant.activation for variant in gating} == {activation}


def test_a_step_of_32_bits_and_other_models_have_norms_of_the_steps_dtype():
    whole = KernelOperations(SimulatedLauncher(runs=False), SPEC, "float32", 16)
    other = replace(SPEC, architecture="qwen3")
    half = KernelOperations(SimulatedLauncher(runs=False), other, "bfloat16", 16)
    for variant in (*whole.variants, *half.variants):
        assert "float32_weights" not in variant.name
        assert "float32_norms" not in variant.name
    (layer, *_) = tiny_plan(other, torch.bfloat16).place(torch.device("cpu")).layers
    assert layer.attn_norm.dtype == torch.bfloat16
