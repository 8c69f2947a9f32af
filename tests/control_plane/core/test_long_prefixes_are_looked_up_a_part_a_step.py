"""A long prompt that waits keeps no stream waiting: not while it is looked up, and not after."""

from __future__ import annotations

import gc
import random

import pytest

from control_plane.core import arrivals
from control_plane.core.prefix_cache import PrefixCache, TokenChain

TEXT = list(range(1, 401))  # 100 blocks


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(arrivals, "DIGESTS_A_STEP", 30)


@pytest.fixture
def digested(monkeypatch) -> list[int]:
    """The blocks that were digested since the list was cleared."""
    blocks = []
    digest = TokenChain._digest

    def counted(self: TokenChain, index: int):
        blocks.append(index)
        return digest(self, index)

    monkeypatch.setattr(TokenChain, "_digest", counted)
    return blocks


@pytest.fixture
def looked_at(monkeypatch) -> list[int]:
    """The blocks of chains that were asked for."""
    blocks = []
    block = TokenChain.block

    def counted(self: TokenChain, index: int):
        blocks.append(index)
        return block(self, index)

    monkeypatch.setattr(TokenChain, "block", counted)
    return blocks


def with_a_cached_text(engine, **limits):
    e = engine(num_blocks=160, prefix_cache=True, max_total_tokens=512, **limits)
    e.ask(1, TEXT, max_tokens=1)
    e.run()
    return e


