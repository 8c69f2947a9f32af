"""What an executor says of some prompts: the same in every way that promises equal bits.

Timed steps attend to whatever lies in the pool; these have their prompts computed first.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.executor.interface import ExecutionBatch, GPUExecutor, SamplingRow

PROMPT_TOKENS: Final = 40
STEPS: Final = 64
"""Decode steps behind the prompts."""

Answers = list[tuple[tuple[int, float], ...]]


def num_tokens() -> int:
    """Return the tokens of a row in the end."""
    return PROMPT_TOKENS + STEPS


def answers(executor: GPUExecutor, rows: int, blocks_of_row: int) -> Answers:
    """Return, of each step, every row's greedy token and its log-probability.

    `rows`: as many as the executor takes in a step; `blocks_of_row`: of the pool, a row; they must
    hold `num_tokens`.
    """
    ones = np.ones(rows, dtype=np.int32)
    tables = np.arange(rows * blocks_of_row, dtype=np.int32).reshape(rows, blocks_of_row)
    prompts = (np.arange(rows * PROMPT_TOKENS, dtype=np.int32) * 7) % 251 + 2
    positions = np.tile(np.arange(PROMPT_TOKENS, dtype=np.int32), rows)
    said: Answers = []
    tokens, lengths = prompts, ones * PROMPT_TOKENS
    for step in range(STEPS + 1):
        context = PROMPT_TOKENS + step
        output = executor.execute(
            ExecutionBatch(
                input_tokens=tokens,
                positions=positions,
                seq_lens=ones * context,
                block_tables=tables,
                is_prefill=np.full(rows, step == 0),
                prompt_lens=ones * PROMPT_TOKENS,
                query_lens=lengths,
                sampled_rows=np.arange(rows, dtype=np.int32),
                sampling=[
                    SamplingRow(0.0, 1.0, row, 0, context, num_logprobs=0) for row in range(rows)
                ],
            )
        )
        logprobs = [one.logprob for one in output.sample_logprobs]
        said.append(tuple(zip(output.next_tokens.tolist(), logprobs, strict=True)))
        tokens, positions, lengths = output.next_tokens, ones * context, ones
    return said
