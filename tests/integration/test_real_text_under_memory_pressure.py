"""The embedded model in pools far too small for all requests at once, and with all shared."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hetero_infer.bench.server import StartedPlanes, started_planes
from tests.devices import Target
from tests.golden.prompts import PROMPTS
from tests.integration.asking import Server, check_tokens, request

pytestmark = pytest.mark.model

SWAP_SPACE = 0.03  # GiB: more blocks than the device has


@contextmanager
def server(target: Target, **settings: object) -> Iterator[Server]:
    with started_planes(target.config(**settings)) as planes, Server(planes.control) as made:
        yield made


def sampling(number: int) -> dict[str, float]:
    return {"temperature": 0.8 if number % 3 else 0.0, "seed": number, "top_p": 0.95}


TWELVE = [request(text, 24, **sampling(i)) for i, text in enumerate(list(PROMPTS.values())[:12])]


@pytest.fixture(scope="module")
def alone(target) -> Iterator[Server]:
    """A server with room for all, where nothing is shared."""
    with server(target, prefix_cache=False) as made:
        yield made


@pytest.fixture(scope="module")
def ample(alone) -> list[list[list[int]]]:
    """What the twelve say together where there is room for all."""
    return alone.ask_together(TWELVE)


def ask_all_before_a_step_ends(
    crowded: Server, planes: StartedPlanes, requests: list
) -> list[list[list[int]]]:
    """In their order, while the compute plane stands still.

    Who runs beside whom, and so who has to give way, is then no matter of when they arrive.
    """
    os.kill(planes.compute_pid, signal.SIGSTOP)
    with ThreadPoolExecutor(len(requests)) as pool:
        try:
            answers = []
            for asked in requests:
                answers.append(pool.submit(crowded.ask, asked))
                crowded.wait_until(lambda: crowded.metrics.total_requests == len(answers))
        finally:
            os.kill(planes.compute_pid, signal.SIGCONT)
        return [answer.result() for answer in answers]


SMALL_POOLS = [
    pytest.param(4, 32, 0.0, id="4x32"),
    pytest.param(8, 16, SWAP_SPACE, id="8x16-swap", marks=pytest.mark.slow),
    pytest.param(4, 32, SWAP_SPACE, id="4x32-swap", marks=pytest.mark.slow),
    pytest.param(8, 16, 0.0, id="8x16", marks=pytest.mark.slow),
]


@pytest.mark.wide
@pytest.mark.parametrize(("num_blocks", "block_size", "swap_space"), SMALL_POOLS)
def test_twelve_requests_in_a_pool_for_two_say_what_they_say_in_an_ample_one(
    target, judge, ample, num_blocks, block_size, swap_space
):
    pool = {"max_num_blocks": num_blocks, "block_size": block_size, "swap_space": swap_space}
    with started_planes(target.config(**pool)) as planes, Server(planes.control) as crowded:
        check_tokens(judge, TWELVE, ask_all_before_a_step_ends(crowded, planes, TWELVE), ample)
        metrics, memory = crowded.metrics, crowded.memory
        assert metrics.completed_requests == 12
        assert metrics.num_preemptions >= 1
        assert (metrics.num_swaps > 0) == (swap_space > 0)
        assert (memory.total_blocks, memory.used_blocks) == (num_blocks, 0)
        assert memory.used_host_blocks == 0


BEGINNINGS = [
    "",
    "You are a helpful assistant who answers in one short sentence and never apologises. " * 2,
    PROMPTS["chat"] + PROMPTS["story"] + PROMPTS["python"] + PROMPTS["arithmetic"] * 2,
]


def sixty_four() -> list:
    """Shared beginnings of no, a few and many blocks; one, two or three samples."""
    texts = [text for name, text in PROMPTS.items() if name != "long"]  # it would be most of it all
    return [
        request(
            BEGINNINGS[i % 3] + texts[i // 3 % len(texts)],
            4 + i % 4,
            n=1 + (i % 4 == 0) + (i % 8 == 0),
            **sampling(i),
        )
        for i in range(64)
    ]


@pytest.mark.slow
def test_sixty_four_at_once_say_what_they_say_one_by_one_with_everything_on(target, judge, alone):
    requests = sixty_four()
    expected = alone.ask_in_turn(requests)
    assert {len(samples) for samples in expected} == {1, 2, 3}
    with server(target, prefill_chunk=48, max_batch_size=24, max_num_seqs=40) as crowd:
        check_tokens(judge, requests, crowd.ask_together(requests), expected)
        again = crowd.ask_together(requests)  # now with the cache full of them
        metrics, memory = crowd.metrics, crowd.memory
    check_tokens(judge, requests, again, expected)
    assert metrics.cached_tokens > 64 * 16
    assert (memory.used_blocks, metrics.failed_requests) == (0, 0)
