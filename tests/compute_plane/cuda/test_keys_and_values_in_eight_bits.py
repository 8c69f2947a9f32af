"""int8 and float8 pools of the executor on torch's CPU: beside the CPU engine's, shared, moved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cuda.attention_kernels import layer_strides
from compute_plane.cuda.block_pools import KV_DTYPES, BlockPools, block_bytes
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.reference_blocks import read_blocks, write_tokens
from compute_plane.executor.interface import BlockCopy, CopyKind, GPUExecutor
from compute_plane.memory.block_digest import block_digest
from compute_plane.model.loader import load_model
from compute_plane.model.source import DEFAULT
from kernels.cpu.kv_layout import decode_blocks
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.quantized_kv import encode_heads
from kernels.reference.sampling import Choice
from tests.compute_plane.cuda.torch_executors import SPEC, torch_executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import STAND_IN
from tests.golden.batch_driver import BatchDriver, DrivenSequence
from tests.golden.prompts import DATA
from tests.judging import REFERENCE, could_choose

NUM_BLOCKS, BLOCK_SIZE = 60, 4
EIGHT_BITS = ["int8", "float8"]

OF_SPREAD = {"int8": 0.1, "float8": 0.4}
"""How far logits may be from those over exact keys and values, in units of their own spread."""
OF_CPU_ENGINE = {"int8": 0.1, "float8": 0.4}
"""How far those of both engines may be apart: where it has the instructions, the CPU engine rounds
queries to bfloat16, and codes then differ here and there, by more in float8."""


def stand_in(kv_dtype: str, **options: object) -> BatchDriver:
    """Return the executor over tiny weights, its pool in some format; it computes in float32."""
    made = torch_executor(
        pool_dtype=KV_DTYPES[kv_dtype], num_blocks=NUM_BLOCKS, keep_logits=True, **options
    )  # type: ignore[arg-type]
    return driver_of(made)


def driver_of(executor: GPUExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module", params=EIGHT_BITS)
def cpu_engine(request: pytest.FixtureRequest) -> Iterator[CpuExecutor]:
    pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE, request.param)
    with tiny_executor(SPEC, tiny_weights(SPEC), pool, num_threads=1, keep_logits=True) as made:
        yield made


def sequences() -> list[DrivenSequence]:
    random = np.random.default_rng(1)
    return [
        DrivenSequence(random.integers(0, SPEC.vocab_size, length).tolist())
        for length in (3, 9, 17, 30)
    ]


def logits_before(driver: BatchDriver, prompt: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
    """Return the logits before each of some tokens behind a prompt, [tokens, V]."""
    sequence, found = DrivenSequence(list(prompt)), []
    for token in tokens:
        batch = driver.batch([sequence])
        output = driver.executor.execute(batch)
        assert output.logits is not None
        found.append(output.logits[0])
        sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(token)
    driver.release(sequence)
    return np.array(found)


def check_greedy(
    driver: BatchDriver, prompt: Sequence[int], tokens: Sequence[int], kv_dtype: str
) -> None:
    """Check that each token could be another executor's, led along them."""
    rows = logits_before(driver, prompt, tokens)
    for position, (row, token) in enumerate(zip(rows, tokens, strict=True), len(prompt)):
        tolerance = OF_CPU_ENGINE[kv_dtype] * float(row.std())
        assert could_choose(row, Choice(0.0, 1.0, 0, 0, position, 0, 0.0), token, tolerance)


@pytest.mark.parametrize("chunk", [None, 7])
def test_tokens_are_those_of_the_cpu_engine_over_such_a_pool(
    cpu_engine: CpuExecutor, chunk: int | None
) -> None:
    kv_dtype = cpu_engine._pool.layout.dtype
    found = stand_in(kv_dtype).generate(sequences(), 10, chunk)
    expected = driver_of(cpu_engine).generate(sequences(), 10)
    for prompt, tokens, others in zip(sequences(), found, expected, strict=True):
        if tokens != others:  # at a near tie
            check_greedy(driver_of(cpu_engine), prompt.tokens, tokens, kv_dtype)


