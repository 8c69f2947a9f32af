"""Mixtures of experts on torch: choosing, groups of rows, whole models, memory and graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from compute_plane.cuda import build, expert_products
from compute_plane.cuda.dense_kernels import DenseKernels
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.expert_products import (
    choose,
    expert_working_bytes,
    has_grouped_products,
    multiply_groups,
    router_logits,
)
from compute_plane.cuda.experts import DeviceExperts, ExpertMatrices, ExpertUses, StackedMatrix
from compute_plane.cuda.matrices import DenseMatrix, Matrix, Projection, QuantizedMatrix
from compute_plane.cuda.planned_feedforward import PlannedExperts
from compute_plane.cuda.planned_matrix import PlannedMatrix
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weight_plan import WeightPlan, plan_weights
from compute_plane.executor.registry import ExecutorContext
from compute_plane.model import expert_layout, layout
from compute_plane.model.errors import UnsupportedModelError
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import Mixture, ModelSpec, Scores
from compute_plane.model.tensor import RawTensor, TensorFormat
from kernels.reference import mixture as reference
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.torch_executors import RecordingDriver
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import STAND_IN, Target
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(tiny_spec(quantisable=True), architecture="mixtral", mixture=Mixture(7, 3))
COUNTS = [0, 4, 0, 1, 9, 0, 2]
"""Rows of each expert."""
Q4_1, Q8_0, BF16 = TensorFormat.Q4_1, TensorFormat.Q8_0, TensorFormat.BF16


@pytest.mark.parametrize("normalises", [False, True])
def test_experts_and_weights_are_those_of_the_reference(normalises: bool) -> None:
    random = np.random.default_rng(0)
    x, router = random.standard_normal((20, 32), np.float32), random.standard_normal((9, 32), "f4")
    x[3] = 0  # all logits are equal: the lowest numbers
    logits = router_logits(torch.from_numpy(x), torch.from_numpy(router))
    chosen, weights = choose(logits, Mixture(9, 4, normalises_weights=normalises))
    expected, weighed = np.empty((20, 4), np.int32), np.empty((20, 4), np.float32)
    reference.route(x @ router.T, normalises=normalises, chosen=expected, weights=weighed)
    np.testing.assert_array_equal(chosen.numpy(), expected)
    np.testing.assert_allclose(weights.numpy(), weighed, rtol=1e-5)


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrects", [False, True])
def test_scores_may_be_sigmoids_and_corrected_where_experts_are_chosen(
    normalises: bool, scores: Scores, corrects: bool
) -> None:
    random = np.random.default_rng(1)
    logits = 2 * random.standard_normal((20, 9), np.float32)
    logits[7] = -300 - np.arange(9) if scores == "sigmoid" else logits[7]
    correction = 0.3 * random.standard_normal(9, np.float32) if corrects else None
    chosen, weights = choose(
        torch.from_numpy(logits),
        Mixture(9, 4, normalises, scores, 1.75),
        None if correction is None else torch.from_numpy(correction),
    )
    expected, weighed = np.empty((20, 4), np.int32), np.empty((20, 4), np.float32)
    reference.route(
        logits, normalises=normalises, chosen=expected, weights=weighed,
        is_sigmoid=scores == "sigmoid", correction=correction, scale=1.75,
    )  # fmt: skip
    np.testing.assert_array_equal(chosen.numpy(), expected)
    np.testing.assert_allclose(weights.numpy(), weighed, rtol=1e-5)


def test_the_choice_is_made_in_float32_whatever_a_step_is() -> None:
    """Rounded logits would tie."""
    router = torch.tensor([[1.0, 0.0], [1.0 + 2**-12, 0.0], [0.5, 0.0]])
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    chosen, _ = choose(router_logits(x, router), Mixture(3, 2))
    assert chosen.tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_each_group_of_rows_meets_its_own_matrix(dtype: torch.dtype, is_stacked: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(7, 24, 32).to(dtype)
    rows = torch.randn(sum(COUNTS), 32).to(dtype)
    ends = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    if is_stacked:
        stack = StackedMatrix.of(DenseMatrix(values.view(-1, 32)), 7)
        matrices = ExpertMatrices.stacked([stack])
    else:
        matrices = ExpertMatrices(tuple(Projection((DenseMatrix(one),)) for one in values))
    assert matrices.num_outputs == 24
    found = multiply_groups(rows, ends, matrices, ReferenceOperations())
    experts = torch.repeat_interleave(torch.arange(7), torch.tensor(COUNTS))
    expected = torch.einsum("rk,rnk->rn", rows.float(), values[experts].float())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.1, torch.float16: 0.02}[dtype]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_groups_do_not_wait_where_the_library_reads_their_ends(monkeypatch) -> None:
    device = torch.device("cuda:0")
    for capability, expected in {
        (9, 0): True,
        (10, 3): True,
        (8, 0): False,
        (12, 0): False,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert has_grouped_products(device, torch.bfloat16) is expected
        assert not has_grouped_products(device, torch.float16)
        assert not has_grouped_products(device, torch.float32)


def logits_of(
    target: Target,
    formats: dict[str, TensorFormat],
    dtype: str,
    told: list[list[int]] | None = None,
) -> tuple[list[np.ndarray], list[list[int]]]:
    """Return all logits of a few steps of several rows, and the tokens; `told`: tokens to come."""
    model = model_in_memory(SPEC, tiny_weights(SPEC), formats)
    prompts = [[5, 17, 40, 41, 42, 9, 100], [3], [77, 78, 79]]
    sequences = [DrivenSequence(list(prompt)) for prompt in prompts]
    seen = []
    with target.running(
        model, num_blocks=20, block_size=16, dtype=dtype, keep_logits=True
    ) as executor:
        driver = BatchDriver(executor, num_blocks=20, block_size=16)
        for _ in range(5):
            batch = driver.batch(sequences)
            output = executor.execute(batch)
            assert output.logits is not None
            seen += list(output.logits)
            driver.commit(sequences, batch, output)
            for sequence, tokens in zip(sequences, told or [], strict=False):
                sequence.tokens[:] = tokens[: len(sequence.tokens)]
    return seen, [sequence.tokens for sequence in sequences]


CPU = Target("cpu", "cpu")
CPU_DEVICE = torch.device("cpu")


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("formats", "dtype", "tolerance"),
    [
        ({}, "float32", 1e-4),
        ({"": Q8_0}, "float32", 1e-4),
        ({"down": Q8_0, "": Q4_1}, "auto", 0.15),
        ({"down": BF16, "": Q8_0}, "auto", 0.15),
        ({}, "bfloat16", 0.15),
    ],
    ids=["float32", "decoded", "four and eight bits", "quantised and not", "bfloat16"],
)
def test_models_say_what_the_cpu_executor_says(
    formats: dict[str, TensorFormat], dtype: str, tolerance: float
) -> None:
    """Within what rounding does: rows of int8 there, and logits of some 2 in magnitude."""
    expected, tokens = logits_of(CPU, formats, dtype)
    found, _ = logits_of(STAND_IN, formats, dtype, tokens)
    assert np.abs(np.stack(found) - np.stack(expected)).mean() < tolerance


def test_tokens_may_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, tokens = logits_of(STAND_IN, {}, "float32")
    monkeypatch.setattr(expert_products, "PIECE_TOKENS", 3)
    found, again = logits_of(STAND_IN, {}, "float32")
    assert again == tokens
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def planned(formats: dict[str, TensorFormat], dtype: str = "bfloat16") -> WeightPlan:
    model: LoadedModel = model_in_memory(SPEC, tiny_weights(SPEC), formats)
    return plan_weights(SPEC, model.source, dtype)


@pytest.mark.parametrize(
    ("formats", "uses"),
    [
        ({}, ExpertUses(has_dense=True)),
        ({"": Q4_1}, ExpertUses(frozenset({"Q4_1"}), frozenset({"Q4_1"}))),
        ({"down": Q8_0}, ExpertUses(frozenset({"Q8_0"}), has_dense=True)),
        ({"gate_proj": Q8_0, "": Q4_1}, ExpertUses(frozenset({"Q4_1", "Q8_0"}))),
        ({"up_proj": Q8_0}, ExpertUses(frozenset({"Q8_0"}), has_dense=True)),
    ],
    ids=["dense", "quantised", "in part", "gates apart", "half a gate"],
)
def test_matrices_of_all_experts_lie_one_behind_the_other(
    formats: dict[str, TensorFormat], uses: ExpertUses
) -> None:
    plan = planned(formats)
    part = plan.layers[0].feedforward
    assert isinstance(part, PlannedExperts)
    assert part.is_stacked
    assert plan.experts == uses
    experts = plan.place(CPU_DEVICE).layers[0].feedforward
    assert isinstance(experts, DeviceExperts)
    assert experts.router.dtype is torch.float32
    assert experts.gate_up.num_outputs == 2 * SPEC.intermediate_size
    for stack in experts.stacks:
        assert stack.values.nbytes == sum(one.num_bytes for one in stack.matrices)
    target = part.parts[0].down[0].target
    for number, projection in enumerate(experts.down.of_experts):
        name = layout.layer_tensor(0, expert_layout.expert_role(number, expert_layout.DOWN))
        alone = PlannedMatrix((plan.source.tensor(name),), target).place(CPU_DEVICE)
        assert torch.equal(content(projection.parts[0]), content(alone))


def content(matrix: Matrix) -> torch.Tensor:
    return matrix.packed if isinstance(matrix, QuantizedMatrix) else matrix.values


def test_matrices_that_are_no_whole_panels_lie_apart() -> None:
    spec = replace(SPEC, intermediate_size=48)
    formats = {"gate_proj": Q8_0, "up_proj": Q4_1}
    plan = plan_weights(spec, model_in_memory(spec, tiny_weights(spec), formats).source, "bfloat16")
    part = plan.layers[0].feedforward
    assert isinstance(part, PlannedExperts)
    assert not part.is_stacked
    experts = plan.place(CPU_DEVICE).layers[0].feedforward
    assert isinstance(experts, DeviceExperts)
    assert len(experts.gate_up.of_experts) == SPEC.mixture.num_experts
    assert not experts.stacks
    assert plan.experts == ExpertUses()


def test_experts_whose_inputs_have_an_order_of_their_own_lie_apart() -> None:
    source = model_in_memory(SPEC, tiny_weights(SPEC), {"": Q8_0}).source
    name = layout.layer_tensor(1, expert_layout.expert_role(2, expert_layout.DOWN))

    class Ordered:
        """The source, with an order of one matrix's inputs."""

        def tensor(self, asked: str) -> RawTensor:
            tensor = source.tensor(asked)
            order = np.arange(SPEC.intermediate_size)[::-1].copy()
            return replace(tensor, input_order=order) if asked == name else tensor

    plan = plan_weights(SPEC, Ordered(), "bfloat16")
    stacked = [layer.feedforward.is_stacked for layer in plan.layers]
    assert stacked == [True, False]
    assert plan.quantized.num_weights == max(
        SPEC.vocab_size * SPEC.hidden_size, 2 * SPEC.intermediate_size * SPEC.hidden_size
    )