@pytest.mark.usefixtures("few")
def test_while_others_run_a_part_of_it_is_digested_in_each_step(engine, digested) -> None:
    e = with_a_cached_text(engine)
    e.ask(2, [900], max_tokens=30)
    e.step()
    again = e.ask(3, [*TEXT, 7, 7, 7], max_tokens=2)
    counts = []
    while not again.output_tokens:
        digested.clear()
        output = e.step()
        counts.append(len(digested))
        assert output.decode_request_ids == [2]  # which goes on in every one of them
    assert [count // 10 for count in counts] == [3, 3, 3, 1]  # and a block that the other fills
    assert again.cached_tokens == len(TEXT)


@pytest.mark.usefixtures("few")
def test_with_nobody_to_wait_for_it_it_is_looked_up_at_once(engine) -> None:
    e = with_a_cached_text(engine)
    again = e.ask(2, [*TEXT, 7], max_tokens=2)
    e.step()
    assert again.cached_tokens == len(TEXT)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("num_blocks", [29, 30, 31, 60, 61, 100])
def test_all_who_come_together_find_what_they_have_in_common(engine, num_blocks: int) -> None:
    e = with_a_cached_text(engine)
    asked = [e.ask(number, [*TEXT[: 4 * num_blocks], number], max_tokens=2) for number in (2, 3, 4)]
    e.step()
    assert [request.cached_tokens for request in asked] == [4 * num_blocks] * 3


@pytest.mark.usefixtures("few")
def test_what_a_burst_has_in_common_is_digested_once(engine, digested) -> None:
    e = with_a_cached_text(engine, max_batch_size=32)
    e.ask(2, [900], max_tokens=30)
    e.step()
    digested.clear()
    for number in range(3, 20):
        e.ask(number, [*TEXT[:80], number], max_tokens=2, arrival_time=number)
    assert e.step().prefill_request_ids == list(range(3, 20))
    assert digested == list(range(20))


@pytest.mark.usefixtures("few")
def test_what_is_not_there_is_not_digested(engine, digested) -> None:
    e = with_a_cached_text(engine)
    e.ask(2, [900], max_tokens=30)
    e.step()
    digested.clear()
    e.ask(3, [*TEXT[:8], *[900] * 200], max_tokens=2)
    assert len(e.send().prefill_request_ids) == 1
    assert digested[:3] == [0, 1, 2]


@pytest.mark.usefixtures("few")
def test_requests_admitted_in_one_step_share_its_time(engine, digested) -> None:
    e = with_a_cached_text(engine)
    texts = [[*(number * 1000 + token for token in range(80))] for number in (3, 4, 5)]
    for number, text in enumerate(texts, 3):
        e.ask(number, text, max_tokens=1)
    e.run()
    e.ask(2, [900], max_tokens=30)
    e.step()
    for number, text in enumerate(texts, 13):
        e.ask(number, [*text, number], max_tokens=2, arrival_time=number)
    digested.clear()
    assert e.step().prefill_request_ids == [13]
    assert len(digested) <= 31  # and the block that the admitted one fills
    # Of the second one a part was digested already, so there is time for the third.
    assert e.step().prefill_request_ids == [14, 15]


def test_who_waits_for_room_is_not_looked_up_anew_in_each_step(engine, looked_at) -> None:
    e = with_a_cached_text(engine, memory_threshold=1.0)
    e.ask(2, [900] * 4 * 55, max_tokens=60, arrival_time=1.0)
    e.step()
    e.ask(3, [*TEXT, *[5] * 100], max_tokens=2, arrival_time=2.0)
    e.step()
    assert e.scheduler.get_stats().num_waiting == 1
    looked_at.clear()
    for _ in range(8):
        e.step()
    assert e.scheduler.get_stats().num_waiting == 1
    assert len(looked_at) < 40


def test_what_was_found_is_forgotten_from_the_first_block_that_is_lost() -> None:
    chain = TokenChain(TEXT, [], block_size=4, roles_matter=True)
    cache = PrefixCache()
    for index in range(50):
        cache.add(chain.block(index), 100 + index)
    assert cache.find(chain, 100) == list(range(100, 150))
    assert cache.find(chain, 20) == list(range(100, 120))
    cache.remove(130)
    assert cache.find(chain, 100) == list(range(100, 130))
    cache.remove(140)  # is behind what is lost
    cache.add(chain.block(30), 7)
    assert cache.find(chain, 100) == [*range(100, 130), 7, *range(131, 140)]
    other = TokenChain([9] * 8, [], block_size=4, roles_matter=True)
    assert cache.find(other, 2) == []
    cache.remove(7)
    assert cache.find(chain, 100) == list(range(100, 130))


def test_a_chain_takes_over_what_is_the_same() -> None:
    draw = random.Random(5)
    for _ in range(300):
        size = draw.choice([1, 4, 16])
        num_tokens = draw.randrange(1, 80 * size)
        first = [draw.randrange(9) for _ in range(num_tokens)]
        second = first[: draw.randrange(num_tokens + 1)] + [9] * draw.randrange(40)
        one = TokenChain(first, [], block_size=size, roles_matter=True)
        num_digested = draw.randrange(num_tokens // size + 1)
        if num_digested:
            one.block(num_digested - 1)
        other = TokenChain(second, [], block_size=size, roles_matter=True)
        fresh = TokenChain(second, [], block_size=size, roles_matter=True)
        other.take_over(one)
        pairs = enumerate(zip(first, second, strict=False))
        num_same = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
        assert other.num_digested == min(num_digested, num_same // size)
        for index in range(len(second) // size):
            assert other.block(index) == fresh.block(index)


def test_a_chain_of_another_tenant_gives_nothing() -> None:
    one = TokenChain(TEXT, [], block_size=4, roles_matter=True, salt="one")
    one.block(50)
    other = TokenChain(TEXT, [], block_size=4, roles_matter=True, salt="other")
    other.take_over(one)
    assert other.num_digested == 0


def test_the_chain_of_a_request_that_has_ended_is_let_go(engine) -> None:
    e = with_a_cached_text(engine)
    e.ask(2, [*TEXT, 7], max_tokens=1)
    e.run()
    e.scheduler.get_completed()
    gc.collect()
    assert e.kv._cache.last_chain is None


def test_blocks_that_can_be_found_are_nothing_to_the_garbage_collector() -> None:
    chain = TokenChain(TEXT, [], block_size=4, roles_matter=True)
    cache = PrefixCache()
    for index in range(50):
        cache.add(chain.block(index), index)
    gc.collect()
    held = [*cache._digests.values(), *cache._tokens.values(), *chain._digests, *chain._tokens]
    assert not any(map(gc.is_tracked, held))
