from __future__ import annotations

import asyncio

import pytest

from control_plane.core.batch import EndToken, TokenLogprobs
from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import FinishReason, RequestState
from control_plane.engine.events import RequestEnd, RequestTimings, RequestUpdate
from control_plane.engine.sample_text import SampleText
from control_plane.engine.stream_hub import StreamHub
from control_plane.engine.streams import RequestStream
from control_plane.errors import DrainingError, RequestFailedError, SlowReaderError
from control_plane.text.simple_tokenizer import SimpleTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
END = RequestEnd(RequestState.COMPLETED, LENGTH, RequestTimings(0.0, 0.0, 0.0))


class Stream(RequestStream):
    """A stream that notes what it asks of the engine."""

    def __init__(self, *, num_samples=1, tokenizer=None, max_unread_tokens=99, **params):
        self.stopped, self.given_up = [], 0
        asked = GenerationParams(**params)
        super().__init__(
            [SampleText(tokenizer or SimpleTokenizer(), asked) for _ in range(num_samples)],
            stop_sample=lambda index, num_tokens: self.stopped.append((index, num_tokens)),
            give_up=self.count_give_up,
            max_unread_tokens=max_unread_tokens,
        )

    def count_give_up(self):
        self.given_up += 1


class CountingLoop:
    """An event loop as far as the hub uses it from the engine thread: counts its wake-ups."""

    def __init__(self):
        self.calls = []
        self.later = []

    def call_soon_threadsafe(self, callback, *args):
        self.calls.append((callback, args))

    def call_later(self, delay_s, callback, *args):
        self.later.append((delay_s, callback, args))

    def deliver(self):
        calls, self.calls = self.calls, []
        for callback, args in calls:
            callback(*args)

    def deliver_later(self, delay_s):
        ((delay, callback, args),) = self.later
        assert delay == delay_s
        self.later = []
        callback(*args)


def run(coroutine):
    return asyncio.run(coroutine)


def tokens(deltas):
    """Of the one sample there is."""
    (delta,) = deltas
    assert delta.sample_index == 0
    return delta.token_ids


def take(*updates, **options):
    """Push updates and read them in one go."""

    async def read():
        stream = Stream(**options)
        for update in updates:
            stream.push(update)
        return stream, await stream.next_deltas()

    return run(read())


def text_update(text, **fields):
    return RequestUpdate(1, tuple(text.encode()), **fields)


def test_one_turn_is_one_wake_up_however_many_requests_it_served():
    async def read():
        loop = CountingLoop()
        hub = StreamHub(loop)
        streams = [Stream() for _ in range(50)]
        for i, stream in enumerate(streams):
            hub.open(i, stream)
        hub.publish([RequestUpdate(i, (i,)) for i in range(50)])
        assert len(loop.calls) == 1
        loop.deliver()
        return [await stream.next_deltas() for stream in streams]

    assert [tokens(part) for part in run(read())] == [[i] for i in range(50)]


def test_what_comes_while_a_busy_loop_is_spared_is_handed_over_together_and_in_order():
    class Pauses:
        def pause_s(self):
            return pauses.pop(0)

    async def read():
        loop = CountingLoop()
        hub = StreamHub(loop, Pauses())
        stream = Stream()
        hub.open(1, stream)
        hub.publish([text_update("a")])
        loop.deliver()
        assert tokens(await stream.next_deltas()) == list(b"a")
        for letter in "bcd":
            hub.publish([text_update(letter)])
            loop.deliver()
        reader = asyncio.create_task(stream.next_deltas())
        await asyncio.sleep(0)
        assert not reader.done()
        hub.publish([text_update("e", end=END)])
        loop.deliver_later(0.01)
        (delta,) = await reader
        assert (delta.token_ids, delta.end) == (list(b"bcde"), END)
        assert len(loop.calls) == 0
        hub.open(2, stream := Stream())
        hub.publish([RequestUpdate(2, (7,))])  # it is woken again for what comes then
        loop.deliver()
        return await stream.next_deltas()

    pauses = [0.0, 0.01, 0.0]
    assert tokens(run(read())) == [7]


