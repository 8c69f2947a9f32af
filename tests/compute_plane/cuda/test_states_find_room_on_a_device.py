"""How many states a device gets beside weights, steps, graphs and blocks; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compute_plane.cuda import host_layers_plan, pool_size
from compute_plane.cuda.block_pools import BlockPools, block_bytes, layer_bytes
from compute_plane.cuda.build import build_on, planned_weights
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.host_layers_plan import device_bytes, working_bytes
from compute_plane.cuda.largest_step import StepSizes, run_largest_step
from compute_plane.cuda.model import DecoderModel
from compute_plane.cuda.operands import StateRows
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.state_pool import state_bytes
from compute_plane.cuda.weight_plan import plan_weights
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext, build_executor
from compute_plane.memory.sizing import MIB, Memory
from planes.errors import ConfigError
from tests.compute_plane.cuda.metered_device import MeteredDriver, MeteredOperations
from tests.compute_plane.cuda.recurrent_models import GRANITE4, LFM2, MAMBA2, SIZES
from tests.compute_plane.cuda.recurrent_models import SPEC as LONG
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.golden.batch_driver import BatchDriver, DrivenSequence

SPEC = replace(LONG, context_length=96)
BLOCK_SIZE, MAX_TOKENS = 4, 64
DEVICE_BYTES = 12 * MIB
STATE_BYTES = state_bytes(SPEC)


def context(tmp_path: Path, **changes: object) -> ExecutorContext:
    plain = ExecutorContext(
        spec=SPEC, model=tiny_model(SPEC), block_size=BLOCK_SIZE, num_blocks=10, dtype="bfloat16",
        kv_cache_dtype="auto", instruction_set="auto", device="cuda", max_tokens=MAX_TOKENS,
        num_threads=1, kernel_cache=tmp_path, max_rows=4, fills_memory=True, max_slots=4096,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def built_on(driver: MeteredDriver, wants: ExecutorContext) -> BuiltExecutor:
    assert wants.model is not None
    plan = planned_weights(wants, wants.model, driver.device)
    with driver.meter:
        return build_on(wants, wants.model, plan, driver, MeteredOperations(driver))


@pytest.mark.parametrize("uses_graphs", [False, True])
def test_a_device_is_filled_to_its_share_with_states_and_blocks_and_holds_the_largest_steps(
    tmp_path: Path, uses_graphs: bool
) -> None:
    driver = MeteredDriver(DEVICE_BYTES, foreign_bytes=MIB)
    built = built_on(driver, context(tmp_path, uses_graphs=uses_graphs))
    limit = 0.9 * DEVICE_BYTES
    assert built.num_states == int(limit) // 8 // STATE_BYTES
    assert built.num_slots == -(-built.num_states * 3 // 4)
    assert built.num_blocks is not None
    assert built.kv_pool_bytes == built.num_blocks * block_bytes(SPEC, torch.bfloat16, BLOCK_SIZE)
    with driver.meter:
        sequences = BatchDriver(built.executor, num_blocks=built.num_blocks, block_size=BLOCK_SIZE)
        states = iter(range(built.num_states))
        prompts = [DrivenSequence([1] * 8, state=next(states)) for _ in range(8)]
        built.executor.execute(sequences.batch(prompts))
        one = DrivenSequence([1] * MAX_TOKENS, state=next(states))
        built.executor.execute(sequences.batch([one]))
        rows = [DrivenSequence([1, 2, 3], state=state) for state in range(4)]
        sequences.generate(rows, 3)
    assert driver.foreign_bytes + driver.meter.peak <= limit
    left = limit - driver.foreign_bytes - driver.meter.peak
    assert left < 0.1 * limit * uses_graphs + built.kv_pool_bytes / 256 + 128 * 1024 + STATE_BYTES


def test_slots_are_as_many_as_wanted_and_rows_of_graphs_no_more(tmp_path: Path) -> None:
    for max_slots, num_slots, rungs in ((3, 3, (1, 2, 4)), (4096, 14, (1, 2, 4, 8, 16))):
        driver = MeteredDriver(DEVICE_BYTES)
        built = built_on(driver, context(tmp_path, max_slots=max_slots, max_rows=256))
        assert isinstance(built.executor, CudaExecutor)
        assert built.num_slots == num_slots
        assert built.num_slots < built.num_states <= 2 * max_slots
        assert built.executor.graphs.captured == rungs


def test_models_without_states_have_room_for_none(tmp_path: Path) -> None:
    spec = replace(SPEC, architecture="qwen3", recurrence=None)
    built = built_on(
        MeteredDriver(DEVICE_BYTES), context(tmp_path, spec=spec, model=tiny_model(spec))
    )
    assert (built.num_slots, built.num_states) == (0, 0)
    assert isinstance(built.executor, CudaExecutor)
    assert built.executor._pools.states is None
    assert state_bytes(spec) == 0


def test_a_device_without_room_for_a_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one part in 8 of all memory") as info:
        built_on(MeteredDriver(DEVICE_BYTES), context(tmp_path, gpu_memory_utilization=0.04))
    assert info.value.field == "model"


def test_an_error_about_blocks_says_what_states_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MiB for states of sequences") as info:
        built_on(
            MeteredDriver(DEVICE_BYTES), context(tmp_path, fills_memory=False, num_blocks=1 << 20)
        )
    assert info.value.field == "max_num_blocks"


def test_a_budget_sets_states_aside(tmp_path: Path) -> None:
    driver = MeteredDriver(DEVICE_BYTES, foreign_bytes=MIB)
    wants = context(tmp_path, gpu_memory_utilization=0.5)
    budget = pool_size.pool_budget(wants, driver, ReferenceOperations(), 0, bytes_of_states=MIB)
    assert budget.aside_bytes == MIB + (DEVICE_BYTES // 2 - 2 * MIB) // 10


def test_the_largest_step_goes_through_one_state_as_one_long_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which kernels keep the most apart."""
    given: list[StateRows] = []

    def note(*arguments: object) -> None:
        *_, out, _, _, _, rows, _ = arguments
        assert isinstance(rows, StateRows)
        assert isinstance(out, torch.Tensor)
        out.zero_()
        given.append(rows)

    monkeypatch.setattr(ReferenceOperations, "delta_net", note)
    driver, wants = MeteredDriver(DEVICE_BYTES), context(tmp_path)
    assert wants.model is not None
    weights = planned_weights(wants, wants.model, driver.device).place(driver.device, 1)
    run_largest_step(
        SPEC, weights, ReferenceOperations(), driver, StepSizes(BLOCK_SIZE, MAX_TOKENS, 4),
        pool_dtype=torch.bfloat16,
    )  # fmt: skip
    assert len(given) == 2
    for rows in given:
        assert rows.num_long == 1
        assert rows.rows[0].tolist() == [0, MAX_TOKENS, 0, 1]
        assert not rows.rows[1:].any()
        assert rows.token_rows.tolist() == [0] * MAX_TOKENS


