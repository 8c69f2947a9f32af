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

    def ask(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int = 8,
        *,
        n: int = 1,
        priority: int = 0,
        cache_salt: str = "",
        uses_cache: bool = True,
        arrival_time: float = 0.0,
    ) -> Request:
        request = Request(
            request_id,
            list(prompt),
            GenerationParams(max_tokens=max_tokens, seed=1, n=n),
            frozenset({EOS}),
            priority=priority,
            cache_salt=cache_salt,
            uses_cache=uses_cache,
            arrival_time=arrival_time,
        )
        self.scheduler.add_request(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_pending_work():
            self.step()

    def send(self, now: float = 0.0) -> SchedulerOutput:
        output = self.scheduler.schedule(now)
        assert output is not None
        self.in_flight.append(output)
        return output

    def commit(
        self,
        tokens: dict[int, int] | None = None,
        *,
        failures: tuple[RowFailure, ...] = (),
        refusal: str | None = None,
        now: float = 0.0,
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
            ),
            now,
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
    def make(
        num_blocks: int = 64,
        block_size: int = 4,
        *,
        prefix_cache: bool = False,
        roles_matter: bool = True,
        **limits: float,
    ) -> Engine:
        kv = KVCacheManager(
            num_blocks, block_size, prefix_cache=prefix_cache, roles_matter=roles_matter
        )
        return Engine(Scheduler(SchedulerConfig(**limits), kv), kv)

    return make
