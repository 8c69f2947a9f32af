"""The CPU executor's short way: steps in which every row decodes, as most of a busy plane's do.

Between two steps one thread works and the others wait, so what a step costs there counts whole.
Such steps come in runs that share arrays nobody can write (`decode_run`) and the keys of their
samples (`sampling_rows`): what follows from those is made once a run. The headers point to memory
that stays; a step puts there what moves on:

    each step               tokens, positions, places in the pool, positions of the samples
    with another table      the address of the block tables
    with long contexts      how attention is cut (`kernels.cpu.attention_plan`)
    where samples have penalties, biases, masks or log-probabilities: their records
    with another run        everything

Whatever else a step may have, and all that is wrong with one, is left to the ordinary way, which
says what it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.adapter_runs import adapter_runs
from compute_plane.cpu.sample_records import SampleRecords
from compute_plane.cpu.state_rows import NO_ROWS, state_rows
from compute_plane.cpu.step_headers import PieceArrays, StepHeaders
from compute_plane.executor.decode_checks import DecodeChecks
from compute_plane.executor.interface import ExecutionBatch, Int32Array
from compute_plane.executor.sampling_rows import SamplingKeys, SamplingRows
from compute_plane.executor.token_layout import PoolShape
from kernels.cpu.attention_plan import AttentionShape, LastingPlan
from kernels.cpu.sample_record import SampleWord

Words = npt.NDArray[np.int64]

TOKENS_HEADER, LOGITS_HEADER = 0, 1
ANY_LENGTH: Final = 2**31 - 1
"""Block tables limit how long sequences are, nothing else here."""


class Samples(NamedTuple):
    """The records of a step's samples, and where their answers are written to."""

    answers: SampleRecords
    records: Words


class _Run:
    """What steps share as long as `query_lens`, `sampled_rows` and `keys` are the same objects."""

    def __init__(
        self, batch: ExecutionBatch, keys: SamplingKeys, every: Words, shape: AttentionShape
    ) -> None:
        self.query_lens, self.sampled_rows, self.keys = batch.query_lens, batch.sampled_rows, keys
        self.out_tokens = every[: len(batch.query_lens)]
        self.all_are_sampled = bool(np.array_equal(batch.sampled_rows, self.out_tokens))
        self.attention = LastingPlan(batch.query_lens, shape)
        self.states, self.adapters = batch.states, batch.adapters
        self.adapter_runs = adapter_runs(batch.adapters)
        self._plain: Samples | None = None
        self._are_plain = _are_plain(keys)

    def samples(self, batch: ExecutionBatch, sampling: SamplingRows, vocab_size: int) -> Samples:
        """Return the samples of one of its steps. Raises ValidationError, as `SampleRecords`."""
        made = self._plain
        if made is None or sampling.masks:
            answers = SampleRecords(batch, vocab_size)
            made = Samples(answers, answers.take(self.out_tokens, self.out_tokens))
            if self._are_plain and not sampling.masks:
                self._plain = made
        else:
            made.records[:, SampleWord.POSITION] = sampling.positions
        return made

    def has(self, batch: ExecutionBatch, keys: SamplingKeys) -> bool:
        """Whether a batch has what all steps of the run share."""
        return (
            batch.query_lens is self.query_lens
            and batch.states is self.states
            and batch.adapters is self.adapters
            and batch.sampled_rows is self.sampled_rows
            and keys is self.keys
            and not (self.query_lens.flags.writeable or self.sampled_rows.flags.writeable)
            and not (self.states.flags.writeable or self.adapters.flags.writeable)
        )


