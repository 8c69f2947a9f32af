"""The float32 executor for CPUs: Numba kernels over the block pool, NumPy's BLAS for matrices.

Kernels keep the law that a row's result does not depend on its neighbours; BLAS does not promise it
(its summation order may change with the number of rows), so with this executor equal requests give
equal tokens, not equal bits of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from types import TracebackType
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.executor.interface import (
    BoolArray,
    ExecutionBatch,
    ExecutionOutput,
    Float32Array,
    Int32Array,
    SamplingRow,
)
from compute_plane.executor.llama_step import LlamaStep
from compute_plane.executor.token_layout import PoolShape, TokenLayout, lay_out_tokens
from compute_plane.executor.worker_threads import WorkerThreads
from kernels.registry import load_kernels

if TYPE_CHECKING:
    from compute_plane.memory.kv_pool import KvPool
    from compute_plane.model.spec import ModelSpec
    from compute_plane.model.weights import LlamaWeights

LOGITS_ROWS: Final = 64
"""Rows of logits that exist at once; with a vocabulary of 50 000 they take 12 MiB."""

NOT_FINITE: Final = "the logits are not finite"


class CpuExecutor:
    """Runs batches of a Llama-family model on the CPU; a `GPUExecutor`.

    `kv_pool` must have the layers and heads of `spec`. `num_threads` bounds BLAS (of the whole
    process) and the kernels' threads. `keep_logits`: return the sampled rows' logits, for tests and
    tools. Not thread-safe: one thread, the device thread, calls it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: LlamaWeights,
        kv_pool: KvPool,
        *,
        num_threads: int,
        kernels: str = "cpu",
        keep_logits: bool = False,
    ) -> None:
        self.numerics_id = f"cpu/float32/{kernels}+blas"
        self._workers = WorkerThreads(num_threads)
        self._kernels = load_kernels(kernels)
        self._step = LlamaStep(spec, weights, kv_pool, self._kernels, self._workers)
        self._kv_pool = kv_pool
        self._shape = PoolShape(kv_pool.num_blocks, kv_pool.block_size, spec.vocab_size)
        self._keep_logits = keep_logits

    def execute(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step. Raises ValidationError, with nothing changed, if the batch is malformed."""
        layout = lay_out_tokens(batch, self._shape)
        for copy in batch.copies:
            self._kv_pool.copy_block(copy.source, copy.destination)
        hidden = self._step.run(layout)
        failed_rows: dict[int, str] = {}
        prompt_logprobs = self._prompt_logprobs(batch, layout, hidden, failed_rows)
        next_tokens, logits = self._sample(batch, layout, hidden, failed_rows)
        return ExecutionOutput(
            next_tokens=next_tokens,
            failed_rows=failed_rows,
            logits=logits,
            prompt_logprobs=prompt_logprobs,
        )

    def capture_decode_graph(self, batch_size: int) -> None:
        """Do nothing: a CPU has no launches to save."""

    def execute_graph(self, batch: ExecutionBatch) -> ExecutionOutput:
        """Run one step like `execute`."""
        return self.execute(batch)

    def close(self) -> None:
        """End the executor's threads."""
        self._workers.close()

    def __enter__(self) -> CpuExecutor:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _sample(
        self,
        batch: ExecutionBatch,
        layout: TokenLayout,
        hidden: Float32Array,
        failed_rows: dict[int, str],
    ) -> tuple[Int32Array, Float32Array | None]:
        """Return the sampled tokens [K] and, where kept, their logits [K, V]."""
        num_samples = len(batch.sampled_rows)
        tokens = np.zeros(num_samples, dtype=np.int32)
        kept: list[Float32Array] = []
        for start in range(0, num_samples, LOGITS_ROWS):
            piece = slice(start, min(start + LOGITS_ROWS, num_samples))
            # Samples of one row share its logits.
            rows, logits_rows = np.unique(batch.sampled_rows[piece], return_inverse=True)
            logits = self._step.logits(hidden[layout.row_ends[rows] - 1])
            is_finite = np.empty(piece.stop - piece.start, dtype=np.bool_)
            self._draw(
                logits,
                logits_rows.astype(np.int32),
                batch.sampling[piece],
                tokens[piece],
                is_finite,
            )
            for row in batch.sampled_rows[piece][~is_finite]:
                failed_rows[int(row)] = NOT_FINITE
            if self._keep_logits:
                kept.append(logits[logits_rows])
        return tokens, np.concatenate(kept) if kept else None

    def _draw(
        self,
        logits: Float32Array,
        logits_rows: Int32Array,
        sampling: Sequence[SamplingRow],
        out: Int32Array,
        is_finite: BoolArray,
    ) -> None:
        """Draw the samples [K] of a piece, shared out over the threads."""
        temperatures = np.array([row.temperature for row in sampling], dtype=np.float64)
        top_ps = np.array([row.top_p for row in sampling], dtype=np.float64)
        seeds = np.array([row.seed for row in sampling], dtype=np.uint64)
        sample_indexes = np.array([row.sample_index for row in sampling], dtype=np.int64)
        positions = np.array([row.position for row in sampling], dtype=np.int64)

        def task(share: slice) -> None:
            self._kernels.sample(
                logits, logits_rows[share], temperatures[share], top_ps[share], seeds[share],
                sample_indexes[share], positions[share], out[share], is_finite[share],
            )  # fmt: skip

        num_shares = min(self._workers.num_threads, len(out))
        bounds = [len(out) * i // num_shares for i in range(num_shares + 1)]
        self._workers.run([partial(task, slice(a, b)) for a, b in pairwise(bounds)])

    def _prompt_logprobs(
        self,
        batch: ExecutionBatch,
        layout: TokenLayout,
        hidden: Float32Array,
        failed_rows: dict[int, str],
    ) -> list[Float32Array]:
        """Return the wanted log-probabilities; a row where one is NaN fails."""
        wanted: list[Float32Array] = []
        for row, given in zip(batch.prompt_logprob_rows, batch.prompt_logprob_targets, strict=True):
            targets = np.ascontiguousarray(given, dtype=np.int32)
            first = int(layout.row_ends[row] - batch.query_lens[row])
            logprobs = np.empty(len(targets), dtype=np.float32)
            for start in range(0, len(targets), LOGITS_ROWS):
                end = min(start + LOGITS_ROWS, len(targets))
                logits = self._step.logits(hidden[first + start : first + end])
                self._kernels.token_logprobs(logits, targets[start:end], logprobs[start:end])
            if not np.isfinite(logprobs).all():
                failed_rows[row] = NOT_FINITE
            wanted.append(logprobs)
        return wanted