def test_where_the_device_is_the_processor_states_are_taken_of_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = 2 * 16 * STATE_BYTES
    monkeypatch.setattr(pool_size, "host_memory", lambda: Memory(8 * free, free))
    blocks = 100 * block_bytes(SPEC, torch.float32, BLOCK_SIZE)
    share = 1 - (free - 16 * STATE_BYTES - blocks) / (8 * free)
    wants = context(
        Path("unused"), device="cpu", dtype="float32", gpu_memory_utilization=share, max_slots=8
    )
    built = build_executor("cuda", wants)
    assert (built.num_states, built.num_blocks) == (16, 100)


def test_states_are_counted_where_a_model_may_be_cut() -> None:
    plan = plan_weights(SPEC, tiny_model(SPEC).source, "float32")
    sizes = {"item_bytes": 4, "max_tokens": MAX_TOKENS}
    of_layers = layer_bytes(SPEC, torch.float32, BLOCK_SIZE, 10)
    needs = device_bytes(SPEC, plan, layer_bytes=of_layers, num_states=3, **sizes)
    weights = sum(layer.num_bytes for layer in plan.layers)
    pool_bytes = 10 * block_bytes(SPEC, torch.float32, BLOCK_SIZE)
    assert sum(needs.layers) == pool_bytes + weights + 3 * STATE_BYTES
    assert needs.first == plan.embedding.num_bytes + working_bytes(SPEC, 4, MAX_TOKENS)


