"""The same trace through the scheduler and the KV cache manager of the control plane.

Only the compute plane is missing: a sampled token is any token, because nobody reads it. Steps are
put together while the one before runs, as the engine does it, so what they take ahead of their time
is counted as taken; samples of a prompt share its blocks and copy the one they begin to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from control_plane.core.batch import StepBatch, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import SchedulerConfig
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler
from hetero_infer.bench.memory_trace import MemoryRun, StepUse, TraceRequest
from planes.errors import ExecutionError

ANY_TOKEN = 0
PIPELINE_DEPTH = 2


class _Written:
    """Which tokens of which sequence are in the pool: what the compute plane would know.

    A slot's start names its sequence by the seed, the number of the request, and the sample.
    """

    def __init__(self, trace: Sequence[TraceRequest]) -> None:
        self._first_seq_ids: list[int] = []
        next_id = 1  # as the scheduler numbers them: by arrival, a number for each sample
        for request in trace:
            self._first_seq_ids.append(next_id)
            next_id += request.num_samples
        self._seq_of_slot: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}

    def sent(self, batch: StepBatch) -> list[tuple[int, int]]:
        """Take note of a step's starts; (sequence, tokens it has) once the step has run."""
        for start in batch.starts:
            seq_id = self._first_seq_ids[start.params.seed or 0] + start.sample_index
            self._seq_of_slot[start.slot] = seq_id
            self._num_tokens[seq_id] = 0
        ends = []
        started = {start.slot for start in batch.starts}
        for slot, position, length in zip(
            batch.slots, batch.positions, batch.query_lens, strict=True
        ):
            seq_id = self._seq_of_slot[slot]
            if slot in started:
                self._num_tokens[seq_id] = position  # shared with others, who wrote them
            ends.append((seq_id, position + length))
        for row, slot in zip(batch.sampled_rows, batch.sampled_slots, strict=False):
            ends.append((self._seq_of_slot[slot], ends[row][1]))
        return ends

    def runs(self, ends: list[tuple[int, int]]) -> None:
        """Take note of what a step writes."""
        self._num_tokens.update(ends)

    def count(self, kv_cache: KVCacheManager) -> int:
        """Return the tokens in blocks that a table holds; one that several hold counts once."""
        block_size = kv_cache.block_size
        full: set[int] = set()
        begun: dict[int, int] = {}
        for seq_id in list(self._num_tokens):
            table = kv_cache.get_block_table(seq_id)
            if table is None:
                del self._num_tokens[seq_id]
                continue
            num_full, rest = divmod(self._num_tokens[seq_id], block_size)
            full.update(table[:num_full])
            if rest:
                begun[table[num_full]] = max(begun.get(table[num_full], 0), rest)
        return len(full) * block_size + sum(n for block, n in begun.items() if block not in full)


def run_paged(
    trace: Sequence[TraceRequest],
    num_blocks: int,
    block_size: int,
    config: SchedulerConfig,
    *,
    depth: int = PIPELINE_DEPTH,
) -> MemoryRun:
    """Run a trace, with `depth` steps under way; raises EngineError for what can never fit."""
    kv_cache = KVCacheManager(num_blocks, block_size)
    scheduler = Scheduler(config, kv_cache)
    for number, request in enumerate(trace):
        params = GenerationParams(
            max_tokens=request.output_tokens,
            temperature=0.0,
            seed=number,
            ignore_eos=True,
            n=request.num_samples,
        )
        scheduler.add_request(Request(number, [ANY_TOKEN] * request.prompt_tokens, params))
    written = _Written(trace)
    under_way: deque[tuple[StepBatch, list[tuple[int, int]]]] = deque()
    steps: list[StepUse] = []
    num_copied = 0
    while scheduler.has_pending_work():
        while len(under_way) < depth and (output := scheduler.schedule()) is not None:
            under_way.append((output.batch, written.sent(output.batch)))
        if not under_way:
            raise ExecutionError("the scheduler has work but no step")
        batch, ends = under_way.popleft()
        written.runs(ends)
        num_copied += len(batch.copies)
        stats = kv_cache.get_memory_stats()
        steps.append(
            StepUse(
                num_running=stats.num_sequences,
                num_waiting=scheduler.get_stats().num_waiting,
                reserved=stats.used_blocks * block_size,
                used=written.count(kv_cache),
            )
        )
        scheduler.commit(StepResult(batch.step_id, [ANY_TOKEN] * len(batch.sampled_rows)))
        scheduler.get_completed()
    return MemoryRun(
        method="paged",
        pool_tokens=num_blocks * block_size,
        steps=steps,
        num_preemptions=scheduler.get_stats().num_preemptions,
        moved_tokens=num_copied * block_size,
    )
