"""Steps without adapters are what they are in a model without; rows without, what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.adapted_products import AdaptedProducts
from compute_plane.cuda.adapters import DeviceAdapters, DevicePair
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.layer_products import Hidden, LayerProducts
from compute_plane.cuda.matrices import Projection
from compute_plane.executor.adapter_runs import AdapterRun, runs_of
from compute_plane.model.adapter import Adapter
from compute_plane.model.spec import ModelSpec
from compute_plane.model.tensor import TensorFormat
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from tests.compute_plane.cuda.adapted_models import (
    ADAPTERS_OF_ROWS,
    Formats,
    adapted_plan,
    source_of,
    step_logits,
    two_adapters,
    with_adapters,
)
from tests.compute_plane.cuda.noted_launches import NotedLauncher, NotedLaunches, read_too_early
from tests.compute_plane.cuda.noted_products import EPS, FEATURES, SIZE, Recording, dense, drawn
from tests.compute_plane.cuda.steps_on_kernels import operations_on
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

SPEC = tiny_spec(quantisable=True)
NUM_BLOCKS, BLOCK_SIZE = 60, 4
ON_KERNELS = replace(
    SPEC, vocab_size=41, num_heads=2, num_kv_heads=1, head_dim=64, hidden_size=64,
    intermediate_size=64,
)  # fmt: skip
QUANTISED: Formats = {"proj": TensorFormat.Q8_0}


def executor_of(
    adapters: Sequence[Adapter], spec: ModelSpec = SPEC, driver: RecordingDriver | None = None
) -> CudaExecutor:
    return torch_executor(
        spec, driver, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, keep_logits=True,
        plan=adapted_plan(spec, source_of(spec), adapters),
    )  # fmt: skip


def test_rows_without_an_adapter_get_what_they_get_in_a_batch_without_any() -> None:
    executor = executor_of(two_adapters(source_of(SPEC)))
    for chunk in (None, 3):
        mixed = step_logits(executor, ADAPTERS_OF_ROWS, chunk=chunk)
        alone = step_logits(executor, [0] * 5, chunk=chunk)
        for ours, expected in zip(mixed, alone, strict=True):
            for row, logits in ours.items():
                difference = np.abs(logits - expected[row]).max()
                assert difference < 2e-5 if ADAPTERS_OF_ROWS[row] == 0 else difference > 0.1


@pytest.mark.parametrize("most_rows", [16, 0])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_products_are_those_of_a_model_without_adapters_where_nothing_is_added(
    most_rows: int, num_parts: int
) -> None:
    """Bit for bit, and by the same operations, but for the norm that adapters' inputs need."""
    qkv, o = dense(SIZE * 2, SIZE), dense(SIZE, SIZE)
    found, calls = [], []
    for is_adapted in (False, True):
        operations = Recording(most_rows=most_rows, num_parts=num_parts)
        products = products_of(operations, [qkv, o] if is_adapted else [])
        hidden = Hidden(drawn(6, SIZE), adapters=(AdapterRun(0, 1, 3), AdapterRun(1, 5, 6)))
        outputs = products.normed(hidden, drawn(SIZE), qkv)
        products.add(hidden, outputs[:, :SIZE].contiguous(), o)
        found.append((outputs, hidden.sums()))
        calls.append(operations.take())
    for plain, adapted in zip(*found, strict=True):
        changed = [not one.equal(other) for one, other in zip(plain, adapted, strict=True)]
        assert changed == [False, True, True, False, False, True]
    few = ["rms_norm", "dense_matmul", "dense_matmul"]
    assert calls == ([few[1:], few] if most_rows else [["rms_norm"], ["rms_norm"]])


def products_of(operations: Recording, projections: Sequence[Projection]) -> LayerProducts:
    """Return products with two adapters of these, or without any."""
    if not projections:
        return LayerProducts(operations, EPS)
    pairs = {
        one: [DevicePair(drawn(rank, SIZE), drawn(one.num_outputs, rank)) for rank in (2, 3)]
        for one in projections
    }
    return AdaptedProducts(operations, EPS, DeviceAdapters(pairs, 2))


def test_a_gate_is_a_launch_of_its_own_only_where_an_adapter_changes_it() -> None:
    norm, gate_up, down = drawn(SIZE), dense(2 * FEATURES, SIZE), dense(SIZE, FEATURES)
    calls = []
    for runs in ((), (AdapterRun(0, 0, 2),), (AdapterRun(1, 0, 2),)):
        operations = Recording()
        pair = DevicePair(drawn(2, SIZE), drawn(2 * FEATURES, 2))
        products = AdaptedProducts(operations, EPS, DeviceAdapters({gate_up: [pair, None]}, 2))
        products.gated(Hidden(drawn(4, SIZE), adapters=runs), norm, gate_up, down)
        calls.append(operations.take())
    assert calls == [["dense_matmul"], ["rms_norm", "gate_mul"], ["dense_matmul"]]


