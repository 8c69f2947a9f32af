"""A long prompt that waits keeps no stream waiting: not while it is looked up, and not after."""

from __future__ import annotations

import gc

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
    e.ask(2, [900], max_tokens=30)
    e.step()
    for number in (3, 4, 5):
        e.ask(number, [*TEXT[: 4 * 20], number], max_tokens=2, arrival_time=number)
    digested.clear()
    assert e.step().prefill_request_ids == [3]
    assert len(digested) <= 31  # and the block that the admitted one fills
    # Of the second one a part was digested already, so there is time for the third.
    assert e.step().prefill_request_ids == [4, 5]


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


def test_blocks_that_can_be_found_are_nothing_to_the_garbage_collector() -> None:
    chain = TokenChain(TEXT, [], block_size=4, roles_matter=True)
    cache = PrefixCache()
    for index in range(50):
        cache.add(chain.block(index), index)
    gc.collect()
    held = [*cache._digests.values(), *cache._tokens.values(), *chain._digests, *chain._tokens]
    assert not any(map(gc.is_tracked, held))
