"""All that may befall requests, in one draw: what the other worlds of this folder leave out, too.

Answers that are continued, stop tokens, log-probabilities of prompts, samples and drafts, a flushed
prefix cache, a KV cache that cannot share, and requests that move between schedulers of unlike
limits, beside samples, beams, drafts, constraints, swaps, priorities, failures and lost planes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from control_plane.core.batch import PromptLogprobs, StepBatch, StepResult, TokenLogprobs
from control_plane.core.kv_cache import KVCacheManager, KVCacheManagerProtocol
from control_plane.core.request import FinishReason, Request
from control_plane.core.scheduler import RequestOutput, Scheduler, SchedulerConfig
from planes.errors import EngineError
from tests.properties.model_plane import ModelPlane, Row, must
from tests.properties.scheduler_promises import Memory
from tests.properties.state_plane import StatePlane, with_states
from tests.properties.test_requests_move_between_schedulers import Side
from tests.properties.toy_model import next_logprobs, run_alone

STEMS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 9, 9, 9, 9], [7] * 8)


class OwnKVCache:
    """The calls that a KV cache of a user's own must have, and no others."""

    def __init__(self, kv: KVCacheManager) -> None:
        for name in dir(KVCacheManagerProtocol):
            if not name.startswith("_"):
                setattr(self, name, getattr(kv, name))


class TellingPlane(ModelPlane):
    """Gives the log-probabilities of prompts and drafts as well; of prompts, the positions."""

    def _run(self, batch: StepBatch, fail_row: int | None) -> tuple[StepResult, set[int]]:
        self.drafted: dict[int, list[TokenLogprobs]] = {}
        self.ends: list[int] = []
        result, written = super()._run(batch, fail_row)
        failed = {failure.row for failure in result.row_failures}
        must(len(dict(batch.prompt_logprobs)) == len(batch.prompt_logprobs), "a row asks once")
        prompts = []
        for row, _ in batch.prompt_logprobs:
            first = batch.positions[row] + 1
            end = min(first + batch.query_lens[row], self.ends[row])
            entries = tuple(TokenLogprobs(-float(position)) for position in range(first, end))
            if row not in failed:
                prompts.append(PromptLogprobs(row, first, entries))
        drafted = {batch.sampled_rows.index(row): each for row, each in self.drafted.items()}
        return replace(result, prompt_logprobs=tuple(prompts), draft_logprobs=drafted), written

    def _keep_drafts(self, rows: list[Row], drafts: list[list[int]], *more: object) -> list[int]:
        kept = super()._keep_drafts(rows, drafts, *more)
        for number, (_, slot, _, _) in enumerate(rows):
            self.ends.append(len(slot.tokens))
            count = slot.params.num_logprobs
            if kept[number] and count is not None:
                self.drafted[number] = [
                    next_logprobs(slot.tokens[:end], slot.params.seed, count)
                    for end in range(len(slot.tokens) - kept[number], len(slot.tokens))
                ]
        return kept


class TellingStatePlane(StatePlane, TellingPlane):
    """The same with states."""


