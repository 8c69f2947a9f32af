"""Continuous batching: requests in, steps out, results in, events out.

What a step computes is decided in `control_plane.core.composer`, what a result means in
`control_plane.core.results`, who must give way in `control_plane.core.running`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from control_plane.core.batch import StepResult
from control_plane.core.beams import Beams
from control_plane.core.composer import StepComposer
from control_plane.core.drafting import Drafting
from control_plane.core.embedding import EMBEDDINGS
from control_plane.core.failures import Failures
from control_plane.core.host_pool import HostPool
from control_plane.core.interface import (
    ADAPTERS,
    OPTIONAL_PARAMETERS,
    RequestOutput,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerProtocol,
    SchedulerStats,
)
from control_plane.core.kv_interface import KVCacheManagerProtocol, MemoryStats
from control_plane.core.limits import RequestLimits
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import Request
from control_plane.core.request_table import RequestTable
from control_plane.core.results import Results
from control_plane.core.running import RunningSet
from control_plane.core.slots import SlotPool
from control_plane.core.states import SequenceStates
from control_plane.core.step import Step
from planes.errors import SchedulerError

__all__ = [
    "Scheduler",
    "SchedulerProtocol",
    "SchedulerConfig",
    "SchedulerOutput",
    "SchedulerStats",
    "RequestOutput",
]


class Scheduler:
    """Decides every step; owned by one thread, never waits, does no I/O.

    Steps may be scheduled before earlier ones are committed; commits come in the order of the
    steps. A row may be scheduled while its newest token is still to be sampled by a step in
    flight: the compute plane continues from the token it sampled itself.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManagerProtocol) -> None:
        self._kv = kv_cache
        num_blocks = kv_cache.get_memory_stats().total_blocks
        self._queue = WaitingQueue()
        states = None
        if config.num_states:
            states = SequenceStates(
                config.kept_states, kv_cache.block_size, config.min_state_tokens
            )
        self._running = RunningSet(
            kv_cache,
            SlotPool(config.num_slots),
            self._queue,
            HostPool(config.num_host_blocks),
            states,
            start_prefixes=config.start_prefixes,
        )
        limits = RequestLimits(
            max_model_len=config.max_model_len,
            block_size=kv_cache.block_size,
            num_blocks=num_blocks,
            max_beams=config.num_slots,
            shares_prompts=self._running.sharing is not None and states is None,
        )
        self._requests = RequestTable(limits, self._queue, self._running)
        self._drafting = Drafting(config, kv_cache.block_size, self._running, self._queue)
        self._composer = StepComposer(
            config, kv_cache, self._running, self._queue, self._requests, self._drafting
        )
        beams = Beams(self._requests, self._running, self._queue)
        failures = Failures(kv_cache, self._running)
        self._results = Results(self._requests, self._running, beams, self._drafting, failures)
        self._in_flight: deque[Step] = deque()
        self._last_step = 0
        self._num_steps = 0

    keeps: Final = frozenset((*OPTIONAL_PARAMETERS, EMBEDDINGS, ADAPTERS))
    """`control_plane.core.interface.KeepsParameters`."""

    # Requests

    def add_request(self, request: Request) -> int:
        """Queue a request and return its id.

        Raises what `RequestLimits.check` raises, SchedulerError if it is not new.
        """
        return self._requests.add(request)

    def fork(self, parent_id: int, child: Request) -> int:
        """Add a request that goes on from the tokens another has by now; its id.

        `child` has the parent's prompt and adapter, and parameters of its own; its `output_tokens`
        become a copy of the parent's. It shares the parent's blocks where that is possible and runs
        at once if there is a slot for it; otherwise it waits like any other request.

        Raises what `add_request` raises, SchedulerError if the parent is unknown, has ended, or
        has several samples.
        """
        return self._requests.fork(parent_id, child)

    def cancel(self, request_id: int, now: float = 0.0) -> RequestOutput | None:
        """End a request; its final event, or None if it is unknown or has ended.

        Blocks and slots are free at once, or with the commit of its last step in flight.
        """
        self._set_time(now)
        return self._requests.cancel(request_id)

    def end_sample(
        self, request_id: int, sample_index: int, num_tokens: int, now: float = 0.0
    ) -> RequestOutput | None:
        """End a sample with its first `num_tokens` tokens, as if it had stopped there.

        The event, final if it was the last of its request; None if sample or request are unknown
        or have ended. Not for beams.
        """
        self._set_time(now)
        return self._requests.end_sample(request_id, sample_index, num_tokens)

    def flush_prefix_cache(self) -> int:
        """Let no request find what earlier ones have left; how many idle blocks held something."""
        num_cached = self._kv.get_memory_stats().cached_blocks
        if self._running.sharing is not None:
            self._running.sharing.forget_all()
        if self._running.states is not None:
            self._running.states.forget_kept()
        return num_cached

    def withdraw(self, request_ids: Iterable[int] | None = None) -> list[Request]:
        """Let go of requests, None: of all, so that another scheduler may adopt them.

        Only those that hold no slot and no block, so all of them after `lose_epoch`; ids of others
        and unknown ones mean nothing. In the order in which they would have been served.
        """
        return self._requests.withdraw(request_ids)

    def adopt(self, request: Request) -> int:
        """Queue a request that another scheduler let go, with all its tokens; its id.

        It stands among the waiting ones where its arrival time puts it, and goes on where it was:
        prompt and tokens are computed anew, a beam search has its beams. The caller may set
        `request.search` to None, so that a search begins anew.

        Raises what `RequestLimits.check` raises, SchedulerError if it was in no scheduler or is
        known here.
        """
        return self._requests.adopt(request)

    def isolate(self, request_id: int | None) -> None:
        """Admit nobody but this request, which may be unknown; None: all again.

        Who runs goes on. While it is unknown nothing is admitted.
        """
        self._queue.alone = request_id

    def get_completed(self) -> list[Request]:
        """Return the requests that ended since the last call; call it, or they pile up."""
        return self._requests.take_completed()

    def has_pending_work(self) -> bool:
        """Whether any request waits, runs or still holds blocks."""
        return len(self._running) > 0 or len(self._queue) > 0

    # Numbers

    def get_stats(self) -> SchedulerStats:
        """Return the counters."""
        running, states = self._running, self._running.states
        return SchedulerStats(
            num_steps=self._num_steps,
            num_preemptions=running.num_preemptions,
            num_running=len(running),
            num_waiting=len(self._queue),
            num_in_flight=len(self._in_flight),
            num_swaps=running.num_swaps,
            num_host_blocks_used=running.host.num_used,
            num_waiting_requests=self._queue.num_requests,
            num_drafts=self._drafting.num_drafts,
            num_kept_drafts=self._drafting.num_kept,
            num_kept_states=0 if states is None else len(states.kept),
            num_state_hits=0 if states is None else states.num_hits,
        )

    def get_memory_stats(self) -> MemoryStats:
        """Return the use of the block pool, with its internal fragmentation and the host pool."""
        running = self._running
        return replace(
            self._kv.get_memory_stats(),
            internal_fragmentation=running.internal_fragmentation,
            total_host_blocks=running.host.num_blocks,
            used_host_blocks=running.host.num_used,
        )

    # Steps

    def schedule(self, now: float = 0.0) -> SchedulerOutput | None:
        """Return the next step to send; None if nothing can be computed before a commit."""
        self._set_time(now)
        if self._drafting.is_waiting(self._in_flight):
            return None
        running = self._running
        step = self._composer.compose(self._last_step + 1)
        # Beams that wait for others hold what those need; with nothing under way, they give way.
        while step.is_empty and not self._in_flight and running.yield_beam():
            step = self._composer.compose(self._last_step + 1)
        if step.is_empty:
            return None
        self._last_step = step.step_id
        self._num_steps += 1
        self._in_flight.append(step)
        copies = () if running.states is None else running.states.take_copies()
        return step.output(running.slots.take_released(), *running.host.take_moves(), copies)

    # Results

    def commit(self, result: StepResult, now: float = 0.0) -> list[RequestOutput]:
        """Take in the result of the oldest step in flight; what it means for each request.

        A refused step fails its requests, and ends the epoch: later steps in flight were made as if
        it had run, so they could do harm. The caller opens a new session, then `lose_epoch`.

        Raises SchedulerError, having changed nothing, if the result does not fit that step.
        """
        if not self._in_flight:
            raise SchedulerError(f"result of step {result.step_id}, but no step is in flight")
        step = self._in_flight[0]
        step.check_result(result)
        self._set_time(now)
        self._in_flight.popleft()
        if result.refusal is not None:
            events = self._results.refuse(step, result.refusal)
            self.lose_epoch(self._last_step)
            return events
        return self._results.take(step, result)

    def update_sequences(self, result: StepResult) -> list[RequestOutput]:
        """Do what `commit` does, by the seed documents' name."""
        return self.commit(result)

    # Epochs

    def lose_epoch(self, last_step: int = 0) -> None:
        """Forget what the compute plane held; the next step is `last_step + 1`.

        Everything running is queued again, in order, to be computed anew from its prompt and the
        tokens committed so far; the prefix cache and what was swapped out are gone. Steps in flight
        are dropped and never committed. Also the way to set the step counter after opening a
        session.
        """
        self._in_flight.clear()
        self._running.release_all()
        self._running.last_committed_step = last_step
        self._last_step = last_step

    def _set_time(self, now: float) -> None:
        """Note the time, which never goes back."""
        if now > self._running.now:
            self._running.now = now
