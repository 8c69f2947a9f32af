from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.access.limits import Limits, Meter, TokenBucket
from control_plane.errors import TokenRateError, TooManyConcurrentRequestsError


def test_a_bucket_of_one_token_in_two_seconds_gives_one_in_two_seconds():
    meter = Meter(Limits(max_tokens_per_minute=30), now=0.0)
    meter.book(30, now=0.0)
    admitted = []
    for tick in range(20):
        now = tick / 2
        try:
            meter.begin(now)
        except TokenRateError:
            continue
        meter.book(1, now)
        admitted.append(now)
    assert admitted == [2.0, 4.0, 6.0, 8.0]


def test_a_debt_is_paid_by_time_and_the_error_says_how_long():
    meter = Meter(Limits(max_tokens_per_minute=60), now=0.0)
    meter.begin(now=0.0)
    meter.book(100, now=0.0)  # 40 more than there were
    with pytest.raises(TokenRateError, match="60, is used up; retry in 31") as caught:
        meter.begin(now=10.0)
    assert caught.value.retry_after_s == pytest.approx(31.0)
    meter.begin(now=41.0)


def test_a_full_bucket_holds_no_more_than_a_minute():
    bucket = TokenBucket(60, now=0.0)
    bucket.book(61, now=3600.0)
    assert bucket.wait_s(now=3600.0) == pytest.approx(2.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 10), st.integers(0, 500)), max_size=50),
)
def test_what_is_used_never_exceeds_the_rate_by_more_than_one_request(per_minute, requests):
    bucket, now, used, last = TokenBucket(per_minute, now=0.0), 0.0, 0, 0
    for pause_s, num_tokens in requests:
        now += pause_s
        if bucket.wait_s(now) == 0:
            bucket.book(num_tokens, now)
            used, last = used + num_tokens, num_tokens
    assert used - last <= per_minute * (1 + now / 60) + 1e-6


def test_no_more_requests_at_once_than_allowed_and_a_place_comes_back():
    meter = Meter(Limits(max_concurrent_requests=2), now=0.0)
    meter.begin(0.0)
    meter.begin(0.0)
    with pytest.raises(TooManyConcurrentRequestsError, match="is 2, and 2 are under way") as caught:
        meter.begin(0.0)
    assert caught.value.retry_after_s == 1.0
    meter.end()
    meter.begin(0.0)


def test_a_request_that_is_refused_for_its_tokens_takes_no_place():
    meter = Meter(Limits(max_concurrent_requests=1, max_tokens_per_minute=60), now=0.0)
    meter.book(60, 0.0)
    with pytest.raises(TokenRateError):
        meter.begin(0.0)
    assert meter.num_requests == 0


def test_other_limits_keep_what_is_used():
    meter = Meter(Limits(max_concurrent_requests=5, max_tokens_per_minute=60), now=0.0)
    meter.begin(0.0)
    meter.book(100, 0.0)
    meter.set_limits(Limits(max_concurrent_requests=1, max_tokens_per_minute=120), 0.0)
    with pytest.raises(TooManyConcurrentRequestsError):
        meter.begin(0.0)
    meter.end()
    with pytest.raises(TokenRateError) as caught:
        meter.begin(0.0)
    assert caught.value.retry_after_s == pytest.approx(41 / 2)


def test_without_limits_everything_goes():
    meter = Meter(Limits(), now=0.0)
    for _ in range(1000):
        meter.begin(0.0)
        meter.book(10**9, 0.0)


def test_a_check_says_what_begin_would_and_counts_nothing():
    meter = Meter(Limits(max_concurrent_requests=2, max_tokens_per_minute=60), now=0.0)
    meter.check(0.0, 2)
    assert meter.num_requests == 0
    with pytest.raises(TooManyConcurrentRequestsError, match=r"is 2, and 0 are .*; 3 more are"):
        meter.check(0.0, 3)
    meter.book(60, 0.0)
    with pytest.raises(TokenRateError):
        meter.check(0.0)