def test_a_slow_reader_gets_fewer_and_larger_pieces():
    updates = [text_update(letter) for letter in "abcd"]
    _, (delta,) = take(*updates, text_update("e", end=END))
    assert (delta.text, delta.token_ids, delta.offset) == ("abcde", list(b"abcde"), 0)
    assert (delta.end, delta.finish_reason) == (END, LENGTH)


def test_what_came_of_several_samples_is_kept_apart():
    _, deltas = take(
        text_update("x", sample_index=1),
        text_update("y"),
        RequestUpdate(1, sample_index=1, finish_reason=STOP),
        text_update("z", end=END, finish_reason=LENGTH),
        num_samples=2,
    )
    found = [(d.sample_index, d.text, d.finish_reason, d.end) for d in deltas]
    assert found == [(1, "x", STOP, None), (0, "yz", LENGTH, END)]


def test_pieces_follow_each_other_without_repetition():
    async def read():
        stream = Stream()
        found = []
        for letter in "abc":
            stream.push(text_update(letter))
            (delta,) = await stream.next_deltas()
            found.append((delta.text, delta.offset))
        return found

    assert run(read()) == [("a", 0), ("b", 1), ("c", 2)]


def test_a_waiting_reader_is_woken_by_news_of_its_own_request_only():
    async def read():
        hub = StreamHub(asyncio.get_running_loop())
        first, second = Stream(), Stream()
        hub.open(1, first)
        hub.open(2, second)
        reader = asyncio.create_task(second.next_deltas())
        hub.publish([RequestUpdate(1, (7,))])
        await first.next_deltas()
        assert not reader.done()
        hub.publish([RequestUpdate(2, (8,))])
        return await reader

    assert tokens(run(read())) == [8]


def test_requests_are_found_by_name_and_by_id_until_their_end_or_until_nobody_reads_them():
    async def read():
        hub = StreamHub(asyncio.get_running_loop())
        for request_id, name in ((1, "a"), (2, "a"), (3, "b"), (4, ""), (5, "a")):
            hub.open(request_id, Stream(), name)
        assert [hub.under_way(wanted) for wanted in ("a", "b", "", "c", 4, 9)] == [
            [1, 2, 5], [3], [], [], [4], [],
        ]  # fmt: skip
        hub.close(2)
        hub.close(3)
        hub.publish([RequestUpdate(1, (7,), END), RequestUpdate(4, (7,), END)])
        await asyncio.sleep(0)
        assert [hub.under_way(wanted) for wanted in ("a", "b", 2, 4)] == [[5], [], [], []]

    run(read())


