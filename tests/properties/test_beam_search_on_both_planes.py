"""Beam searches through the real slots: a crowd in a small pool changes no answer."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.executor.simulated import EOS_TOKEN_ID
from control_plane.core.generation_params import GenerationParams
from control_plane.core.kv_cache import KVCacheManager
from control_plane.core.request import Request, RequestState
from control_plane.core.scheduler import Scheduler, SchedulerConfig
from tests.properties.test_both_planes_give_each_request_its_own_text import Plane


def run(
    asked: list[tuple[list[int], GenerationParams]],
    config: SchedulerConfig,
    *,
    num_blocks: int,
    block_size: int,
    prefix_cache: bool,
) -> list[list[list[int]]]:
    """The samples of each request."""
    kv_cache = KVCacheManager(num_blocks, block_size, prefix_cache=prefix_cache)
    scheduler = Scheduler(config, kv_cache)
    plane = Plane(num_blocks, block_size)
    requests = [
        Request(number, list(prompt), params, frozenset({EOS_TOKEN_ID}))
        for number, (prompt, params) in enumerate(asked)
    ]
    for request in requests:
        scheduler.add_request(request)
    num_steps = 0
    while scheduler.has_pending_work():
        num_steps += 1
        assert num_steps < 5_000, "no progress"
        output = scheduler.schedule()
        assert output is not None
        plane.send(output.batch)
        result = plane.receive()
        assert result.refusal is None
        assert not result.row_failures
        scheduler.commit(result)
    assert all(request.state is RequestState.COMPLETED for request in requests)
    assert kv_cache.get_memory_stats().used_blocks == 0
    return [[sample.output_tokens for sample in request.samples] for request in requests]


params = st.builds(
    GenerationParams,
    max_tokens=st.integers(1, 8),
    seed=st.integers(0, 3),
    beam_width=st.sampled_from([2, 3, 4, None]),
    n=st.sampled_from([1, 2]),
    temperature=st.just(0.0),
)


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(
        st.tuples(st.lists(st.integers(65, 67), min_size=1, max_size=12), params),
        min_size=1,
        max_size=4,
    ),
    config=st.builds(
        SchedulerConfig,
        max_batch_size=st.sampled_from([2, 4, 8]),
        max_num_seqs=st.sampled_from([4, 8]),
        max_total_tokens=st.sampled_from([3, 16, 64]),
        memory_threshold=st.sampled_from([0.5, 1.0]),
        start_prefixes=st.booleans(),
    ),
    block_size=st.sampled_from([1, 3, 4]),
    prefix_cache=st.booleans(),
)
def test_beam_searches_in_a_crowd_find_what_each_finds_alone(
    asked, config, block_size, prefix_cache
):
    num_blocks = 4 * -(-20 // block_size)
    together = run(
        asked, config, num_blocks=num_blocks, block_size=block_size, prefix_cache=prefix_cache
    )
    alone = [
        run([one], SchedulerConfig(), num_blocks=256, block_size=4, prefix_cache=False)[0]
        for one in asked
    ]
    assert together == alone
    for samples, (_, chosen) in zip(together, asked, strict=True):
        assert len(samples) == chosen.n
