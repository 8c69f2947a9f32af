"""Scheduler, wire and compute plane in one process, with the executor whose KV is token ids.

Everything between the two cores is the product's: batches go through protobuf as on the wire, slots
are checked and made whole, the simulated executor reads tokens through the block table. One wrong
block, position, slot or seed changes a text, and every text is compared with that of the request
alone.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import SamplingRow
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.simulated import (
    EOS_TOKEN_ID,
    SPEC,
    VOCAB_SIZE,
    SimulatedExecutor,
    draw,
)
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepBatch as ReceivedBatch
from compute_plane.executor.step import StepHeader, StepReply
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.work import Answer, Work
from compute_plane.rpc.convert import batch_from_proto, reply_to_proto
from control_plane.core.batch import StepBatch, StepResult
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from control_plane.engine.convert import batch_to_proto, result_from_proto
from protos.hetero.compute.v1 import compute_pb2
from tests.compute_plane.executor.pipelined_executors import DelayedExecutor

SESSION, EPOCH = 1, 2
MAX_SLOTS = 16
NUM_ADAPTERS = 2


class Plane:
    """A compute plane without its process: protobuf in, protobuf out."""

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        limits = SlotLimits(
            max_slots=MAX_SLOTS,
            max_rows=16,
            max_tokens=256,
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=VOCAB_SIZE,
            context_length=512,
            embedding_size=SPEC.hidden_size,
            num_states=num_states,
            num_adapters=NUM_ADAPTERS,
        )
        self.slots = SlotTable(limits)
        self.executor = SimulatedExecutor(
            num_blocks=num_blocks, block_size=block_size, num_states=num_states
        )
        self._waiting: deque[StepBatch] = deque()

    def send(self, batch: StepBatch) -> None:
        self._waiting.append(batch)

    def receive(self) -> StepResult:
        """Run the oldest batch."""
        batch = self._waiting.popleft()
        prepared = self.slots.prepare(over_the_wire(batch, SESSION, EPOCH))
        output = None if prepared.batch is None else self.executor.execute(prepared.batch)
        header = StepHeader(SESSION, EPOCH, batch.step_id, batch.step_id - 1)
        return back_over_the_wire(StepReply(header, result=self.slots.complete(prepared, output)))


class PipelinedPlane(Plane):
    """The same with a device that runs a step when its answer is wanted, and not before."""

    def __init__(self, num_blocks: int, block_size: int, num_states: int = 0) -> None:
        super().__init__(num_blocks, block_size, num_states)
        executor = DelayedExecutor(
            num_blocks=num_blocks, block_size=block_size, num_states=num_states
        )
        self._sessions = SessionLedger()
        self._session = self._sessions.open("test", take_over=False).session
        self._pipeline = StepPipeline(executor, self.slots, self._sessions, lambda _: None)
        self._answers: deque[Answer] = deque()

    def send(self, batch: StepBatch) -> None:
        epoch = self._sessions.epoch
        header = StepHeader(self._session, epoch, batch.step_id, batch.step_id - 1)
        received = over_the_wire(batch, self._session, epoch)
        self._pipeline.take(Work(header, received, self._answers.append, 0))

    def receive(self) -> StepResult:
        """Have the oldest step run, if it did not have to already."""
        if not self._answers:
            self._pipeline.finish_oldest()
        answer = self._answers.popleft()
        assert isinstance(answer, StepReply)
        return back_over_the_wire(answer)


def over_the_wire(batch: StepBatch, session: int, epoch: int) -> ReceivedBatch:
    sent = batch_to_proto(batch, session=session, epoch=epoch, acked_step=batch.step_id - 1)
    return batch_from_proto(compute_pb2.ExecutionBatch.FromString(sent.SerializeToString()))


def back_over_the_wire(reply: StepReply) -> StepResult:
    answer = reply_to_proto(reply).SerializeToString()
    return result_from_proto(compute_pb2.ExecutionOutput.FromString(answer))


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and what befalls it: the turn it comes in, the turn it is cancelled in.

    `forked`: the turn in which another request goes on from its tokens, if it runs then.
    """

    prompt: list[int]
    params: GenerationParams
    arrives: int
    cancelled: int | None
    forked: int | None
    adapter: int = 0


def alone(asked: Asked, sample_index: int = 0, given: tuple[int, ...] = ()) -> list[int]:
    """What a sample must give after `given`, from the definition of the executor alone."""
    params = asked.params
    assert params.seed is not None
    tokens = [*asked.prompt, *given]
    while len(tokens) < len(asked.prompt) + params.max_tokens:
        key = SamplingRow(
            temperature=float(np.float32(params.temperature)),
            top_p=float(np.float32(params.top_p)),
            seed=params.seed,
            sample_index=sample_index,
            position=len(tokens),
        )
        held = np.array(tokens, dtype=np.int32) + VOCAB_SIZE * asked.adapter
        token = draw(held, key)
        if token == EOS_TOKEN_ID and not params.ignore_eos:
            break
        tokens.append(token)
    return tokens[len(asked.prompt) :]


