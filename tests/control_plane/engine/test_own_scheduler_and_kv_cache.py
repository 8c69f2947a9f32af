# ruff: noqa: ARG002 - the signatures are those of the protocols
"""A scheduler and a KV cache manager that are not ours, in the engine without a change to it."""

from __future__ import annotations

from dataclasses import fields

import pytest

from control_plane.core.batch import SlotStart, StepBatch
from control_plane.core.embedding import EMBEDDINGS, NOTHING_GENERATED, Embedding, Pooling
from control_plane.core.generation_params import GenerationParams
from control_plane.core.interface import (
    ADAPTERS,
    OPTIONAL_PARAMETERS,
    RequestOutput,
    SchedulerOutput,
    SchedulerStats,
)
from control_plane.core.kv_cache import MemoryStats
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.core.scheduler import Scheduler
from control_plane.core.tool_calls import ToolCalls
from control_plane.engine.plugins import CoreFactories
from planes.errors import ConfigError, ValidationError


class OneAtATime:
    """The simplest scheduler there is: the requests one after the other, a step at a time."""

    def __init__(self, config, kv_cache):
        self.kv = kv_cache
        self.waiting, self.completed = [], []
        self.running, self.is_sent, self.num_steps, self.last_step = None, False, 0, 0

    def add_request(self, request):
        self.waiting.append(request)
        return request.id

    def cancel(self, request_id, now=0.0):
        request = next((r for r in self.waiting if r.id == request_id), None)
        if request is not None:
            self.waiting.remove(request)
        elif self.running is not None and self.running.id == request_id and not self.is_sent:
            request, self.running = self.running, None
            self.kv.free_sequence(request_id)
        else:
            return None
        return RequestOutput(request_id, (), RequestState.CANCELLED, FinishReason.CANCELLED)

    def schedule(self, now=0.0):
        if self.is_sent or not (self.running or self.waiting):
            return None
        self.last_step += 1
        self.num_steps += 1
        self.is_sent = True
        batch = {"step_id": self.last_step, "slots": [0], "sampled_rows": [0]}
        if self.running is not None:
            request = self.running
            length = len(request.input_tokens) + len(request.output_tokens)
            new = self.kv.grow_sequence(request.id, length)
            return SchedulerOutput(
                StepBatch(
                    **batch,
                    query_lens=[1],
                    positions=[length - 1],
                    new_block_counts=[len(new)],
                    new_block_ids=new,
                ),
                [request.id],
                [],
            )
        request = self.running = self.waiting.pop(0)
        tokens = (*request.input_tokens, *request.output_tokens)
        start = SlotStart(
            0,
            tokens,
            len(request.input_tokens),
            tuple(self.kv.allocate_sequence(request.id, len(tokens))),
            request.params,
        )
        return SchedulerOutput(
            StepBatch(
                **batch,
                starts=(start,),
                query_lens=[len(tokens)],
                positions=[0],
                new_block_counts=[0],
            ),
            [],
            [request.id],
        )

    def commit(self, result, now=0.0):
        request, self.is_sent = self.running, False
        (token,) = result.sampled_token_ids
        request.output_tokens.append(token)
        state, reason = RequestState.DECODE, None
        if len(request.output_tokens) == request.max_tokens:
            state, reason = RequestState.COMPLETED, FinishReason.LENGTH
            self.kv.free_sequence(request.id)
            self.completed.append(request)
            self.running = None
        return [RequestOutput(request.id, (token,), state, reason)]

    def get_completed(self):
        completed, self.completed = self.completed, []
        return completed

    def has_pending_work(self):
        return bool(self.running or self.waiting)

    def lose_epoch(self, last_step=0):
        self.last_step, self.is_sent = last_step, False
        if self.running is not None:
            self.kv.free_sequence(self.running.id)
            self.waiting.insert(0, self.running)
            self.running = None

    def get_stats(self):
        return SchedulerStats(self.num_steps, 0, int(bool(self.running)), len(self.waiting), 0)


