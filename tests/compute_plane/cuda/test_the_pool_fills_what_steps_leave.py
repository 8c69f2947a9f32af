"""The KV pool takes what weights, the largest step and graphs leave of a device, and no more."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from compute_plane.cuda import pool_size
from compute_plane.cuda.block_pools import KV_DTYPES, BlockPools, block_bytes
from compute_plane.cuda.build import build_on, planned_weights
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.executor.interface import (
    MAX_STEPS_UNDER_WAY,
    EmbeddingPart,
    EmbeddingWant,
    LogitBias,
    Penalties,
    SamplingRow,
)
from compute_plane.executor.registry import BuiltExecutor, ExecutorContext
from compute_plane.memory.sizing import MIB
from planes.errors import ConfigError
from tests.compute_plane.cuda.metered_device import MeteredDriver, MeteredOperations
from tests.compute_plane.cuda.torch_executors import tiny_model
from tests.compute_plane.executor.tiny_llama import tiny_spec
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

SPEC = replace(tiny_spec(), context_length=96)
BLOCK_SIZE, MAX_TOKENS = 4, 64
BLOCK_BYTES = block_bytes(SPEC, torch.bfloat16, BLOCK_SIZE)
DEVICE_BYTES = 6 * MIB


def context(tmp_path: Path, **changes: object) -> ExecutorContext:
    plain = ExecutorContext(
        spec=SPEC, model=tiny_model(SPEC), block_size=BLOCK_SIZE, num_blocks=10, dtype="bfloat16",
        kv_cache_dtype="auto", instruction_set="auto", device="cuda", max_tokens=MAX_TOKENS,
        num_threads=1, kernel_cache=tmp_path, max_rows=4, fills_memory=True,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def built_on(
    driver: MeteredDriver, wants: ExecutorContext, decode_scratch: int = 0
) -> BuiltExecutor:
    """Return the executor on a device, its memory counted from the first tensor on."""
    assert wants.model is not None
    plan = planned_weights(wants, wants.model, driver.device)
    with driver.meter:
        operations = MeteredOperations(driver, decode_scratch)
        return build_on(wants, wants.model, plan, driver, operations)


def prompts(driver: BatchDriver, num_tokens: int) -> object:
    """Return a batch of so many tokens of which everything is wanted that can be."""
    rows = [DrivenSequence(list(range(1, 1 + num_tokens // 8))) for _ in range(8)]
    batch = driver.batch(rows)
    history = int32(np.arange(SPEC.context_length))
    penalties = Penalties(1.2, 0.3, 0.1, history, 3)
    bias = LogitBias(int32([5]), np.array([1], dtype=np.float32))
    return replace(
        batch,
        sampling=[
            SamplingRow(1.0, 0.9, 1, 0, 9, penalties=penalties, logit_bias=bias, num_logprobs=20)
        ] * len(rows),
        prompt_logprob_rows=list(range(8)),
        prompt_logprob_targets=[int32(row.tokens[1:]) for row in rows],
        prompt_num_logprobs=[20] * 8,
        embeddings=[EmbeddingWant(row, EmbeddingPart.SUM) for row in range(8)],
    )  # fmt: skip


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("utilization", "uses_graphs", "kv_dtype"),
    [
        (0.5, False, "auto"), (0.9, False, "auto"), (1.0, False, "auto"),
        (0.5, True, "auto"), (0.9, True, "auto"), (1.0, True, "auto"),
        (0.9, True, "int8"), (1.0, False, "float8"),
    ],
)  # fmt: skip
def test_a_device_is_filled_to_its_share_and_holds_the_largest_steps(
    tmp_path: Path, utilization: float, uses_graphs: bool, kv_dtype: str
) -> None:
    driver = MeteredDriver(DEVICE_BYTES, foreign_bytes=MIB)
    wants = context(
        tmp_path, gpu_memory_utilization=utilization, uses_graphs=uses_graphs, max_slots=4096,
        kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    built = built_on(driver, wants)
    assert built.num_blocks is not None
    of_block = BLOCK_BYTES
    if kv_dtype != "auto":  # a byte for two, and a scale of four a head
        of_block = block_bytes(SPEC, KV_DTYPES[kv_dtype], BLOCK_SIZE)
        assert of_block == BLOCK_BYTES * (SPEC.head_dim + 4) // (2 * SPEC.head_dim)
    assert built.kv_pool_bytes == built.num_blocks * of_block
    limit = utilization * DEVICE_BYTES
    with driver.meter:
        sequences = BatchDriver(built.executor, num_blocks=built.num_blocks, block_size=BLOCK_SIZE)
        built.executor.execute(prompts(sequences, MAX_TOKENS))
        rows = [DrivenSequence([1, 2, 3]) for _ in range(4)]
        sequences.generate(rows, 3)
    assert driver.foreign_bytes + driver.meter.peak <= limit
    # And it is filled, but for the graphs' part and what would make a pool of an odd size.
    left = limit - driver.foreign_bytes - driver.meter.peak
    assert left < 0.1 * limit * uses_graphs + built.kv_pool_bytes / 256 + 64 * 1024


@pytest.mark.wide
def test_a_filled_device_holds_more_rows_than_there_are_logits_and_one_row_as_long_as_can_be(
    tmp_path: Path,
) -> None:
    driver = MeteredDriver(DEVICE_BYTES)
    sizes = {"max_tokens": 600, "max_rows": 600, "max_slots": 4096, "uses_graphs": False}
    built = built_on(driver, context(tmp_path, gpu_memory_utilization=1.0, **sizes))
    sequences = BatchDriver(built.executor, num_blocks=built.num_blocks or 0, block_size=BLOCK_SIZE)
    length = SPEC.context_length - 1
    # The driver has fewer states than rows here, and the model has none.
    long = DrivenSequence([1] * length, num_computed=length - 1, state=0)
    long.blocks = [sequences.free.pop() for _ in range(-(-length // BLOCK_SIZE))]
    batch = sequences.batch([long, *(DrivenSequence([1], state=0) for _ in range(599))])
    penalties = Penalties(1.2, 0.3, 0.1, int32(np.arange(SPEC.context_length)), 3)
    batch = replace(
        batch,
        sampling=[row._replace(penalties=penalties, num_logprobs=20) for row in batch.sampling],
        prompt_logprob_rows=range(600),
        prompt_logprob_targets=[int32([1])] * 600,
        prompt_num_logprobs=[20] * 600,
    )
    driver.meter.num_bytes *= 2
    with driver.meter:
        assert isinstance(built.executor, CudaExecutor)
        under_way = [built.executor.launch(batch) for _ in range(MAX_STEPS_UNDER_WAY)]
        for step in under_way:
            step.answer()
    assert driver.meter.peak <= DEVICE_BYTES


@pytest.mark.parametrize("uses_graphs", [False, True])
def test_a_device_that_is_filled_holds_what_decode_attention_takes_beside(
    tmp_path: Path, uses_graphs: bool
) -> None:
    """More than the largest step's logits, which are not there meanwhile."""
    driver, scratch = MeteredDriver(DEVICE_BYTES), DEVICE_BYTES // 3
    wants = context(tmp_path, gpu_memory_utilization=1.0, uses_graphs=uses_graphs, max_slots=4096)
    built = built_on(driver, wants, scratch)
    assert built.num_blocks is not None
    plain = built_on(MeteredDriver(DEVICE_BYTES), wants)
    assert plain.num_blocks is not None
    assert (plain.num_blocks - built.num_blocks) * BLOCK_BYTES >= scratch // 2
    with driver.meter:
        sequences = BatchDriver(built.executor, num_blocks=built.num_blocks, block_size=BLOCK_SIZE)
        sequences.generate([DrivenSequence(list(range(1, 9))) for _ in range(3)], 3)
    assert DEVICE_BYTES - scratch < driver.meter.peak <= DEVICE_BYTES