def test_working_memory_of_layers_with_states_is_counted() -> None:
    one, two = (working_bytes(SPEC, 2, tokens) for tokens in (1000, 2000))
    inputs = SIZES.channels + SIZES.value_size + 2 * SIZES.num_value_heads
    assert two - one >= 1000 * (2 * (inputs + SIZES.value_size) + 4 * SIZES.channels)


def test_working_memory_of_layers_with_convolutions_is_what_they_read_and_give() -> None:
    """Where nothing else takes more."""
    spec = replace(LFM2, intermediate_size=32, num_heads=2)
    one, two = (working_bytes(spec, 4, tokens) for tokens in (1000, 2000))
    assert two - one == 1000 * 4 * (4 + 3 + 1) * spec.hidden_size


def test_working_memory_of_layers_with_mamba2_has_what_its_launches_leave_each_other() -> None:
    one, two = (working_bytes(GRANITE4, 2, tokens) for tokens in (1000, 2000))
    inner, heads = MAMBA2.inner_size, MAMBA2.num_heads
    inputs = MAMBA2.channels + inner + heads
    floats = MAMBA2.channels + 2 * heads + inner
    elements = 4 * GRANITE4.hidden_size + inputs + inner
    assert two - one == 1000 * (2 * elements + 4 * floats)


def test_models_that_turn_nothing_have_no_tables_of_positions() -> None:
    """Files of Granite 4 H say that they have a million."""
    still = frozenset(range(GRANITE4.num_layers))
    spec = replace(GRANITE4, context_length=1 << 20, layers_without_rope=still)
    assert working_bytes(spec, 2, 64) == working_bytes(replace(spec, context_length=16), 2, 64)
    driver = MeteredDriver(64 * MIB)
    wants = context(Path("unused"), spec=spec, model=tiny_model(spec), max_slots=8)
    with driver.meter:
        assert wants.model is not None
        weights = planned_weights(wants, wants.model, driver.device).place(driver.device, 1)
        pools = BlockPools(
            spec, driver, dtype=torch.bfloat16, block_size=BLOCK_SIZE, num_blocks=4, num_states=1
        )
        before = driver.meter.peak
        DecoderModel(spec, weights, pools, MeteredOperations(driver), spec.context_length, 64)
    assert driver.meter.peak - before < MIB


@pytest.mark.wide
def test_within_a_limit_states_leave_room_for_the_blocks_that_there_must_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that the limit does not cut starts, however many states the limit might have had."""
    monkeypatch.setattr(host_layers_plan, "RESERVED_BYTES", 1 << 16)
    wants = context(tmp_path, fills_memory=False, num_blocks=20_000)
    found: list[int] = []
    for limit in range(22 * MIB, 34 * MIB, MIB):
        executor = built_on(MeteredDriver(limit), replace(wants, gpu_memory_limit=limit))
        found.append(executor.num_states if isinstance(executor.executor, CudaExecutor) else 0)
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == limit // 8 // STATE_BYTES


def test_a_limit_without_room_for_a_state_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least \d MiB are needed for one, got 0") as info:
        built_on(MeteredDriver(DEVICE_BYTES), context(tmp_path, gpu_memory_limit=STATE_BYTES))
    assert info.value.field == "gpu_memory_limit"


def test_nothing_is_swapped(capsys: pytest.CaptureFixture[str]) -> None:
    wants = context(
        Path("unused"), device="cpu", dtype="float32", fills_memory=False, max_slots=8,
        swap_bytes=1 << 20,
    )  # fmt: skip
    built = build_executor("cuda", wants)
    assert built.num_host_blocks == 0
    assert "nothing is swapped" in capsys.readouterr().out
    assert (built.num_slots, built.num_states) == (8, 16)
    assert not built.tells_prompts_apart
