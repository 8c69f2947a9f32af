"""The same trace through the scheduler and the KV cache manager of the control plane.

Only the compute plane is missing: a sampled token is any token, because nobody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.batch import StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler
from hetero_infer.bench.memory_trace import MemoryRun, StepUse, TraceRequest
from planes.errors import ExecutionError

ANY_TOKEN = 0


def run_paged(
    trace: Sequence[TraceRequest], num_blocks: int, block_size: int, config: SchedulerConfig
) -> MemoryRun:
    """Run a trace; raises EngineError for a request that can never fit."""
    kv_cache = KVCacheManager(num_blocks, block_size)
    scheduler = Scheduler(config, kv_cache)
    # Sequences are numbered by arrival, from 1; requests get the same numbers here.
    for number, request in enumerate(trace, start=1):
        params = GenerationParams(
            max_tokens=request.output_tokens, temperature=0.0, seed=0, ignore_eos=True
        )
        scheduler.add_request(Request(number, [ANY_TOKEN] * request.prompt_tokens, params))
    computed: dict[int, int] = {}
    steps: list[StepUse] = []
    while scheduler.has_pending_work():
        output = scheduler.schedule()
        if output is None:
            raise ExecutionError("the scheduler has work but no step")
        batch = output.batch
        rows = [*output.decode_request_ids, *output.prefill_request_ids]
        for number, position, length in zip(rows, batch.positions, batch.query_lens, strict=True):
            computed[number] = position + length
        stats, counters = kv_cache.get_memory_stats(), scheduler.get_stats()
        computed = {n: c for n, c in computed.items() if kv_cache.get_block_table(n) is not None}
        steps.append(
            StepUse(
                num_running=stats.num_sequences,
                num_waiting=counters.num_waiting,
                reserved=stats.used_blocks * block_size,
                used=sum(computed.values()),
            )
        )
        scheduler.commit(StepResult(batch.step_id, [ANY_TOKEN] * len(batch.sampled_rows)))
        scheduler.get_completed()
    return MemoryRun(
        method="paged",
        pool_tokens=num_blocks * block_size,
        steps=steps,
        num_preemptions=scheduler.get_stats().num_preemptions,
    )
