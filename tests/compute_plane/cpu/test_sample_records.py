"""From a batch to sample records, through the operation, to the executor's answer."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from compute_plane.cpu.sample_records import NOT_FINITE, SampleRecords
from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    LogitBias,
    Penalties,
    SamplingRow,
)
from kernels.cpu import sampling
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
from kernels.cpu.sample_record import sampling_scratch_bytes
from kernels.reference.logit_adjustments import Adjustments
from kernels.reference.logprobs import log_softmax, most_likely
from kernels.reference.sampling import Choice, choose
from planes.errors import ValidationError

VOCAB = 300
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(sampling.sample.address)
EMPTY = np.zeros(0, dtype=np.int32)


def batch_of(rows: list[SamplingRow], prompts: dict[int, tuple[list[int], int]]) -> ExecutionBatch:
    """Samples of rows 0, 1, …, and targets and numbers of likely tokens by row."""
    return ExecutionBatch(
        *[EMPTY] * 7,
        sampled_rows=np.arange(len(rows), dtype=np.int32),
        sampling=rows,
        prompt_logprob_rows=list(prompts),
        prompt_logprob_targets=[np.array(t, dtype=np.int32) for t, _ in prompts.values()],
        prompt_num_logprobs=[count for _, count in prompts.values()],
    )


def run(batch: ExecutionBatch, logits: np.ndarray, chunks: int = 3) -> ExecutionOutput:
    """Run all wants, in two groups, want i on row i of the logits."""
    samples = SampleRecords(batch, VOCAB)
    record = np.zeros(RECORD_WORDS, dtype=np.int64)
    record[sampling.LOGITS] = logits.ctypes.data
    record[sampling.LOGITS_STRIDE] = record[sampling.VOCAB] = VOCAB
    scratch = np.zeros(sampling_scratch_bytes(VOCAB), dtype=np.uint8)
    order = np.arange(len(logits))[::-1]
    for wanted in (order[::2], order[1::2]):
        records = samples.take(wanted, wanted)
        header = np.zeros(HEADER_WORDS, dtype=np.int64)
        header[StepWord.NUM_SAMPLES], header[StepWord.SAMPLES] = len(wanted), records.ctypes.data
        header[StepWord.SCRATCH] = scratch.ctypes.data
        for chunk in range(chunks):
            KERNEL(record.ctypes.data, header.ctypes.data, chunk, chunks, 0)
    return samples.output()


HISTORY = np.array([4, 4, 9, 2], dtype=np.int32)
ROWS = [
    SamplingRow(0.0, 1.0, 0, 0, 5),
    SamplingRow(0.8, 0.9, 2**64 - 1, 3, 2**33, 40, 0.01),
    SamplingRow(1.0, 1.0, 7, 0, 9, num_logprobs=0),
    SamplingRow(1.0, 0.95, 8, 0, 9, penalties=Penalties(1.5, 0.5, 0.25, HISTORY, 1)),
    SamplingRow(
        0.0, 1.0, 9, 0, 9, num_logprobs=4,
        logit_bias=LogitBias(np.array([250], dtype=np.int32), np.array([90], dtype=np.float32)),
    ),
]  # fmt: skip
ADJUSTED = {
    3: Adjustments(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.25, history=HISTORY,
        num_prompt=1,
    ),
    4: Adjustments(
        bias_tokens=np.array([250], dtype=np.int32), bias_values=np.array([90], dtype=np.float32)
    ),
}  # fmt: skip


def test_every_want_is_answered_as_specified() -> None:
    logits = np.random.default_rng(1).standard_normal((10, VOCAB)).astype(np.float32) * 3
    output = run(batch_of(ROWS, {1: ([5, 6, 7], 2), 4: ([8, 9], 0)}), logits)
    expected = [
        choose(logits[k], Choice(*row[:7], adjustments=ADJUSTED.get(k, Adjustments())))
        for k, row in enumerate(ROWS)
    ]
    assert output.next_tokens.tolist() == expected
    assert output.next_tokens.dtype == np.int32
    assert not output.failed_rows
    assert [entry.sample for entry in output.sample_logprobs] == [2, 4]
    for entry in output.sample_logprobs:
        row = logits[entry.sample]
        assert entry.logprob == log_softmax(row)[expected[entry.sample]]
        (ids,) = entry.top.token_ids
        count = ROWS[entry.sample].num_logprobs
        assert count is not None
        assert ids.tolist() == most_likely(row, count).tolist()
        assert (entry.top.logprobs[0] == log_softmax(row)[ids]).all()
    targets = {5: 5, 6: 6, 7: 7, 8: 8, 9: 9}  # want by want, the rows behind the samples'
    logprobs = np.concatenate(output.prompt_logprobs)
    assert logprobs.tolist() == [log_softmax(logits[w])[t] for w, t in targets.items()]
    two, none = output.prompt_top_logprobs
    assert two.token_ids.tolist() == [most_likely(logits[w], 2).tolist() for w in (5, 6, 7)]
    assert none.token_ids.shape == (2, 0)


def test_rows_without_finite_logits_fail_and_the_others_do_not() -> None:
    logits = np.zeros((9, VOCAB), dtype=np.float32)
    logits[2, 7] = np.inf
    logits[7, 7] = np.nan
    output = run(batch_of(ROWS, {0: ([5, 6], 1), 4: ([8, 9], 0)}), logits)
    assert output.failed_rows == {2: NOT_FINITE, 4: NOT_FINITE}
    assert np.isfinite(output.prompt_logprobs[0]).all()


def test_a_step_without_wants_has_an_answer() -> None:
    output = run(batch_of([], {}), np.zeros((0, VOCAB), dtype=np.float32))
    assert output.next_tokens.tolist() == []


@pytest.mark.parametrize("bad", [-1, VOCAB])
def test_token_ids_that_would_be_read_as_addresses_are_refused(bad: int) -> None:
    tokens = np.array([3, bad], dtype=np.int32)
    values = np.zeros(2, dtype=np.float32)
    for row in (
        SamplingRow(0.0, 1.0, 0, 0, 5, logit_bias=LogitBias(tokens, values)),
        SamplingRow(0.0, 1.0, 0, 0, 5, penalties=Penalties(1.1, 0.0, 0.0, tokens, 0)),
    ):
        with pytest.raises(ValidationError, match="must be below 300"):
            SampleRecords(batch_of([row], {}), VOCAB)


def test_more_likely_tokens_than_there_are_tokens_give_them_all() -> None:
    rows = [SamplingRow(0.0, 1.0, 0, 0, 5, num_logprobs=VOCAB + 5)]
    output = run(batch_of(rows, {}), np.zeros((1, VOCAB), dtype=np.float32))
    assert output.sample_logprobs[0].top.token_ids.tolist() == [list(range(VOCAB))]
