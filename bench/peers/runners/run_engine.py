"""This product's CPU engine in process, without planes: steps of one token, one after the other.

Like `llama-bench` it begins with an empty context and counts every token; unlike it, it samples
each, and the next step begins with that one. `settings`: of `ComputePlaneConfig`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from compute_plane.config import ComputePlaneConfig
from compute_plane.cpu.build import build_cpu
from compute_plane.executor.interface import ExecutionBatch, Int32Array, SamplingRow
from compute_plane.executor.registry import ExecutorContext
from compute_plane.model.loader import load_model

if TYPE_CHECKING:
    from bench.peers.runners.runner import Job

GREEDY: Final = 0.0


class OwnEngine:
    def __init__(self, job: Job) -> None:
        if job.kind != "decode":
            raise ValueError(f"the engine alone is measured by decode, not by {job.kind}")
        config = ComputePlaneConfig(model=job.model, num_threads=job.threads, **job.settings)
        model = load_model(job.model)
        self._block_size = config.block_size
        self._built = build_cpu(
            ExecutorContext(
                spec=model.spec,
                model=model,
                block_size=config.block_size,
                num_blocks=config.num_blocks,
                dtype=config.dtype,
                kv_cache_dtype=config.kv_cache_dtype,
                instruction_set=config.instruction_set,
                device="cpu",
                max_tokens=config.max_tokens_per_batch,
                num_threads=config.effective_num_threads,
                kernel_cache=config.kernel_cache_root,
            ),
            model,
        )
        self.versions = {"numerics": self._built.numerics_id}

    def measure(self, prompts: list[list[int]], output_tokens: int) -> tuple[int, float]:
        token = prompts[0][0]
        tables = int32(np.arange(-(-output_tokens // self._block_size)))[None]
        began = time.perf_counter()
        for position in range(output_tokens):
            batch = one_token(token, position, tables)
            token = int(self._built.executor.execute(batch).next_tokens[0])
        return output_tokens, time.perf_counter() - began

    def close(self) -> None:
        close = getattr(self._built.executor, "close", None)
        if close is not None:
            close()


def one_token(token: int, position: int, tables: Int32Array) -> ExecutionBatch:
    """Return the step of one sequence's next token."""
    return ExecutionBatch(
        input_tokens=int32([token]),
        positions=int32([position]),
        seq_lens=int32([position + 1]),
        block_tables=tables,
        is_prefill=np.zeros(1, dtype=np.bool_),
        prompt_lens=int32([1]),
        query_lens=int32([1]),
        sampled_rows=int32([0]),
        sampling=[SamplingRow(GREEDY, 1.0, 0, 0, position + 1)],
    )


def int32(values: object) -> Int32Array:
    return np.array(values, dtype=np.int32)


def load(job: Job) -> OwnEngine:
    return OwnEngine(job)
