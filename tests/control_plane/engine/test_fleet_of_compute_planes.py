"""Several fake compute planes behind one front end: where requests go, and how they move."""

from __future__ import annotations

import asyncio
import threading

import pytest

from control_plane.core.scheduler import Scheduler
from control_plane.engine import roster
from control_plane.engine.plugins import CoreFactories
from control_plane.engine.routing import CHUNK_TOKENS
from control_plane.errors import PlaneMismatchError
from planes.errors import ConfigError, EngineError
from tests.control_plane.engine.fleet_driver import LENGTH, STANDS_AFTER, FleetDriver, kill


def test_requests_are_shared_out_and_one_plane_or_two_give_the_same_texts(planes, expected):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            assert fleet.links == [True]
            ids = [fleet.submit(f"prompt {i}", 9, seed=i) for i in range(24)]
            assert [m.load for m in fleet.fleet.members] == [12, 12]
            await fleet.ended(*ids)
            for i, request_id in enumerate(ids):
                assert fleet.text(request_id) == expected(f"prompt {i}", 9, i)
            await fleet.until(lambda: [m.load for m in fleet.fleet.members] == [0, 0])
            await fleet.until(lambda: fleet.fleet.metrics().completed_requests == 24)
            assert fleet.fleet.memory_stats().used_blocks == 0

    asyncio.run(main())


def test_what_may_take_seconds_with_a_plane_is_done_beside_the_event_loop(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            assert fleet.attached_on == [threading.main_thread()]
            assert fleet.prepared_on
            assert threading.main_thread() not in fleet.prepared_on

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_requests_of_a_killed_plane_go_on_at_the_other_with_no_token_lost(planes, expected, n):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            lengths = [LENGTH + i for i in range(6)]
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"prompt {i}", lengths[i], seed=i, n=n) for i in range(6)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await kill(planes[0])
            await fleet.ended(*ids)
            for i, request_id in enumerate(ids):
                for sample in range(n):
                    text = expected(f"prompt {i}", lengths[i], i, sample)
                    assert fleet.text(request_id, sample) == text
            assert fleet.links == [True]  # one was always there
            metrics = fleet.fleet.metrics()
            assert (metrics.total_requests, metrics.completed_requests) == (6, 6)
            moved = fleet.member_of(planes[1]).loop.metrics
            assert (moved.total_requests, moved.completed_requests) == (3, 6)
            assert fleet.fleet.memory_stats().used_blocks == 0
            planes[0].start()  # a new epoch
            await fleet.linked(2)
            again = [fleet.submit(f"again {i}", 5, seed=i) for i in range(4)]
            assert [m.load for m in fleet.fleet.members] == [2, 2]
            await fleet.ended(*again)

    asyncio.run(main())


def test_a_plane_that_comes_later_is_taken_in(planes, expected):
    async def main():
        planes[1].start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(1)
            first = fleet.submit("first", 5)
            await fleet.ended(first)
            planes[0].start()
            await fleet.linked(2)
            ids = [fleet.submit(f"p{i}", 5) for i in range(4)]
            assert fleet.member_of(planes[0]).load == 2
            await fleet.ended(*ids)
            assert [fleet.text(i) for i in ids] == [expected(f"p{i}", 5) for i in range(4)]

    asyncio.run(main())


@pytest.mark.parametrize("knob", ["model", "context_length"])
def test_planes_of_different_models_are_refused_at_the_start_with_what_differs(planes, knob):
    async def main():
        setattr(planes[1], knob, {"model": "another", "context_length": 77}[knob])
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.until(lambda: fleet.faults)
            (fault,) = fleet.faults
            assert isinstance(fault, PlaneMismatchError)
            assert f"must have the same model: {knob} at unix:" in fault.message
            assert "\n" not in fault.message

    asyncio.run(main())


