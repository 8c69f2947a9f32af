"""Models of float8 on the device: nothing is lost, whatever a matrix is multiplied by."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cpu.packed_weights import pack_weights
from compute_plane.cuda import weight_plan
from compute_plane.cuda.matrices import QuantizedMatrix
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.executor.registry import build_executor
from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError
from compute_plane.model.group_blocks import BLOCK, block_type
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.cuda.quantized_layout import unpack_matrix
from kernels.reference.quantized_matmul import dequantized
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import logits_of
from tests.compute_plane.cuda.test_a_cut_model_says_what_its_weights_run_as import cut_in_two
from tests.compute_plane.cuda.test_cuda_plane_on_the_cpu import context
from tests.compute_plane.cuda.test_quantised_weights_stay_so import executor, generated
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import ArraySource
from tests.compute_plane.executor.tiny_weights import tiny_weights

CPU = torch.device("cpu")
FP8 = TensorFormat.FP8
FLOAT8 = {"": FP8}
SPEC = tiny_spec(quantisable=True)
WIDE = replace(SPEC, num_layers=1, num_heads=8, hidden_size=128, intermediate_size=384)
"""Its groups have 128 inputs; those of the other 32."""
MIXTURE = replace(SPEC, architecture="mixtral", mixture=Mixture(5, 2))
PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
TOLERANCES = {"float32": 2e-5, "bfloat16": 0.05, "float16": 0.006}
"""Of logits of a size of some 1, by the dtype of a step."""


class InBlocks(ArraySource):
    """A model of float8 of which nobody says that more than 32 weights share a scale."""

    def tensor(self, name: str) -> RawTensor:
        return replace(super().tensor(name), scale_group=32)


def error_of(spec: ModelSpec, dtype: str) -> tuple[float, bool]:
    """Return how far logits are from those of the weights in float32, and whether text is theirs.

    The distance is the root of the mean squared one.
    """
    source = InBlocks(spec, tiny_weights(spec), FLOAT8)
    if weight_plan.RUNS_AS[FP8] is FP8:
        source = ArraySource(spec, tiny_weights(spec), FLOAT8)
    plans = plan_weights(spec, source, dtype), plan_weights(spec, source, "float32", "float32")
    found, expected = (generated(executor(spec, plan.place(CPU)), PROMPTS, 6) for plan in plans)
    pairs = zip(found[1], expected[1], strict=True)
    squares = [np.square(one - other).mean() for one, other in pairs]
    return float(np.sqrt(np.mean(squares))), found[0] == expected[0]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        *((spec, dtype) for spec in (SPEC, WIDE) for dtype in TOLERANCES),
        (MIXTURE, "float32"),  # in 16 bits another expert may be chosen
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.hidden_size),
)
def test_logits_and_text_are_those_of_the_weights_that_are_meant(
    spec: ModelSpec, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, is_same = error_of(spec, dtype)
    monkeypatch.setattr(weight_plan, "RUNS_AS", {**weight_plan.RUNS_AS, FP8: TensorFormat.Q8_0})
    requantised, _ = error_of(spec, dtype)

    assert error < TOLERANCES[dtype]
    assert is_same
    assert error < requantised / (100 if dtype == "float32" else 1)


@pytest.mark.parametrize(("spec", "label"), [(SPEC, "FP8"), (WIDE, "FP8_G128")])
@pytest.mark.parametrize("tied", [False, True])
def test_every_matrix_is_kept_as_it_is(spec: ModelSpec, label: str, tied: bool) -> None:
    spec = replace(spec, tie_embeddings=tied)
    source, plan = tiny_model(spec, FLOAT8).source, tiny_plan(spec, torch.bfloat16, FLOAT8)
    placed = plan.place(CPU)
    uses = plan.quantized

    assert uses.layers == uses.lm_head == uses.embedding == uses.gates == {label}
    assert (plan.weight_format, placed.conversions) == ("FP8", ())
    (head,) = placed.lm_head.parts
    assert (head is placed.embedding) == tied
    for name, matrix in (
        (layout.EMBEDDING, placed.embedding),
        (layout.layer_tensor(0, layout.DOWN), placed.layers[0].feedforward.down.parts[0]),
    ):
        assert isinstance(matrix, QuantizedMatrix)
        shape = matrix.num_outputs, matrix.num_inputs
        parts = unpack_matrix(matrix.format, matrix.packed.numpy(), *shape)
        found = np.empty(shape, np.float32)
        dequantized(*parts.operands, found)
        np.testing.assert_array_equal(found, source.tensor(name).to_float32())
    assert plan.num_bytes == placed.num_bytes


def test_columns_that_are_sorted_stay_so() -> None:
    """Of `o` rows are sorted before they meet it, of `down` before any step."""
    source = ArraySource(SPEC, tiny_weights(SPEC), FLOAT8, {"o_proj": 2, "down": 1})
    plans = plan_weights(SPEC, source, "float32"), plan_weights(SPEC, source, "float32", "float32")
    found, expected = (generated(executor(SPEC, plan.place(CPU)), PROMPTS, 4) for plan in plans)
    assert plans[0].is_quantised
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_float_dtypes_convert_and_the_cpu_engine_has_eight_bits(tmp_path: Path) -> None:
    model = tiny_model(SPEC, FLOAT8)
    assert pack_weights(SPEC, model.source).weight_format == "FP8 as Q8_0"
    wants = context(tmp_path, spec=SPEC, model=model)
    built = build_executor("cuda", wants)
    assert built.dtype == "FP8"
    assert "/float32/FP8/kv-float32-4" in built.numerics_id
    decoded = build_executor("cuda", replace(wants, dtype="float32"))
    assert decoded.dtype == "float32"
    assert built.weights_bytes < decoded.weights_bytes / 3


def test_layers_on_the_host_have_eight_bits() -> None:
    assert cut_in_two({"": "FP8"}).dtype == "FP8, FP8 as Q8_0"


@pytest.mark.parametrize(
    ("code", "scale", "message"),
    [
        (0x7F, 1.0, r"tensor model\.layers\.1\S*down_proj\S* holds nan at row 2, column 35"),
        (0xFF, 1.0, "holds nan at row 2, column 35"),
        (0x7E, np.nan, "holds nan at row 2, column 32"),
        (0x7E, 1e36, "holds inf at row 2, column 35"),
        (0x01, 1e36, "has weights too large for FP8"),
    ],
)
def test_what_is_no_number_is_the_files_fault(code: int, scale: float, message: str) -> None:
    model = tiny_model(SPEC, FLOAT8)
    tensor = model.source.tensor(layout.layer_tensor(1, layout.DOWN))
    stored = tensor.stored
    assert isinstance(tensor, RawTensor)
    assert isinstance(stored, np.ndarray)
    block = stored.reshape(len(stored), -1, 4 + BLOCK)[2, 1]
    blocks = block.view(block_type(8, has_zeros=False))
    if scale != 1:
        blocks["q"] = 0
        blocks["s"] = scale
    blocks["q"][0, 3] = code
    with pytest.raises(ModelFileError, match=message):
        plan_weights(SPEC, model.source, "bfloat16").place(CPU)


@pytest.mark.parametrize(
    ("has_experts", "dtype"),
    [
        pytest.param(False, "float16", marks=pytest.mark.wide),
        pytest.param(True, "bfloat16", marks=pytest.mark.wide),
        pytest.param(False, "bfloat16", marks=pytest.mark.slow),  # a minute each
        pytest.param(True, "float16", marks=pytest.mark.slow),
    ],
)
def test_kernels_give_what_the_reference_operations_give(has_experts: bool, dtype: str) -> None:
    spec = replace(
        tiny_spec(), vocab_size=41, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64,
        hidden_size=32, intermediate_size=128,
    )  # fmt: skip
    if has_experts:
        spec = replace(spec, architecture="mixtral", mixture=Mixture(5, 2))
    launcher = SimulatedLauncher()
    found = logits_of(spec, FLOAT8, dtype, launcher)
    expected = logits_of(spec, FLOAT8, dtype, None)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=0.05)
    names = {name for name, _ in launcher.launched}
    assert any("fp8" in name for name in names)
    kind = "quantized_experts" if has_experts else "quantized_matmul"
    assert f"{kind}_fp8_{dtype}_m8_gated" in names
    assert f"{kind}_fp8_g128_{dtype}_m8" in names
