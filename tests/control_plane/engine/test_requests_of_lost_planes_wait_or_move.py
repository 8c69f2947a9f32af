"""Requests whose plane is lost, before planes that give the same text and planes that do not."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from control_plane.config import SchedulingLimits
from control_plane.core.request import FinishReason
from control_plane.engine import fleet as fleet_module
from control_plane.engine import loop as loop_module
from control_plane.engine import one_of_several
from control_plane.errors import ComputeUnavailableError
from tests.control_plane.engine.fleet_driver import LENGTH, STANDS_AFTER, FleetDriver, kill


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


def test_many_requests_move_a_few_at_a_time(planes, expected, monkeypatch):
    """The event loop has other things to do in between."""
    monkeypatch.setattr(fleet_module, "PLACED_AT_ONCE", 2)

    async def main():
        planes[0].start()
        async with FleetDriver(planes, limits=SchedulingLimits(max_num_seqs=1)) as fleet:
            await fleet.linked(1)
            planes[0].stands_after = STANDS_AFTER
            started = fleet.submit("started", LENGTH)
            waiting = [fleet.submit(f"waiting {number}", 20) for number in range(5)]
            await fleet.until(lambda: len(fleet.tokens.get((started, 0), ())) > 3)
            planes[1].start()
            await fleet.linked(2)
            with capture_logs() as lines:
                await kill(planes[0])
                for number, request_id in enumerate(waiting):
                    await fleet.ended(request_id)
                    assert fleet.text(request_id) == expected(f"waiting {number}", 20)
            moved = [line["requests"] for line in lines if line["event"] == "requests moved"]
            assert sum(moved) == 6
            assert max(moved) == 2

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
            fleet.fleet._place = lambda origin, moving: moves.append((origin, moving))
            await kill(planes[0])
            await fleet.until(lambda: moves)
            fleet.fleet.begin_to_stop()
        for origin, moving in moves:  # no engine is there any more to end them
            place(origin, moving)
        await asyncio.sleep(0)
        assert {fleet.ends[i].error.reason for i in ids} == {"DRAINING"}

    asyncio.run(main())


def test_a_request_that_kills_every_plane_is_given_up(planes, monkeypatch):
    monkeypatch.setattr(loop_module, "MAX_LOSSES_WITHOUT_PROGRESS", 3)

    async def main():
        for plane in planes:
            plane.start()
            plane.may_run.clear()  # no result ever comes
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            request_id = fleet.submit("poison", 5)
            for number in range(3):
                member = fleet.fleet._routes[request_id].member
                victim = next(p for p in planes if p.address == member.facts.address)
                await asyncio.to_thread(victim.steps_seen.acquire)
                stopped = victim.server.stop(None)
                victim.may_run.set()  # only now: the step must not have a result
                await asyncio.to_thread(stopped.wait)
                if number == 2:
                    break
                await fleet.until(lambda m=member: fleet.fleet._routes[request_id].member is not m)
                victim.start()
                victim.may_run.clear()
                await fleet.linked(2)
            await fleet.ended(request_id)
            assert "lost 3 times in a row while" in fleet.ends[request_id].error.message
            for plane in planes:
                plane.may_run.set()

    asyncio.run(main())


def test_a_plane_that_comes_back_as_another_one_is_left_alone_while_others_serve(
    planes, expected, monkeypatch
):
    monkeypatch.setattr(one_of_several, "UNFIT_PAUSE_S", 0.01)

    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            planes[0].stands_after = STANDS_AFTER
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(4)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            await kill(planes[0])
            planes[0].context_length = 77
            descriptions = planes[0].num_descriptions
            planes[0].start()
            await fleet.ended(*ids)
            assert [fleet.text(i) for i in ids] == [expected(f"s{i}", LENGTH) for i in range(4)]
            await fleet.until(lambda: planes[0].num_descriptions > descriptions + 3)
            assert (fleet.faults, fleet.links) == ([], [True])
            await kill(planes[0])
            planes[0].context_length = planes[1].context_length
            planes[0].start()
            await fleet.linked(2)

    asyncio.run(main())


def test_a_plane_that_another_controller_took_is_left_alone_while_others_serve(planes, expected):
    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            ids = [fleet.submit(f"s{i}", LENGTH) for i in range(4)]
            await fleet.until(lambda: all(len(fleet.tokens.get((i, 0), ())) > 3 for i in ids))
            planes[0].other_session = 9
            await fleet.ended(*ids)
            assert [fleet.text(i) for i in ids] == [expected(f"s{i}", LENGTH) for i in range(4)]
            assert (fleet.faults, fleet.links) == ([], [True])
            assert fleet.fleet.metrics().failed_requests == 0
            await kill(planes[0])
            planes[0].other_session = None
            planes[0].start()
            await fleet.linked(2)

    asyncio.run(main())


def test_a_plane_that_comes_back_as_another_one_ends_it_all_where_no_other_has_served_of_late(
    planes, monkeypatch
):
    monkeypatch.setattr(one_of_several, "UNFIT_PAUSE_S", 0.01)

    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes, grace_s=0.2) as fleet:
            await fleet.linked(2)
            await kill(planes[0])
            planes[0].model = "another"
            planes[0].start()
            descriptions = planes[0].num_descriptions
            await fleet.until(lambda: planes[0].num_descriptions > descriptions + 3)
            assert fleet.faults == []
            await kill(planes[1])
            await fleet.until(lambda: fleet.faults)
            assert "another model: 'another', it was 'fake'" in str(fleet.faults[0])

    asyncio.run(main())


def test_an_unfit_plane_ends_nothing_while_requests_wait_for_the_other_one(
    planes, expected, monkeypatch
):
    monkeypatch.setattr(one_of_several, "UNFIT_PAUSE_S", 0.01)

    async def main():
        for plane in planes:
            plane.start()
        async with FleetDriver(planes) as fleet:
            await fleet.linked(2)
            await kill(planes[0])
            planes[0].model = "another"
            planes[0].start()
            await fleet.linked(1)
            planes[1].stands_after = STANDS_AFTER
            request = fleet.submit("abc", LENGTH)
            await fleet.until(lambda: len(fleet.tokens.get((request, 0), ())) > 3)
            await kill(planes[1])
            descriptions = planes[0].num_descriptions
            await fleet.until(lambda: planes[0].num_descriptions > descriptions + 3)
            assert (fleet.faults, fleet.ends) == ([], {})
            planes[1].start()
            await fleet.ended(request)
            assert fleet.text(request) == expected("abc", LENGTH)

    asyncio.run(main())
