"""Drives an executor by hand, without scheduler or planes: block tables, batches, greedy rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from compute_plane.executor.interface import (
    ExecutionBatch,
    ExecutionOutput,
    GPUExecutor,
    Int32Array,
    SamplingRow,
)

NUM_STATES = 256


@dataclass
class DrivenSequence:
    """A sequence under way: all its tokens, how many of them are computed, its blocks.

    `num_prompt`: how many of them are its prompt, by default those it begins with. `state`: where
    models with states keep its own; −1: it has none yet. `adapter`: as in `ExecutionBatch`.
    """

    tokens: list[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_prompt: int = -1
    state: int = -1
    adapter: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt < 0:
            self.num_prompt = len(self.tokens)


class BatchDriver:
    """Hands out blocks of a pool in a shuffled order and makes the batches of its sequences.

    And states, up to `NUM_STATES` at once, to models with and without.
    """

    def __init__(
        self, executor: GPUExecutor, *, num_blocks: int, block_size: int, seed: int = 0
    ) -> None:
        self.executor = executor
        self.block_size = block_size
        order = np.random.default_rng(seed).permutation(num_blocks)
        self.free = [int(block) for block in order]
        self.free_states = np.random.default_rng(seed).permutation(NUM_STATES).tolist()

    def release(self, sequence: DrivenSequence) -> None:
        """Take back what a sequence holds that is computed no further."""
        self.free += sequence.blocks
        if sequence.state >= 0:
            self.free_states.append(sequence.state)

    def batch(self, sequences: list[DrivenSequence], chunk: int | None = None) -> ExecutionBatch:
        """Return the batch that computes every sequence's next tokens, at most `chunk` each.

        Those that reach their last token are sampled.
        """
        spans, sampled = [], []
        for sequence in sequences:
            if sequence.state < 0:
                sequence.state = self.free_states.pop()
        for row, sequence in enumerate(sequences):
            end = len(sequence.tokens)
            if chunk is not None:
                end = min(end, sequence.num_computed + chunk)
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            spans.append((sequence.num_computed, end))
            if end == len(sequence.tokens):
                sampled.append(row)
        sequences_adapted = any(sequence.adapter for sequence in sequences)
        width = max(len(sequence.blocks) for sequence in sequences)
        tables = np.full((len(sequences), width), -1, dtype=np.int32)
        for row, sequence in enumerate(sequences):
            tables[row, : len(sequence.blocks)] = sequence.blocks
        return ExecutionBatch(
            input_tokens=int32(
                token
                for sequence, (start, end) in zip(sequences, spans, strict=True)
                for token in sequence.tokens[start:end]
            ),
            positions=int32(p for start, end in spans for p in range(start, end)),
            seq_lens=int32(end for _, end in spans),
            block_tables=tables,
            is_prefill=np.array([end - start > 1 for start, end in spans]),
            prompt_lens=int32(sequence.num_prompt for sequence in sequences),
            query_lens=int32(end - start for start, end in spans),
            sampled_rows=int32(sampled),
            states=int32(sequence.state for sequence in sequences),
            adapters=int32(sequence.adapter for sequence in sequences if sequences_adapted),
            sampling=[
                SamplingRow(
                    temperature=sequences[row].temperature,
                    top_p=sequences[row].top_p,
                    seed=sequences[row].seed,
                    sample_index=0,
                    position=len(sequences[row].tokens),
                )
                for row in sampled
            ],
        )

    def commit(
        self, sequences: list[DrivenSequence], batch: ExecutionBatch, output: ExecutionOutput
    ) -> None:
        """Take a step's result into the sequences."""
        for sequence, seq_len in zip(sequences, batch.seq_lens, strict=True):
            sequence.num_computed = int(seq_len)
        for row, token in zip(batch.sampled_rows, output.next_tokens, strict=True):
            sequences[row].tokens.append(int(token))

    def generate(
        self, sequences: list[DrivenSequence], num_tokens: int, chunk: int | None = None
    ) -> list[list[int]]:
        """Run until each sequence has `num_tokens` new tokens; return those."""
        wanted = {id(s): len(s.tokens) + num_tokens for s in sequences}
        starts = [len(s.tokens) for s in sequences]
        while running := [s for s in sequences if len(s.tokens) < wanted[id(s)]]:
            batch = self.batch(running, chunk)
            output = self.executor.execute(batch)
            if output.failed_rows:
                raise AssertionError(output.failed_rows)
            self.commit(running, batch, output)
        return [s.tokens[start:] for s, start in zip(sequences, starts, strict=True)]


def int32(values: object) -> Int32Array:
    """Return an int32 array of an iterable."""
    return np.array(list(values), dtype=np.int32)  # type: ignore[call-overload]