class PlainPages:
    """The simplest block tables there are: nothing is shared, nothing is found again."""

    def __init__(self, num_blocks, block_size, *, prefix_cache, roles_matter):
        self.block_size, self.total = block_size, num_blocks
        self.free = list(range(num_blocks))
        self.tables = {}

    def allocate_sequence(self, seq_id, num_tokens):
        self.tables[seq_id] = []
        return self.grow_sequence(seq_id, num_tokens)

    def allocate_block(self, seq_id):
        self.tables[seq_id].append(self.free.pop())
        return self.tables[seq_id][-1]

    def grow_sequence(self, seq_id, num_tokens):
        num_missing = -(-num_tokens // self.block_size) - len(self.tables[seq_id])
        return [self.allocate_block(seq_id) for _ in range(num_missing)]

    def free_sequence(self, seq_id):
        self.free += self.tables.pop(seq_id)

    def get_block_table(self, seq_id):
        return list(self.tables[seq_id]) if seq_id in self.tables else None

    def get_memory_stats(self):
        num_free = len(self.free)
        return MemoryStats(self.total, self.total - num_free, num_free, len(self.tables))

    def can_allocate(self, num_blocks):
        return num_blocks <= len(self.free)


@pytest.mark.parametrize(
    "factories",
    [
        CoreFactories(scheduler=OneAtATime),
        CoreFactories(kv_cache=PlainPages),
        CoreFactories(OneAtATime, PlainPages),
    ],
    ids=["scheduler", "kv-cache", "both"],
)
def test_a_users_own_part_drives_the_engine_and_changes_no_text(drive, expected, factories):
    driver = drive(factories=factories)
    ids = [driver.submit(f"prompt {i}" * (1 + i), 6 + i, seed=i) for i in range(4)]
    driver.run()
    for i, request_id in enumerate(ids):
        assert driver.text(request_id) == expected(f"prompt {i}" * (1 + i), 6 + i, i)
        assert driver.ends[request_id].finish_reason is FinishReason.LENGTH
    assert driver.loop.memory_stats.used_blocks == 0
    assert driver.loop.metrics.completed_requests == 4


def test_requests_of_an_own_scheduler_that_notes_no_states_are_listed_as_they_ended(drive):
    driver = drive(factories=CoreFactories(scheduler=OneAtATime))
    driver.submit("abc", 3)
    cancelled = driver.submit("def", 3)
    driver.loop.inbox.cancel(cancelled)
    driver.run()
    infos = driver.loop.list_requests(include_ended=True)
    assert [(info.state, info.finish_reason) for info in infos] == [
        (RequestState.CANCELLED, FinishReason.CANCELLED),
        (RequestState.COMPLETED, FinishReason.LENGTH),
    ]


def test_our_scheduler_does_samples_without_sharing_where_the_manager_cannot(drive, expected):
    driver = drive(factories=CoreFactories(kv_cache=PlainPages))
    request_id = driver.submit("hello", 7, seed=2, n=3)
    driver.run()
    for sample in range(3):
        assert driver.text(request_id, sample) == expected("hello", 7, 2, sample)


def test_what_an_own_scheduler_does_not_keep_to_is_refused_by_the_callers_name_of_it(drive):
    driver = drive(factories=CoreFactories(scheduler=OneAtATime))
    request_id = driver.submit("hello", form=ToolCalls("hermes", ()))
    driver.run_until(lambda: request_id in driver.ends)
    error = driver.ends[request_id].error
    assert isinstance(error, ValidationError)
    assert error.field == "tool_choice"
    assert error.message.startswith("tool_choice must be unset: this engine's scheduler")


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("n", 2, "1"),
        ("beam_width", 2, "unset"),
        ("num_logprobs", 0, "unset"),
        ("num_prompt_logprobs", 0, "unset"),
    ],
)
def test_what_an_own_scheduler_does_not_keep_to_is_refused_by_name(drive, name, value, wanted):
    driver = drive(factories=CoreFactories(scheduler=OneAtATime))
    request_id = driver.submit(
        "hello", **({"n": value} if name == "n" else {"asking": {name: value}})
    )
    driver.run_until(lambda: request_id in driver.ends)
    error = driver.ends[request_id].error
    assert isinstance(error, ValidationError)
    assert error.field == name
    assert error.message.startswith(f"{name} must be {wanted}: this engine's scheduler")


def test_an_own_scheduler_is_given_what_it_says_that_it_keeps_to(drive):
    class Both(OneAtATime):
        keeps = frozenset({"n"})

    driver = drive(factories=CoreFactories(scheduler=Both))
    request_id = driver.submit("hello", 3, n=2)
    driver.run()
    assert driver.ends[request_id].error is None


def test_an_own_scheduler_that_makes_no_embeddings_is_asked_for_none(drive):
    driver = drive(factories=CoreFactories(scheduler=OneAtATime))
    request = Request(7, [1, 2], NOTHING_GENERATED, embedding=Embedding(Pooling.LAST))
    driver.loop.inbox.submit(request)
    driver.run()
    error = driver.ends[7].error
    assert isinstance(error, ValidationError)
    assert error.message == "this engine's scheduler makes no embeddings"


def test_our_scheduler_keeps_to_every_parameter():
    assert Scheduler.keeps == frozenset((*OPTIONAL_PARAMETERS, EMBEDDINGS, ADAPTERS))
    assert set(OPTIONAL_PARAMETERS) <= {field.name for field in fields(GenerationParams)}


def test_an_own_scheduler_outlives_its_compute_plane(drive, fake_plane, expected):
    driver = drive(factories=CoreFactories(scheduler=OneAtATime))
    request_id = driver.submit("abc", 12)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 4)
    fake_plane.kill()
    fake_plane.start()
    driver.run()
    assert driver.text(request_id) == expected("abc", 12)


def test_parts_are_loaded_by_name():
    here = "control_plane.core"
    loaded = CoreFactories.load(f"{here}.scheduler:Scheduler", f"{here}.kv_cache:KVCacheManager")
    assert loaded == CoreFactories() == CoreFactories.load(None, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nothing", "scheduler must be module:attribute, got 'nothing'"),
        ("no_such_module:Thing", "no_such_module:Thing cannot be imported: ModuleNotFoundError"),
        ("math:nothing", "math:nothing cannot be imported: AttributeError"),
        ("math:pi", "'math:pi' must be callable, got float"),
        (7, "7 must be callable, got int"),
    ],
)
def test_a_name_that_leads_to_no_factory_is_refused(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        CoreFactories.load(given, None)
    assert caught.value.field == "scheduler"


class Boastful(PlainPages):
    def get_memory_stats(self):
        return MemoryStats(10**6, 0, 10**6, 0)


@pytest.mark.parametrize(
    ("factories", "said"),
    [
        (CoreFactories(scheduler=lambda *_: object()), "scheduler: object has no add_request"),
        (CoreFactories(scheduler=lambda: None), "scheduler: making it failed: TypeError"),
        (CoreFactories(kv_cache=lambda *_, **__: 3), "kv_cache_manager: int has no .*can_allocate"),
        (CoreFactories(kv_cache=Boastful), "manages 1000000 blocks of 4 tokens, the .* has 64 of"),
    ],
)
def test_what_is_no_scheduler_or_kv_cache_manager_is_refused_before_it_is_used(
    drive, factories, said
):
    with pytest.raises(ConfigError, match=said):
        drive(factories=factories)
