"""What an engine loop does when it is asked for its requests, turn by turn."""

from __future__ import annotations

import pytest

from control_plane.engine.vain_losses import MAX_LOSSES_WITHOUT_PROGRESS


@pytest.fixture
def lost(drive, fake_plane):
    """A loop whose compute plane has just been killed; one request has tokens."""
    driver = drive()
    request_id = driver.submit("started", 20)
    driver.run_until(lambda: len(driver.tokens.get(request_id, ())) >= 3)
    fake_plane.kill()
    driver.run_until(lambda: not driver.links[-1])
    return driver


def test_all_news_of_a_request_are_published_before_it_leaves(lost):
    left = []
    late = lost.submit("late", 5)

    def note(moving):
        for each in moving:
            assert (
                len(lost.tokens[each.request.id]) == each.entry.num_given_tokens
            )  # its admission was told
            left.append(each.request.id)

    lost.loop.inbox.withdraw(lambda _: True, note)
    lost.loop.step()
    assert left == [late - 1, late]
    assert not lost.loop.has_pending_work
    assert lost.loop.list_requests() == []


def test_only_requests_that_may_go_leave(lost):
    late, left = lost.submit("late", 5), []
    lost.loop.inbox.withdraw(lambda request: not request.output_tokens, left.extend)
    lost.loop.step()
    assert [each.request.id for each in left] == [late]
    assert [info.request_id for info in lost.loop.list_requests()] == [late - 1]


def test_a_plane_that_is_back_keeps_its_requests(lost, fake_plane, expected):
    left = []
    fake_plane.start()
    lost.run_until(lambda: lost.links[-1])
    lost.loop.inbox.withdraw(lambda _: True, left.extend)
    lost.run()
    assert left == []
    assert lost.text(1) == expected("started", 20)


def test_a_request_that_comes_back_goes_on_where_it_was(lost, fake_plane, expected):
    left = []
    lost.loop.inbox.withdraw(lambda _: True, left.extend)
    lost.loop.step()
    lost.loop.inbox.adopt(left[0])
    fake_plane.start()
    lost.run()
    assert lost.text(1) == expected("started", 20)
    metrics = lost.loop.metrics
    assert (metrics.total_requests, metrics.completed_requests) == (1, 1)
    assert lost.ends[1].timings.time_to_first_token_s is not None


def test_losses_of_requests_that_have_left_are_not_held_against_those_that_come(drive, fake_plane):
    driver, left = drive(), []
    driver.run_until(lambda: driver.links == [True])
    for _ in range(MAX_LOSSES_WITHOUT_PROGRESS + 1):
        fake_plane.may_run.clear()  # no result in between, which would be progress
        driver.submit("innocent", 20)
        driver.send()
        fake_plane.kill()
        driver.run_until(lambda: not driver.links[-1])
        driver.loop.inbox.withdraw(lambda _: True, left.extend)
        driver.loop.step()
        fake_plane.start()
        driver.run_until(lambda: driver.links[-1])
    assert len(left) == MAX_LOSSES_WITHOUT_PROGRESS + 1
    assert driver.ends == {}
