from __future__ import annotations

import asyncio

from control_plane.core.request import FinishReason, RequestState
from control_plane.engine.events import RequestEnd, RequestTimings, RequestUpdate
from control_plane.engine.streams import StreamHub

END = RequestEnd(RequestState.COMPLETED, FinishReason.LENGTH, RequestTimings(0.0, 0.0, 0.0))


def tokens(part):
    """Of the one sample there is."""
    (sample,) = part.samples
    assert sample.sample_index == 0
    return sample.token_ids


class CountingLoop:
    """An event loop as far as the hub uses it from the engine thread: counts its wake-ups."""

    def __init__(self):
        self.calls = []

    def call_soon_threadsafe(self, callback, *args):
        self.calls.append((callback, args))

    def deliver(self):
        for callback, args in self.calls:
            callback(*args)


def test_one_turn_is_one_wake_up_however_many_requests_it_served():
    async def run():
        loop = CountingLoop()
        hub = StreamHub(loop)
        streams = [hub.open(i) for i in range(50)]
        hub.publish([RequestUpdate(i, (i,)) for i in range(50)])
        assert len(loop.calls) == 1
        loop.deliver()
        return [await stream.next_part() for stream in streams]

    assert [tokens(part) for part in asyncio.run(run())] == [[i] for i in range(50)]


def test_a_slow_reader_gets_fewer_and_larger_parts():
    async def run():
        loop = CountingLoop()
        hub = StreamHub(loop)
        stream = hub.open(1)
        for token_id in range(5):
            hub.publish([RequestUpdate(1, (token_id,))])
        hub.publish([RequestUpdate(1, (5,), END)])
        loop.deliver()
        return await stream.next_part()

    part = asyncio.run(run())
    assert (tokens(part), part.end) == ([0, 1, 2, 3, 4, 5], END)


def test_what_came_of_several_samples_is_kept_apart_in_one_part():
    async def run():
        hub = StreamHub(asyncio.get_running_loop())
        stream = hub.open(1)
        hub.publish([RequestUpdate(1, (7,), sample_index=1), RequestUpdate(1, (8,))])
        stop, length = FinishReason.STOP, FinishReason.LENGTH
        hub.publish([RequestUpdate(1, sample_index=1, finish_reason=stop)])
        hub.publish([RequestUpdate(1, (9,), END, sample_index=0, finish_reason=length)])
        await asyncio.sleep(0)
        return await stream.next_part()

    assert asyncio.run(run()) == (
        [(1, [7], FinishReason.STOP), (0, [8, 9], FinishReason.LENGTH)],
        END,
    )


def test_parts_follow_each_other_without_repetition():
    async def run():
        hub = StreamHub(asyncio.get_running_loop())
        stream = hub.open(1)
        parts = []
        for token_id in range(3):
            hub.publish([RequestUpdate(1, (token_id,))])
            parts.append(tokens(await stream.next_part()))
        return parts

    assert asyncio.run(run()) == [[0], [1], [2]]


def test_a_waiting_reader_is_woken_by_news_of_its_own_request_only():
    async def run():
        hub = StreamHub(asyncio.get_running_loop())
        first, second = hub.open(1), hub.open(2)
        reader = asyncio.create_task(second.next_part())
        hub.publish([RequestUpdate(1, (7,))])
        await first.next_part()
        assert not reader.done()
        hub.publish([RequestUpdate(2, (8,))])
        return await reader

    assert tokens(asyncio.run(run())) == [8]


def test_news_of_a_closed_stream_are_dropped_and_the_hub_knows_when_it_is_idle():
    async def run():
        hub = StreamHub(asyncio.get_running_loop())
        hub.open(1)
        waiting = asyncio.create_task(hub.wait_until_idle())
        await asyncio.sleep(0)
        assert not waiting.done()
        hub.close(1)
        hub.close(1)
        await waiting
        hub.publish([RequestUpdate(1, (7,), END)])
        await asyncio.sleep(0)
        assert len(hub) == 0

    asyncio.run(run())


def test_publishing_to_a_closed_event_loop_is_the_end_of_the_process_and_no_fault():
    loop = asyncio.new_event_loop()
    hub = StreamHub(loop)
    loop.close()
    hub.publish([RequestUpdate(1, (7,))])
