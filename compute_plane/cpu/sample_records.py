"""What is drawn from a step's logits, as the records of `kernels.cpu.sampling`, and the answers.

The *wants* of a step are its samples, in order, then every target of the prompt log-probabilities;
each is one record. Array letters: K samples, W wants, P places of a row, n most likely tokens.
"""

from __future__ import annotations

import struct
from itertools import repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Int32Array,
    SampleLogprobs,
    SamplingRow,
    TopLogprobs,
)
from kernels.cpu.sample_record import BLOCK, SAMPLE_WORDS, SampleWord
from planes.errors import ValidationError

Words = npt.NDArray[np.int64]

NOT_FINITE: Final = "the logits are not finite"

ANSWER: Final = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("is_finite", "<i8")])
"""Where the operation writes; only the first byte of `is_finite`."""
ANSWER_OFFSETS: Final = {
    SampleWord.OUT_TOKEN: 0,
    SampleWord.OUT_LOGPROB: 4,
    SampleWord.OUT_FINITE: 8,
}

PLAIN: Final = struct.Struct("=ddQqqqd")
"""The first words of a record, which are the first fields of a `SamplingRow`, in their order."""
NUM_PLAIN: Final = 7
RECORD_BYTES: Final = 8 * SAMPLE_WORDS


def _defaults() -> Words:
    words = np.zeros(SAMPLE_WORDS, dtype=np.int64)
    words.view(np.float64)[[SampleWord.TOP_P, SampleWord.REPETITION_PENALTY]] = 1.0
    words[[SampleWord.GIVEN_TOKEN, SampleWord.NUM_LOGPROBS]] = -1
    return words


DEFAULTS: Final = _defaults()


