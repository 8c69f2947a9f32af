"""Requests with adapters: each gets what it would get alone, whatever befalls it and its plane.

The fake plane holds other ids for the same tokens with each adapter, and answers with a hash of
them: a block that is found for another one, or a start without its own, changes a text.
"""

from __future__ import annotations

import asyncio

import pytest

from control_plane.config import SchedulingLimits
from control_plane.core.request import Request, RequestState
from control_plane.core.request_options import MAX_SALT_BYTES, RequestOptions
from control_plane.engine.plane import AdapterDescription
from control_plane.errors import ModelNotFoundError, PlaneMismatchError
from planes.errors import SchedulerError, ValidationError
from tests.control_plane.engine.fleet_driver import LENGTH, STANDS_AFTER, FleetDriver, kill
from tests.control_plane.engine.frontend_driver import asking, collect, running_frontend, text_of
from tests.control_plane.http.conftest import make_plane

ADAPTERS = ("poet", "lawyer/v2")
LONG = "a prompt of some blocks, which all of them begin with"


@pytest.fixture
def fake_plane(fake_plane):
    fake_plane.adapters = ADAPTERS
    return fake_plane


def scope(adapter, salt=""):
    return Request(1, [1], asking(), adapter=adapter, cache_salt=salt).cache_scope


# --- what they are called ---


def test_a_name_is_that_of_the_model_or_of_an_adapter(drive):
    plane = drive().connected.plane
    assert plane.adapters[1] == AdapterDescription("lawyer/v2", 8, 80, b"lawyer/v2".hex())
    assert [plane.adapter_of(name) for name in plane.models] == [0, 1, 2]
    assert [plane.name_of(number) for number in range(3)] == ["fake", *ADAPTERS]
    with pytest.raises(ModelNotFoundError, match=r"model 'x' is not loaded, 'fake' is, with the "
                       r"adapters poet, lawyer/v2$"):  # fmt: skip
        plane.adapter_of("x")


def test_of_many_adapters_a_message_names_a_few():
    plane = make_plane(adapters=tuple(AdapterDescription(f"a{n}") for n in range(1000)))
    with pytest.raises(ModelNotFoundError, match=r"adapters a0, .*, a7 and 992 more$"):
        plane.adapter_of("x")


@pytest.mark.parametrize("adapters", [("a", "a"), ("a", "fake")])
def test_a_plane_with_two_of_one_name_is_refused(drive, fake_plane, adapters):
    fake_plane.adapters = adapters
    with pytest.raises(PlaneMismatchError, match=r"several of one name among .*: fake, a, "):
        drive()


def test_no_salt_spells_the_blocks_of_an_adapter():
    assert scope(0, "mine") == "mine"
    RequestOptions(cache_salt="x" * MAX_SALT_BYTES).validate()
    found = {scope(adapter, salt) for adapter in (1, 11) for salt in ("", "1", "\0", "1\0")}
    assert len(found) == 8
    assert all(len(each.encode()) > MAX_SALT_BYTES for each in found)


# --- one plane ---


def test_each_adapter_gives_its_own_text_and_finds_its_own_blocks_only(drive, expected):
    driver = drive()
    for _ in range(2):
        for adapter in (0, 1, 2):
            request_id = driver.submit(LONG, adapter=adapter)
            driver.run()
            assert driver.text(request_id) == expected(LONG, 12, adapter=adapter)
    cached = [driver.ends[request_id].cached_tokens for request_id in range(1, 7)]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 40


def test_side_by_side_with_samples_and_through_preemption_all_have_their_own_texts(
    drive, fake_plane, expected
):
    fake_plane.num_blocks = 24
    driver = drive(limits=SchedulingLimits(memory_threshold=1.0))
    asked = {driver.submit(LONG[:20], 30, n=n, adapter=a): a for a in (1, 0, 2) for n in (1, 2)}
    driver.run()
    assert driver.loop.metrics.num_preemptions > 0
    for request_id, adapter in asked.items():
        assert driver.text(request_id) == expected(LONG[:20], 30, adapter=adapter)
    twice = {key for key in driver.samples if key[1] == 1}
    for request_id, sample in twice:
        text = expected(LONG[:20], 30, sample=sample, adapter=asked[request_id])
        assert driver.text(request_id, 1) == text
    assert len(twice) == 3


def test_blocks_that_were_swapped_out_come_back_to_their_adapter(drive, fake_plane, expected):
    fake_plane.num_blocks, fake_plane.num_host_blocks = 24, 64
    driver = drive(limits=SchedulingLimits(memory_threshold=1.0))
    asked = {driver.submit(LONG[:20], 40, adapter=adapter): adapter for adapter in (1, 2, 1, 0)}
    driver.run()
    assert driver.loop.metrics.num_swaps > 0
    for request_id, adapter in asked.items():
        assert driver.text(request_id) == expected(LONG[:20], 40, adapter=adapter)


