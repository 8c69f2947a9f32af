"""Models with states, cut between torch's CPU device and the CPU engine: both have their halves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu import build
from compute_plane.cuda import host_layers_build
from compute_plane.cuda.block_pools import BlockPools, block_bytes, layer_bytes, plan_copies
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.host_layers import HostLayersExecutor
from compute_plane.cuda.host_layers_plan import device_bytes, first_layers
from compute_plane.cuda.largest_step import StepSizes, bytes_of_histories, bytes_of_tables
from compute_plane.cuda.state_pool import state_bytes
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.executor.interface import BlockCopy, StateCopy
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.memory import state_sizing
from compute_plane.memory.sizing import Memory
from compute_plane.model.spec import ModelSpec
from planes.errors import ConfigError, ValidationError
from tests.compute_plane.cuda.cut_executors import BLOCK_SIZE, NUM_BLOCKS, cut_executor
from tests.compute_plane.cuda.recurrent_models import GRANITE4, LFM2, SPEC
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    tiny_spec,
    with_single_layers,
    with_states_beside,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence

FLOAT_BYTES = 4
MAX_TOKENS = 40


def with_layers(spec: ModelSpec, *layers: int) -> ModelSpec:
    """Return the model with states in these of its layers."""
    assert spec.recurrence is not None
    return replace(spec, recurrence=replace(spec.recurrence, layers=frozenset(layers)))


MODELS = {
    "states first": with_layers(replace(SPEC, num_layers=4), 0, 1, 2),
    "states last": with_layers(replace(SPEC, num_layers=4), 1, 2, 3),
    "in turns": with_layers(replace(LFM2, num_layers=4), 0, 2),
    "Mamba-2": GRANITE4,
    # MLPs that weigh more than states do, or all of it is on the device with fewer of those.
    "layers of one thing each": with_single_layers(
        replace(tiny_spec(), intermediate_size=4096), "-M*-"
    ),
    "layers of both": with_states_beside(
        replace(tiny_spec(), num_layers=4, intermediate_size=4096)
    ),
}


def driver_of(executor: object) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)  # type: ignore[arg-type]


def sequences() -> list[DrivenSequence]:
    random = np.random.default_rng(5)
    return [
        DrivenSequence(random.integers(0, SPEC.vocab_size, length).tolist(), state=number)
        for number, length in enumerate((1, 9, 23))
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> ModelSpec:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def expected(model: ModelSpec) -> list[list[int]]:
    pool = pool_for(model, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(model, tiny_weights(model), pool, num_threads=1) as cpu:
        return driver_of(cpu).generate(sequences(), 6)


@pytest.fixture
def cut(model: ModelSpec) -> Iterator[HostLayersExecutor]:
    made = cut_executor(2, model=model)
    yield made
    made.close()


@pytest.mark.spread(8)
@pytest.mark.parametrize("num_device_layers", [1, 2, 3])
@pytest.mark.parametrize("chunk", [None, 7])
def test_wherever_it_is_cut_it_gives_the_tokens_of_the_cpu_executor(
    model: ModelSpec, expected: list[list[int]], num_device_layers: int, chunk: int | None
) -> None:
    executor = cut_executor(num_device_layers, model=model)
    assert driver_of(executor).generate(sequences(), 6, chunk) == expected
    executor.close()


def test_a_copy_of_a_state_is_one_of_both_halves(cut: HostLayersExecutor) -> None:
    driver = driver_of(cut)
    one = DrivenSequence([5, 9, 77, 3], state=3)  # a whole block
    driver.commit([one], batch := driver.batch([one]), cut.execute(batch))
    other = replace(one, tokens=list(one.tokens), blocks=list(one.blocks), state=8)
    batch = driver.batch([one, other])
    output = cut.execute(replace(batch, state_copies=[StateCopy(3, 8)]))
    assert output.logits is not None
    np.testing.assert_array_equal(*output.logits)


def test_a_row_without_a_state_is_refused_before_anything_is_done(cut: HostLayersExecutor) -> None:
    driver = driver_of(cut)
    batch = driver.batch([DrivenSequence([1, 2, 3], state=3)])
    none = np.zeros(0, dtype=np.int32)
    pools = cut._pools
    assert pools.states is not None
    before = pools.device.clone(), pools.states.device.clone()
    with pytest.raises(ValidationError, match="needs 1 entries, got 0") as info:
        cut.execute(replace(batch, states=none))
    assert info.value.field == "states"
    for old, new in zip(before, (pools.device, pools.states.device), strict=True):
        assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_blocks_without_a_layer_on_the_device_have_digests_of_the_hosts() -> None:
    executor = cut_executor(2, model=MODELS["states first"])
    driver = driver_of(executor)
    same = [DrivenSequence([4, 5, 6, 7], state=state) for state in range(2)]
    other = DrivenSequence([9, 5, 6, 7], state=2)
    batch = driver.batch([*same, other])
    blocks = batch.block_tables.reshape(-1).tolist()
    one, two, three = executor.execute(replace(batch, digest_blocks=blocks)).block_digests
    assert one == two != three
    executor.close()


# --- built within a limit ---


def built(spec: ModelSpec, limit: int | None) -> BuiltExecutor:
    context = ExecutorContext(
        spec=spec, model=tiny_model(spec), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
        dtype="float32", kv_cache_dtype="auto", instruction_set="auto", device="cpu",
        max_tokens=MAX_TOKENS, num_threads=1, max_slots=8, max_rows=6, gpu_memory_limit=limit,
        kernel_cache=Path(ComputePlaneConfig().kernel_cache_root),
    )  # fmt: skip
    made = build_executor("cuda", context)
    close = getattr(made.executor, "close", None)
    if close is not None:
        close()
    return made


def limit_of(spec: ModelSpec, num_layers: int, num_states: int) -> int:
    """Return the smallest limit within which so many layers, with states, are on the device."""
    weights = plan_weights(spec, tiny_model(spec).source, "float32")
    sizes = StepSizes(BLOCK_SIZE, MAX_TOKENS, 6)
    counted = device_bytes(
        spec,
        weights,
        item_bytes=FLOAT_BYTES,
        layer_bytes=layer_bytes(spec, torch.float32, BLOCK_SIZE, NUM_BLOCKS),
        max_tokens=MAX_TOKENS,
        num_states=num_states,
        more_bytes=bytes_of_tables(spec, sizes),
        whole_bytes=bytes_of_histories(spec, sizes),
    )
    if num_layers == spec.num_layers:
        return counted.whole
    return counted.first + sum(counted.layers[:num_layers])


def test_layers_have_the_memory_of_what_is_in_them() -> None:
    spec = MODELS["layers of one thing each"]
    weights = plan_weights(spec, tiny_model(spec).source, "float32")
    counted = device_bytes(
        spec, weights, item_bytes=FLOAT_BYTES, layer_bytes={spec.heads: 10**6}, max_tokens=4,
        num_states=3,
    )  # fmt: skip
    own = [layer.num_bytes for layer in weights.layers]
    assert spec.recurrence is not None
    states = 3 * FLOAT_BYTES * spec.recurrence.state_floats
    assert list(counted.layers) == [own[0], own[1] + states, own[2] + 10**6, own[3]]


@pytest.mark.spread(3)
def test_a_model_with_states_is_cut_at_a_memory_limit(model: ModelSpec) -> None:
    whole = built(model, None)
    assert whole.num_states == 16
    for num_layers in (1, 2):
        made = built(model, limit_of(model, num_layers, num_states=16))
        executor = made.executor
        assert isinstance(executor, HostLayersExecutor)
        assert executor._host._model.layers
        assert len(executor._host._model.layers) == 4 - num_layers
        assert (made.num_slots, made.num_states) == (8, 16)
        assert executor._pools.states is not None
        assert executor._pools.num_states == 16
    assert isinstance(built(model, limit_of(model, 4, num_states=2)).executor, CudaExecutor)


def test_a_limit_below_one_layer_with_its_states_is_refused(model: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="one layer with its part") as info:
        built(model, limit_of(model, 1, num_states=16) - 1)
    assert info.value.field == "gpu_memory_limit"
    assert "\n" not in info.value.message


def test_there_are_as_many_states_as_find_room_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = MODELS["states first"]
    assert spec.recurrence is not None
    scarce = 8 * 9 * FLOAT_BYTES * spec.recurrence.state_floats  # one layer's are the host's
    monkeypatch.setattr(build, "host_memory", lambda: Memory(scarce, scarce))
    made = built(spec, limit_of(spec, 2, num_states=16))
    assert isinstance(made.executor, HostLayersExecutor)
    assert (made.num_slots, made.num_states) == (7, 9)
    assert made.executor._pools.num_states == made.num_states
    assert made.executor._host._states is not None
    assert made.executor._host._states.num_states == made.num_states


def test_states_take_a_part_of_the_limit(model: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = limit_of(model, 2, num_states=5)
    monkeypatch.setattr(state_sizing, "SHARE_OF_ALL", limit // (5 * state_bytes(model)))
    made = built(model, limit)
    assert isinstance(made.executor, HostLayersExecutor)
    assert (made.num_slots, made.num_states) == (4, 5)


def test_pool_and_states_must_both_find_room(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = MODELS["states last"]
    limit = limit_of(spec, 2, num_states=16)
    of_device = first_layers(spec, 2)
    needed = NUM_BLOCKS * block_bytes(of_device, torch.float32, BLOCK_SIZE)
    needed += 16 * state_bytes(of_device)
    monkeypatch.setattr(host_layers_build, "available_memory_bytes", lambda: needed)
    assert isinstance(built(spec, limit).executor, HostLayersExecutor)
    monkeypatch.setattr(host_layers_build, "available_memory_bytes", lambda: needed - 1)
    with pytest.raises(ConfigError, match="MiB are available"):
        built(spec, limit)


def test_blocks_of_no_layer_are_not_copied() -> None:
    """A kernel would be launched for nothing, which CUDA refuses."""
    spec = first_layers(MODELS["states first"], 3)
    pools = BlockPools(
        spec, CpuDriver(), dtype=torch.float32, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS
    )

    class NoOperations:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    plan = plan_copies([BlockCopy(1, 2)])
    pools.run(plan, torch.from_numpy(plan.pairs), NoOperations())  # type: ignore[arg-type]
