"""This product's CPU engine in process, without planes: steps, one after the other.

Like `llama-bench` it decodes behind a context of all of the prompt but its last token and counts
every token; unlike it, it samples each that it generates, and the next step begins with that one.
Prompts are cut as the engine prefers them. `settings`: of `ComputePlaneConfig`.
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
        if job.kind not in ("decode", "prefill"):
            raise ValueError(f"the engine alone is not measured by {job.kind}")
        self._kind = job.kind
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
        [prompt] = prompts
        if self._kind == "prefill":
            return self._prefill(prompt, self._tables(len(prompt)))
        *context, token = prompt
        tables = self._tables(len(context) + output_tokens)
        self._prefill(context, tables)
        began = time.perf_counter()
        for position in range(len(context), len(context) + output_tokens):
            batch = self._step([token], position, tables, len(prompt), is_last=True)
            token = int(self._built.executor.execute(batch).next_tokens[0])
        return output_tokens, time.perf_counter() - began

    def _prefill(self, prompt: list[int], tables: Int32Array) -> tuple[int, float]:
        chunk = self._built.preferred_prefill_chunk
        began = time.perf_counter()
        for start in range(0, len(prompt), chunk):
            end = min(len(prompt), start + chunk)
            batch = self._step(
                prompt[start:end], start, tables, len(prompt), is_last=end == len(prompt)
            )
            self._built.executor.execute(batch)
        return len(prompt), time.perf_counter() - began

    def _tables(self, num_tokens: int) -> Int32Array:
        return int32(np.arange(-(-num_tokens // self._block_size)))[None]

    def _step(
        self, tokens: list[int], start: int, tables: Int32Array, num_prompt: int, *, is_last: bool
    ) -> ExecutionBatch:
        end = start + len(tokens)
        return ExecutionBatch(
            input_tokens=int32(tokens),
            positions=int32(range(start, end)),
            seq_lens=int32([end]),
            block_tables=tables,
            is_prefill=np.full(1, end <= num_prompt),
            prompt_lens=int32([num_prompt]),
            query_lens=int32([len(tokens)]),
            sampled_rows=int32([0] if is_last else []),
            sampling=[SamplingRow(GREEDY, 1.0, 0, 0, end)] if is_last else [],
            states=int32([0] if self._built.num_states else []),
        )

    def close(self) -> None:
        close = getattr(self._built.executor, "close", None)
        if close is not None:
            close()


def int32(values: object) -> Int32Array:
    return np.array(values, dtype=np.int32)


def load(job: Job) -> OwnEngine:
    return OwnEngine(job)
