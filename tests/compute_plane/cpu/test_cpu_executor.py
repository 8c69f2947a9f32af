from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from compute_plane.cpu import model_table
from compute_plane.cpu.executor import CpuExecutor
from compute_plane.executor.interface import BlockCopy, ExecutionBatch, GPUExecutor, SamplingRow
from planes.errors import ValidationError
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.golden.batch_driver import BatchDriver, DrivenSequence, int32

SPEC = tiny_spec()
WEIGHTS = tiny_weights(SPEC)
NUM_BLOCKS, BLOCK_SIZE = 260, 4


@pytest.fixture
def executor() -> Iterator[CpuExecutor]:
    pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE)
    with tiny_executor(SPEC, WEIGHTS, pool, keep_logits=True) as made:
        yield made


@pytest.fixture
def driver(executor: CpuExecutor) -> BatchDriver:
    return BatchDriver(executor, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [
        [int(token) for token in random.integers(0, SPEC.vocab_size, random.integers(1, 40))]
        for _ in range(count)
    ]


def test_it_is_an_executor(executor: CpuExecutor) -> None:
    assert isinstance(executor, GPUExecutor)
    executor.capture_decode_graph(8)


@pytest.mark.parametrize("chunk", [None, 1, 3, 7])
def test_sequences_together_and_in_chunks_give_the_tokens_they_give_alone(
    driver: BatchDriver, chunk: int | None
) -> None:
    def sequences() -> list[DrivenSequence]:
        return [
            DrivenSequence(list(prompt), temperature=0.7 * (row % 2), top_p=0.9, seed=row)
            for row, prompt in enumerate(prompts(9))
        ]

    alone = [driver.generate([sequence], 12)[0] for sequence in sequences()]
    assert driver.generate(sequences(), 12, chunk) == alone


def test_a_batch_longer_than_a_piece_gives_the_tokens_of_chunks(driver: BatchDriver) -> None:
    tokens = [int(t) for t in np.random.default_rng(2).integers(0, SPEC.vocab_size, 500)]
    alone = driver.generate([DrivenSequence(list(tokens))], 2, chunk=50)
    driver.free = [int(block) for block in np.random.default_rng(1).permutation(NUM_BLOCKS)]
    sequences = [DrivenSequence(list(tokens)), DrivenSequence(list(tokens[:300]))]
    assert sum(len(sequence.tokens) for sequence in sequences) > model_table.PIECE_TOKENS
    assert driver.generate(sequences, 2)[0] == alone[0]


def test_a_step_without_samples_draws_none_also_after_a_longer_step(driver: BatchDriver) -> None:
    executor = driver.executor
    assert isinstance(executor, CpuExecutor)
    runs: list[int] = []
    run = executor._team.run
    executor._team.run = lambda entries: (runs.append(len(entries)), run(entries))[1]

    def silent_step(num_tokens: int) -> None:
        batch = driver.batch([DrivenSequence([1] * num_tokens)])
        executor._keep_logits = False
        executor.execute(replace(batch, sampled_rows=int32([]), sampling=[]))

    silent_step(5)
    silent_step(model_table.PIECE_TOKENS + 1)  # two pieces
    silent_step(5)
    assert runs[2] == runs[0] < runs[1]


def test_one_row_may_feed_several_samples(driver: BatchDriver) -> None:
    sequence = DrivenSequence(prompts(1, seed=8)[0])
    batch = driver.batch([sequence])
    ways = [SamplingRow(1.0, 0.95, 3, index, len(sequence.tokens)) for index in range(70)]
    batch = replace(batch, sampled_rows=int32([0] * 70), sampling=ways)
    many = driver.executor.execute(batch).next_tokens
    assert len(set(many.tolist())) > 5
    for index in (0, 33, 69):
        single = replace(batch, sampled_rows=int32([0]), sampling=[ways[index]])
        assert driver.executor.execute(single).next_tokens[0] == many[index]


def test_prompt_log_probabilities_are_those_of_the_logits(driver: BatchDriver) -> None:
    tokens = [int(t) for t in np.random.default_rng(9).integers(0, SPEC.vocab_size, 150)]
    expected = []
    sequence = DrivenSequence([])
    for token in tokens:
        if sequence.tokens:
            logits = driver.executor.execute(driver.batch([sequence])).logits
            assert logits is not None
            shifted = logits[0].astype(np.float64) - logits.max()
            expected.append(shifted[token] - np.log(np.exp(shifted).sum()))
            sequence.num_computed = len(sequence.tokens)
        sequence.tokens.append(token)
    other, whole = DrivenSequence(prompts(1)[0]), DrivenSequence(tokens)
    batch = driver.batch([other, whole])
    output = driver.executor.execute(
        replace(batch, prompt_logprob_rows=[1], prompt_logprob_targets=[int32(tokens[1:])])
    )
    np.testing.assert_allclose(output.prompt_logprobs[0], expected, atol=1e-4)


def test_a_row_without_finite_logits_fails_alone(driver: BatchDriver) -> None:
    sequences = [DrivenSequence(prompt) for prompt in prompts(3, seed=10)]
    [expected] = driver.generate([DrivenSequence(list(sequences[2].tokens))], 2)
    driver.generate(sequences, 1)
    executor = driver.executor
    assert isinstance(executor, CpuExecutor)
    executor._pool.data[sequences[1].blocks[0]] = 0xFF
    output = executor.execute(driver.batch(sequences))
    assert list(output.failed_rows) == [1]
    assert output.next_tokens[2] == expected[1]
    asked = replace(
        driver.batch(sequences),
        sampled_rows=int32([]),
        sampling=[],
        prompt_logprob_rows=[1, 2],
        prompt_logprob_targets=[int32([3]), int32([4])],
    )
    output = executor.execute(asked)
    assert list(output.failed_rows) == [1]
    assert np.isfinite(output.prompt_logprobs[1]).all()


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
        ("query_lens", int32([6, 0])),
        ("input_tokens", int32([1, 2])),
        ("input_tokens", int32([1, 2, 3, 4, 5, SPEC.vocab_size])),
        ("input_tokens", int32([1, 2, 3, 4, 5, -1])),
        ("positions", int32([0, 1, 2, 3, 5, 6])),
        ("positions", int32([-1, 1, 2, 3, 4, 6])),
        ("positions", int32([0, 1])),
        ("seq_lens", int32([5, 9])),
        ("seq_lens", int32([5])),
        ("block_tables", np.array([[0, NUM_BLOCKS], [2, 3]], dtype=np.int32)),
        ("block_tables", np.array([[0, 1], [-1, 3]], dtype=np.int32)),
        ("block_tables", np.array([[0, 1], [2, 0]], dtype=np.int32)),
        ("sampled_rows", int32([2])),
        ("sampling", []),
        ("prompt_logprob_targets", [int32([1])]),
        ("copies", [BlockCopy(0, NUM_BLOCKS)]),
    ],
)
def test_a_malformed_batch_is_refused_by_field_and_changes_nothing(
    executor: CpuExecutor, field: str, value: object
) -> None:
    executor.execute(well_formed())
    before = executor._pool.data.copy()
    # A sound copy goes with it: it must not be made either.
    changes = {"copies": [BlockCopy(2, 9)], field: value}
    with pytest.raises(ValidationError) as info:
        executor.execute(replace(well_formed(), **changes))
    assert info.value.field == field
    np.testing.assert_array_equal(executor._pool.data, before)


def test_prompt_logprob_targets_beyond_the_row_or_the_vocabulary_are_refused(
    executor: CpuExecutor,
) -> None:
    for targets in ([1] * 6, [SPEC.vocab_size]):
        batch = replace(
            well_formed(), prompt_logprob_rows=[0], prompt_logprob_targets=[int32(targets)]
        )
        with pytest.raises(ValidationError, match=r"targets|must be in 0 to"):
            executor.execute(batch)


def test_one_thread_gives_the_tokens_of_two() -> None:
    results = []
    for num_threads in (1, 2):
        pool = pool_for(SPEC, NUM_BLOCKS, BLOCK_SIZE)
        with tiny_executor(SPEC, WEIGHTS, pool, num_threads=num_threads) as made:
            driver = BatchDriver(made, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
            results.append(driver.generate([DrivenSequence(p) for p in prompts(7)], 8))
    assert results[0] == results[1]