def test_bytes_held_are_those_planned() -> None:
    for formats in ({}, {"": Q4_1}, {"down": Q8_0}):
        plan = planned(formats)
        weights = plan.place(CPU_DEVICE)
        held = sum(
            matrix.num_bytes
            for layer in plan.layers
            for matrix in (*layer.vectors, *layer.matrices)
        )
        ends = [plan.embedding, plan.final_norm, plan.lm_head]
        assert weights.num_bytes == held + sum(matrix.num_bytes for matrix in ends)


def test_experts_in_several_formats_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="must be stored in one format"):
        planned({"experts.3.gate_proj": Q8_0})


def test_working_memory_counts_the_rows_of_a_piece() -> None:
    assert expert_working_bytes(replace(SPEC, mixture=None), 2, 1000) == 0
    few, many = (expert_working_bytes(SPEC, 2, tokens) for tokens in (100, 4096))
    assert few > 100 * 3 * SPEC.intermediate_size * 3 * 2
    more = expert_working_bytes(SPEC, 2, 8192)
    assert more - many == 4096 * 2 * SPEC.hidden_size * 2


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("dtype", "most_rows", "captured"),
    [
        ("bfloat16", 24, (1, 2, 4, 8, 16, 24)),  # torch's products of groups do not wait either
        ("float32", 24, (1, 2, 4, 8, 16)),
        ("float32", 3, (1, 2, 4)),
    ],
)
def test_steps_are_captured_as_long_as_they_do_not_wait(
    tmp_path: Path, dtype: str, most_rows: int, captured: tuple[int, ...]
) -> None:
    model, device = model_in_memory(SPEC, tiny_weights(SPEC)), RecordingDriver(memory=1 << 30)
    context = ExecutorContext(
        spec=SPEC, model=model, block_size=16, num_blocks=40, dtype=dtype, kv_cache_dtype="auto",
        instruction_set="auto", device="cuda", max_tokens=64, num_threads=1, kernel_cache=tmp_path,
        max_rows=most_rows,
    )  # fmt: skip
    plan = build.planned_weights(context, model, device.device)
    with capture_logs() as logs:
        made = build.build_on(context, model, plan, device, ReferenceOperations())
    assert isinstance(made.executor, CudaExecutor)
    assert made.executor.graphs.captured == captured
    told = [line["most_rows"] for line in logs if line["event"].startswith("no decode graphs")]
    assert told == ([16] if captured[-1] < most_rows else [])


def test_no_kernel_is_made_for_a_gate_that_no_layer_has() -> None:
    def written(spec: ModelSpec) -> set[str]:
        kernels = DenseKernels(SimulatedLauncher(), spec, "bfloat16")
        return {variant.writes for variant in kernels.variants}

    assert written(replace(SPEC, mixture=None)) - written(SPEC) == {"gated"}