class CpuDecodeSteps:
    """Describes the steps that it takes in headers of its own, beside `headers`.

    `most_rows`: of a step. `tells_prompts_apart`: tokens of prompts are not computed as generated
    ones are. Keeps alive what its headers point to.
    """

    def __init__(
        self,
        shape: PoolShape,
        headers: StepHeaders,
        *,
        chunk_heads: int,
        attention: AttentionShape,
        most_rows: int,
        tells_prompts_apart: bool,
    ) -> None:
        self._shape = shape
        self._headers = headers.others()
        self._chunk_heads, self._attention = chunk_heads, attention
        self._most_rows = most_rows
        self._tells_prompts_apart = tells_prompts_apart
        self._checks = DecodeChecks(shape, ANY_LENGTH, None, most_rows)
        self._every = np.arange(most_rows)
        self._tokens: Int32Array = np.zeros(most_rows, dtype=np.int32)
        self._positions: Int32Array = np.zeros(most_rows, dtype=np.int32)
        self._kv_places: Words = np.zeros(most_rows, dtype=np.int64)
        self._run: _Run | None = None
        self._described: PieceArrays | None = None
        self._described_records: Words | None = None

    @property
    def headers(self) -> tuple[int, int]:
        """Addresses of the headers of the tokens and of the logits."""
        return self._headers.address(TOKENS_HEADER), self._headers.address(LOGITS_HEADER)

    def take(self, batch: ExecutionBatch) -> SampleRecords | None:
        """Describe a step, and return where its answers will be; None: it goes the ordinary way.

        Raises ValidationError for token ids of samples that there are not, as the ordinary way.
        """
        sampling = batch.sampling
        if not isinstance(sampling, SamplingRows) or _asks_for_more(batch):
            return None
        num_rows = len(batch.query_lens)
        if not 0 < num_rows <= self._most_rows or len(sampling) != num_rows:
            return None
        kv_places = self._checks.kv_slots(batch)
        if kv_places is None or not batch.block_tables.flags.c_contiguous:
            return None
        if self._shape.num_states and not _go_on(batch, self._shape.num_states):
            return None
        if len(batch.adapters) and not _are_adapters(batch, self._shape.num_adapters):
            return None
        if self._tells_prompts_apart and (batch.positions < batch.prompt_lens).any():
            return None
        run = self._run
        if run is None or not run.has(batch, sampling.keys):
            run = self._run = _Run(batch, sampling.keys, self._every, self._attention)
            self._described = None
        if not run.all_are_sampled:
            return None
        samples = run.samples(batch, sampling, self._shape.vocab_size)
        self._tokens[:num_rows] = batch.input_tokens
        self._positions[:num_rows] = batch.positions
        self._kv_places[:num_rows] = kv_places
        self._describe_tokens(batch, run, num_rows)
        if self._described_records is not samples.records:
            self._headers.describe_logits(
                LOGITS_HEADER, out_tokens=run.out_tokens, samples=samples.records
            )
            self._described_records = samples.records
        return samples.answers

    def _describe_tokens(self, batch: ExecutionBatch, run: _Run, num_rows: int) -> None:
        """Bring the header of the tokens up to date."""
        attention = run.attention.plan(batch.positions, batch.block_tables)
        before = self._described
        if (
            before is not None
            and before.block_tables is batch.block_tables
            and before.attention is attention
        ):
            return
        self._described = PieceArrays(
            self._tokens[:num_rows],
            self._positions[:num_rows],
            self._kv_places[:num_rows],
            batch.block_tables,
            attention,
            self._state_rows(batch, num_rows),
            adapter_runs=run.adapter_runs,
        )
        self._headers.describe_tokens(TOKENS_HEADER, 0, self._described, self._chunk_heads)

    def _state_rows(self, batch: ExecutionBatch, num_rows: int) -> Int32Array:
        """Return which states the rows go on from, in models with states."""
        if not self._shape.num_states:
            return NO_ROWS
        return state_rows(self._every[:num_rows].astype(np.int32), batch.positions, batch.states)


def _go_on(batch: ExecutionBatch, num_states: int) -> bool:
    """Whether every row goes on from a state of its own, and none is to be copied."""
    states = batch.states
    return (
        not batch.state_copies
        and len(states) == len(batch.query_lens)
        and not (batch.positions == 0).any()
        and int(states.view(np.uint32).max()) < num_states
        and len(set(states.tolist())) == len(states)
    )


def _are_adapters(batch: ExecutionBatch, num_adapters: int) -> bool:
    """Whether every row has an adapter that there is, or none."""
    adapters = batch.adapters
    return (
        adapters.shape == batch.query_lens.shape
        and adapters.dtype == np.int32
        and int(adapters.view(np.uint32).max()) <= num_adapters
    )


def _asks_for_more(batch: ExecutionBatch) -> bool:
    """Whether anything but samples is wanted, or done before."""
    return bool(
        batch.copies or batch.prompt_logprob_rows or batch.digest_blocks or batch.embeddings
    ) or (batch.input_sources is not None)


def _are_plain(keys: SamplingKeys) -> bool:
    """Whether samples have no penalties, biases or log-probabilities."""
    return not (
        keys.have_penalties or keys.asked or any(key.logit_bias is not None for key in keys.keys)
    )