@dataclass
class FullSide(Side):
    """A world that also keeps the log-probabilities that came."""

    shares: bool = True
    logprobs: dict[tuple[int, int], list[TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shares:
            self.scheduler = Scheduler(self.config, OwnKVCache(self.kv))  # type: ignore[arg-type]

    @property
    def plane_class(self) -> type[ModelPlane]:
        return TellingStatePlane if self.config.num_states else TellingPlane

    def join(self, other: Side | None) -> None:
        super().join(other)
        if isinstance(other, FullSide):
            self.logprobs = other.logprobs

    def decode_ready(self) -> set[int]:
        self.has_forked = True  # decodes first: as in the other worlds
        return set()

    def try_to_submit(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, object],
        options: dict[str, object],
        num_given: int,
    ) -> None:
        request = self.make(prompt, max_tokens, **options)
        request.params = replace(request.params, **params)  # type: ignore[arg-type]
        if request.params.num_prompt_logprobs is not None:
            request.uses_cache = False
        is_plain = not params and not request.constraints and request.params.n == 1
        if is_plain and request.params.beam_width is None:
            request.output_tokens = run_alone(request)[0][: min(num_given, max_tokens - 1)]
        self.know(request)
        given = tuple(request.output_tokens)
        try:
            self.scheduler.add_request(request)
        except EngineError:
            return  # of what may be refused the other worlds speak
        self._expect(request, given)

    def could_adopt(self, request: Request) -> bool:
        width = request.params.beam_width
        return (
            request.max_total_len <= self.config.max_model_len
            and self.blocks_of(request) <= self.memory.num_blocks
            and (width is None or (self.shares and width <= self.config.num_slots))
        )

    def move(self, to: FullSide) -> None:
        """As `give_away`, to a side of other limits."""
        stay = [r for r in self.requests if r.state.is_final or not to.could_adopt(r)]
        self.requests = [r for r in self.requests if r not in stay]
        self.give_away(to, begins_anew=False)
        self.requests = sorted([*self.requests, *stay], key=lambda r: r.arrival_time)

    def check_order(self, output: object) -> None:
        """Their clocks differ, so the order of their lists says nothing here."""

    def take(self, event: RequestOutput) -> None:
        request = next(r for r in self.requests if r.id == event.request_id)
        if event.new_token_ids and request.params.num_logprobs is not None:
            assert len(event.logprobs) == len(event.new_token_ids)
            self.logprobs[event.request_id, event.sample_index].extend(event.logprobs)
        super().take(event)

    def compare_with_alone(self, request: Request, index: int) -> None:
        received, params = self.received[request.id, index], request.params
        if request.samples[index].finish_reason is FinishReason.STOP and params.include_stop:
            tokens = run_alone(request, index, self.given[request.id])[0]
            if len(received) == len(tokens) + 1:
                assert received.pop() in params.stop_token_ids
        super().compare_with_alone(request, index)
        num_given = len(self.given[request.id])
        told = self.logprobs[request.id, index]
        for place in range(num_given, len(received) if params.num_logprobs is not None else 0):
            history = [*request.input_tokens, *received[:place]]
            wanted = next_logprobs(history, params.seed, params.num_logprobs or 0)
            assert told[place - num_given] == wanted
        # Its first sample asks for them, unless the test has ended that before it was computed.
        if params.num_prompt_logprobs is not None and self.received[request.id, 0]:
            positions = [-entry.logprob for entry in request.prompt_logprobs]
            assert positions == list(range(1, request.num_prompt_tokens))

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        running = self.scheduler._running
        assert (running.num_kv_tokens, running.num_table_entries) == (0, 0)
        assert running.slots.num_free == self.config.num_slots
        assert not running.is_preempting
        assert len(running.filled) == 0


def draw_config(draw: Random) -> SchedulerConfig:
    one_of = draw.choice
    return SchedulerConfig(
        max_batch_size=one_of([1, 2, 3, 4, 8, 8, 32]),
        max_num_seqs=one_of([1, 2, 3, 6, 6, 16]),
        max_model_len=one_of([14, 40, 40]),
        max_total_tokens=one_of([1, 3, 5, 7, 16, 64, 64]),
        max_prefill_tokens=one_of([None, None, 1, 4]),
        memory_threshold=one_of([1.0, 1.0, 0.9, 0.5]),
        max_slots=one_of([None, None, 8, 2]),
        prefill_patience=one_of([1, 3]),
        num_host_blocks=one_of([0, 4, 12, 64]),
        speculative_tokens=one_of([0, 1, 3, 7]),
        prompt_lookup_min=one_of([1, 2]),
        grammar_drafts=one_of([0, 1, 3, 7]),
        start_prefixes=one_of([True, False]),
        draft_model=one_of([True, False]),
    )


def draw_sides(draw: Random, *, has_states: bool) -> list[FullSide]:
    num_blocks, block_size = draw.choice([(8, 2), (16, 1), (6, 3), (5, 4), (14, 2), (12, 3)])
    is_caching, roles_matter = draw.random() < 0.7, draw.random() < 0.5
    sides: list[FullSide] = []
    for num_more in (0, draw.choice([0, 3])):
        memory = Memory(num_blocks + num_more, block_size, is_caching, roles_matter)
        config = draw_config(draw)
        if has_states:
            config = with_states(config, draw.choice([0, 1, 2, 6]), draw.choice([1, 2, 4]))
        sides.append(FullSide(config, memory, shares=draw.random() < 0.85))
        sides[-1].join(sides[0] if len(sides) > 1 else None)
    return sides


def submit(draw: Random, side: FullSide) -> None:
    def maybe(chance: float, **given: object) -> dict[str, object]:
        return given if draw.random() < chance else {}

    options = {
        **maybe(0.2, ignore_eos=False),
        **maybe(0.25, n=draw.choice([2, 3, 4, 7])),
        **maybe(0.2, constrained=True),
        **maybe(0.25, min_tokens=draw.choice([1, 2, 4, 8, 20])),
        **maybe(0.3, priority=draw.choice([-5, -1, 1])),
        **maybe(0.1, cache_salt="another"),
        **maybe(0.1, uses_cache=False),
        **maybe(0.3, adapter=draw.choice([1, 2])),
    }
    params: dict[str, object] = {**maybe(0.15, num_prompt_logprobs=1)}
    if side.shares and draw.random() < 0.15:
        options["beam_width"] = draw.choice([1, 2, 3])
    else:
        params |= maybe(0.2, num_logprobs=draw.choice([0, 2]) or 1)
        params |= maybe(
            0.15,
            stop_token_ids=tuple(draw.sample(range(11), 2)),
            include_stop="constrained" not in options,  # whose toys hear of no stop token
        )
    prompt = draw.choice(STEMS)[: draw.randint(1, 8)]
    if draw.random() < 0.2:
        prompt = draw.choices(range(1, 11), k=draw.randint(1, 12))
    num_given = draw.choice([0, 0, 0, 0, 2, 6])
    max_tokens = draw.choice([1, 1, 2, 3, 7, 9, 10, 20])
    side.try_to_submit(prompt, max_tokens, params, options, num_given)


def befall(draw: Random, sides: list[FullSide]) -> None:
    """One event; most are steps."""
    side, what = draw.choice(sides), draw.random()
    request = draw.choice(side.requests) if side.requests else None
    may_send = len(side.in_flight) < 3
    if what < 0.25:
        if sum(not r.state.is_final for r in side.requests) < 25:
            submit(draw, side)
    elif what < 0.29 and request is not None:
        side.cancel(request)
    elif what < 0.33 and request is not None:
        side.end_sample(request, draw.randrange(request.params.n), draw.randint(0, 5))
    elif what < 0.35:
        side.scheduler.flush_prefix_cache()
    elif what < 0.37:
        side.lose_epoch(draw.randint(0, 1000))
        side.move(draw.choice(sides))
    elif what < 0.38:
        side.move(draw.choice(sides))  # who happens to hold nothing
    elif what < 0.41 and may_send:
        side.send(fail_row=draw.randint(0, 3))
    elif what < 0.415 and may_send:
        side.send(refuse=True)
    elif what < 0.6 and may_send:
        side.send()
    elif what < 0.75 and side.in_flight:
        side.commit()
    else:
        side.run_steps(draw.randint(1, 8), draw.choice([1, 2, 3]))


def run(seed: int, *, has_states: bool = False) -> None:
    draw = Random(seed)
    sides = draw_sides(draw, has_states=has_states)
    for _ in range(draw.randint(20, 90)):
        for side in sides:
            side.now += draw.random() < 0.1
        befall(draw, sides)
        for side in sides:
            side.check_invariants()
    for side in sides:
        side.finish(depth=draw.choice([1, 2, 3]))


@pytest.mark.wide
def test_whatever_befalls_them_together_requests_get_what_they_get_alone():
    for seed in range(40):
        run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 9000, 1000))
def test_whatever_befalls_them_together_thousands_of_times_is_no_matter(first_seed):
    for seed in range(first_seed, first_seed + 1000):
        run(seed)