def test_runs_are_of_neighbours_with_one_adapter() -> None:
    assert runs_of(int32([0, 0, 2, 2, 1, 0, 1])) == ((1, 2, 4), (0, 4, 5), (0, 6, 7))
    assert runs_of(int32([3])) == ((2, 0, 1),)
    assert runs_of(int32([0, 0])) == runs_of(int32([])) == ()


def noted_steps(
    formats: Formats, *, is_adapted: bool, adapters: Sequence[int] = (0, 0, 0), long: bool = False
) -> list[list[str]]:
    """Return the names of launches of two prompts, of a third beside them, and of decodes.

    `long`: with so many tokens that kernels leave products to the library.
    """
    source, noted = source_of(ON_KERNELS, formats), NotedLaunches()
    drawn_adapters = two_adapters(source) if is_adapted else ()
    made = torch_executor(
        ON_KERNELS, RecordingDriver(), dtype=torch.bfloat16, num_blocks=12, block_size=16,
        operations=operations_on(NotedLauncher(noted), ON_KERNELS, formats, "bfloat16"),
        plan=adapted_plan(ON_KERNELS, source, drawn_adapters, torch.bfloat16),
    )  # fmt: skip
    made.capture_decode_graph(4)
    driver = BatchDriver(made, num_blocks=12, block_size=16)
    rows = [DrivenSequence([3] * (30 if long else 3)), DrivenSequence([4, 5])]
    third, found = DrivenSequence([6, 7, 8]), []
    for running in (rows, [*rows, third], [*rows, third]):
        batch = with_adapters(driver.batch(running), adapters[: len(running)])
        noted.launches = []
        with noted:
            made.execute(batch)
        assert read_too_early(noted.launches) == []
        assert any(one.kind is RopeWriteKvVariant for one in noted.launches)
        found.append([one.name for one in noted.launches])
        for row in running:
            row.num_computed = len(row.tokens)
            row.tokens.append(1)
    return found


@pytest.mark.parametrize("formats", [{}, QUANTISED], ids=["dense", "quantised"])
def test_steps_without_adapters_are_launched_as_in_a_model_without(formats: Formats) -> None:
    assert noted_steps(formats, is_adapted=True) == noted_steps(formats, is_adapted=False)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("formats", [{}, QUANTISED], ids=["dense", "quantised"])
def test_steps_with_adapters_find_their_kernels_and_none_reads_too_early(
    formats: Formats, long: bool
) -> None:
    steps = noted_steps(formats, is_adapted=True, adapters=(2, 0, 1), long=long)
    # Of a layer the first adapter changes four products, the second qkv and gate · up.
    assert [step.count("aten.addmm_.default") for step in steps] == [4, 12, 12]
    plain = noted_steps(formats, is_adapted=True, long=long)
    assert ["aten.addmm_.default" in step for step in plain] == [False] * 3


def test_a_step_with_adapters_is_no_graph_and_the_next_one_is() -> None:
    device = RecordingDriver()
    executor = executor_of(two_adapters(source_of(SPEC)), driver=device)
    executor.capture_decode_graph(2)
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    rows = [DrivenSequence([3, 4, 5]), DrivenSequence([6, 7])]
    replays = []
    for adapters in ([0, 1], [0, 1], [0, 0], [2, 1], [0, 0]):
        batch = with_adapters(driver.batch(rows), adapters)
        device.take_calls()
        driver.commit(rows, batch, executor.execute(batch))
        replays.append("replay" in device.take_calls())
    assert replays == [False, False, True, False, True]


@pytest.mark.parametrize("adapters", [[0, 0, 0], [2, 0, 1], [1, 2, 0]])
def test_tokens_that_are_samples_of_the_step_before_are_those_of_their_rows(
    adapters: list[int],
) -> None:
    """Rows with adapters are sorted on the device, and samples come back in the batch's order."""
    tokens = []
    for are_awaited in (False, True):
        executor = executor_of(two_adapters(source_of(SPEC)), driver=RecordingDriver())
        executor.capture_decode_graph(4)
        driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        rows = [DrivenSequence([3 + row] * (2 + row)) for row in range(3)]
        steps, found = [], []
        for number in range(4):
            batch = with_adapters(driver.batch(rows), adapters)
            if number and are_awaited:
                batch = replace(batch, input_tokens=int32([0] * 3), input_sources=int32(range(3)))
            steps.append(executor.launch(batch))
            if not are_awaited or number == 3 or len(steps) == 2:
                found += [step.answer().next_tokens.tolist() for step in steps]
                steps = []
            for row, sequence in enumerate(rows):
                sequence.num_computed = len(sequence.tokens)
                sequence.tokens.append(0 if are_awaited else found[-1][row])
        tokens.append(found)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 4
