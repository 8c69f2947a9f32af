"""A scheduler and the half of an engine loop that tests of its rules need."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from control_plane.core.batch import RowFailure, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import (
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

EOS = 0
TOKEN = 5


@dataclass
class Engine:
    """Sends steps of `scheduler` and commits them with tokens the test chooses."""

    scheduler: Scheduler
    kv: KVCacheManager
    in_flight: deque[SchedulerOutput] = field(default_factory=deque)

    def submit(
        self, request_id: int, prompt_len: int, max_tokens: int = 8, *, ignore_eos: bool = False
    ) -> Request:
        request = Request(
            request_id,
            [TOKEN] * prompt_len,
            GenerationParams(max_tokens=max_tokens, seed=1, ignore_eos=ignore_eos),
            frozenset({EOS}),
        )
        assert self.scheduler.add_request(request) == request_id
        return request

    def send(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        assert output is not None
        self.in_flight.append(output)
        return output

    def commit(
        self,
        tokens: dict[int, int] | None = None,
        *,
        failures: tuple[RowFailure, ...] = (),
        refusal: str | None = None,
    ) -> list[RequestOutput]:
        """Commit the oldest step: `tokens` by request id, TOKEN for the others."""
        output = self.in_flight.popleft()
        ids = output.decode_request_ids + output.prefill_request_ids
        sampled = [(tokens or {}).get(ids[row], TOKEN) for row in output.batch.sampled_rows]
        return self.scheduler.commit(
            StepResult(
                output.batch.step_id,
                [] if refusal is not None else sampled,
                row_failures=failures,
                refusal=refusal,
            )
        )

    def step(self, tokens: dict[int, int] | None = None) -> SchedulerOutput:
        output = self.send()
        self.commit(tokens)
        return output

    @property
    def used_blocks(self) -> int:
        self.kv.check_invariants()
        return self.kv.get_memory_stats().used_blocks


@pytest.fixture
def engine() -> Callable[..., Engine]:
    def make(num_blocks: int = 64, block_size: int = 4, **limits: float) -> Engine:
        kv = KVCacheManager(num_blocks, block_size)
        return Engine(Scheduler(SchedulerConfig(**limits), kv), kv)

    return make
