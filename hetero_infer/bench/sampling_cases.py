"""Choosing a token from the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from compute_plane.cpu.thread_team import Entry
from hetero_infer.bench.kernel_cases import VOCAB, KernelCase
from hetero_infer.bench.kernel_workbench import Workbench
from kernels.cpu.operands import LOGITS, LOGITS_STRIDE
from kernels.cpu.operands import VOCAB as VOCAB_WORD
from kernels.cpu.operation import StepWord
from kernels.cpu.sample_record import SAMPLE_WORDS, SampleWord, sampling_scratch_bytes
from kernels.cpu.sampling import sample

ROWS: Final = (1, 32)
OFF: Final[Mapping[SampleWord, float]] = {
    SampleWord.TOP_P: 1.0,
    SampleWord.REPETITION_PENALTY: 1.0,
    SampleWord.PRESENCE_PENALTY: 0.0,
    SampleWord.FREQUENCY_PENALTY: 0.0,
    SampleWord.MIN_P: 0.0,
}
KINDS: Final[Mapping[str, Mapping[SampleWord, float]]] = {
    "greedy": {SampleWord.TEMPERATURE: 0.0},
    "temperature": {SampleWord.TEMPERATURE: 1.0},
    "top-p 0.9": {SampleWord.TEMPERATURE: 1.0, SampleWord.TOP_P: 0.9},
    "top-k 50": {SampleWord.TEMPERATURE: 1.0, SampleWord.TOP_K: 50},
}
FLOAT_WORDS: Final = {*OFF, SampleWord.TEMPERATURE}
SPREAD: Final = 4.0
"""Of the logits; a model's are not flat either."""
OUT_BYTES: Final = 64


def sampling_cases() -> list[KernelCase]:
    """Return the common ways of choosing a token."""
    return [
        KernelCase(
            name=f"sampling {kind} {rows} × {VOCAB}",
            num_bytes=4 * rows * VOCAB,
            num_operations=0,
            peak=None,
            prepare=partial(_prepare, words, rows),
        )
        for kind, words in KINDS.items()
        for rows in ROWS
    ]


def _prepare(words: Mapping[SampleWord, float], rows: int, bench: Workbench) -> Sequence[Entry]:
    samples = np.zeros((rows, SAMPLE_WORDS), np.int64)
    out = bench.zeros(rows * OUT_BYTES)
    for at, value in {**OFF, **words}.items():
        is_float = at in FLOAT_WORDS
        samples[:, at] = np.float64(value).view(np.int64) if is_float else int(value)
    samples[:, SampleWord.LOGITS_ROW] = np.arange(rows)
    samples[:, SampleWord.SEED] = samples[:, SampleWord.POSITION] = 1 + np.arange(rows)
    samples[:, SampleWord.GIVEN_TOKEN] = samples[:, SampleWord.NUM_LOGPROBS] = -1
    samples[:, SampleWord.OUT_TOKEN] = out + OUT_BYTES * np.arange(rows)
    samples[:, SampleWord.OUT_FINITE] = samples[:, SampleWord.OUT_TOKEN] + 8
    logits = SPREAD * bench.random.standard_normal(rows * VOCAB, np.float32)
    operands = {LOGITS: bench.place(logits), LOGITS_STRIDE: VOCAB, VOCAB_WORD: VOCAB}
    record = bench.record(sample, rows, operands)
    header = bench.header(
        {StepWord.NUM_SAMPLES: rows, StepWord.SAMPLES: bench.place(samples)},
        scratch_bytes=sampling_scratch_bytes(VOCAB),
    )
    return [(record, header)]
