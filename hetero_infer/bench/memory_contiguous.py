"""What paging replaces, simulated: each request's keys and values in one contiguous region.

*Static*: a request reserves the longest length there is when it starts. *Dynamic*: it reserves what
it has, and twice as much whenever that is full; in place if the memory behind it is free, else
somewhere else, which copies it. Steps are put together as `control_plane.core.scheduler` does it:
decode first, then prompts within the step's tokens, in order of arrival; where memory runs out, the
youngest is preempted and computed anew later.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.core.interface import SchedulerConfig
from hetero_infer.bench.memory_trace import MemoryRun, StepUse, TraceRequest
from planes.errors import ConfigError, ExecutionError

GROWTH = 2


class RegionPool:
    """Contiguous regions of `size` tokens, first fit; free neighbours become one run."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free: list[tuple[int, int]] = [(0, size)]  # (start, length), by start

    @property
    def num_free(self) -> int:
        """Free tokens."""
        return sum(length for _, length in self._free)

    @property
    def largest_run(self) -> int:
        """Length of the largest free run."""
        return max((length for _, length in self._free), default=0)

    def allocate(self, length: int) -> int | None:
        """Return where a region of this length starts now; None if no free run is long enough."""
        for index, (start, free) in enumerate(self._free):
            if free >= length:
                self._take(index, start, length)
                return start
        return None

    def extend(self, start: int, length: int, more: int) -> bool:
        """Make a region longer in place, if what follows it is free."""
        index = bisect.bisect_left(self._free, (start + length, 0))
        if index == len(self._free):
            return False
        run, free = self._free[index]
        if run != start + length or free < more:
            return False
        self._take(index, run, more)
        return True

    def release(self, start: int, length: int) -> None:
        """Give a region back."""
        index = bisect.bisect_left(self._free, (start, 0))
        if index < len(self._free) and self._free[index][0] == start + length:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == start:
            start, before = self._free.pop(index - 1)
            length += before
            index -= 1
        self._free.insert(index, (start, length))

    def _take(self, index: int, start: int, length: int) -> None:
        free = self._free[index][1]
        if free == length:
            del self._free[index]
        else:
            self._free[index] = (start + length, free - length)


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request under way. `known`: tokens that exist; `computed`: those written into memory."""

    arrival: int
    request: TraceRequest
    known: int
    computed: int = 0
    start: int = 0
    capacity: int = 0


@dataclass(slots=True)
class _Simulation:
    """One trace under one rule. `grows`: dynamic; else `max_model_len` is reserved at once."""

    pool: RegionPool
    config: SchedulerConfig
    grows: bool
    waiting: deque[_Sequence]
    running: list[_Sequence] = field(default_factory=list)
    steps: list[StepUse] = field(default_factory=list)
    num_preemptions: int = 0
    moved_tokens: int = 0

    def run(self) -> None:
        """Step until every request has ended."""
        while self.waiting or self.running:
            if not self._step():
                raise ExecutionError("the simulated requests cannot get on")

    def _step(self) -> bool:
        """Run one step; False if nothing was computed."""
        config = self.config
        budget, rows = config.max_total_tokens, config.max_batch_size
        prefill = min(config.max_prefill_tokens or budget, budget)
        done: list[_Sequence] = []
        decoding = [s for s in self.running if s.known - s.computed == 1]
        for sequence in decoding:
            if rows and budget and sequence in self.running and self._room(sequence, 1):
                self._compute(sequence, 1, done)
                rows, budget = rows - 1, budget - 1
        for sequence in [s for s in self.running if s.known - s.computed > 1]:
            count = min(sequence.known - sequence.computed, budget, prefill)
            if rows and count and sequence in self.running and self._room(sequence, count):
                self._compute(sequence, count, done)
                rows, budget, prefill = rows - 1, budget - count, prefill - count
        while self.waiting and rows and self.waiting[0] not in done:
            count = min(self.waiting[0].known, budget, prefill)
            if not count or not self._admit(count):
                break
            self._compute(self.running[-1], count, done)
            rows, budget, prefill = rows - 1, budget - count, prefill - count
        self._record()
        for sequence in done:
            if sequence.known <= sequence.request.max_held_tokens:
                continue
            # It may have been preempted for a row of the very step that gave its last token.
            if sequence in self.running:
                self._leave(sequence)
            else:
                self.waiting.remove(sequence)
        return rows < config.max_batch_size

    def _compute(self, sequence: _Sequence, count: int, done: list[_Sequence]) -> None:
        sequence.computed += count
        if sequence.computed == sequence.known:
            sequence.known += 1  # the step samples the next token
            done.append(sequence)

    def _admit(self, count: int) -> bool:
        """Give the first that waits a region, if there is one for it."""
        sequence = self.waiting[0]
        capacity = self.config.max_model_len
        if self.grows:
            capacity = count
            taken = self.pool.size - self.pool.num_free
            threshold = self.config.memory_threshold * self.pool.size
            if self.running and taken + sequence.known + 1 > threshold:
                return False
        start = self.pool.allocate(capacity)
        if start is None:
            return False
        self.waiting.popleft()
        sequence.start, sequence.capacity = start, capacity
        self.running.append(sequence)
        return True

    def _room(self, sequence: _Sequence, count: int) -> bool:
        """Make room for `count` more tokens; who is younger may have to go."""
        needed = sequence.computed + count
        while sequence.capacity < needed:
            wanted = max(needed, min(GROWTH * sequence.capacity, self.config.max_model_len))
            if any(self._resize(sequence, capacity) for capacity in (wanted, needed)):
                return True
            youngest = self.running[-1]
            if youngest is sequence and len(self.running) > 1:
                return False
            if youngest is sequence:
                # Alone, and what is free lies on both sides of it: it is computed anew.
                self._preempt(sequence)
                return False
            self._preempt(youngest)
        return True

    def _resize(self, sequence: _Sequence, capacity: int) -> bool:
        """Make a region longer, in place or somewhere else."""
        if self.pool.extend(sequence.start, sequence.capacity, capacity - sequence.capacity):
            sequence.capacity = capacity
            return True
        start = self.pool.allocate(capacity)
        if start is None:
            return False
        self.pool.release(sequence.start, sequence.capacity)
        sequence.start, sequence.capacity = start, capacity
        self.moved_tokens += sequence.computed
        return True

    def _preempt(self, sequence: _Sequence) -> None:
        self._leave(sequence)
        self.num_preemptions += 1
        sequence.computed = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: _Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(sequence.start, sequence.capacity)

    def _record(self) -> None:
        free = self.pool.num_free
        self.steps.append(
            StepUse(
                num_running=len(self.running),
                num_waiting=len(self.waiting),
                reserved=self.pool.size - free,
                used=sum(sequence.computed for sequence in self.running),
                stranded=free - self.pool.largest_run,
            )
        )


def simulate_contiguous(
    trace: Sequence[TraceRequest], pool_tokens: int, config: SchedulerConfig, *, grows: bool
) -> MemoryRun:
    """Run a trace; raises ConfigError if the pool cannot hold the longest request."""
    if pool_tokens < config.max_model_len:
        raise ConfigError(
            f"max_num_blocks: the pool of {pool_tokens} tokens must hold max_model_len "
            f"({config.max_model_len}) tokens in one piece",
            field="max_num_blocks",
        )
    # Nothing can be shared: every sample has a region of its own, prompt and all.
    samples = [request for request in trace for _ in range(request.num_samples)]
    sequences = (_Sequence(i, r, known=r.prompt_tokens) for i, r in enumerate(samples))
    simulation = _Simulation(RegionPool(pool_tokens), config, grows, deque(sequences))
    simulation.run()
    return MemoryRun(
        method="dynamic" if grows else "static",
        pool_tokens=pool_tokens,
        steps=simulation.steps,
        num_preemptions=simulation.num_preemptions,
        moved_tokens=simulation.moved_tokens,
    )