def test_news_of_a_closed_stream_are_dropped_and_the_hub_knows_when_it_is_idle():
    async def read():
        hub = StreamHub(asyncio.get_running_loop())
        hub.open(1, Stream())
        waiting = asyncio.create_task(hub.wait_until_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.close(1)
        hub.close(1)
        await waiting
        hub.publish([RequestUpdate(1, (7,), END)])
        await asyncio.sleep(0)
        assert len(hub) == 0

    run(read())


def test_publishing_to_a_closed_event_loop_is_the_end_of_the_process_and_no_fault():
    loop = asyncio.new_event_loop()
    hub = StreamHub(loop)
    loop.close()
    hub.publish([RequestUpdate(1, (7,))])


def test_a_stop_string_ends_its_sample_though_nobody_reads():
    stream = Stream(num_samples=2, stop=("##",))
    stream.push(text_update("one#", sample_index=1))
    assert stream.stopped == []
    stream.push(text_update("# two", sample_index=1))
    assert stream.stopped == [(1, 3)]
    stream.push(text_update(" three", sample_index=1))
    stream.push(text_update("zero"))

    async def read():
        return await stream.next_deltas()

    stopped, other = run(read())
    assert (stopped.text, stopped.token_ids) == ("one", list(b"one"))
    assert (stopped.finish_reason, stopped.matched_stop) == (STOP, "##")
    assert (other.sample_index, other.text, other.finish_reason) == (0, "zero", None)


def test_a_request_whose_first_sample_stopped_ended_by_that_whatever_the_engine_says():
    stream, (delta,) = take(text_update("one##", finish_reason=LENGTH, end=END), stop=("##",))
    assert stream.stopped == []  # it has ended anyway
    assert (delta.finish_reason, delta.end.finish_reason) == (STOP, STOP)
    assert delta.matched_stop == "##"
    assert stream.texts[0].num_tokens == 3


def test_a_stop_token_is_told_of_a_sample_that_it_ended():
    _, (delta,) = take(
        text_update("one", finish_reason=STOP, matched_stop=42, end=END), stop_token_ids=(42,)
    )
    assert (delta.text, delta.finish_reason, delta.matched_stop) == ("one", STOP, 42)


def test_logprobs_stay_with_their_tokens_while_pieces_are_merged():
    entries = [TokenLogprobs(-float(i)) for i in range(4)]
    _, (delta,) = take(
        text_update("ab", logprobs=tuple(entries[:2])),
        text_update("cd", logprobs=tuple(entries[2:])),
    )
    assert delta.logprobs == tuple(entries)


def test_a_token_that_ended_a_sample_comes_with_its_end_unless_a_stop_string_was_first():
    end_token = EndToken(257, TokenLogprobs(-0.5))
    end = RequestUpdate(1, finish_reason=STOP, end_token=end_token, end=END)
    _, (delta,) = take(text_update("ab"), end)
    assert (delta.text, delta.end_token) == ("ab", end_token)
    _, (delta,) = take(text_update("ab"), end, stop=("b",))
    assert (delta.text, delta.end_token) == ("a", None)


def test_a_reader_that_leaves_more_than_the_bound_loses_its_request_and_nothing_is_kept_for_it():
    async def read():
        stream = Stream(max_unread_tokens=8)
        stream.push(text_update("12345678"))
        assert stream.given_up == 0
        stream.push(text_update("9"))
        assert stream.given_up == 1
        stream.push(text_update("10"))
        stream.push(RequestUpdate(1, end=END))
        assert (stream.given_up, stream.has_ended) == (1, True)
        with pytest.raises(SlowReaderError, match="more than 8 tokens"):
            await stream.next_deltas()

    run(read())


def test_the_bound_is_on_what_waits_and_not_on_what_comes_at_once_or_in_all():
    async def read():
        stream = Stream(max_unread_tokens=8)
        for _ in range(5):
            stream.push(text_update("a long answer of a beam search"))
            await stream.next_deltas()
        assert stream.given_up == 0

    run(read())


def test_what_came_before_an_error_is_taken_before_it_however_late_the_reader_is():
    error = DrainingError("the server shut down")
    end = RequestEnd(RequestState.FAILED, FinishReason.ERROR, END.timings, error)

    async def read():
        stream = Stream()
        stream.push(text_update("a"))
        stream.push(text_update("b"))
        stream.push(RequestUpdate(1, end=end))
        (delta,) = await stream.next_deltas()
        assert (delta.token_ids, delta.end) == (list(b"ab"), None)
        for _ in range(2):
            with pytest.raises(DrainingError):
                await stream.next_deltas()

    run(read())


def test_an_error_of_the_request_reaches_the_reader_instead_of_its_end():
    error = DrainingError("the server shut down")
    end = RequestEnd(RequestState.FAILED, FinishReason.ERROR, END.timings, error)
    with pytest.raises(DrainingError):
        take(RequestUpdate(1, end=end))


def test_a_tokenizer_that_raises_ends_its_own_request_only():
    class Broken(SimpleTokenizer):
        def token_bytes(self, token_id):
            raise KeyError(token_id)

    async def read():
        loop = CountingLoop()
        hub = StreamHub(loop)
        broken, sound = Stream(tokenizer=Broken()), Stream()
        hub.open(1, broken)
        hub.open(2, sound)
        hub.publish([RequestUpdate(1, (65,)), RequestUpdate(2, (65,))])
        loop.deliver()
        assert tokens(await sound.next_deltas()) == [65]
        assert broken.given_up == 1
        with pytest.raises(RequestFailedError, match="tokenizer"):
            await broken.next_deltas()

    run(read())
