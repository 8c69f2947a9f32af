from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, Request, RequestState
from control_plane.engine.events import RequestEnd, RequestTimings, RequestUpdate
from control_plane.engine.sample_text import SampleText
from control_plane.engine.streams import RequestStream
from control_plane.errors import QueueFullError
from control_plane.metrics.histogram import MAX_PENDING, BatchedHistogram, Histogram
from control_plane.metrics.request_meter import RequestMeter
from control_plane.text.simple_tokenizer import SimpleTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture
def meter():
    return RequestMeter()


def open_stream(meter, *, max_unread_tokens=100, **params):
    request = Request(1, [1, 2, 3], GenerationParams(max_tokens=50, **params), arrival_time=10.0)
    texts = [SampleText(SimpleTokenizer(), request.params) for _ in range(request.params.n)]
    return RequestStream(
        texts,
        stop_sample=lambda *_: None,
        give_up=lambda: None,
        max_unread_tokens=max_unread_tokens,
        watch=meter.watch(request),
    )


def tokens(text, at, **fields):
    return RequestUpdate(1, tuple(text.encode()), at=at, **fields)


def end(state=RequestState.COMPLETED, reason=LENGTH, error=None, timings=(0.5, 2.0, 4.0)):
    return RequestEnd(state, reason, RequestTimings(*timings), error)


def sums(histogram):
    reading = histogram.read()
    return reading.num_values, pytest.approx(reading.total)


def test_a_value_at_a_bound_is_counted_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert histogram.read().counts == [2, 2, 1]


def test_values_in_batches_come_to_the_same_as_one_by_one():
    values = [0.001 * (i % 7) for i in range(3 * MAX_PENDING + 5)]
    one, many = Histogram((0.002, 0.004)), BatchedHistogram((0.002, 0.004))
    for value in values:
        one.observe(value)
        many.observe(value)
    assert many.read().counts == one.read().counts
    assert many.read().total == pytest.approx(one.read().total)


def test_times_are_those_of_the_commits_for_each_sample(meter):
    stream = open_stream(meter, n=2)
    stream.push(RequestUpdate(1))
    stream.push(tokens("a", 12.0))
    stream.push(tokens("b", 12.5, sample_index=1))
    stream.push(tokens("c", 12.75))
    stream.push(tokens("d", 14.0, sample_index=1))
    stream.push(RequestUpdate(1, end=end(), at=14.0))
    stream.leave()
    assert sums(meter.time_to_first_token) == (1, 2.0)
    assert sums(meter.inter_token) == (2, 0.75 + 1.5)
    assert sums(meter.e2e) == (1, 4.0)
    assert sums(meter.queue) == (1, 0.5)
    assert sums(meter.prefill) == (1, 1.5)
    assert sums(meter.decode) == (1, 2.0)
    assert (meter.num_prompt_tokens, meter.num_generation_tokens) == (3, 4)
    assert meter.num_successes == {STOP: 0, LENGTH: 1}
    assert meter.num_cancelled == 0


def test_what_lies_behind_a_stop_string_is_in_no_sum(meter):
    stream = open_stream(meter, stop=("cd",))
    for index, letter in enumerate("abcdefg"):
        stream.push(tokens(letter, 11.0 + index))
    stream.push(RequestUpdate(1, end=end(reason=LENGTH)))
    assert meter.num_generation_tokens == 2
    assert sums(meter.inter_token) == (3, 3.0)
    assert meter.num_successes[STOP] == 1  # as its client sees it


def test_tokens_held_back_until_the_end_are_counted_then(meter):
    stream = open_stream(meter, stop=("xyz",))
    stream.push(tokens("x", 11.0))
    assert meter.num_generation_tokens == 0
    stream.push(tokens("y", 12.0, finish_reason=LENGTH, end=end()))
    assert meter.num_generation_tokens == 2


def test_a_request_cut_off_gives_what_was_held_back(meter):
    stream = open_stream(meter, stop=("xyz",))
    stream.push(tokens("x", 11.0))
    stream.push(RequestUpdate(1, end=end(RequestState.CANCELLED, FinishReason.CANCELLED)))
    stream.leave()
    assert meter.num_generation_tokens == 1
    assert (meter.num_cancelled, sum(meter.num_successes.values())) == (1, 0)
    assert sums(meter.e2e) == (0, 0.0)


def test_a_request_that_was_refused_is_in_no_sum(meter):
    stream = open_stream(meter)
    error = QueueFullError("full")
    stream.push(RequestUpdate(1, end=end(RequestState.FAILED, FinishReason.ERROR, error)))
    stream.leave()
    assert (meter.num_prompt_tokens, meter.num_cancelled) == (0, 0)


def test_a_reader_who_leaves_cancels_and_one_too_slow_fails(meter):
    left = open_stream(meter)
    left.push(tokens("a", 11.0))
    left.leave()
    assert meter.num_cancelled == 1
    slow = open_stream(meter, max_unread_tokens=2)
    for index in range(4):
        slow.push(tokens("a", 11.0 + index))
    slow.leave()
    assert meter.num_cancelled == 1
    assert meter.num_generation_tokens == 3
