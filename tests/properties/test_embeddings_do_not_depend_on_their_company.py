"""Scheduler, wire and compute plane in one process: an embedding is its text's, in any company.

With the executor whose hidden states are hashes of what it reads through the block table, and with
a tiny model on the CPU executor, to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compute_plane.executor.simulated import SPEC, hidden_states
from control_plane.core.embedding import NOTHING_GENERATED, Embedding, Pooling
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from tests.compute_plane.executor.tiny_llama import pool_for, tiny_executor, tiny_spec
from tests.compute_plane.executor.tiny_weights import tiny_weights
from tests.properties.executor_plane import ExecutorPlane
from tests.properties.test_both_planes_give_each_request_its_own_text import PipelinedPlane, Plane


@dataclass(frozen=True)
class Asked:
    """A text to embed, or with a `pooling` of None one to go on with; `arrives` in that turn."""

    prompt: list[int]
    pooling: Pooling | None
    arrives: int


def request_of(number: int, asked: Asked) -> Request:
    if asked.pooling is None:
        return Request(number, list(asked.prompt), GenerationParams(max_tokens=9, seed=number))
    return Request(
        number,
        list(asked.prompt),
        NOTHING_GENERATED,
        uses_cache=asked.pooling is Pooling.LAST,
        embedding=Embedding(asked.pooling),
    )


def run(asked, config, make_plane, *, num_blocks, block_size, depth, deaths) -> list[Request]:
    """Run everything; planes die in the turns `deaths`."""
    kv_cache = KVCacheManager(num_blocks, block_size, prefix_cache=True)
    scheduler = Scheduler(config, kv_cache)
    plane, num_in_flight, turn = make_plane(), 0, 0
    made = [request_of(number, one) for number, one in enumerate(asked)]
    while turn <= 20 or scheduler.has_pending_work():
        assert turn < 20_000, "no progress"
        for request, one in zip(made, asked, strict=True):
            if one.arrives == turn:
                scheduler.add_request(request)
        if turn in deaths:
            plane, num_in_flight = make_plane(), 0
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
    assert all(request.state is RequestState.COMPLETED for request in made)
    assert kv_cache.get_memory_stats().used_blocks == 0
    kv_cache.check_invariants()
    return made


def alone(asked: Asked) -> list[float]:
    """What the simulated executor's hidden states make of a text, by their definition."""
    tokens = np.array(asked.prompt, dtype=np.int32)
    if asked.pooling is Pooling.LAST:
        return hidden_states(tokens).tolist()
    states = [hidden_states(tokens[:end]) for end in range(1, len(tokens) + 1)]
    return (np.add.reduce(states) / len(tokens)).tolist()


texts = st.builds(
    Asked,
    prompt=st.lists(st.integers(65, 67), min_size=1, max_size=40),
    pooling=st.sampled_from([Pooling.LAST, Pooling.MEAN, None]),
    arrives=st.integers(0, 12),
)
mixes = given(
    asked=st.lists(texts, min_size=1, max_size=7),
    config=st.builds(
        SchedulerConfig,
        max_batch_size=st.integers(1, 6),
        max_num_seqs=st.integers(1, 6),
        max_model_len=st.just(64),
        max_total_tokens=st.integers(1, 48),
        embedding_size=st.just(SPEC.hidden_size),
        max_embeddings=st.integers(1, 4),
    ),
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare_blocks=st.integers(0, 8),
    depth=st.integers(1, 2),
    deaths=st.sets(st.integers(1, 20), max_size=2),
    plane_class=st.sampled_from([Plane, PipelinedPlane]),
)


def check(asked, config, block_size, spare_blocks, depth, deaths, plane_class) -> None:
    num_blocks = -(-64 // block_size) + spare_blocks
    made = run(
        asked,
        config,
        lambda: plane_class(num_blocks, block_size),
        num_blocks=num_blocks,
        block_size=block_size,
        depth=depth,
        deaths=deaths,
    )
    for request, one in zip(made, asked, strict=True):
        if request.embedding is not None:
            assert list(request.embedding.pooled) == alone(one)


@settings(max_examples=40)
@mixes
def test_in_any_mix_of_requests_each_text_has_its_own(**drawn) -> None:
    check(**drawn)


@pytest.mark.slow
@settings(max_examples=3000)
@mixes
def test_in_thousands_of_mixes_each_text_has_its_own(**drawn) -> None:
    check(**drawn)


MODEL = tiny_spec()
WEIGHTS = tiny_weights(MODEL)
TEXTS = [
    Asked(np.random.default_rng(seed).integers(0, MODEL.vocab_size, length).tolist(), pooling, 0)
    for seed, length in enumerate([33, 1, 17, 40])
    for pooling in (Pooling.LAST, Pooling.MEAN)
]


def embedded(executor, asked, config, *, num_blocks=40, deaths=()) -> dict[int, bytes]:
    planes = []

    def make_plane() -> ExecutorPlane:
        if planes:
            planes[-1].close()
        planes.append(ExecutorPlane(executor, MODEL, num_blocks, 4))
        return planes[-1]

    made = run(
        asked, config, make_plane, num_blocks=num_blocks, block_size=4, depth=2, deaths=deaths
    )
    planes[-1].close()
    return {
        request.id: request.embedding.pooled.tobytes()
        for request in made
        if request.embedding is not None
    }


def config_of(**limits: int) -> SchedulerConfig:
    return SchedulerConfig(
        max_model_len=64, embedding_size=MODEL.hidden_size, max_embeddings=8, **limits
    )


@pytest.mark.wide
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(
    budget=st.integers(3, 48),
    num_blocks=st.integers(16, 40),
    order=st.permutations(range(len(TEXTS))),
    deaths=st.sets(st.integers(1, 8), max_size=1),
)
def test_the_bits_of_a_model_are_the_same_alone_and_in_any_company(
    budget, num_blocks, order, deaths
) -> None:
    pool = pool_for(MODEL, 40, 4)
    with tiny_executor(MODEL, WEIGHTS, pool, num_threads=1) as executor:
        expected = [embedded(executor, [one], config_of())[0] for one in TEXTS]
        company = [Asked([7, 8, 9], None, turn) for turn in range(3)]
        asked = [TEXTS[index] for index in order] + company
        found = embedded(
            executor,
            asked,
            config_of(max_total_tokens=budget, max_num_seqs=6),
            num_blocks=num_blocks,
            deaths=deaths,
        )
    assert [found[place] for place in range(len(order))] == [expected[index] for index in order]
