"""A scheduler and, in place of a compute plane, what its requests are to say."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from control_plane.core.batch import StepResult
from control_plane.core.constraint import Constraint
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import (
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)

EOS = 99
OPEN = b"\xfe" * 13
"""Stands for all that does not end a sample."""


@dataclass
class Desk:
    """A scheduler whose rows all answer the next token of their request's song, once a step."""

    tokens: int = 7
    block_size: int = 16
    depth: int = 2
    caches: bool = False
    config: dict[str, int] = field(default_factory=dict)
    sent: list[SchedulerOutput] = field(default_factory=list)
    events: list[RequestOutput] = field(default_factory=list)
    guess: Callable[[list[int]], list[int]] = list
    """What the plane's draft model makes of what follows, as many tokens as are wanted."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerConfig(speculative_tokens=self.tokens, **self.config),
            KVCacheManager(64, self.block_size, prefix_cache=self.caches, roles_matter=False),
        )
        self.songs: dict[int, list[int]] = {}
        self.requests: dict[int, Request] = {}
        self.in_flight: deque[SchedulerOutput] = deque()

    def add(
        self,
        prompt: Sequence[int],
        song: Sequence[int],
        constraint: Constraint | None = None,
        **params: object,
    ) -> None:
        """A request whose text is to be `song`."""
        request_id = len(self.songs) + 1
        values: dict[str, object] = {"max_tokens": len(song), "seed": 0, **params}
        self.songs[request_id] = [*prompt, *song]
        self.requests[request_id] = Request(
            request_id,
            list(prompt),
            GenerationParams(**values),  # type: ignore[arg-type]
            eos_token_ids=frozenset({EOS}),
            constraints=() if constraint is None else (constraint,),
            open_tokens=OPEN if "min_tokens" in params else b"",
        )
        self.scheduler.add_request(self.requests[request_id])

    def send(self) -> SchedulerOutput | None:
        output = self.scheduler.schedule()
        if output is not None:
            self.sent.append(output)
            self.in_flight.append(output)
        return output

    def answer(self) -> list[RequestOutput]:
        """Commit the oldest step, as a plane that sings would have it."""
        output = self.in_flight.popleft()
        batch = output.batch
        ids = [*output.decode_request_ids, *output.prefill_request_ids]
        drafts = iter(batch.draft_ids)
        kept, tokens = [0] * batch.num_rows, []
        next_drafts: dict[int, list[int]] = {}
        for row in range(batch.num_rows):
            song = self.songs[ids[row]]
            count = batch.draft_counts[row] if batch.draft_counts else 0
            end = batch.positions[row] + batch.query_lens[row] - count
            guesses = [next(drafts) for _ in range(count)]
            while kept[row] < count and guesses[kept[row]] == song[end + kept[row]]:
                kept[row] += 1
            tokens.append(song[end + kept[row]])
            if batch.wanted_drafts and batch.wanted_drafts[row]:
                rest = song[end + kept[row] + 1 :][: batch.wanted_drafts[row]]
                next_drafts[row] = self.guess(rest)
        result = StepResult(
            batch.step_id,
            [tokens[row] for row in batch.sampled_rows],
            kept_drafts=[kept[row] for row in batch.sampled_rows] if any(kept) else [],
            next_drafts=next_drafts,
        )
        events = self.scheduler.commit(result)
        self.events += events
        return events

    def run(self) -> None:
        while self.scheduler.has_pending_work():
            while len(self.in_flight) < self.depth and self.send() is not None:
                pass
            self.answer()

    def text(self, request_id: int) -> list[int]:
        return [t for e in self.events if e.request_id == request_id for t in e.new_token_ids]


def drafts_of(output: SchedulerOutput | None) -> list[int]:
    """How many drafts each row of a step has, which there must be; empty: none has any."""
    assert output is not None
    return output.batch.draft_counts