class SampleRecords:
    """The records of a step's wants, and the memory their answers are written to.

    Keeps alive what the records point to; to be kept until the step is over. Raises ValidationError
    for token ids that are not below `vocab_size`: they become addresses.
    """

    def __init__(self, batch: ExecutionBatch, vocab_size: int) -> None:
        self._batch = batch
        self._vocab_size = vocab_size
        num_samples = len(batch.sampling)
        num_wants = num_samples + sum(map(len, batch.prompt_logprob_targets))
        self._kept: list[object] = []
        self._sample_tops: dict[int, TopLogprobs] = {}
        self._prompt_tops: list[TopLogprobs] = []
        self._answers = np.zeros(num_wants, dtype=ANSWER)
        self._words: Words = np.empty((num_wants, SAMPLE_WORDS), dtype=np.int64)
        self._words[:] = DEFAULTS
        places = _places(self._answers)
        for word, offset in ANSWER_OFFSETS.items():
            self._words[:, word] = places + offset
        buffer: memoryview = memoryview(self._words.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        pack = PLAIN.pack_into
        for k, row in enumerate(batch.sampling):
            pack(buffer, RECORD_BYTES * k, *row[:NUM_PLAIN])
            if not row.is_plain:
                self._add_extras(k, row)
        if num_wants > num_samples:
            self._add_prompts(num_samples)

    def take(self, wanted: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Words:
        """Return the records of some wants; want `wanted[i]` reads logits row `rows[i]`."""
        words = self._words[wanted]
        words[:, SampleWord.LOGITS_ROW] = rows
        return words

    def output(self, logits: Float32Array | None = None) -> ExecutionOutput:
        """Return the answers, once the operation has run over all wants."""
        batch, num_samples = self._batch, len(self._batch.sampling)
        failed_rows: dict[int, str] = {}
        logprobs = self._answers["logprob"]
        is_finite = self._answers["is_finite"][:num_samples]
        if not is_finite.all():
            failed = batch.sampled_rows[is_finite == 0]
            failed_rows.update(zip(failed.tolist(), repeat(NOT_FINITE)))
        prompts = []
        first = num_samples
        for row, targets in zip(
            batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True
        ):
            prompts.append(logprobs[first : first + len(targets)].copy())
            if np.isnan(prompts[-1]).any():
                failed_rows[int(row)] = NOT_FINITE
            first += len(targets)
        return ExecutionOutput(
            next_tokens=self._answers["token"][:num_samples].copy(),
            failed_rows=failed_rows,
            logits=logits,
            prompt_logprobs=prompts,
            sample_logprobs=[
                SampleLogprobs(k, float(logprobs[k]), top) for k, top in self._sample_tops.items()
            ],
            prompt_top_logprobs=self._prompt_tops,
        )

    def _add_extras(self, k: int, row: SamplingRow) -> None:
        """Add bias, penalties, mask and log-probabilities to the record of sample `k`."""
        words, numbers = self._words[k], self._words.view(np.float64)[k]
        if row.num_logprobs is not None:
            words[SampleWord.NUM_LOGPROBS] = row.num_logprobs
            self._sample_tops[k] = self._tops(slice(k, k + 1), row.num_logprobs)
        if row.logit_bias is not None:
            tokens = self._token_ids("sampling.logit_bias.token_ids", row.logit_bias.token_ids)
            values = np.ascontiguousarray(row.logit_bias.values, dtype=np.float32)
            self._kept.append(values)
            words[SampleWord.BIAS_TOKENS] = tokens.ctypes.data
            words[SampleWord.BIAS_VALUES] = values.ctypes.data
            words[SampleWord.NUM_BIASES] = len(tokens)
        if row.penalties is not None:
            history = self._token_ids("sampling.penalties.history", row.penalties.history)
            numbers[SampleWord.REPETITION_PENALTY] = row.penalties.repetition
            numbers[SampleWord.PRESENCE_PENALTY] = row.penalties.presence
            numbers[SampleWord.FREQUENCY_PENALTY] = row.penalties.frequency
            words[SampleWord.HISTORY] = history.ctypes.data
            words[SampleWord.NUM_HISTORY] = len(history)
            words[SampleWord.NUM_PROMPT] = row.penalties.num_prompt
        if row.allowed_tokens is not None:
            mask = np.zeros(8 * -(-self._vocab_size // BLOCK), dtype=np.uint8)
            mask[: row.allowed_tokens.size] = row.allowed_tokens
            self._kept.append(mask)
            words[SampleWord.ALLOWED] = mask.ctypes.data

    def _add_prompts(self, first: int) -> None:
        """Add the records of the prompt log-probabilities, from want `first` on."""
        batch = self._batch
        counts = batch.prompt_num_logprobs or [0] * len(batch.prompt_logprob_targets)
        for targets, count in zip(batch.prompt_logprob_targets, counts, strict=True):
            wants = slice(first, first + len(targets))
            self._words[wants, SampleWord.GIVEN_TOKEN] = targets
            self._words[wants, SampleWord.NUM_LOGPROBS] = count
            self._prompt_tops.append(self._tops(wants, count))
            first += len(targets)

    def _tops(self, wants: slice, count: int) -> TopLogprobs:
        """Return memory for the most likely tokens of some wants, [P, n], and point to it."""
        shape = (wants.stop - wants.start, min(count, self._vocab_size))
        top = TopLogprobs(np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.float32))
        self._words[wants, SampleWord.OUT_TOP_TOKENS] = _places(top.token_ids)
        self._words[wants, SampleWord.OUT_TOP_LOGPROBS] = _places(top.logprobs)
        return top

    def _token_ids(self, field: str, given: Int32Array) -> Int32Array:
        """Return token ids as the operation reads them. Raises ValidationError for a bad one."""
        tokens = np.ascontiguousarray(given, dtype=np.int32)
        if tokens.size and int(tokens.view(np.uint32).max()) >= self._vocab_size:
            raise ValidationError(f"must be below {self._vocab_size}", field=field)
        self._kept.append(tokens)
        return tokens


def _places(array: npt.NDArray[np.generic]) -> Words:
    """Return the addresses of the items of an array's first dimension."""
    places: Words = np.arange(len(array), dtype=np.int64)
    places *= array.strides[0]
    places += array.ctypes.data
    return places
