from __future__ import annotations

from control_plane.core.generation_params import GenerationParams
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import Request
from control_plane.core.slots import SlotPool


def queue_of(*arrivals: int) -> WaitingQueue:
    queue = WaitingQueue()
    for arrival in arrivals:
        queue.append(arrival, request(arrival))
    return queue


def request(arrival: int) -> Request:
    return Request(100 + arrival, [1], GenerationParams(seed=0))


def drained(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


def test_the_queue_is_first_come_first_served():
    assert drained(queue_of(1, 2, 3)) == [1, 2, 3]


def test_preempted_requests_stand_in_front_in_the_order_they_arrived():
    queue = queue_of(7, 8)
    for arrival in (4, 2, 5):
        queue.put_back(arrival, request(arrival))
    assert queue.peek().arrival == 2
    assert drained(queue) == [2, 4, 5, 7, 8]


def test_a_request_is_removed_from_anywhere_in_the_queue():
    queue = queue_of(7, 8, 9)
    for arrival in (4, 2, 5):
        queue.put_back(arrival, request(arrival))
    assert queue.remove(104).id == 104
    assert queue.remove(108).id == 108
    assert queue.remove(108) is None
    assert 104 not in queue
    assert 105 in queue
    assert 109 in queue
    assert drained(queue) == [2, 5, 7, 9]
    assert 105 not in queue


def test_a_released_slot_is_listed_once_and_can_be_used_at_once():
    slots = SlotPool(2)
    first, second = slots.acquire(), slots.acquire()
    assert {first, second} == {0, 1}
    slots.release(first, was_started=True)
    assert slots.acquire() == first
    assert slots.take_released() == (first,)
    assert slots.take_released() == ()


def test_a_slot_that_was_never_started_is_not_listed():
    slots = SlotPool(1)
    slots.release(slots.acquire(), was_started=False)
    assert slots.take_released() == ()
    assert slots.num_free == 1


def test_a_reset_forgets_what_was_to_be_released():
    slots = SlotPool(2)
    slots.release(slots.acquire(), was_started=True)
    slots.acquire()
    slots.reset()
    assert (slots.num_free, slots.take_released()) == (2, ())
