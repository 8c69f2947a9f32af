"""The kernels for quantised weights: which is taken when, and a model on them in the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.gpu.cases.quantized_matmul import draw_matrix
from compute_plane.cuda import quantized_kernels
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.matrices import QuantizedMatrix
from compute_plane.cuda.quantized_kernels import QuantizedKernels
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import QuantizedUses
from compute_plane.errors import DeviceUnavailableError
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from kernels.cuda.quantized_formats import FORMATS
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_strands import most_rows_of
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import RecordingDriver, tiny_plan, torch_executor
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(
    tiny_spec(), vocab_size=41, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64,
    hidden_size=32, intermediate_size=32,
)  # fmt: skip
NUM_BLOCKS, BLOCK_SIZE = 12, 16
EVERYTHING = {"v_proj": TensorFormat.Q8_0, "": TensorFormat.Q4_1}
NOT_THE_WIDEST = {"q_proj": TensorFormat.F32, "k_proj": TensorFormat.F32} | EVERYTHING


def drawn(label: str, num_outputs: int, num_inputs: int) -> QuantizedMatrix:
    """Return a matrix of small weights."""
    num_spans = num_inputs // FORMATS[label].span
    matrix = draw_matrix(np.random.default_rng(num_outputs), label, num_outputs, num_spans)
    packed = torch.from_numpy(pack_matrix(label, matrix))
    return QuantizedMatrix(label, packed, num_outputs, num_inputs)


def rows_of(num_rows: int, num_inputs: int) -> torch.Tensor:
    values = np.random.default_rng(0).standard_normal((num_rows, num_inputs), dtype=np.float32)
    return torch.from_numpy(values).bfloat16()


def kernels_for(
    matrix: QuantizedMatrix, launcher: SimulatedLauncher, dtype: str = "bfloat16"
) -> QuantizedKernels:
    label, num_outputs = frozenset([matrix.format]), matrix.num_outputs
    gates = label if matrix.in_turns else frozenset[str]()
    uses = QuantizedUses(
        label, label, label, gates, label, num_outputs, num_outputs * matrix.num_inputs
    )
    made = QuantizedKernels(launcher, dtype, uses, "silu")
    launcher.prepare(made.variants)
    return made


def products(
    made: QuantizedKernels,
    matrix: QuantizedMatrix,
    x: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a product between other columns, which are NaN, by kernels and by the reference."""
    found, expected = (
        torch.full((len(x), matrix.num_outputs + 5), torch.nan, dtype=dtype) for _ in range(2)
    )
    made.matmul(found, x, matrix, 3, bias)
    ReferenceOperations().quantized_matmul(expected, x, matrix, 3, bias)
    return found, expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    matrix, launcher = drawn("Q4_0", 40, 64), SimulatedLauncher()
    found, expected = products(kernels_for(matrix, launcher), matrix, rows_of(3, 64), dtype)
    tolerance = {"atol": 1e-5, "rtol": 0} if dtype == torch.float32 else {"atol": 0, "rtol": 2**-7}
    torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
    assert len(launcher.launched) == 1


def test_rows_of_float16_are_multiplied_in_float16() -> None:
    matrix, launcher = drawn("Q4_0", 40, 64), SimulatedLauncher()
    made = kernels_for(matrix, launcher, "float16")
    found, expected = products(made, matrix, rows_of(3, 64).half(), torch.float16)
    torch.testing.assert_close(found, expected, equal_nan=True, atol=0, rtol=2**-10)
    assert [name for name, _ in launcher.launched] == ["quantized_matmul_q4_0_float16_m8"]


@pytest.mark.parametrize(
    ("label", "dtype"),
    [("Q8_0", torch.bfloat16), ("Q8_Z_G64", torch.float32), ("FP8", torch.bfloat16)],
)
def test_many_rows_are_multiplied_with_unpacked_weights_a_run_of_panels_at_a_time(
    label: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_kernels, "SCRATCH_BYTES", 2 * 64 * 50)  # 50 rows: one panel
    matrix, launcher = drawn(label, 70, 64), SimulatedLauncher()
    x = rows_of(most_rows_of(label) + 1, 64)
    found, expected = products(kernels_for(matrix, launcher), matrix, x, dtype)
    torch.testing.assert_close(found, expected, equal_nan=True, atol=0.03, rtol=0.01)
    unpacking = f"quantized_rows_{label.lower()}_bfloat16"
    assert [name for name, _ in launcher.launched] == [unpacking] * 3


@pytest.mark.parametrize("num_rows", [3, 129])
def test_a_bias_is_added_however_many_rows_there_are(num_rows: int) -> None:
    matrix, launcher = drawn("Q8_0", 40, 64), SimulatedLauncher()
    bias = 3 * rows_of(1, 40)[0]
    made, x = kernels_for(matrix, launcher), rows_of(num_rows, 64)
    found, expected = products(made, matrix, x, torch.bfloat16, bias)
    torch.testing.assert_close(found, expected, equal_nan=True, atol=0.03, rtol=0.01)
    names = ["quantized_matmul_q8_0_bfloat16_m8_biased"]
    if num_rows > most_rows_of("Q8_0"):
        names = ["quantized_rows_q8_0_bfloat16"]
    assert [name for name, _ in launcher.launched] == names


