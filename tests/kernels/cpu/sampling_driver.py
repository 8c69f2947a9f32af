"""Runs the sampling operation over rows of logits, as the step would, and its reference."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kernels.cpu import sampling
from kernels.cpu.compiled import operation
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, StepWord
from kernels.cpu.sample_record import SAMPLE_WORDS, SampleWord, sampling_scratch_bytes
from kernels.reference.logit_adjustments import Adjustments
from kernels.reference.logprobs import log_softmax, most_likely
from kernels.reference.sampling import Choice, choose
from tests.kernels.cpu.float64_words import write_float64

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(sampling.sample.address)
GARBAGE = np.float32(1e30)


@operation(num_arguments=4)
def write_uniform(seed: int, sample_index: int, position: int, out: int) -> None:
    """Write the operation's random number: Python cannot call what operations call."""
    write_float64(out, sampling.uniform(np.uint64(seed), sample_index, position))


WRITE_UNIFORM = write_uniform.to_function(4)


def cpu_uniform(seed: np.uint64, sample_index: int, position: int) -> float:
    """The operation's random number."""
    number = np.empty(1)
    WRITE_UNIFORM(int(np.int64(seed)), sample_index, position, number.ctypes.data)
    return float(number[0])


@dataclass(frozen=True)
class Asked:
    """A choice of row `row`, with log-probabilities, or those of a given token alone."""

    choice: Choice
    row: int = 0
    num_logprobs: int = -1
    given_token: int = -1


@dataclass
class Answer:
    """What comes of it. `top`: (token, log-probability)."""

    token: int
    is_finite: bool
    logprob: float | None
    top: list[tuple[int, float]]