params = st.builds(
    GenerationParams,
    max_tokens=st.integers(1, 24),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 1, 2, 3]),
)
requests = st.builds(
    Asked,
    # Few different tokens, so that prompts share beginnings.
    prompt=st.lists(st.integers(65, 67), min_size=1, max_size=40),
    params=params,
    arrives=st.integers(0, 20),
    cancelled=st.none() | st.integers(0, 40),
    forked=st.none() | st.integers(0, 40),
    adapter=st.integers(0, NUM_ADAPTERS),
)
limits = st.builds(
    SchedulerConfig,
    max_batch_size=st.integers(1, 8),
    max_num_seqs=st.integers(1, 8),
    max_model_len=st.just(64),
    max_total_tokens=st.integers(1, 64),
    memory_threshold=st.sampled_from([0.5, 0.9, 1.0]),
    speculative_tokens=st.sampled_from([0, 3, 7]),
    prompt_lookup_min=st.sampled_from([1, 2]),
    start_prefixes=st.booleans(),
)


def run_mix(
    asked: list[Asked],
    config: SchedulerConfig,
    *,
    block_size: int,
    spare_blocks: int,
    depth: int,
    deaths: set[int],
    prefix_cache: bool,
    plane_class: type[Plane] = Plane,
) -> None:
    """Run everything; `deaths` are the turns in which the compute plane dies and is replaced."""
    num_blocks = -(-64 // block_size) + spare_blocks
    kv_cache = KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(config, kv_cache)
    plane = plane_class(num_blocks, block_size, config.num_states)
    num_in_flight = 0
    made: dict[int, Request] = {}
    forks: list[tuple[Asked, tuple[int, ...], Request]] = []
    turn = 0
    while turn <= 40 or scheduler.has_pending_work():
        assert turn < 20_000, "no progress"
        for number, one in enumerate(asked):
            if one.arrives == turn:
                eos = frozenset({EOS_TOKEN_ID})
                made[number] = Request(
                    number, list(one.prompt), one.params, eos, adapter=one.adapter
                )
                scheduler.add_request(made[number])
            elif one.cancelled == turn:
                scheduler.cancel(number)
            elif one.forked == turn and number in made:
                forks += fork(scheduler, made[number], one)
        if turn in deaths:
            plane = plane_class(num_blocks, block_size, config.num_states)
            num_in_flight = 0
            scheduler.lose_epoch()
        while num_in_flight < depth and (output := scheduler.schedule()) is not None:
            plane.send(output.batch)
            num_in_flight += 1
        if num_in_flight:
            result = plane.receive()
            num_in_flight -= 1
            assert result.refusal is None
            scheduler.commit(result)
        turn += 1
    assert not num_in_flight
    compare(asked, made)
    for one, said, child in forks:
        assert child.output_tokens == alone(one, given=said)
    stats = kv_cache.get_memory_stats()
    assert (stats.used_blocks, stats.num_sequences) == (0, 0)
    kv_cache.check_invariants()


def compare(asked: list[Asked], made: dict[int, Request]) -> None:
    for number, one in enumerate(asked):
        for index, sample in enumerate(made[number].samples):
            text, expected = sample.output_tokens, alone(one, index)
            assert text == expected[: len(text)]
            if one.cancelled is None or one.cancelled <= one.arrives:
                assert text == expected


def fork(
    scheduler: Scheduler, parent: Request, asked: Asked
) -> list[tuple[Asked, tuple[int, ...], Request]]:
    """Let a request with another seed go on from the parent's tokens, if it can be forked."""
    said = tuple(parent.output_tokens)
    if parent.state.is_final or parent.params.n > 1 or len(said) >= parent.max_tokens:
        return []
    params = replace(asked.params, seed=(asked.params.seed or 0) ^ 1)
    eos, adapter = parent.eos_token_ids, parent.adapter
    child = Request(1000 + parent.id, list(asked.prompt), params, eos, adapter=adapter)
    scheduler.fork(parent.id, child)
    return [(replace(asked, params=params), said, child)]


mix: dict[str, st.SearchStrategy[object]] = {
    "asked": st.lists(requests, min_size=1, max_size=8),
    "block_size": st.sampled_from([1, 3, 4, 16]),
    "spare_blocks": st.integers(0, 12),
    "depth": st.integers(1, 3),
    "deaths": st.sets(st.integers(1, 40), max_size=3),
    "prefix_cache": st.booleans(),
}
mixes = given(config=limits, **mix)


@settings(max_examples=60, deadline=None)
@mixes
def test_any_mix_of_requests_gives_each_its_own_text_and_leaks_no_block(
    asked, config, block_size, spare_blocks, depth, deaths, prefix_cache
):
    run_mix(
        asked,
        config,
        block_size=block_size,
        spare_blocks=spare_blocks,
        depth=depth,
        deaths=deaths,
        prefix_cache=prefix_cache,
    )


@pytest.mark.wide
@settings(max_examples=40, deadline=None)
@mixes
def test_so_does_a_plane_that_launches_steps_before_it_knows_the_tokens_of_those_before(
    asked, config, block_size, spare_blocks, depth, deaths, prefix_cache
):
    run_mix(
        asked,
        config,
        block_size=block_size,
        spare_blocks=spare_blocks,
        depth=depth,
        deaths=deaths,
        prefix_cache=prefix_cache,
        plane_class=PipelinedPlane,
    )


@pytest.mark.slow
@pytest.mark.parametrize("plane_class", [Plane, PipelinedPlane])
@settings(max_examples=5000, deadline=None)
@mixes
def test_thousands_of_mixes_give_each_request_its_own_text_and_leak_no_block(
    asked, config, block_size, spare_blocks, depth, deaths, prefix_cache, plane_class
):
    run_mix(
        asked,
        config,
        block_size=block_size,
        spare_blocks=spare_blocks,
        depth=depth,
        deaths=deaths,
        prefix_cache=prefix_cache,
        plane_class=plane_class,
    )