def test_a_plane_of_another_model_that_comes_later_is_kept_out(planes, monkeypatch):
    monkeypatch.setattr(roster, "NEXT_TRY_S", 0.01)

    async def main():
        planes[0].start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(1)
            monkeypatch.setattr(roster, "START_S", -1.0)
            planes[1].model = "another"
            planes[1].start()
            await fleet.ended(fleet.submit("abc", 50))
            assert (len(fleet.fleet.members), fleet.faults) == (1, [])
            await kill(planes[1])
            planes[1].model = "fake"
            planes[1].start()
            await fleet.linked(2)

    asyncio.run(main())


def test_a_scheduler_that_cannot_move_requests_is_refused_for_several_planes(planes):
    class Stays:
        def __init__(self, config, kv_cache):
            self._own = Scheduler(config, kv_cache)

        def __getattr__(self, name):
            if name in ("withdraw", "adopt"):
                raise AttributeError(name)
            return getattr(self._own, name)

    async def main():
        planes[0].start()
        async with FleetDriver(planes, factories=CoreFactories(scheduler=Stays)) as fleet:
            await fleet.until(lambda: fleet.faults)
            (fault,) = fleet.faults
            assert isinstance(fault, ConfigError)
            assert "must have adopt and withdraw" in fault.message

    asyncio.run(main())


# --- unlike planes ---


# --- both away, unlike sizes, the same beginnings ---


def test_a_request_that_fits_only_the_larger_pool_goes_there(planes):
    async def main():
        planes[0].num_blocks, planes[1].num_blocks = 8, 200
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            ids = [fleet.submit("x" * 100, 50) for _ in range(2)]
            assert fleet.member_of(planes[1]).load == 2
            with pytest.raises(EngineError, match="the pool has 200"):
                fleet.submit("x" * 800, 10)
            await fleet.ended(*ids)
            assert all(fleet.ends[i].error is None for i in ids)

    asyncio.run(main())


def test_prompts_that_begin_alike_go_to_the_same_plane(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            stems = [letter * 8 * CHUNK_TOKENS for letter in "ab"]
            await fleet.ended(*[fleet.submit(stem, 3) for stem in stems])  # one each
            for number in range(3):  # one after the other: both planes are idle each time
                for stem in stems:
                    await fleet.until(lambda: not any(m.load for m in fleet.fleet.members))
                    await fleet.ended(fleet.submit(f"{stem} {number}", 3))
            firsts = [{s.token_ids[0] for b in p.batches for s in b.starts} for p in planes]
            assert sorted(map(bytes, firsts)) == [b"a", b"b"]
            await fleet.until(lambda: fleet.fleet.metrics().completed_requests == 8)
            assert fleet.fleet.metrics().cached_tokens >= 6 * 8 * CHUNK_TOKENS

    asyncio.run(main())


def test_what_was_sent_to_a_plane_that_was_lost_speaks_for_it_no_more(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            await fleet.ended(fleet.submit("a" * 8 * CHUNK_TOKENS, 3))
            (taken,) = (plane for plane in planes if len(fleet.member_of(plane).trace) > 0)
            member = fleet.member_of(taken)
            await kill(taken)
            await fleet.until(lambda: len(member.trace) == 0)

    asyncio.run(main())


# --- commands that meet a request on its way ---


# --- what concerns all of them ---


def test_questions_are_answered_for_all_planes_at_once(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(4)]
            loop = asyncio.get_running_loop()
            answer = loop.create_future()
            fleet.fleet.inspect(lambda infos: loop.call_soon_threadsafe(answer.set_result, infos))
            assert [info.request_id for info in await answer] == ids
            assert fleet.fleet.memory_stats().total_blocks == 4096
            for request_id in ids:
                fleet.fleet.cancel(request_id)
            await fleet.ended(*ids)
            await fleet.ended(*[fleet.submit("abcdefgh" * (i + 1), 3) for i in range(2)])
            flushed = loop.create_future()
            fleet.fleet.flush_prefix_cache(
                lambda count: loop.call_soon_threadsafe(flushed.set_result, count)
            )
            assert await flushed > 0
            await fleet.until(lambda: fleet.fleet.memory_stats().cached_blocks == 0)
            fleet.roster.has_turned()
            await fleet.until(fleet.roster.has_turned)

    asyncio.run(main())
