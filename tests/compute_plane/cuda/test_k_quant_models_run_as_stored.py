"""Models of five bits and K-quants on the device: nothing is lost, whatever their files mix."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cuda.matrices import QuantizedMatrix
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cuda.k_quant_layout import BLOCK_BYTES
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.reference.quantized_matmul import dequantized
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import logits_of
from tests.compute_plane.cuda.test_quantised_weights_stay_so import executor, generated
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec

CPU = torch.device("cpu")
SPEC = replace(
    tiny_spec(head_dim=64), num_layers=2, num_heads=4, hidden_size=256, intermediate_size=512
)
MIXTURE = replace(SPEC, architecture="mixtral", mixture=Mixture(5, 2), intermediate_size=256)
Q4_K_M = {"embed": "Q6_K", "v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"}
"""What the names of its tensors contain → formats, as llama.cpp makes files of it."""
Q5_K_M = Q4_K_M | {"": "Q5_K"}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.3, "float16": 0.08}
"""Of logits of a size of some 2, by the dtype of a step, which rounds what is between products:
decoded to float16 they differ by up to 0.04, to bfloat16 by up to 0.19."""


def formats(labels: dict[str, str]) -> dict[str, TensorFormat]:
    return {part: TensorFormat[label] for part, label in labels.items()}


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("spec", "labels", "dtype"),
    [
        *((SPEC, Q4_K_M, dtype) for dtype in TOLERANCES),
        (SPEC, Q5_K_M, "float32"),
        (SPEC, {"": "Q5_0", "down": "Q5_1"}, "float32"),
        (SPEC, {"": "Q3_K"}, "float32"),
        (MIXTURE, Q4_K_M, "float32"),  # in 16 bits another expert may be chosen
    ],
    ids=lambda value: value.get("", "") if isinstance(value, dict) else str(value)[:8],
)
def test_logits_and_text_are_those_of_the_decoded_weights(
    spec: ModelSpec, labels: dict[str, str], dtype: str
) -> None:
    model = tiny_model(spec, formats(labels))
    plans = (
        plan_weights(spec, model.source, dtype),
        plan_weights(spec, model.source, "float32", "float32"),
    )
    assert plans[0].is_quantised
    assert not plans[1].is_quantised

    found, expected = (generated(executor(spec, plan.place(CPU)), PROMPTS, 6) for plan in plans)

    if dtype == "float32":
        assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCES[dtype])
        if found[0] != expected[0]:
            break  # from here on texts differ, and logits with them


@pytest.mark.spread(5)
@pytest.mark.parametrize("label", BLOCK_BYTES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_kept_as_it_is(label: str, tied: bool) -> None:
    spec = replace(SPEC, tie_embeddings=tied)
    labels = {"": TensorFormat[label]}
    source, plan = tiny_model(spec, labels).source, tiny_plan(spec, torch.bfloat16, labels)
    placed = plan.place(CPU)
    uses = plan.quantized

    assert uses.layers == uses.lm_head == uses.embedding == uses.gates == {label}
    assert (plan.weight_format, placed.conversions) == (label, ())
    assert plan.weight_format == pack_weights(spec, source).weight_format
    (head,) = placed.lm_head.parts
    assert (head is placed.embedding) == tied
    for name, matrix in (
        (layout.EMBEDDING, placed.embedding),
        (layout.layer_tensor(0, layout.DOWN), placed.layers[0].feedforward.down.parts[0]),
    ):
        assert isinstance(matrix, QuantizedMatrix)
        shape = matrix.num_outputs, matrix.num_inputs
        found = np.empty(shape, np.float32)
        parts = unpack_matrix(matrix.format, matrix.packed.numpy(), *shape)
        dequantized(*parts.operands, found)
        np.testing.assert_array_equal(found, source.tensor(name).to_float32())
    assert plan.num_bytes == placed.num_bytes


def test_a_file_takes_hardly_more_memory_than_it_has_bytes() -> None:
    plan = tiny_plan(SPEC, torch.bfloat16, formats(Q4_K_M))
    stored = sum(
        tensor.stored.shape[0] * tensor.stored.shape[1]
        for tensor, target in plan._matrices()
        if tensor.format is target
    )
    assert stored < sum(m.num_bytes for m in plan._everything() if m.is_quantised) < 1.04 * stored


@pytest.mark.parametrize(
    ("label", "at"), [("Q4_K", 0), ("Q4_K", 2), ("Q5_K", 2), ("Q6_K", 208), ("Q5_1", 2)]
)
def test_a_number_that_is_none_is_the_files_fault(label: str, at: int) -> None:
    model = tiny_model(SPEC, {"": TensorFormat[label]})
    tensor = model.source.tensor(layout.layer_tensor(1, layout.DOWN))
    assert isinstance(tensor, RawTensor)
    stored = tensor.stored
    assert isinstance(stored, np.ndarray)
    stored[2, at : at + 2] = np.float16([np.inf]).view(np.uint8)
    with pytest.raises(ModelFileError, match=r"tensor model\.layers\.1\S*down_proj\S* holds"):
        plan_weights(SPEC, model.source, "bfloat16").place(CPU)


@pytest.mark.slow  # minutes each
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
def test_kernels_give_what_the_reference_operations_give(has_experts: bool, dtype: str) -> None:
    spec = replace(
        tiny_spec(), vocab_size=41, num_layers=1, num_heads=4, num_kv_heads=1, head_dim=64,
        hidden_size=256, intermediate_size=256,
    )  # fmt: skip
    if has_experts:
        spec = replace(spec, architecture="mixtral", mixture=Mixture(5, 2))
    labels = formats(Q4_K_M)
    launcher = SimulatedLauncher()
    found = logits_of(spec, labels, dtype, launcher)
    expected = logits_of(spec, labels, dtype, None)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)
    names = {name for name, _ in launcher.launched}
    kind = "quantized_experts" if has_experts else "quantized_matmul"
    assert f"{kind}_q4_k_{dtype}_m8_gated" in names
    assert f"{kind}_q6_k_{dtype}_m8" in names