@pytest.mark.parametrize(
    ("label", "most"),
    [("Q4_0", 256), ("Q4_1", 224), ("Q8_0", 128), ("Q4_0_G128", 256), ("Q4_Z", 224),
     ("Q4_Z_G128", 256), ("Q8_Z", 128), ("Q8_Z_G128", 128), ("FP8", 128), ("FP8_G128", 128)],
)  # fmt: skip
def test_the_kernel_is_taken_as_long_as_it_moves_fewer_bytes(label: str, most: int) -> None:
    assert most_rows_of(label) == most


def test_a_kernel_is_chosen_by_rows_and_by_what_is_written() -> None:
    matrix, launcher = drawn("Q8_0", 70, 64), SimulatedLauncher(runs=False)
    made = kernels_for(matrix, launcher)
    for num_rows in (1, 8, 9, 17, 128):
        made.matmul(torch.empty(num_rows, 70).bfloat16(), rows_of(num_rows, 64), matrix, 0)
    made.matmul(torch.empty(2, 70), rows_of(2, 64), matrix, 0)
    assert [(name.rpartition("_m")[2], grid[0]) for name, grid in launcher.launched] == [
        ("8", 1), ("8", 1), ("16", 1), ("32", 1), ("32", 4), ("8_to_float32", 1),
    ]  # fmt: skip


def test_rows_of_a_quantised_table_are_embedded() -> None:
    matrix, launcher = drawn("Q8_0", 70, 64), SimulatedLauncher()
    tokens = torch.tensor([69, 3, 3, 40], dtype=torch.int32)
    found, expected = (torch.empty(4, 64).bfloat16() for _ in range(2))
    kernels_for(matrix, launcher).unpack_rows(found, matrix, tokens)
    ReferenceOperations().embedding(expected, matrix, tokens)
    assert found.equal(expected)


def test_kernels_and_scratch_memory_are_made_for_what_there_is() -> None:
    plan = tiny_plan(SPEC, torch.bfloat16, {"down": TensorFormat.Q4_0, "embed": TensorFormat.Q8_0})
    made = QuantizedKernels(SimulatedLauncher(), "bfloat16", plan.quantized, "silu")
    assert [variant.name for variant in made.variants] == [
        "quantized_matmul_q4_0_bfloat16_m8",
        "quantized_matmul_q4_0_bfloat16_m16",
        "quantized_matmul_q4_0_bfloat16_m32",
        "quantized_rows_q4_0_bfloat16",
        "quantized_rows_q8_0_bfloat16",
    ]
    assert len(made._scratch) == SPEC.hidden_size * SPEC.intermediate_size  # not the embedding's
    formats = {"down": TensorFormat.Q4_0, "lm_head": TensorFormat.Q8_0}
    uses = tiny_plan(SPEC, torch.bfloat16, formats).quantized
    assert (uses.layers, uses.lm_head) == ({"Q4_0"}, {"Q8_0"})
    formats = {"lm_head": TensorFormat.F32, "": TensorFormat.Q4_0}
    assert tiny_plan(SPEC, torch.bfloat16, formats).has_dense  # the head
    assert not tiny_plan(SPEC, torch.bfloat16, {"": TensorFormat.Q4_0}).has_dense
    unquantised = tiny_plan(SPEC, torch.bfloat16).quantized
    assert unquantised == QuantizedUses()
    assert QuantizedKernels(SimulatedLauncher(), "float32", unquantised, "silu").variants == []


def test_a_dtype_without_kernels_for_quantised_weights_is_refused() -> None:
    uses = tiny_plan(SPEC, torch.float32, EVERYTHING).quantized
    with pytest.raises(DeviceUnavailableError, match="dtype must be one of bfloat16") as info:
        KernelOperations(SimulatedLauncher(), SPEC, "float32", BLOCK_SIZE, uses)
    assert info.value.field == "dtype"


def logits_of(
    spec: ModelSpec, formats: dict[str, TensorFormat], *, on_kernels: bool, replays: bool
) -> list[np.ndarray]:
    """Return the logits of a prefill, and of a decode replayed from a graph."""
    operations = None
    if on_kernels:
        uses = tiny_plan(spec, torch.bfloat16, formats).quantized
        operations = KernelOperations(SimulatedLauncher(), spec, "bfloat16", BLOCK_SIZE, uses)
    made = torch_executor(
        spec, RecordingDriver(), dtype=torch.bfloat16, num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE, operations=operations, keep_logits=True, formats=formats,
    )  # fmt: skip
    made._pools.device.zero_()
    driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence([4, 5, 6])]
    found = [made.execute(driver.batch(rows)).logits]
    if not replays:
        return found
    rows[0].num_computed = 3
    rows[0].tokens.append(7)
    made.capture_decode_graph(1)
    found.append(made.execute(driver.batch(rows)).logits)
    return found


@pytest.mark.wide
@pytest.mark.parametrize(
    ("spec", "formats", "replays"),
    [
        (SPEC, NOT_THE_WIDEST, False),
        pytest.param(
            replace(SPEC, num_layers=2, hidden_size=64, tie_embeddings=True),
            EVERYTHING,
            True,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_quantised_model_on_kernels_gives_the_reference_s_logits(
    spec: ModelSpec, formats: dict[str, TensorFormat], replays: bool
) -> None:
    found, expected = (
        logits_of(spec, formats, on_kernels=which, replays=replays) for which in (True, False)
    )
    for one, other in zip(found, expected, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_allclose(one, other, atol=0.1, rtol=0.02)