def test_graphs_are_given_room_for_the_scratch_memory_of_attention(tmp_path: Path) -> None:
    """Up to their share; with as many rows as the largest graph has, of the longest context."""
    asked: list[tuple[int, int]] = []

    class Scratch(ReferenceOperations):
        def decode_scratch_bytes(self, num_rows: int, longest: int) -> int:
            asked.append((num_rows, longest))
            return 5 * MIB

    driver, wants = MeteredDriver(1 << 40), context(tmp_path, max_rows=3)
    plain, more = (
        pool_size.pool_budget(wants, driver, operations, 0).aside_bytes
        for operations in (ReferenceOperations(), Scratch())
    )
    assert more - plain == 5 * MIB
    assert asked == [(4, SPEC.context_length)]


def test_what_others_hold_and_a_larger_step_make_the_pool_smaller(tmp_path: Path) -> None:
    def num_blocks(foreign_bytes: int = 0, **changes: object) -> int:
        driver = MeteredDriver(DEVICE_BYTES, foreign_bytes)
        return built_on(driver, context(tmp_path, **changes)).num_blocks or 0

    alone = num_blocks()
    assert alone > 100
    assert alone - 60 <= num_blocks(foreign_bytes=40 * BLOCK_BYTES) <= alone - 25
    assert num_blocks(max_tokens=2 * MAX_TOKENS) < alone - 10
    assert num_blocks(max_slots=2) == 2 * SPEC.context_length // BLOCK_SIZE


