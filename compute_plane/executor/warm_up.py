"""The first step of an executor."""

from __future__ import annotations

import numpy as np

from compute_plane.executor.interface import ExecutionBatch, GPUExecutor, SamplingRow


def warm_up(executor: GPUExecutor, block_size: int, *, has_states: bool = False) -> None:
    """Run a tiny step, so that every page a step touches is there before the first batch.

    It writes the first block and, of models with states, the first one, which nobody holds yet.
    """
    num_tokens = min(2, block_size)
    executor.execute(
        ExecutionBatch(
            input_tokens=np.zeros(num_tokens, dtype=np.int32),
            positions=np.arange(num_tokens, dtype=np.int32),
            seq_lens=np.array([num_tokens], dtype=np.int32),
            block_tables=np.zeros((1, 1), dtype=np.int32),
            is_prefill=np.ones(1, dtype=np.bool_),
            prompt_lens=np.ones(1, dtype=np.int32),
            query_lens=np.array([num_tokens], dtype=np.int32),
            sampled_rows=np.zeros(1, dtype=np.int32),
            sampling=[SamplingRow(1.0, 0.9, 0, 0, num_tokens)],
            prompt_logprob_rows=[0],
            prompt_logprob_targets=[np.zeros(num_tokens - 1, dtype=np.int32)],
            states=np.zeros(int(has_states), dtype=np.int32),
        )
    )
