"""Batches for `SlotTable` tests, and a table with the simulated executor behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import ExecutionBatch, SamplingRow
from compute_plane.executor.simulated import VOCAB_SIZE, SimulatedExecutor, draw
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import (
    BlockMove,
    Int64Array,
    PromptLogprobsRequest,
    SamplingKey,
    SlotStart,
    StepBatch,
    StepResult,
    TableCopy,
)

LIMITS = SlotLimits(
    max_slots=8,
    max_rows=8,
    max_tokens=64,
    block_size=4,
    num_blocks=64,
    vocab_size=VOCAB_SIZE,
    context_length=40,
)

GREEDY = SamplingKey(temperature=0.0, top_p=1.0, seed=0, sample_index=0)


def column(values: Sequence[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def start(
    slot: int, tokens: Sequence[int], blocks: Sequence[int], sampling: SamplingKey = GREEDY
) -> SlotStart:
    return SlotStart(slot, column(list(tokens)), len(tokens), column(blocks), sampling)


def step(
    rows: Sequence[tuple[int, int, int]] = (),
    *,
    sampled: Sequence[int] | None = None,
    sampled_slots: Sequence[int] = (),
    starts: Sequence[SlotStart] = (),
    released: Sequence[int] = (),
    new_blocks: Sequence[Sequence[int]] = (),
    tokens: Sequence[Sequence[int]] = (),
    copies: Sequence[TableCopy] = (),
    swap_out: Sequence[tuple[int, int]] = (),
    swap_in: Sequence[tuple[int, int]] = (),
    prompt_logprobs: Sequence[int] = (),
    num_prompt_logprobs: int = 0,
    digest_blocks: Sequence[int] = (),
) -> StepBatch:
    """A batch of rows (slot, position, query_len), every row sampled unless told otherwise."""
    return StepBatch(
        slots=column([row[0] for row in rows]),
        positions=column([row[1] for row in rows]),
        query_lens=column([row[2] for row in rows]),
        sampled_rows=column(range(len(rows)) if sampled is None else sampled),
        sampled_slots=column(sampled_slots),
        starts=starts,
        released=column(released),
        new_block_counts=column([len(ids) for ids in new_blocks]),
        new_block_ids=column([block for ids in new_blocks for block in ids]),
        token_counts=column([len(ids) for ids in tokens]),
        token_ids=column([token for ids in tokens for token in ids]),
        copies=copies,
        swap_out=[BlockMove(*move) for move in swap_out],
        swap_in=[BlockMove(*move) for move in swap_in],
        prompt_logprobs=[
            PromptLogprobsRequest(row, num_prompt_logprobs) for row in prompt_logprobs
        ],
        digest_blocks=column(digest_blocks),
    )


class Plane:
    """A slot table and the simulated executor, without threads and wires."""

    def __init__(self, limits: SlotLimits = LIMITS) -> None:
        self.slots = SlotTable(limits)
        self.executor = SimulatedExecutor(
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            num_host_blocks=limits.num_host_blocks,
            num_states=limits.num_states,
        )
        self.batches: list[ExecutionBatch] = []

    def run(self, batch: StepBatch, failed_rows: dict[int, str] | None = None) -> StepResult:
        prepared = self.slots.prepare(batch)
        output = None
        if prepared.batch is not None:
            self.batches.append(prepared.batch)
            output = self.executor.execute(prepared.batch)
            output = replace(output, failed_rows=failed_rows or {})
        return self.slots.complete(prepared, output)

    def tokens(self, batch: StepBatch) -> list[int]:
        """Run a batch in which nothing fails; its tokens."""
        result = self.run(batch)
        assert not result.row_failures
        tokens: list[int] = result.sampled_token_ids.tolist()
        return tokens


def alone(prompt: bytes, num_tokens: int, sampling: SamplingKey = GREEDY) -> list[int]:
    """What a prompt gives when nothing can go wrong: no blocks, no batch, the hash alone."""
    known = list(prompt)
    for _ in range(num_tokens):
        row = SamplingRow(
            sampling.temperature,
            sampling.top_p,
            sampling.seed,
            sampling.sample_index,
            len(known),
            sampling.top_k,
            sampling.min_p,
        )
        known.append(draw(np.array(known, dtype=np.int32), row))
    return known[len(prompt) :]
