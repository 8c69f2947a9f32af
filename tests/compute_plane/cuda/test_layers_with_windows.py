"""Models with windows in some of their layers on the CUDA executor, against the CPU executor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.cuda.operands import LayerAttention
from compute_plane.executor.interface import GPUExecutor
from compute_plane.model.spec import ModelSpec
from kernels.cuda.attention_chunks import TILE_TOKENS
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_prefill import PrefillVariant
from tests.compute_plane.cuda.cut_executors import cut_executor
from tests.compute_plane.cuda.played_cuda import played_cuda, played_device
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import logits_of
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

NUM_BLOCKS, BLOCK_SIZE = 60, 4
WINDOW = 7
"""Of which the beginning is in any slot of a block, as a text grows."""
LAYERS = {
    "all": frozenset(range(4)),
    "all but every second": frozenset({0, 2}),
    "the last two": frozenset({2, 3}),
    "none": frozenset[int](),
}
STEPS = 12


def spec_with(layers: frozenset[int], **changes: int) -> ModelSpec:
    spec = replace(tiny_spec(), num_layers=4, **changes)
    return replace(spec, window=WINDOW, layers_with_window=layers) if layers else spec


def sequences() -> list[DrivenSequence]:
    """Shorter than the window at first, longer, and much longer; greedy and drawn in turn."""
    random = np.random.default_rng(5)
    return [
        DrivenSequence(
            random.integers(0, tiny_spec().vocab_size, length).tolist(),
            temperature=0.7 * (row % 2), top_p=0.9, seed=row,
        )
        for row, length in enumerate((3, WINDOW, 11, 30))
    ]  # fmt: skip


def tokens_of(executor: GPUExecutor, chunk: int | None = None) -> list[list[int]]:
    driver = BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return driver.generate(sequences(), STEPS, chunk)


def tokens_on_the_cpu(spec: ModelSpec) -> list[list[int]]:
    pool = pool_for(spec, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(spec, tiny_weights(spec), pool, num_threads=1) as cpu:
        return tokens_of(cpu)


def on_torch(
    spec: ModelSpec, driver: RecordingDriver | None = None, *, graphs: bool = False
) -> CudaExecutor:
    made = torch_executor(spec, driver, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    if graphs:
        made.capture_decode_graph(4)
    return made


@pytest.mark.spread(2)
@pytest.mark.parametrize("layers", LAYERS)
def test_texts_are_those_of_the_cpu_executor_whole_in_chunks_and_through_graphs(
    layers: str,
) -> None:
    spec, device = spec_with(LAYERS[layers]), RecordingDriver()
    expected = tokens_on_the_cpu(spec)
    if layers != "none":
        assert expected != tokens_on_the_cpu(spec_with(LAYERS["none"]))
    assert tokens_of(on_torch(spec)) == expected
    assert tokens_of(on_torch(spec), chunk=5) == expected
    assert tokens_of(on_torch(spec, device, graphs=True)) == expected
    assert device.take_calls().count("replay") == STEPS - 1


def test_steps_on_a_played_device_are_in_order_and_give_the_same_texts() -> None:
    spec = spec_with(LAYERS["all but every second"])
    with played_cuda() as world:
        driver, operations = played_device(world)
        with driver.computing():
            executor = torch_executor(
                spec, driver, operations=operations, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE
            )
        executor.capture_decode_graph(4)
        found = tokens_of(executor)
    assert world.races == []
    assert found == tokens_on_the_cpu(spec)


@pytest.mark.parametrize("layers", ["all", "all but every second", "the last two"])
def test_a_layer_has_its_window_on_whichever_side_of_the_cut_it_is(layers: str) -> None:
    spec = spec_with(LAYERS[layers])
    expected = tokens_on_the_cpu(spec)
    for num_device_layers in (1, 2, 3):
        executor = cut_executor(num_device_layers, model=spec)
        assert tokens_of(executor, chunk=5) == expected
        executor.close()


# --- through the kernels --------------------------------------------------------------------------

KERNEL_SHAPE = {
    "vocab_size": 41, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "hidden_size": 32,
    "intermediate_size": 64,
}  # fmt: skip


def kernels_of(layers: frozenset[int]) -> tuple[SimulatedLauncher, KernelOperations]:
    launcher = SimulatedLauncher(runs=False)
    return launcher, KernelOperations(launcher, spec_with(layers, **KERNEL_SHAPE), "bfloat16", 16)


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [("all", [True]), ("all but every second", [False, True]), ("none", [False])],
)
def test_the_kernels_that_a_model_s_layers_need_are_built_and_no_others(
    layers: str, kinds: list[bool]
) -> None:
    launcher, operations = kernels_of(LAYERS[layers])
    attention = [
        variant
        for variant in operations.variants
        if isinstance(variant, DecodeVariant | PrefillVariant)
    ]
    assert [variant.has_window for variant in attention] == kinds * 2
    assert {variant.name for variant in attention} <= set(launcher.prepared)


def test_rows_are_split_and_have_room_for_what_a_layer_reads_of_them() -> None:
    launcher, operations = kernels_of(LAYERS["all but every second"])
    query, pool = (
        torch.zeros(shape, dtype=torch.bfloat16) for shape in ((1, 2, 64), (4, 2, 2, 1, 16, 64))
    )
    tables, lengths = torch.zeros((1, 200), dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for window in (None, 100, 1000):
        own = LayerAttention(window)
        operations.attention_decode(query, query, pool, 1, tables, lengths, 3000, own)
    (plain, grid), (short, short_grid), (long, long_grid) = launcher.launched
    assert (short, long) == (f"{plain}_window",) * 2
    assert short_grid[1] == 1 < long_grid[1] < grid[1]
    variant = DecodeVariant("bfloat16", 64, 2, 16, None, True)
    read = 1000 + TILE_TOKENS - 1
    assert long_grid == variant.plan(1, 1, read, launcher.num_multiprocessors).grid


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "window"),
    [
        ("float32", 5),
        pytest.param("float32", 19, marks=pytest.mark.slow),
        pytest.param("bfloat16", 19, marks=pytest.mark.slow),
    ],
)
def test_steps_on_kernels_give_what_the_reference_operations_give(dtype: str, window: int) -> None:
    spec = spec_with(frozenset({1}), **KERNEL_SHAPE)
    spec = replace(spec, num_layers=3, window=window)  # of the last one prompts leave a token each
    launcher, prompts = SimulatedLauncher(), ([1 + i % 40 for i in range(22)], [5, 6, 7])
    found, expected = (logits_of(spec, {}, dtype, on, prompts) for on in (launcher, None))
    tolerance = 1e-4 if dtype == "float32" else 0.15
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)
    attention = {name for name in launcher.prepared if name.startswith("attention_")}
    assert attention <= {name for name, _ in launcher.launched}
