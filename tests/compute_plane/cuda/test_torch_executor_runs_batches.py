"""The executor on torch's CPU device: the CPU executor's tokens, errors, steps under way.

A library's products may give a row other bits in another batch, so what
is compared are tokens; what holds in bits is in `test_torch_blocks_are_paged`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.executor.interface import (
    MAX_STEPS_UNDER_WAY,
    BlockCopy,
    ExecutionBatch,
    GPUExecutor,
    SamplingRow,
)
from planes.errors import ExecutionError, ValidationError
from tests.compute_plane.cuda.torch_executors import BLOCK_SIZE, NUM_BLOCKS, SPEC, torch_executor
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32


@pytest.fixture
def executor() -> CudaExecutor:
    return torch_executor(keep_logits=True)


@pytest.fixture
def driver(executor: CudaExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def prompt(seed: int, length: int | None = None) -> list[int]:
    random = np.random.default_rng(seed)
    return random.integers(0, SPEC.vocab_size, length or random.integers(1, 40)).tolist()


def sequences(count: int = 7) -> list[DrivenSequence]:
    """Greedy ones and drawn ones in turn."""
    return [
        DrivenSequence(prompt(row), temperature=0.7 * (row % 2), top_p=0.9, seed=row)
        for row in range(count)
    ]


def test_it_is_an_executor(executor: CudaExecutor) -> None:
    assert isinstance(executor, GPUExecutor)
    executor.capture_decode_graph(8)  # a CPU has none
    assert executor.graphs.captured == ()


@pytest.mark.parametrize("chunk", [None, 7])
def test_together_and_in_chunks_it_gives_the_tokens_of_the_cpu_executor(
    driver: BatchDriver, chunk: int | None
) -> None:
    pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(SPEC, tiny_weights(SPEC), pool) as cpu:
        other = BatchDriver(cpu, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        expected = other.generate(sequences(), 8)
    assert driver.generate(sequences(), 8, chunk) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_its_logits_are_those_of_float32_but_for_rounding(
    executor: CudaExecutor, driver: BatchDriver, dtype: torch.dtype
) -> None:
    batch = driver.batch([DrivenSequence(prompt(1)), DrivenSequence(prompt(2))])
    expected = executor.execute(batch).logits
    found = torch_executor(dtype=dtype, keep_logits=True).execute(batch).logits
    assert expected is not None
    assert found is not None
    spread = expected.std()
    np.testing.assert_allclose(
        found, expected, atol=(0.1 if dtype == torch.bfloat16 else 0.02) * spread
    )
    assert not np.array_equal(found, found.astype(np.float16))  # float32, not rounded


def test_decoding_rows_and_prefills_may_stand_in_any_order(driver: BatchDriver) -> None:
    rows = [DrivenSequence(prompt(row, 9)) for row in range(20)]  # more than any sort leaves alone
    driver.generate(rows[1::2], 1)
    expected = [driver.generate([DrivenSequence(list(row.tokens))], 1)[0][0] for row in rows]
    assert driver.executor.execute(driver.batch(rows)).next_tokens.tolist() == expected


def test_more_samples_than_a_group_holds_may_share_a_row(driver: BatchDriver) -> None:
    batch = driver.batch([DrivenSequence(prompt(8))])
    ways = [SamplingRow(1.0, 0.95, 3, index, batch.sampling[0].position) for index in range(300)]
    many = driver.executor.execute(replace(batch, sampled_rows=int32([0] * 300), sampling=ways))
    assert len(set(many.next_tokens.tolist())) > 5
    for index in (0, 255, 299):
        one = replace(batch, sampled_rows=int32([0]), sampling=[ways[index]])
        assert driver.executor.execute(one).next_tokens[0] == many.next_tokens[index]


def test_prompt_log_probabilities_are_those_of_the_logits(driver: BatchDriver) -> None:
    tokens = prompt(9, 30)
    expected = []
    for length in range(1, 30):
        logits = driver.executor.execute(driver.batch([DrivenSequence(tokens[:length])])).logits
        assert logits is not None
        shifted = logits[0].astype(np.float64) - logits.max()
        expected.append(shifted[tokens[length]] - np.log(np.exp(shifted).sum()))
    batch = driver.batch([DrivenSequence(prompt(3)), DrivenSequence(list(tokens))])
    output = driver.executor.execute(
        replace(batch, prompt_logprob_rows=[1], prompt_logprob_targets=[int32(tokens[1:])])
    )
    np.testing.assert_allclose(output.prompt_logprobs[0], expected, atol=1e-4)


def test_a_row_without_finite_logits_fails_alone(
    executor: CudaExecutor, driver: BatchDriver
) -> None:
    rows = [DrivenSequence(prompt(row)) for row in (10, 11, 12)]
    [expected] = driver.generate([DrivenSequence(list(rows[2].tokens))], 2)
    driver.generate(rows, 1)
    executor._pools.device[rows[1].blocks[0]] = float("nan")
    output = executor.execute(driver.batch(rows))
    assert list(output.failed_rows) == [1]
    assert output.next_tokens[2] == expected[1]
    asked = replace(
        driver.batch(rows),
        sampled_rows=int32([]),
        sampling=[],
        prompt_logprob_rows=[1, 2],
        prompt_logprob_targets=[int32([3]), int32([4])],
    )
    output = executor.execute(asked)
    assert list(output.failed_rows) == [1]
    assert np.isfinite(output.prompt_logprobs[1]).all()


def test_digests_tell_the_bytes_of_blocks(executor: CudaExecutor, driver: BatchDriver) -> None:
    same = [DrivenSequence(prompt(4, 8)), DrivenSequence(prompt(4, 8))]
    blocks = [*driver.batch(same).block_tables.reshape(-1).tolist()]
    digests = executor.execute(replace(driver.batch(same), digest_blocks=blocks)).block_digests
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_no_more_steps_are_under_way_than_there_are_buffers(
    executor: CudaExecutor, driver: BatchDriver
) -> None:
    rows = range(MAX_STEPS_UNDER_WAY + 1)
    batches = [driver.batch([DrivenSequence(prompt(row))]) for row in rows]
    expected = [executor.execute(batch).next_tokens[0] for batch in batches]
    under_way = [executor.launch(batch) for batch in batches[:-1]]
    with pytest.raises(ExecutionError, match=f"at most {MAX_STEPS_UNDER_WAY} steps"):
        executor.launch(batches[-1])
    found = [step.answer().next_tokens[0] for step in under_way]
    assert [*found, executor.execute(batches[-1]).next_tokens[0]] == expected


def test_a_step_that_fails_leaves_its_buffers_to_the_next(
    executor: CudaExecutor, driver: BatchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the device is ill")

    batch = driver.batch([DrivenSequence(prompt(1))])
    expected = executor.execute(batch).next_tokens
    with monkeypatch.context() as patch:
        patch.setattr(executor._operations, "gate_mul", fail)
        for _ in range(MAX_STEPS_UNDER_WAY + 1):
            with pytest.raises(RuntimeError, match="ill"):
                executor.execute(batch)
    assert executor.execute(batch).next_tokens == expected


def well_formed() -> ExecutionBatch:
    """Two rows: positions 0–4 of one sequence, position 6 of another."""
    return ExecutionBatch(
        input_tokens=int32([1, 2, 3, 4, 5, 6]),
        positions=int32([0, 1, 2, 3, 4, 6]),
        seq_lens=int32([5, 7]),
        block_tables=np.array([[0, 1], [2, 3]], dtype=np.int32),
        is_prefill=np.array([True, False]),
        prompt_lens=int32([5, 6]),
        query_lens=int32([5, 1]),
        sampled_rows=int32([1]),
        sampling=[SamplingRow(0.0, 1.0, 0, 0, 7)],
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("query_lens", int32([])),
        ("input_tokens", int32([1, 2, 3, 4, 5, SPEC.vocab_size])),
        ("positions", int32([0, 1, 2, 3, 4, 5])),
        ("positions", int32([0, 2, 1, 3, 4, 6])),
        ("seq_lens", int32([5, 9])),
        ("block_tables", np.array([[0, NUM_BLOCKS], [2, 3]], dtype=np.int32)),
        ("sampled_rows", int32([2])),
        ("sampling.num_logprobs", [SamplingRow(0.0, 1.0, 0, 0, 7, num_logprobs=21)]),
        ("copies", [BlockCopy(0, NUM_BLOCKS)]),
    ],
)
def test_a_malformed_batch_is_refused_by_field_and_changes_nothing(
    executor: CudaExecutor, field: str, value: object
) -> None:
    executor.execute(well_formed())
    before = executor._pools.device.clone()
    # A sound copy goes with it: it must not be made either.
    changes = {"copies": [BlockCopy(2, 9)], field.partition(".")[0]: value}
    with pytest.raises(ValidationError) as info:
        executor.execute(replace(well_formed(), **changes))
    assert info.value.field == field
    np.testing.assert_array_equal(executor._pools.device, before)


def test_the_context_and_the_most_tokens_of_a_step_are_limits(executor: CudaExecutor) -> None:
    executor._max_tokens = 5
    with pytest.raises(ValidationError, match="at most 5 tokens, got 6"):
        executor.execute(well_formed())
    executor._max_tokens, executor._longest = 6, 6
    with pytest.raises(ValidationError, match="at most 6, got 7"):
        executor.execute(well_formed())
    executor._longest = 7
    assert executor.execute(well_formed()).next_tokens.size
