"""Scheduler, wire, slots and an executor with a tiny model: a crowd in a small pool, planes dying.

What a request says beside others, preempted, found in the prefix cache or rebuilt on a new plane is
what it says alone; where bits are not promised, each token is one that could follow there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compute_plane.executor.interface import GPUExecutor
from compute_plane.model.loader import LoadedModel
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from tests.compute_plane.executor.tiny_llama import (
    KERNEL_HEAD_DIM,
    tiny_spec,
    with_convolutions,
    with_delta_net,
    with_mamba2,
    with_states_beside,
)
from tests.compute_plane.executor.tiny_sources import model_in_memory
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.devices import Target
from tests.judging import Judge, Said
from tests.properties.executor_plane import MAX_SLOTS, NUM_STATES, ExecutorPlane

SPEC = tiny_spec(head_dim=KERNEL_HEAD_DIM)
MODEL = model_in_memory(SPEC, tiny_weights(SPEC))
RECURRENT = {
    "DeltaNet": with_delta_net, "convolutions": with_convolutions, "Mamba-2": with_mamba2,
    "Mamba-2 beside attention": with_states_beside,
}  # fmt: skip
"""What layers have in place of attention, or beside it, and what makes a model of it."""
EOS = frozenset({0})
MAX_LEN = 40
SMALL_BLOCKS, LARGE_BLOCKS = (16, 4), (8, 16)
"""Blocks of a small pool, and their tokens: large ones where a device has no others."""
ROOMY = SchedulerConfig(max_model_len=MAX_LEN)

Asked = tuple[list[int], GenerationParams]


def blocks_on(target: Target) -> tuple[int, int]:
    """The number of blocks and their size."""
    return SMALL_BLOCKS if target.block_size(SMALL_BLOCKS[1]) == SMALL_BLOCKS[1] else LARGE_BLOCKS


@contextmanager
def executor_on(target: Target, model: LoadedModel = MODEL) -> Iterator[GPUExecutor]:
    num_blocks, block_size = blocks_on(target)
    with target.running(model, num_blocks=num_blocks, block_size=block_size) as made:
        yield made


def run(
    executor: GPUExecutor,
    blocks: tuple[int, int],
    asked: list[Asked],
    config: SchedulerConfig,
    *,
    depth: int = 1,
    deaths: frozenset[int] = frozenset(),
    prefix_cache: bool = False,
    model: LoadedModel = MODEL,
) -> list[list[list[int]]]:
    """The samples of each request; in the turns of `deaths` the plane is lost with its slots."""
    roles_matter = getattr(executor, "tells_prompts_apart", True)
    kv_cache = KVCacheManager(*blocks, prefix_cache=prefix_cache, roles_matter=roles_matter)
    if model.spec.recurrence is not None:
        config = replace(config, max_slots=MAX_SLOTS, num_states=NUM_STATES, min_state_tokens=4)
    scheduler = Scheduler(config, kv_cache)
    plane = ExecutorPlane(executor, model.spec, *blocks)
    requests = [
        Request(number, list(prompt), params, EOS) for number, (prompt, params) in enumerate(asked)
    ]
    for request in requests:
        scheduler.add_request(request)
    num_in_flight = 0
    turn = 0
    while scheduler.has_pending_work():
        turn += 1
        assert turn < 2_000, "no progress"
        if turn in deaths:
            plane.close()
            plane = ExecutorPlane(executor, model.spec, *blocks)
            num_in_flight = 0
            scheduler.lose_epoch()
        while num_in_flight < depth and (output := scheduler.schedule()) is not None:
            plane.send(output.batch)
            num_in_flight += 1
        if num_in_flight:
            result = plane.receive()
            num_in_flight -= 1
            assert result.refusal is None
            assert not result.row_failures
            scheduler.commit(result)
    plane.close()
    assert all(request.state is RequestState.COMPLETED for request in requests)
    assert kv_cache.get_memory_stats().used_blocks == 0
    return [[sample.output_tokens for sample in request.samples] for request in requests]


def check_crowd(
    target: Target,
    executor: GPUExecutor,
    asked: list[Asked],
    model: LoadedModel = MODEL,
    **crowd,
) -> None:
    """Check what a crowd is told beside what each of it is told alone."""
    blocks = blocks_on(target)
    together = run(executor, blocks, asked, model=model, **crowd)
    alone = [run(executor, blocks, [one], ROOMY, model=model)[0] for one in asked]
    said = [
        Said(prompt, params, tokens, index)
        for (prompt, params), samples in zip(asked, together, strict=True)
        for index, tokens in enumerate(samples)
    ]
    judge = Judge(target, model)
    try:
        judge.check(said, [tokens for samples in alone for tokens in samples], "float32")
    finally:
        judge.close()


params = st.builds(
    GenerationParams,
    max_tokens=st.integers(1, 10),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_p=st.sampled_from([0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    ignore_eos=st.booleans(),
    n=st.sampled_from([1, 1, 2]),
)
# Few different tokens, so that prompts share beginnings.
prompts = st.lists(st.integers(65, 67), min_size=1, max_size=20)
crowds = given(
    asked=st.lists(st.tuples(prompts, params), min_size=2, max_size=6),
    config=st.builds(
        SchedulerConfig,
        max_batch_size=st.integers(2, 8),
        max_num_seqs=st.integers(2, 8),
        max_model_len=st.just(MAX_LEN),
        max_total_tokens=st.integers(2, 64),
        memory_threshold=st.sampled_from([0.5, 1.0]),
        start_prefixes=st.booleans(),
    ),
    depth=st.integers(1, 2),
    deaths=st.frozensets(st.integers(1, 20), max_size=2),
    prefix_cache=st.booleans(),
)
usual = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def executor(target: Target) -> Iterator[GPUExecutor]:
    with executor_on(target) as made:
        yield made


@pytest.mark.wide
@settings(usual, max_examples=20)
@crowds
def test_a_crowd_in_a_small_pool_is_told_what_each_is_told_alone(target, executor, **crowd):
    check_crowd(target, executor, **crowd)


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest) -> LoadedModel:
    spec = RECURRENT[request.param](tiny_spec(quantisable=True, head_dim=KERNEL_HEAD_DIM))
    return model_in_memory(spec, tiny_weights(spec))


@pytest.fixture(scope="module")
def recurrent_executor(target: Target, recurrent: LoadedModel) -> Iterator[GPUExecutor]:
    with executor_on(target, recurrent) as made:
        yield made


@pytest.mark.wide
@settings(usual, max_examples=20)
@crowds
def test_a_crowd_of_a_model_with_states_is_told_what_each_is_told_alone(
    target, recurrent, recurrent_executor, **crowd
):
    check_crowd(target, recurrent_executor, model=recurrent, **crowd)


@pytest.mark.slow
@settings(usual, max_examples=500)
@crowds
def test_hundreds_of_crowds_of_a_model_with_states_are_told_the_same(
    target, recurrent, recurrent_executor, **crowd
):
    check_crowd(target, recurrent_executor, model=recurrent, **crowd)


@pytest.mark.slow
@settings(usual, max_examples=500)
@crowds
def test_hundreds_of_crowds_are_told_what_each_is_told_alone(target, executor, **crowd):
    check_crowd(target, executor, **crowd)


def test_a_crowd_of_the_cuda_executor_is_told_what_each_is_told_alone(cuda_target):
    """Without `--device` a look at it on torch's CPU device."""
    asked: list[Asked] = [
        ([65] * 9, GenerationParams(max_tokens=8, temperature=0.0, seed=1)),
        ([65] * 8 + [66], GenerationParams(max_tokens=6, temperature=1.0, seed=5, n=2)),
        ([66, 67] * 7, GenerationParams(max_tokens=9, temperature=0.7, seed=3, ignore_eos=True)),
    ]
    config = SchedulerConfig(max_model_len=MAX_LEN, max_total_tokens=12, memory_threshold=1.0)
    with executor_on(cuda_target) as executor:
        check_crowd(
            cuda_target, executor, asked, config=config, depth=2, deaths=frozenset({5}),
            prefix_cache=True,
        )  # fmt: skip
