"""Quantised weights on the device: planned by format, packed, and models computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cuda.block_pools import BlockPools
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.matrices import DenseMatrix, Matrix, QuantizedMatrix
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import RUNS_AS, WeightPlan, plan_weights
from compute_plane.cuda.weights import DTYPES, DeviceWeights
from compute_plane.executor.registry import build_executor
from compute_plane.model import layout
from compute_plane.model.errors import ModelFileError
from compute_plane.model.loader import LoadedModel, load_model
from compute_plane.model.source import DEFAULT
from compute_plane.model.tensor import RawTensor, TensorFormat, TensorSource
from kernels.cuda.quantized_formats import GATE_TURN
from kernels.cuda.quantized_layout import pack_rows, unpack_matrix
from planes.errors import ConfigError
from tests.compute_plane.cuda.test_cuda_plane_on_the_cpu import context
from tests.compute_plane.cuda.torch_executors import tiny_model, tiny_plan
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence

CPU = torch.device("cpu")
SPEC = tiny_spec(quantisable=True)
MIXED = {
    "v_proj": TensorFormat.Q8_0,
    "o_proj": TensorFormat.Q8_0,
    "up_proj": TensorFormat.BF16,
    "embed": TensorFormat.Q8_0,
    "": TensorFormat.Q4_1,
}
"""What the names of its tensors contain → formats of a file."""
NUM_BLOCKS, BLOCK_SIZE = 60, 4


def executor(spec, weights: DeviceWeights) -> CudaExecutor:
    pools = BlockPools(
        spec, CpuDriver(), dtype=weights.dtype, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
    )
    return CudaExecutor(spec, weights, pools, ReferenceOperations(), CpuDriver(), keep_logits=True)


def generated(made: CudaExecutor, prompts: list[list[int]], count: int) -> tuple[list, list]:
    """Return greedy tokens of prompts, and the logits of every step."""
    logits = []

    class Watching:
        def execute(self, batch):
            output = made.execute(batch)
            logits.append(output.logits)
            return output

    driver = BatchDriver(Watching(), num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]
    return driver.generate([DrivenSequence(list(p)) for p in prompts], count), logits


def decoded_too(model: LoadedModel) -> tuple[WeightPlan, WeightPlan]:
    """Return the plans of a model as it is stored, and decoded to float32."""
    spec, source = model.spec, model.source
    return plan_weights(spec, source, "float32"), plan_weights(spec, source, "float32", "float32")


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_mixed_formats_gives_the_logits_and_tokens_of_its_decoded_weights(
    tied: bool,
) -> None:
    model = tiny_model(replace(SPEC, tie_embeddings=tied), MIXED)
    packed, decoded = decoded_too(model)
    prompts = [[3, 1, 4, 1, 5], [9, 2]]
    found, expected = (
        generated(executor(model.spec, plan.place(CPU)), prompts, 6) for plan in (packed, decoded)
    )
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.wide
@pytest.mark.model
def test_the_embedded_model_gives_the_logits_and_tokens_of_its_decoded_weights() -> None:
    model = load_model(DEFAULT)
    model = replace(model, spec=replace(model.spec, num_layers=2))
    packed, decoded = decoded_too(model)
    assert packed.weight_format == "Q8_0, Q4_1"  # the embedding is the larger part
    assert packed.num_bytes < decoded.num_bytes / 3
    prompts = [[504, 3575, 282, 4649, 314], [28]]
    found, expected = (
        generated(executor(model.spec, plan.place(CPU)), prompts, 3) for plan in (packed, decoded)
    )
    assert found[0] == expected[0]
    for one, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-3)


def test_what_reads_the_same_input_is_one_matrix_for_each_run_of_equal_formats() -> None:
    weights = tiny_plan(SPEC, torch.bfloat16, MIXED).place(CPU)
    layer = weights.layers[0]
    queries, keys_values = SPEC.query_size, SPEC.kv_size
    assert shapes(layer.mixer.qkv.parts) == [
        ("Q4_1", queries + keys_values, SPEC.hidden_size),
        ("Q8_0", keys_values, SPEC.hidden_size),
    ]
    assert shapes(layer.feedforward.gate_up.parts) == [
        ("Q4_1", SPEC.intermediate_size, SPEC.hidden_size),
        ("bfloat16", SPEC.intermediate_size, SPEC.hidden_size),
    ]
    assert shapes(layer.mixer.o.parts) == [("Q8_0", SPEC.hidden_size, queries)]
    assert shapes([weights.embedding]) == [("Q8_0", SPEC.vocab_size, SPEC.hidden_size)]
    assert shapes(weights.lm_head.parts) == [("Q4_1", SPEC.vocab_size, SPEC.hidden_size)]
    same = tiny_plan(SPEC, torch.bfloat16, {"": TensorFormat.Q4_0}).place(CPU)
    assert [len(same.layers[1].mixer.qkv.parts), len(same.layers[1].feedforward.gate_up.parts)] == [
        1,
        1,
    ]


def shapes(parts: list[Matrix] | tuple[Matrix, ...]) -> list[tuple[str, int, int]]:
    found = []
    for part in parts:
        if isinstance(part, QuantizedMatrix):
            found.append((part.format, part.num_outputs, part.num_inputs))
        else:
            found.append((str(part.values.dtype).removeprefix("torch."), *part.values.shape))
    return found


def test_a_joined_matrix_is_packed_as_its_rows_lie_in_the_file() -> None:
    model = tiny_model(SPEC, MIXED)
    (matrix, _) = tiny_plan(SPEC, torch.float16, MIXED).place(CPU).layers[1].mixer.qkv.parts
    assert isinstance(matrix, QuantizedMatrix)
    tensors = [
        model.source.tensor(layout.layer_tensor(1, role)) for role in (layout.QUERY, layout.KEY)
    ]
    rows = np.concatenate([tensor.rows() for tensor in tensors])
    np.testing.assert_array_equal(matrix.packed.numpy(), pack_rows("Q4_1", rows, SPEC.hidden_size))
    parts = unpack_matrix("Q4_1", matrix.packed.numpy(), *shapes([matrix])[0][1:])
    values = np.concatenate([tensor.to_float32() for tensor in tensors])
    scales, minima = (
        np.repeat(n.astype(np.float32), 32, axis=1) for n in (parts.scales, parts.minima)
    )
    np.testing.assert_array_equal(parts.quants * scales + minima, values)


def test_a_gate_lies_in_turns_with_what_it_gates() -> None:
    formats = {"": TensorFormat.Q4_1}
    source, plan = tiny_model(SPEC, formats).source, tiny_plan(SPEC, torch.float16, formats)
    gate_up = plan.place(CPU).layers[0].feedforward.gate_up.gate_in_turns
    assert gate_up is not None
    assert plan.quantized.gates == {"Q4_1"}
    gate, up = (
        source.tensor(layout.layer_tensor(0, role)).rows() for role in (layout.GATE, layout.UP)
    )
    rows = np.concatenate(
        [
            part[first : first + GATE_TURN]
            for first in range(0, SPEC.intermediate_size, GATE_TURN)
            for part in (gate, up)
        ]
    )
    packed = pack_rows("Q4_1", rows, SPEC.hidden_size)
    np.testing.assert_array_equal(gate_up.packed.numpy(), packed)


def test_a_gate_that_is_no_whole_turns_lies_before_what_it_gates() -> None:
    spec = replace(SPEC, intermediate_size=104)
    formats = {"gate_proj": TensorFormat.Q8_0, "up_proj": TensorFormat.Q8_0}
    plan = tiny_plan(spec, torch.float16, formats)
    gate_up = plan.place(CPU).layers[0].feedforward.gate_up
    assert shapes(gate_up.parts) == [("Q8_0", 208, SPEC.hidden_size)]
    assert gate_up.gate_in_turns is None
    assert not plan.quantized.gates


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_a_plan_are_those_that_are_taken(tied: bool, dtype: str) -> None:
    plan = tiny_plan(replace(SPEC, tie_embeddings=tied), DTYPES[dtype], MIXED)
    weights = plan.place(CPU)
    tensors = [weights.final_norm]
    matrices = [weights.embedding, *weights.lm_head.parts]
    for layer in weights.layers:
        tensors += [layer.attn_norm, layer.mlp_norm]
        for projection in (
            layer.mixer.qkv,
            layer.mixer.o,
            layer.feedforward.gate_up,
            layer.feedforward.down,
        ):
            matrices += projection.parts
    tensors += [
        m.values if isinstance(m, DenseMatrix) else m.packed for m in dict.fromkeys(matrices)
    ]
    assert weights.num_bytes == plan.num_bytes == sum(tensor.nbytes for tensor in tensors)
    assert {tensor.dtype for tensor in tensors} == {DTYPES[dtype], torch.uint8}
    assert (weights.embedding in weights.lm_head.parts) == tied


@dataclass(frozen=True)
class Relabelled:
    """A source whose matrices say they are of a format; nobody reads them."""

    source: TensorSource
    format: TensorFormat

    @property
    def names(self) -> Sequence[str]:
        return self.source.names

    def tensor(self, name: str) -> RawTensor:
        tensor = self.source.tensor(name)
        return tensor if "norm" in name else replace(tensor, format=self.format)

    def forget_pages(self) -> None:
        pass


@pytest.mark.parametrize("stored", RUNS_AS)
def test_a_format_without_a_kernel_runs_as_the_nearest_that_has_one(stored: TensorFormat) -> None:
    source = Relabelled(tiny_model(SPEC).source, stored)
    (planned,) = plan_weights(SPEC, source, "bfloat16").layers[0].feedforward.down
    expected = {"F32": "BF16", "F16": "BF16", "Q3_K": "Q6_K"}
    expected |= dict.fromkeys(("Q2_K", "IQ4_NL", "IQ4_XS"), "Q8_0")
    expected |= {"INT4": "Q4_0", "UINT4": "Q4_Z", "INT8": "Q8_0", "UINT8": "Q8_Z"}
    assert planned.target.label == expected.get(stored.label, stored.label)


def test_a_dtype_that_is_named_decodes_everything() -> None:
    model = tiny_model(SPEC, MIXED)
    plan = plan_weights(SPEC, model.source, "float16", "float16")
    assert not plan.is_quantised
    assert plan.weight_format == "Q4_1 as F16, Q8_0 as F16, BF16 as F16"
    head = plan.place(CPU).lm_head.parts[0]
    assert isinstance(head, DenseMatrix)
    values = model.source.tensor(layout.LM_HEAD).to_float32()
    assert head.values.equal(torch.from_numpy(values).half())


def test_what_runs_in_another_format_than_the_file_s_is_told_with_its_loss() -> None:
    weights = tiny_plan(SPEC, torch.bfloat16, {"down_proj": TensorFormat.F32} | MIXED).place(CPU)
    (told,) = weights.conversions
    assert (told.stored, told.runs_as, told.num_matrices) == ("F32", "BF16", SPEC.num_layers)
    assert 1e-4 < told.relative_error < 4e-3
    matrix_bytes = 2 * SPEC.hidden_size * SPEC.intermediate_size
    assert told.num_bytes == SPEC.num_layers * matrix_bytes  # norms are converted too, not counted


def test_the_plane_says_what_the_weights_are(tmp_path: Path) -> None:
    wants = context(tmp_path, spec=SPEC, model=tiny_model(SPEC, {"": TensorFormat.Q4_0}))
    built = build_executor("cuda", wants)
    assert built.dtype == "Q4_0"
    assert "/float32/Q4_0/kv-float32-4" in built.numerics_id
    decoded = build_executor("cuda", replace(wants, dtype="bfloat16"))
    assert decoded.dtype == "bfloat16"
    assert "/bfloat16/Q4_0 as BF16/kv-bfloat16-4" in decoded.numerics_id
    assert built.weights_bytes < decoded.weights_bytes / 3


def test_weights_are_refused_by_the_bytes_that_they_really_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wants = context(tmp_path, spec=SPEC, model=tiny_model(SPEC, {"": TensorFormat.Q4_0}))
    needed = tiny_plan(SPEC, torch.float32, {"": TensorFormat.Q4_0}).num_bytes
    monkeypatch.setattr("compute_plane.cuda.build.available_memory_bytes", lambda: needed)
    build_executor("cuda", wants)
    monkeypatch.setattr("compute_plane.cuda.build.available_memory_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="its weights need") as info:
        build_executor("cuda", wants)
    assert info.value.field == "model"


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, "bfloat16", "holds nan at row 2, column 3"),
        (1e6, "float16", "too large for F16"),
    ],
)
def test_a_weight_that_the_format_cannot_hold_is_the_file_s_fault(
    value: float, dtype: str, message: str
) -> None:
    model = tiny_model(SPEC)
    stored = model.source.tensor(layout.layer_tensor(1, layout.DOWN)).stored
    stored.view(np.float32)[2, 3] = value
    with pytest.raises(ModelFileError, match=message):
        plan_weights(SPEC, model.source, dtype).place(CPU)