def test_what_loading_has_left_is_released_before_the_pool_is_sized(tmp_path: Path) -> None:
    found = []
    for left_bytes in (0, DEVICE_BYTES // 2):
        driver = MeteredDriver(DEVICE_BYTES)
        with driver.meter:
            torch.empty(left_bytes, dtype=torch.uint8)
        found.append(built_on(driver, context(tmp_path)).num_blocks)
    assert found[0] == found[1]


def test_without_graphs_nothing_is_set_aside_for_them(tmp_path: Path) -> None:
    asides = []
    for changes in ({}, {"uses_graphs": False}):
        driver = MeteredDriver(DEVICE_BYTES)
        wants = context(tmp_path, **changes)
        with_graphs = built_on(driver, wants)
        asides.append(with_graphs.num_blocks or 0)
        assert bool(with_graphs.executor.graphs.captured) == wants.uses_graphs  # type: ignore[attr-defined]
    with_graphs, without = asides
    assert without - with_graphs >= 0.08 * without


def test_graphs_are_captured_once_the_pool_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    driver = MeteredDriver(DEVICE_BYTES)
    monkeypatch.setattr(
        BlockPools, "__init__", noting(BlockPools.__init__, lambda: events.append("pool"))
    )
    monkeypatch.setattr(driver, "capture", noting(driver.capture, lambda: events.append("graph")))
    built_on(driver, context(tmp_path))
    assert events == ["pool", "pool", "graph", "graph", "graph"]  # the first of one block


def noting(function, note):
    def run(*arguments, **named):
        note()
        return function(*arguments, **named)

    return run


def test_a_number_of_blocks_that_does_not_fit_is_refused_with_the_largest_that_does(
    tmp_path: Path,
) -> None:
    driver = MeteredDriver(DEVICE_BYTES)
    with pytest.raises(ConfigError, match=r"at most \d+ blocks fit") as info:
        built_on(driver, context(tmp_path, fills_memory=False, num_blocks=1 << 20))
    assert info.value.field == "max_num_blocks"
    found = re.search(r"at most (\d+) blocks fit", info.value.message)
    assert found is not None
    most = int(found[1])
    driver = MeteredDriver(DEVICE_BYTES)
    built = built_on(driver, context(tmp_path, fills_memory=False, num_blocks=most))
    assert built.num_blocks == most
    driver = MeteredDriver(DEVICE_BYTES)
    with pytest.raises(ConfigError, match=f"at most {most} blocks fit"):
        built_on(driver, context(tmp_path, fills_memory=False, num_blocks=most + 1))


def test_a_device_without_room_for_one_sequence_is_refused_with_what_takes_it(
    tmp_path: Path,
) -> None:
    driver = MeteredDriver(DEVICE_BYTES)
    with pytest.raises(ConfigError) as info:
        built_on(driver, context(tmp_path, gpu_memory_utilization=0.05))
    assert info.value.field == "max_num_blocks"
    for words in (
        "needs 24", "of 6 MiB a share of 0.05 may be taken (--gpu-memory-utilization)",
        f"a step of {MAX_TOKENS} tokens was run (--max-tokens-per-batch; weights: 0 MiB)",
        ", 0 MiB are for decode graphs",
    ):  # fmt: skip
        assert words in info.value.message
    assert "\n" not in info.value.message


def test_a_step_that_finds_no_room_is_refused_by_its_tokens(tmp_path: Path) -> None:
    driver = MeteredDriver(MIB + MIB // 2)
    with pytest.raises(ConfigError, match="a step of 4096 tokens finds no room") as info:
        built_on(driver, context(tmp_path, max_tokens=4096))
    assert info.value.field == "max_tokens_per_batch"


def test_a_limit_stands_for_the_share_and_a_pool_must_fit_below_it(tmp_path: Path) -> None:
    driver = MeteredDriver(DEVICE_BYTES)
    wants = context(tmp_path, fills_memory=False, gpu_memory_limit=DEVICE_BYTES, num_blocks=7)
    budget = pool_size.pool_budget(wants, driver, ReferenceOperations(), 0)
    assert (budget.limit_bytes, budget.used_bytes) == (DEVICE_BYTES, 0)


def test_graphs_may_take_a_tenth_of_what_is_left(tmp_path: Path) -> None:
    driver = MeteredDriver(DEVICE_BYTES, foreign_bytes=MIB)
    wants = context(tmp_path, gpu_memory_utilization=0.5)
    budget = pool_size.pool_budget(wants, driver, ReferenceOperations(), 0)
    assert budget.aside_bytes == (DEVICE_BYTES // 2 - MIB) // 10