def test_every_beam_is_started_with_the_adapter_of_its_search(drive, fake_plane):
    fake_plane.features = (*fake_plane.features, "logprobs")
    driver = drive()
    request_id = driver.submit("beams", 6, asking={"beam_width": 3}, adapter=2)
    driver.run()
    assert driver.ends[request_id].state is RequestState.COMPLETED
    starts = [start for batch in fake_plane.batches for start in batch.starts]
    assert len(starts) >= 3
    assert {start.adapter for start in starts} == {2}


def test_answers_go_on_on_a_plane_that_is_back_with_the_same_adapters(drive, fake_plane, expected):
    driver = drive()
    asked = {driver.submit("abc", 40, adapter=adapter): adapter for adapter in (2, 1, 0)}
    driver.run_until(lambda: any(map(len, driver.samples.values())))
    fake_plane.kill()
    fake_plane.start()
    driver.run()
    for request_id, adapter in asked.items():
        assert driver.text(request_id) == expected("abc", 40, adapter=adapter)


@pytest.mark.parametrize("after", [ADAPTERS[::-1], ADAPTERS[:1], (), (*ADAPTERS, "more")])
def test_a_plane_that_is_back_with_other_adapters_is_another_plane(drive, fake_plane, after):
    driver = drive()
    driver.submit("abc", 20, adapter=1)
    driver.loop.step()
    fake_plane.kill()
    fake_plane.adapters = after
    fake_plane.start()
    with pytest.raises(PlaneMismatchError, match=r"another adapters: .*, it was poet \(sha256 70"):
        driver.run()


def test_a_fork_has_the_adapter_of_its_parent(drive):
    driver = drive()
    parent = driver.submit("abc", 20, adapter=1)
    driver.run_until(lambda: len(driver.tokens.get(parent, ())) >= 2)
    scheduler = driver.loop._scheduler
    child = Request(99, list(b"abc"), asking(20), adapter=2)
    with pytest.raises(SchedulerError, match="a fork has the adapter of its parent"):
        scheduler.fork(parent, child)
    driver.run()


def test_a_scheduler_that_says_nothing_of_adapters_is_given_no_request_with_one(drive):
    driver = drive()
    driver.loop._scheduler.keeps = frozenset()  # type: ignore[misc]
    request_id = driver.submit("abc", adapter=1)
    driver.run()
    error = driver.ends[request_id].error
    assert isinstance(error, ValidationError)
    assert (error.field, error.message) == ("model", "this engine's scheduler takes no adapters")


# --- several planes ---


@pytest.fixture
def two_planes(planes):
    for plane in planes:
        plane.adapters = ADAPTERS
    return planes


def test_requests_move_to_a_sibling_with_their_adapters(two_planes, expected):
    async def play():
        first, second = two_planes
        first.start()
        second.start()
        async with FleetDriver(two_planes) as driver:
            await driver.linked(2)
            first.stands_after = second.stands_after = STANDS_AFTER
            asked = {driver.submit(f"{n}", LENGTH, adapter=n % 3): n for n in range(6)}
            dying = driver.member_of(first)
            await driver.until(lambda: len(first.batches) > STANDS_AFTER and dying.load > 0)
            second.stands_after = None
            second.may_run.set()
            await kill(first)
            await driver.ended(*asked)
            for request_id, number in asked.items():
                assert driver.text(request_id) == expected(str(number), LENGTH, adapter=number % 3)

    asyncio.run(play())


def test_planes_with_other_adapters_do_not_serve_together(two_planes):
    async def play():
        first, second = two_planes
        second.adapters = ADAPTERS[::-1]
        first.start()
        second.start()
        async with FleetDriver(two_planes) as driver:
            await driver.until(lambda: driver.faults)
            (fault,) = driver.faults
            assert isinstance(fault, PlaneMismatchError)
            assert "must have the same model: adapters at unix:" in fault.message
            assert "is lawyer/v2 (sha256 6c61777965" in fault.message or "is poet" in fault.message

    asyncio.run(play())


def test_where_a_prompt_goes_depends_on_what_was_sent_with_its_adapter(two_planes):
    async def play():
        for plane in two_planes:
            plane.start()
        async with FleetDriver(two_planes) as driver:
            await driver.linked(2)
            prompt = "x" * 200
            one = driver.submit(prompt, adapter=1)
            await driver.ended(one)
            fleet = driver.fleet
            hashes = [
                fleet._hashes(Request(1, [120] * 200, asking(), adapter=a)) for a in (0, 1, 2)
            ]
            known = [[m.trace.num_cached_tokens(each) for m in fleet.members] for each in hashes]
            assert sorted(known[1]) == [0, 192]
            assert known[0] == known[2] == [0, 0]

    asyncio.run(play())


# --- the front end ---


def test_the_front_end_of_an_adapter_asks_with_it(compute_address, expected):
    async def play():
        async with running_frontend(asyncio.get_running_loop(), compute_address) as frontend:
            assert frontend.model == "fake"
            for adapter, name in enumerate(("fake", *ADAPTERS)):
                engine = frontend.of_model(name)
                assert engine.model == name
                generation = await engine.submit(LONG, asking())
                assert text_of(await collect(generation)) == expected(LONG, 12, adapter=adapter)
            with pytest.raises(ModelNotFoundError):
                frontend.of_model("fakes")
            assert frontend.model == "fake"

    asyncio.run(play())