def padded(logits: np.ndarray, padding: int) -> np.ndarray:
    """The rows with columns of nonsense behind them, which nobody may read."""
    rows = np.full((len(logits), logits.shape[1] + padding), GARBAGE, dtype=np.float32)
    rows[:, : logits.shape[1]] = logits
    rows[:, logits.shape[1] + padding // 2 :] = np.nan
    return rows


def run_records(rows: np.ndarray, vocab: int, words: np.ndarray) -> np.ndarray:
    """Run the operation over sample records, in scratch memory full of nonsense: return that."""
    record = np.zeros(RECORD_WORDS, dtype=np.int64)
    record[sampling.LOGITS] = rows.ctypes.data
    record[sampling.LOGITS_STRIDE], record[sampling.VOCAB] = rows.shape[1], vocab
    size = sampling_scratch_bytes(vocab)
    scratch = np.full(size + 64, 0xFF, dtype=np.uint8)
    header = np.zeros(HEADER_WORDS, dtype=np.int64)
    header[StepWord.SAMPLES], header[StepWord.NUM_SAMPLES] = words.ctypes.data, len(words)
    header[StepWord.SCRATCH], header[StepWord.SCRATCH_BYTES] = scratch.ctypes.data, size
    record_address, header_address = record.ctypes.data, header.ctypes.data
    for k in range(len(words)):
        KERNEL(record_address, header_address, k, len(words), 0)
    assert (scratch[size:] == 0xFF).all()
    return scratch


def weights_of(row: np.ndarray, temperature: float) -> np.ndarray:
    """Return the weights that the operation has given the tokens of a row of logits, int64."""
    words = np.zeros((1, SAMPLE_WORDS), dtype=np.int64)
    numbers, out = words.view(np.float64)[0], np.zeros(2, np.int32)
    numbers[[SampleWord.TEMPERATURE, SampleWord.TOP_P]] = temperature, 1.0
    numbers[SampleWord.REPETITION_PENALTY] = 1.0
    words[0, [SampleWord.GIVEN_TOKEN, SampleWord.NUM_LOGPROBS]] = -1
    words[0, [SampleWord.OUT_TOKEN, SampleWord.OUT_FINITE]] = out.ctypes.data + np.array([0, 4])
    scratch = run_records(row[None], len(row), words)
    return scratch[: 8 * len(row)].view(np.int64)


def sample_columns(
    logits, logits_rows, temperatures, top_ps, seeds, sample_indexes, positions, out, is_finite
) -> None:
    """The operation with the parameters of `kernels.reference.sampling.sample`."""
    words = np.zeros((len(out), SAMPLE_WORDS), dtype=np.int64)
    numbers = words.view(np.float64)
    numbers[:, SampleWord.TEMPERATURE], numbers[:, SampleWord.TOP_P] = temperatures, top_ps
    numbers[:, SampleWord.REPETITION_PENALTY] = 1.0
    words.view(np.uint64)[:, SampleWord.SEED] = seeds
    words[:, SampleWord.SAMPLE_INDEX], words[:, SampleWord.POSITION] = sample_indexes, positions
    words[:, SampleWord.LOGITS_ROW] = logits_rows
    words[:, [SampleWord.GIVEN_TOKEN, SampleWord.NUM_LOGPROBS]] = -1
    places = np.arange(len(out))
    words[:, SampleWord.OUT_TOKEN] = out.ctypes.data + 4 * places
    words[:, SampleWord.OUT_FINITE] = is_finite.ctypes.data + places
    run_records(logits, logits.shape[1], words)


def padded_mask(allowed: np.ndarray, vocab: int) -> np.ndarray | None:
    """The mask with bits of nonsense behind it, up to whole blocks; None: there is none."""
    if not allowed.size:
        return None
    mask = np.full(8 * -(-vocab // 64), 0xFF, dtype=np.uint8)
    mask[: allowed.size] = allowed
    return mask


def run(logits: np.ndarray, asked: Sequence[Asked], padding: int = 7) -> list[Answer]:
    """Run the operation, in scratch memory full of nonsense."""
    vocab = logits.shape[1]
    rows = padded(logits, padding)
    count, width = len(asked), max(1, *(a.num_logprobs for a in asked))
    tokens = np.full(count, -7, dtype=np.int32)
    finite = np.full(count, 7, dtype=np.uint8)
    logprobs = np.full(count, 7, dtype=np.float32)
    top_tokens = np.full((count, width), -7, dtype=np.int32)
    top_logprobs = np.full((count, width), 7, dtype=np.float32)
    words = np.zeros((count, SAMPLE_WORDS), dtype=np.int64)
    masks = [padded_mask(one.choice.adjustments.allowed_tokens, vocab) for one in asked]
    for k, one in enumerate(asked):
        choice, adjust = one.choice, one.choice.adjustments
        numbers = {
            SampleWord.TEMPERATURE: choice.temperature,
            SampleWord.TOP_P: choice.top_p,
            SampleWord.MIN_P: choice.min_p,
            SampleWord.REPETITION_PENALTY: adjust.repetition_penalty,
            SampleWord.PRESENCE_PENALTY: adjust.presence_penalty,
            SampleWord.FREQUENCY_PENALTY: adjust.frequency_penalty,
        }
        for index, number in numbers.items():
            words[k].view(np.float64)[index] = number
        words[k].view(np.uint64)[SampleWord.SEED] = choice.seed
        integers = {
            SampleWord.SAMPLE_INDEX: choice.sample_index,
            SampleWord.POSITION: choice.position,
            SampleWord.TOP_K: choice.top_k,
            SampleWord.LOGITS_ROW: one.row,
            SampleWord.GIVEN_TOKEN: one.given_token,
            SampleWord.NUM_LOGPROBS: one.num_logprobs,
            SampleWord.HISTORY: adjust.history.ctypes.data,
            SampleWord.NUM_HISTORY: len(adjust.history),
            SampleWord.NUM_PROMPT: adjust.num_prompt,
            SampleWord.BIAS_TOKENS: adjust.bias_tokens.ctypes.data,
            SampleWord.BIAS_VALUES: adjust.bias_values.ctypes.data,
            SampleWord.NUM_BIASES: len(adjust.bias_tokens),
            SampleWord.ALLOWED: 0 if masks[k] is None else masks[k].ctypes.data,
            SampleWord.OUT_TOKEN: tokens[k:].ctypes.data,
            SampleWord.OUT_FINITE: finite[k:].ctypes.data,
            SampleWord.OUT_LOGPROB: logprobs[k:].ctypes.data,
            SampleWord.OUT_TOP_TOKENS: top_tokens[k].ctypes.data,
            SampleWord.OUT_TOP_LOGPROBS: top_logprobs[k].ctypes.data,
        }
        for index, value in integers.items():
            words[k, index] = value
    run_records(rows, vocab, words)
    answers = []
    for k, one in enumerate(asked):
        listed = min(max(one.num_logprobs, 0), vocab)
        assert (top_tokens[k, listed:] == -7).all()
        assert one.num_logprobs >= 0 or logprobs[k] == 7
        answers.append(
            Answer(
                int(tokens[k]),
                bool(finite[k]),
                float(logprobs[k]) if one.num_logprobs >= 0 else None,
                list(
                    zip(
                        top_tokens[k, :listed].tolist(),
                        top_logprobs[k, :listed].tolist(),
                        strict=True,
                    )
                ),
            )
        )
    return answers


def specified(logits: np.ndarray, one: Asked) -> Answer:
    """What the reference answers for one sample."""
    row = np.ascontiguousarray(logits[one.row], dtype=np.float32)
    token = choose(row, one.choice) if one.given_token < 0 else one.given_token
    is_finite = bool(np.isfinite(row).all())
    if not is_finite:
        token = 0
    assert token is not None
    logprob, top = None, []
    if one.num_logprobs >= 0:
        values = log_softmax(row)
        logprob = float(values[token])
        if is_finite:
            ids = most_likely(row, one.num_logprobs)
            top = [(int(v), float(values[v])) for v in ids]
    return Answer(token, is_finite, logprob, top)


def sample_all(logits: np.ndarray, choices: Sequence[Choice]) -> list[int]:
    """The operation's tokens: choice k from row k, or all from the only row."""
    logits = np.asarray(logits, dtype=np.float32)
    rows = [0] * len(choices) if len(logits) == 1 else range(len(choices))
    asked = [Asked(choice, row) for choice, row in zip(choices, rows, strict=True)]
    return [answer.token for answer in run(logits, asked)]


def adjustments(
    bias: dict[int, float] | None = None,
    history: Sequence[int] = (),
    num_prompt: int = 0,
    allowed: Sequence[int] | None = None,
    vocab: int = 0,
    **penalties: float,
) -> Adjustments:
    """Adjustments from plain Python. `allowed`: the tokens of a mask, of `vocab`; None: no mask."""
    bias = bias or {}
    mask = np.zeros(0, dtype=np.uint8)
    if allowed is not None:
        mask = np.packbits(np.isin(np.arange(vocab), allowed), bitorder="little")
    return Adjustments(
        bias_tokens=np.array(list(bias), dtype=np.int32),
        bias_values=np.array(list(bias.values()), dtype=np.float32),
        history=np.array(history, dtype=np.int32),
        num_prompt=num_prompt,
        allowed_tokens=mask,
        **penalties,
    )
