"""Several fake compute planes behind one front end: where requests go, and how they move."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.config import SchedulingLimits
from control_plane.core.request import FinishReason
from control_plane.core.scheduler import Scheduler
from control_plane.engine import fleet as fleet_module
from control_plane.engine import roster
from control_plane.engine.plugins import CoreFactories
from control_plane.engine.routing import CHUNK_TOKENS
from control_plane.errors import ComputeUnavailableError, PlaneMismatchError
from planes.errors import ConfigError, EngineError
from tests.control_plane.engine.fleet_driver import FleetDriver

LENGTH = 300
STANDS_AFTER = 30
"""Batches of a plane that is to be killed: some tokens of each request, and far from all."""


@pytest.fixture
def planes(tmp_path, fake_plane_class):
    """Two planes; a test starts those that it wants there from the beginning."""
    sockets = [f"unix:{tmp_path}/{name}.sock" for name in ("one", "two")]
    planes = [fake_plane_class(socket, num_blocks=2048) for socket in sockets]
    yield planes
    for plane in planes:
        if hasattr(plane, "server"):
            plane.kill()


async def kill(plane):
    await asyncio.to_thread(plane.kill)


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


def test_a_started_request_waits_for_its_plane_and_an_unstarted_one_moves(planes, expected):
    async def main():
        planes[1].numerics_id = "other/1"
        planes[0].start()
        async with FleetDriver(planes, limits=SchedulingLimits(max_num_seqs=1)) as fleet:
            await fleet.linked(1)
            planes[0].stands_after = STANDS_AFTER
            started, waiting = fleet.submit("started", LENGTH), fleet.submit("waiting", 20)
            await fleet.until(lambda: len(fleet.tokens.get((started, 0), ())) > 3)
            planes[1].start()
            await fleet.linked(2)
            await kill(planes[0])
            await fleet.ended(waiting)
            assert fleet.text(waiting) == expected("waiting", 20)
            num_tokens = len(fleet.tokens[started, 0])
            assert started not in fleet.ends
            assert num_tokens < LENGTH
            planes[0].start()
            await fleet.ended(started)
            assert fleet.text(started) == expected("started", LENGTH)
            assert fleet.member_of(planes[1]).loop.metrics.completed_requests == 1

    asyncio.run(main())


def test_a_started_request_moves_between_unlike_planes_if_the_operator_allows_it(planes, expected):
    async def main():
        planes[1].numerics_id = "other/1"
        for plane in planes:
            plane.start()
        async with FleetDriver(planes, allow_numerics_change=True) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(2)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await kill(planes[0])
            await fleet.ended(*ids)
            assert [fleet.text(i) for i in ids] == [expected(f"s{i}", LENGTH) for i in range(2)]

    asyncio.run(main())


def test_a_request_that_waits_for_a_like_plane_fails_after_the_grace(planes):
    async def main():
        planes[1].numerics_id = "other/1"
        for plane in planes:
            plane.start()
        async with FleetDriver(planes, grace_s=0.0) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(2)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await kill(planes[0])
            await fleet.ended(*ids)
            errors = [fleet.ends[i].error for i in ids]
            assert sum(isinstance(error, ComputeUnavailableError) for error in errors) == 1

    asyncio.run(main())


def test_with_no_grace_requests_still_go_on_at_a_like_plane(planes, expected):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes, grace_s=0.0) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(4)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await kill(planes[0])
            await fleet.ended(*ids)
            assert [fleet.text(i) for i in ids] == [expected(f"s{i}", LENGTH) for i in range(4)]

    asyncio.run(main())


# --- both away, unlike sizes, the same beginnings ---


def test_requests_of_both_planes_wait_and_go_on_at_the_first_that_comes_back(planes, expected):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            planes[1].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH, seed=i) for i in range(4)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await asyncio.gather(kill(planes[0]), kill(planes[1]))
            await fleet.linked(0)
            assert fleet.links == [True, False]
            ids.append(fleet.submit("s4", LENGTH, seed=4))
            planes[1].start()
            await fleet.ended(*ids)
            for i, request_id in enumerate(ids):
                assert fleet.text(request_id) == expected(f"s{i}", LENGTH, i)
            assert fleet.links == [True, False, True]

    asyncio.run(main())


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


# --- commands that meet a request on its way ---


def test_a_cancel_that_comes_while_its_request_moves_is_not_lost(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH * 4) for i in range(2)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            place, moves = fleet.fleet._place, []

            def cancel_first(origin, moving):
                for each in moving:  # its old engine has let it go, no new one has it
                    fleet.fleet.cancel(each.request.id)
                    moves.append(each.request.id)
                place(origin, moving)

            fleet.fleet._place = cancel_first
            await kill(planes[0])
            await fleet.until(lambda: moves)
            await fleet.ended(*moves)
            assert [fleet.ends[i].finish_reason for i in moves] == [FinishReason.CANCELLED]
            fleet.fleet.cancel(next(i for i in ids if i not in moves))
            await fleet.ended(*ids)
            await fleet.until(lambda: fleet.fleet.memory_stats().used_blocks == 0)
            assert fleet.fleet._routes == {}

    asyncio.run(main())


def test_what_moves_while_the_server_shuts_down_is_told_so(planes):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH * 4) for i in range(2)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            place, moves = fleet.fleet._place, []

            def stop_first(origin, moving):
                fleet.fleet.begin_to_stop()
                place(origin, moving)
                moves.append(len(moving))

            fleet.fleet._place = stop_first
            await kill(planes[0])
            await fleet.until(lambda: moves)
        await asyncio.sleep(0)
        assert {fleet.ends[i].error.reason for i in ids} == {"DRAINING"}

    asyncio.run(main())


def test_a_request_that_kills_every_plane_is_given_up(planes, monkeypatch):
    monkeypatch.setattr(fleet_module, "MAX_LOSSES_WITHOUT_PROGRESS", 3)

    async def main():
        for plane in planes:
            plane.start()
            plane.may_run.clear()  # no result ever comes
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            request_id = fleet.submit("poison", 5)
            for number in range(3):
                route = fleet.fleet._routes[request_id]
                assert route.num_vain_losses == number
                victim = next(p for p in planes if p.address == route.member.facts.address)
                await asyncio.to_thread(victim.steps_seen.acquire)
                stopped = victim.server.stop(None)
                victim.may_run.set()  # only now: the step must not have a result
                await asyncio.to_thread(stopped.wait)
                await fleet.until(lambda n=number, r=route: r.num_vain_losses > n)
                victim.start()
                victim.may_run.clear()
                await fleet.linked(2)
            await fleet.ended(request_id)
            assert "lost 3 times in a row while" in fleet.ends[request_id].error.message
            for plane in planes:
                plane.may_run.set()

    asyncio.run(main())


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
