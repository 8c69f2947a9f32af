"""A model cut between torch's CPU device and the CPU engine: whole models' tokens and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.host_layers import HostLayersExecutor, rows_for_the_host
from compute_plane.cuda.layer_products import Hidden
from compute_plane.executor.interface import BlockCopy, CopyKind, GPUExecutor, SamplingRow
from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.gguf_mixture import SHARING
from compute_plane.model.spec import Mixture
from planes.errors import ValidationError
from tests.compute_plane.cuda.cut_executors import BLOCK_SIZE, NUM_BLOCKS, SPEC, cut_executor
from tests.compute_plane.cuda.torch_executors import RecordingDriver
from tests.compute_plane.executor.tiny_llama import (
    pool_for,
    tiny_executor,
    with_heads_of_two_sizes,
    with_latents,
)
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32


@pytest.fixture
def executor() -> Iterator[HostLayersExecutor]:
    made = cut_executor(num_host_blocks=4)
    yield made
    made.close()


@pytest.fixture
def driver(executor: HostLayersExecutor) -> BatchDriver:
    return driver_of(executor)


def driver_of(executor: GPUExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def prompt(seed: int, length: int | None = None) -> list[int]:
    random = np.random.default_rng(seed)
    return random.integers(0, SPEC.vocab_size, length or random.integers(1, 30)).tolist()


def sequences() -> list[DrivenSequence]:
    """Greedy ones and drawn ones in turn."""
    return [
        DrivenSequence(prompt(row), temperature=0.7 * (row % 2), top_p=0.9, seed=row)
        for row in range(5)
    ]


def test_it_is_an_executor_that_runs_one_step_after_the_other(executor: HostLayersExecutor) -> None:
    assert isinstance(executor, GPUExecutor)
    assert not hasattr(executor, "launch")
    executor.capture_decode_graph(8)  # there is nothing to capture


@pytest.mark.spread(1)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_wherever_it_is_cut_whole_and_in_chunks_it_gives_the_tokens_of_the_cpu_executor(
    architecture: str,
) -> None:
    """What is a layer's own goes with it: biases, norms, windows, angles or having none.

    Multipliers count once, on the side where they belong.
    """
    spec = replace(SPEC, architecture=architecture)
    if architecture == "smollm3":
        spec = replace(spec, layers_without_rope=frozenset({0, 3}))
    if ARCHITECTURES[architecture].experts == "always":
        spec = replace(spec, mixture=Mixture(5, 2))
    if architecture in SHARING:
        shared = {"shared_size": 96, "dense_layers": 2, "dense_size": 64, "corrects_choice": True}
        gates = architecture == "qwen2moe"
        spec = replace(spec, mixture=Mixture(5, 2, gates_shared=gates, **shared))
    if architecture == "granite":
        spec = replace(spec, embedding_scale=5.0, score_scale=0.3, logits_scale=0.25)
    if architecture == "deepseek2":
        spec = with_latents(spec)
    if architecture == "gemma3":
        local = frozenset({0, 2})
        spec = replace(spec, window=9, layers_with_window=local, embedding_scale=3.0)
        spec = replace(spec, local_rope_theta=50.0, layers_with_local_rope=local)
    if architecture == "gemma4":
        spec = with_heads_of_two_sizes(spec)
    pool = pool_for(spec, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(spec, tiny_weights(spec), pool, num_threads=1) as cpu:
        expected = driver_of(cpu).generate(sequences(), 6)
    for num_device_layers in (1, 2, 3):
        for chunk in (None, 7):
            executor = cut_executor(num_device_layers, model=spec)
            assert driver_of(executor).generate(sequences(), 6, chunk) == expected
            executor.close()


def test_a_device_whose_copies_arrive_late_is_waited_for(driver: BatchDriver) -> None:
    expected = driver.generate(sequences(), 4)
    device = RecordingDriver()
    executor = cut_executor(driver=device)
    assert driver_of(executor).generate(sequences(), 4) == expected
    assert device.calls.count("download") == 4
    assert "capture" not in device.calls
    executor.close()


def test_rows_are_summed_in_float32_on_their_way_to_the_host() -> None:
    residual, added = torch.tensor([[1.0, 2**-9]], dtype=torch.bfloat16).chunk(2, dim=1)
    summed = rows_for_the_host(Hidden(residual, added))
    assert summed.view(torch.float32).tolist() == [1.0 + 2**-9]


def test_in_16_bits_the_devices_part_differs_by_rounding_alone(driver: BatchDriver) -> None:
    batch = driver.batch([DrivenSequence(prompt(1)), DrivenSequence(prompt(2))])
    expected = driver.executor.execute(batch).logits
    executor = cut_executor(dtype=torch.bfloat16)
    found = executor.execute(batch).logits
    executor.close()
    assert expected is not None
    assert found is not None
    np.testing.assert_allclose(found, expected, atol=0.1 * expected.std())


def test_a_digest_tells_the_bytes_of_both_halves_of_a_block(
    executor: HostLayersExecutor, driver: BatchDriver
) -> None:
    same = [DrivenSequence(prompt(4, 8)), DrivenSequence(prompt(4, 8))]
    batch = driver.batch(same)
    blocks = batch.block_tables.reshape(-1).tolist()
    digests = executor.execute(replace(batch, digest_blocks=blocks)).block_digests
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]
    other = driver.batch([DrivenSequence(prompt(8, 4))])
    asked = replace(other, digest_blocks=[blocks[0]])
    executor._pools.device[blocks[0], 0, 0, 0, 0, 0] += 1
    of_device = executor.execute(asked).block_digests
    executor._host._pool.data[blocks[0], 0] ^= 1
    of_both = executor.execute(asked).block_digests
    assert len({digests[0], *of_device, *of_both}) == 3


@pytest.mark.parametrize("is_on_the_host", [False, True])
def test_a_row_without_finite_logits_fails_alone(
    executor: HostLayersExecutor, driver: BatchDriver, is_on_the_host: bool
) -> None:
    rows = [DrivenSequence(prompt(row)) for row in (10, 11, 12)]
    [expected] = driver.generate([DrivenSequence(list(rows[2].tokens))], 2)
    driver.generate(rows, 1)
    if is_on_the_host:
        executor._host._pool.data[rows[1].blocks[0]] = 0xFF
    else:
        executor._pools.device[rows[1].blocks[0]] = float("nan")
    output = executor.execute(driver.batch(rows))
    assert list(output.failed_rows) == [1]
    assert output.next_tokens[2] == expected[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": int32([1, 2])},
        {"positions": int32([1, 0])},  # what the host alone would take
        {  # longer than the pool has room for
            "seq_lens": int32([NUM_BLOCKS * BLOCK_SIZE + 1]),
            "positions": int32([NUM_BLOCKS * BLOCK_SIZE - 1, NUM_BLOCKS * BLOCK_SIZE]),
            "block_tables": np.zeros((1, NUM_BLOCKS + 1), dtype=np.int32),
        },
        {"sampling": [SamplingRow(0.0, 1.0, 0, 0, 2)] * 2},
        {"copies": [BlockCopy(2, 9), BlockCopy(0, NUM_BLOCKS)]},
        {"copies": [BlockCopy(2, 9), BlockCopy(0, 4, CopyKind.SWAP_OUT)]},
    ],
)
def test_a_malformed_batch_is_refused_and_changes_neither_part(
    executor: HostLayersExecutor, driver: BatchDriver, changes: dict[str, object]
) -> None:
    batch = driver.batch([DrivenSequence([1, 2])])
    parts = [executor._pools.device.numpy(), executor._host._pool.data]
    before = [part.tobytes() for part in parts]
    with pytest.raises(ValidationError) as info:
        # A sound copy goes with it: it must not be made either.
        executor.execute(replace(batch, **{"copies": [BlockCopy(2, 9)], **changes}))
    assert info.value.field == next(iter(changes))
    assert [part.tobytes() for part in parts] == before


def test_a_device_that_fails_fails_its_step_alone(
    executor: HostLayersExecutor, driver: BatchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is ill")

    batch = driver.batch([DrivenSequence(prompt(1))])
    expected = executor.execute(batch).next_tokens
    with monkeypatch.context() as patch:
        patch.setattr(executor._operations, "gate_mul", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ill"):
                executor.execute(batch)
    assert executor.execute(batch).next_tokens == expected


def test_the_hosts_part_is_closed_with_it(
    executor: HostLayersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(executor._host, "close", lambda: closed.append("host"))
    executor.close()
    assert closed == ["host"]