def test_a_block_keeps_what_the_cpu_engine_keeps(cpu_engine: CpuExecutor) -> None:
    theirs = cpu_engine._pool
    kv_dtype = theirs.layout.dtype
    ours = stand_in(kv_dtype)
    for driver in (ours, driver_of(cpu_engine)):
        rows = sequences()
        driver.executor.execute(driver.batch(rows))
    full = [block for row in rows for block in row.blocks[: len(row.tokens) // BLOCK_SIZE]]
    expected = decode_blocks(theirs.layout.parts[0], theirs.data[full])
    pool = ours.executor._pools.device  # type: ignore[attr-defined]
    for layer, apart in ((0, 1e-3), (1, 3)):  # of the largest step between two codes
        found = read_blocks(pool, layer, np.array(full), SPEC.head_dim)[:, 0]
        largest = np.abs(expected[:, layer]).max(axis=-1, keepdims=True)
        step = largest / (127 if kv_dtype == "int8" else 14)
        assert (np.abs(found - expected[:, layer]) <= apart * step).all()


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_logits_are_within_the_formats_tolerance_of_those_over_exact_blocks(kv_dtype: str) -> None:
    exact, rounded = (stand_in(name) for name in ("float32", kv_dtype))
    [prompt, *_] = sequences()[2:]
    tokens = list(range(10, 22))
    expected = logits_before(exact, prompt.tokens, tokens)
    apart = np.abs(logits_before(rounded, prompt.tokens, tokens) - expected).max()
    assert 0 < apart < OF_SPREAD[kv_dtype] * expected.std()
    if kv_dtype == "float8":
        assert apart > OF_SPREAD["int8"] / 2 * expected.std()  # or it is no float8


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_what_lies_in_a_slot_is_the_specifications_codes_and_scale(kv_dtype: str) -> None:
    pools = BlockPools(
        SPEC, CpuDriver(), dtype=KV_DTYPES[kv_dtype], block_size=BLOCK_SIZE, num_blocks=3
    )
    random = np.random.default_rng(3)
    blocks = random.standard_normal((3, 2, SPEC.num_kv_heads, BLOCK_SIZE, SPEC.head_dim))
    blocks = blocks.astype(np.float32)
    slots = random.permutation(3 * BLOCK_SIZE)[:-1]
    tokens = blocks.transpose(0, 3, 1, 2, 4).reshape(-1, *blocks.shape[1:3], SPEC.head_dim)
    write_tokens(pools.device, 1, torch.from_numpy(slots), tokens[slots])
    left = np.setdiff1d(np.arange(3 * BLOCK_SIZE), slots)[0]
    blocks[left // BLOCK_SIZE, :, :, left % BLOCK_SIZE] = 0
    found = pools.device.view(torch.uint8).numpy()
    np.testing.assert_array_equal(found[:, 1], encode_heads(kv_dtype, blocks))
    assert not found[:, 0].any()


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_a_row_whose_blocks_hold_no_number_fails_alone(kv_dtype: str) -> None:
    driver = stand_in(kv_dtype)
    rows = sequences()[:3]
    driver.generate(rows, 1)
    pool = driver.executor._pools.device  # type: ignore[attr-defined]
    pool.view(torch.uint8)[rows[1].blocks[0]] = 0xFF  # scales too
    assert list(driver.executor.execute(driver.batch(rows)).failed_rows) == [1]


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_a_block_found_in_the_cache_serves_another_sequence(kv_dtype: str) -> None:
    driver = stand_in(kv_dtype)
    first = sequences()[3]
    driver.generate([first], 1)
    shared = 2 * BLOCK_SIZE
    tokens = [*first.tokens[:shared], 5, 6, 7]
    [expected] = logits_before(stand_in(kv_dtype), tokens, [0])
    reader = DrivenSequence(list(tokens), num_computed=shared, blocks=first.blocks[:2])
    [found] = driver.executor.execute(driver.batch([reader])).logits  # type: ignore[union-attr]
    # Rows that are multiplied in other company are rounded otherwise, and so are some codes.
    np.testing.assert_allclose(found, expected, atol=OF_SPREAD[kv_dtype] / 2 * expected.std())


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_a_swapped_sequence_goes_on_bit_for_bit_and_a_fork_from_a_copy(kv_dtype: str) -> None:
    logits = []
    for is_moved in (False, True):
        driver = stand_in(kv_dtype, num_host_blocks=4)
        sequence = DrivenSequence([5, 6, 7, 8, 9, 10, 11])
        driver.generate([sequence], 1)
        copies = []
        if is_moved:
            olds, sequence.blocks = sequence.blocks, [driver.free.pop(), driver.free.pop()]
            forked = [driver.free.pop() for _ in olds]
            places = list(zip(olds, (3, 1), sequence.blocks, strict=True))
            copies = [BlockCopy(old, host, CopyKind.SWAP_OUT) for old, host, _ in places]
            copies += [BlockCopy(30, old) for old in olds]  # what was there is gone
            copies += [
                BlockCopy(host, other, CopyKind.SWAP_IN)
                for (_, host, _), other in zip(places, forked, strict=True)
            ]
            copies += [
                BlockCopy(other, new) for other, new in zip(forked, sequence.blocks, strict=True)
            ]
        output = driver.executor.execute(replace(driver.batch([sequence]), copies=copies))
        assert output.logits is not None
        logits.append(output.logits.tobytes())
    assert logits[0] == logits[1]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_block_takes_the_bytes_that_are_counted_and_those_are_moved(kv_dtype: str) -> None:
    counted = block_bytes(SPEC, KV_DTYPES[kv_dtype], 16)
    values = 2 * SPEC.num_layers * SPEC.num_kv_heads * 16
    of_value = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8": 1}[kv_dtype]
    scale = 4 if kv_dtype in EIGHT_BITS else 0
    assert counted == values * (SPEC.head_dim * of_value + scale)
    pools = BlockPools(
        SPEC, CpuDriver(), dtype=KV_DTYPES[kv_dtype], block_size=16, num_blocks=5,
        num_host_blocks=3,
    )  # fmt: skip
    assert pools.device.untyped_storage().nbytes() == pools.num_bytes == 5 * counted
    assert pools.host.untyped_storage().nbytes() == 3 * counted
    assert pools.block_size == 16
    assert pools.device[1].data_ptr() - pools.device[0].data_ptr() == counted


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_a_digest_is_of_every_byte_of_a_block_and_no_other(kv_dtype: str) -> None:
    pools = BlockPools(SPEC, CpuDriver(), dtype=KV_DTYPES[kv_dtype], block_size=16, num_blocks=3)
    content = pools.device.view(torch.uint8).numpy().reshape(3, -1)
    content[:] = np.random.default_rng(5).integers(0, 256, content.shape, dtype=np.uint8)
    assert pools.digest(1) == block_digest(content[1])
    before = pools.digest(1)
    content[(0, 2), :] = 0
    assert pools.digest(1) == before
    content[1, -1] ^= 1  # of a scale
    assert pools.digest(1) != before


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_kernels_find_a_layer_by_counting_bytes(kv_dtype: str) -> None:
    spec = replace(SPEC, head_dim=64, num_layers=3)
    pools = BlockPools(
        spec, CpuDriver(), dtype=KV_DTYPES[kv_dtype], block_size=16, num_blocks=2
    )  # fmt: skip
    of_heads = spec.num_kv_heads * 16 * (64 + 4)
    block = 2 * 3 * of_heads
    assert layer_strides(pools.device, 2) == (block, 4 * of_heads, 5 * of_heads)
    assert CopyBlocksVariant().grid(7, block // 4)[0] == 7  # whole vectors, or it raises


def greedy_runs(names: tuple[str, ...]) -> list[dict]:
    runs = json.loads((DATA / "greedy.json").read_text(encoding="utf-8"))["runs"]
    return [run for run in runs if run["name"] in names]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_the_embedded_models_greedy_tokens_could_be_the_cpu_engines(kv_dtype: str) -> None:
    model, num_tokens = load_model(DEFAULT), 16
    prompts = [run["prompt_token_ids"] for run in greedy_runs(("greeting", "chinese"))]
    sizes = {"num_blocks": 40, "block_size": 16}
    with STAND_IN.running(model, kv_cache_dtype=kv_dtype, **sizes) as executor:  # type: ignore[arg-type]
        driver = BatchDriver(executor, **sizes)
        found = driver.generate([DrivenSequence(list(ids)) for ids in prompts], num_tokens)
    with REFERENCE.running(model, kv_cache_dtype=kv_dtype, keep_logits=True, **sizes) as executor:  # type: ignore[arg-type]
        driver = BatchDriver(executor, **sizes)
        for prompt, tokens in zip(prompts, found, strict=True):
            check_greedy(driver, prompt, tokens, kv_dtype)
