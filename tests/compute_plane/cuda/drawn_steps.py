"""Drawn sequences of decode steps, sent through slots and pipeline to an executor with graphs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import ExecutionBatch, LogitBias, SamplingRow
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    SamplingKey,
    SlotStart,
    StepBatch,
    StepHeader,
    StepReply,
    StepResult,
    TableCopy,
)
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.work import Answer, Work
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    RecordingDriver,
    torch_executor,
)
from tests.compute_plane.executor.slot_batches import column, start, step
from tests.golden.batch_driver import int32

LIMITS = SlotLimits(
    max_slots=8, max_rows=8, max_tokens=64, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
    vocab_size=SPEC.vocab_size, context_length=SPEC.context_length, num_host_blocks=4,
)  # fmt: skip
NUM_SLOTS = 6
MOST_TOKENS = 40 * BLOCK_SIZE
NEVER_WRITTEN = 255
"""A block that no slot has: what lies there is not finite."""
SWAPPED = {250, 251}
BIAS = LogitBias(int32([3, 9]), np.array([4.0, -6.0], dtype=np.float32))
WAYS: Sequence[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.8},
    {"presence_penalty": 1.5, "frequency_penalty": 0.4, "num_logprobs": 2},
    {"logit_bias": BIAS},
    {"logit_bias": BIAS, "repetition_penalty": 0.7, "num_logprobs": 0},
    {"num_logprobs": 20},
]
Row = tuple[int, int, int]
RUNGS = (8, 4, 2)
"""The largest first, as a plane captures them: they share the memory of their inputs then."""


class Counted:
    """Lets an executor take the short way, or never, and counts."""

    def __init__(self, executor: CudaExecutor, *, may: bool = True) -> None:
        self.num_short = 0
        self._take, self._may = executor._decode.take, may
        executor._decode.take = self  # type: ignore[assignment,method-assign]

    def __call__(self, batch: ExecutionBatch) -> object:
        taken = self._take(batch) if self._may else None
        self.num_short += taken is not None
        return taken


class Controller:
    """Draws steps: all slots or some, in any order, now and then one that begins anew.

    `asks`: slots want penalties, biases and log-probabilities as well, and some steps begin two
    samples of one prompt, copy and swap blocks, give a slot a prefix that is not finite, or are
    refused.
    """

    def __init__(self, seed: int, *, asks: bool = False) -> None:
        self._random = random.Random(seed)
        self._has_one_key = seed % 3 == 0
        self._asks = asks
        self._one_key = SamplingKey(0.0, 1.0, 5, 0, repetition_penalty=1.8 if asks else 1.0)
        self._lengths = [0] * NUM_SLOTS
        self._tables: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
        self._shared: dict[int, TableCopy] = {}  # what a slot must copy before it writes

    def _key(self) -> SamplingKey:
        drawn = self._random
        if self._has_one_key:  # so that only the tokens tell slots apart
            return self._one_key
        key = SamplingKey(drawn.choice([0.0, 0.7, 1.2]), 0.9, drawn.randrange(1 << 63), 0)
        if drawn.randrange(3) == 0:
            key = replace(key, top_k=5, min_p=0.01)
        return replace(key, **drawn.choice(WAYS)) if self._asks else key

    def _begin(self, slot: int, length: int = 0) -> tuple[SlotStart, Row]:
        length = length or self._random.randint(1, 9)
        self._lengths[slot] = length
        self._shared.pop(slot, None)
        prompt = self._random.choices(range(SPEC.vocab_size), k=length)
        blocks = self._tables[slot] = self._free(-(-length // BLOCK_SIZE))
        return start(slot, prompt, blocks, self._key()), (slot, 0, length)

    def _free(self, count: int) -> list[int]:
        """Blocks that no slot has, also before this step, and that nothing is copied to."""
        held = {block for table in self._tables for block in table}
        free = sorted(set(range(NEVER_WRITTEN)) - held - SWAPPED)
        return free[:count]

    def first(self) -> StepBatch:
        begun = [self._begin(slot) for slot in range(NUM_SLOTS)]
        return step([row for _, row in begun], starts=[one for one, _ in begun])

    def next(self) -> StepBatch:
        drawn = self._random
        slots = list(range(NUM_SLOTS))
        kind = drawn.randrange(24)
        if kind == 0:
            drawn.shuffle(slots)
        elif kind == 1:
            slots = sorted(drawn.sample(slots, drawn.randint(1, NUM_SLOTS)))
        if self._asks and kind == 6:
            return step([(drawn.choice(slots), 0, 1)] * 2)  # which no plane takes
        if self._asks and kind == 3:
            return self._two_of_one_prompt(drawn.sample(slots, 2))
        starts, rows, new_blocks, copies = [], [], [], []
        restarted = drawn.choice(slots) if kind == 2 else None
        poisoned = drawn.choice(slots) if self._asks and kind == 4 else None
        for slot in slots:
            if slot in (restarted, poisoned) or self._lengths[slot] == MOST_TOKENS:
                begun, row = self._begin(slot, 2 * BLOCK_SIZE if slot == poisoned else 0)
                if slot == poisoned:
                    self._tables[slot][0] = NEVER_WRITTEN
                    begun = replace(begun, block_ids=column(self._tables[slot]))
                    row = (slot, BLOCK_SIZE, BLOCK_SIZE)
                starts.append(begun)
                new_blocks.append([])
            else:
                row = (slot, self._lengths[slot], 1)
                table = self._tables[slot]
                new = self._free(1) if self._lengths[slot] == len(table) * BLOCK_SIZE else []
                new_blocks.append(new)
                table.extend(new)
                self._lengths[slot] += 1
                if slot in self._shared:
                    copies.append(self._shared.pop(slot))
            rows.append(row)
        swaps = {"swap_out": [(250, 1)], "swap_in": [(1, 251)]} if self._asks and kind == 5 else {}
        return step(
            rows,
            starts=starts,
            new_blocks=new_blocks if any(new_blocks) else [],
            copies=copies,
            **swaps,
        )

    def _two_of_one_prompt(self, slots: list[int]) -> StepBatch:
        """One row, sampled for two slots; the second one copies the last block before it writes."""
        slot, other = slots
        begun, row = self._begin(slot)
        table = self._tables[slot]
        length = self._lengths[other] = self._lengths[slot]
        self._tables[other] = list(table)
        self._shared.pop(other, None)
        if length % BLOCK_SIZE:
            self._tables[other][-1:] = target = self._free(1)
            self._shared[other] = TableCopy(other, len(table) - 1, table[-1], *target)
        twin = replace(begun, slot=other, sampling=self._key())
        return step([row], starts=[begun, twin], sampled=[0, 0], sampled_slots=[slot, other])


def is_refused(batch: StepBatch) -> bool:
    """Whether a drawn step names a slot twice."""
    return len(set(batch.slots.tolist())) < batch.slots.size


def pipelined(
    executor: CudaExecutor, batches: Sequence[StepBatch], *, waits_every: int = 0
) -> list[StepResult]:
    """Send everything as fast as it is taken, two under way; what is answered, but for refusals.

    `waits_every`: behind so many steps the next one is sent when all is answered; 0: never.
    """
    sessions, answers = SessionLedger(), list[Answer]()
    slots = SlotTable(replace(LIMITS, num_states=executor._pools.num_states))
    pipeline = StepPipeline(executor, slots, sessions, lambda _: None)
    session = sessions.open("test", take_over=False).session
    for step_id, batch in enumerate(batches, 1):
        header = StepHeader(session, sessions.epoch, step_id, step_id - 1)
        pipeline.take(Work(header, batch, answers.append, 0))
        if waits_every and step_id % waits_every == 0:
            pipeline.finish_all()
    pipeline.finish_all()
    results = []
    for batch, answer in zip(batches, answers, strict=True):
        assert isinstance(answer, StepReply)
        if is_refused(batch):
            assert answer.refusal is not None
            continue
        assert answer.result is not None, answer
        results.append(answer.result)
    return results


def tokens_of(results: Sequence[StepResult]) -> list[list[int]]:
    """The tokens of steps in which no row fails."""
    assert not any(result.row_failures for result in results)
    return [result.sampled_token_ids.tolist() for result in results]


def drawn_batches(seed: int, count: int, *, asks: bool = False) -> list[StepBatch]:
    controller = Controller(seed, asks=asks)
    return [controller.first(), *(controller.next() for _ in range(count))]


def with_graphs(driver: RecordingDriver | None = None, spec: ModelSpec = SPEC) -> CudaExecutor:
    executor = torch_executor(spec, driver or RecordingDriver(), num_host_blocks=4)
    for rung in RUNGS:
        executor.capture_decode_graph(rung)
    return executor


def decode_batch(position: int = 5, rows: int = 2) -> ExecutionBatch:
    """Rows in two blocks of their own each."""
    ones = np.ones(rows, dtype=np.int32)
    return ExecutionBatch(
        input_tokens=int32(range(1, rows + 1)),
        positions=ones * position,
        seq_lens=ones * (position + 1),
        block_tables=np.arange(2 * rows, dtype=np.int32).reshape(rows, 2),
        is_prefill=np.zeros(rows, dtype=np.bool_),
        prompt_lens=ones,
        query_lens=ones,
        sampled_rows=int32(range(rows)),
        sampling=[SamplingRow(0.0, 1.0, row, 0, position + 1) for row in range(rows)],
    )


def shared_tables(batch: ExecutionBatch) -> ExecutionBatch:
    """As the steps of a run share them."""
    batch.block_tables.flags.writeable = False
    return batch
