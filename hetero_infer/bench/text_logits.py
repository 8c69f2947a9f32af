"""The logits of every position of a text, from an executor that is driven by hand."""

from __future__ import annotations

from typing import Final

import numpy as np

from compute_plane.cpu.executor import CpuExecutor
from compute_plane.cpu.packed_layers import PackedWeights
from compute_plane.executor.interface import (
    ExecutionBatch,
    Float32Array,
    Int32Array,
    SamplingRow,
)
from compute_plane.memory.kv_pool import KvPool, pool_layout
from compute_plane.memory.state_pool import make_states
from compute_plane.model.spec import ModelSpec
from planes.errors import ExecutionError

BLOCK_SIZE: Final = 16
WINDOW: Final = 64
"""Positions of a step: as many rows of logits as the executor computes at once."""


class TextLogits:
    """One format under test: packed weights, a KV pool for one text, and their executor.

    `max_tokens`: of the longest text. `kv_dtype`: a key of `kernels.cpu.kv_layout.VALUE_BYTES`.
    Raises ConfigError for an unknown one, the family's MemoryError if there is no memory.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        kv_dtype: str,
        *,
        max_tokens: int,
        num_threads: int,
    ) -> None:
        self._num_blocks = -(-max_tokens // BLOCK_SIZE)
        self._has_states = spec.recurrence is not None
        self._executor = CpuExecutor(
            spec,
            weights,
            KvPool(pool_layout(spec, kv_dtype, BLOCK_SIZE), self._num_blocks),
            num_threads=num_threads,
            max_tokens=WINDOW,
            keep_logits=True,
            states=make_states(spec, 1),
        )

    @property
    def numerics_id(self) -> str:
        """What decides the bits of the logits, but for model and sources."""
        return self._executor.numerics_id

    def of(self, tokens: Int32Array, first: int) -> Float32Array:
        """Return the logits [n, V] behind each of `tokens`, n of them, at most WINDOW.

        They stand at `first` and the n - 1 positions after it, of the text whose tokens before
        `first` were given to the calls before this one. Raises ExecutionError if logits are not
        finite.
        """
        if not self._has_states:
            return self._of_step(tokens, first)
        # Of a sequence with a state one row can go on at a time.
        places = range(len(tokens))
        return np.concatenate([self._of_step(tokens[i : i + 1], first + i) for i in places])

    def _of_step(self, tokens: Int32Array, first: int) -> Float32Array:
        """Return the same, of tokens of one step."""
        output = self._executor.execute(self._batch(tokens, first))
        for row, message in output.failed_rows.items():
            raise ExecutionError(f"{self.numerics_id}: position {first + row}: {message}")
        if output.logits is None:
            raise ExecutionError("the executor keeps no logits")
        return output.logits

    def close(self) -> None:
        """End the executor's threads."""
        self._executor.close()

    def _batch(self, tokens: Int32Array, first: int) -> ExecutionBatch:
        """Return a step in which each token is a row of its own, of one and the same sequence.

        They count as generated: where prompts are computed otherwise, it is more precisely.
        All share one block table; in every layer all keys and values are written before any are
        read, so that each row sees those of the rows before it.
        """
        count = len(tokens)
        positions = np.arange(first, first + count, dtype=np.int32)
        blocks = np.arange(self._num_blocks, dtype=np.int32)
        return ExecutionBatch(
            input_tokens=tokens,
            positions=positions,
            seq_lens=positions + np.int32(1),
            block_tables=np.tile(blocks, (count, 1)),
            is_prefill=np.ones(count, dtype=np.bool_),
            prompt_lens=np.zeros(count, dtype=np.int32),
            query_lens=np.ones(count, dtype=np.int32),
            sampled_rows=np.arange(count, dtype=np.int32),
            states=np.zeros(int(self._has_states), dtype=np.int32),
            sampling=[
                SamplingRow(
                    temperature=0.0, top_p=1.0, seed=0, sample_index=0, position=int(position) + 1
                )
                for position in positions
            ],
        )
