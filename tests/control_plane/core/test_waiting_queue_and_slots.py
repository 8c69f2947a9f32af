from __future__ import annotations

import pytest

from control_plane.core.generation_params import GenerationParams
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import Group, Request, Sample, Sequence
from control_plane.core.slots import SlotPool


def sequence(arrival: int, priority: int = 0) -> Sequence:
    request = Request(100 + arrival, [1], GenerationParams(seed=0), priority=priority)
    request.samples = [Sample(request.output_tokens)]
    return Sequence(arrival, request, Group(request, request.params, arrival))


def queue_of(*arrivals: int) -> WaitingQueue:
    queue = WaitingQueue()
    for arrival in arrivals:
        queue.add(sequence(arrival))
    return queue


def drained(queue: WaitingQueue) -> list[int]:
    return [queue.pop().seq_id for _ in range(len(queue))]


def test_the_queue_is_first_come_first_served():
    assert drained(queue_of(1, 2, 3)) == [1, 2, 3]


def test_preempted_sequences_stand_in_front_in_the_order_they_arrived():
    queue = queue_of(7, 8, 4, 2, 5)
    assert queue.peek().seq_id == 2
    assert drained(queue) == [2, 4, 5, 7, 8]


def test_a_lower_priority_number_comes_first_and_arrival_decides_within_it():
    queue = WaitingQueue()
    for arrival, priority in ((1, 5), (2, 0), (3, -1), (4, 0), (5, -1)):
        queue.add(sequence(arrival, priority))
    assert drained(queue) == [3, 5, 2, 4, 1]


def test_a_sequence_is_removed_from_anywhere_in_the_queue():
    queue = WaitingQueue()
    sequences = {arrival: sequence(arrival) for arrival in (7, 8, 9, 4, 2, 5)}
    for seq in sequences.values():
        queue.add(seq)
    queue.remove(sequences[4])
    queue.remove(sequences[2])
    assert sequences[4] not in queue
    assert sequences[5] in queue
    assert len(queue) == 4
    assert drained(queue) == [5, 7, 8, 9]


@pytest.mark.parametrize("takes_alone", [False, True])
def test_one_made_anew_stands_in_the_place_of_one_that_was_removed(takes_alone):
    """As a beam does; whatever the order, they are never compared."""
    queue = queue_of(5, 6)
    old, new = sequence(4), sequence(4)
    queue.add(old)
    if takes_alone:
        queue.alone = old.request_id
        assert queue.pop() is old
        queue.alone = None
    else:
        queue.remove(old)
    assert queue.peek().seq_id == 5
    queue.add(old)
    queue.remove(old)
    queue.add(new)
    assert queue.pop() is new
    assert drained(queue) == [5, 6]


def test_removed_sequences_do_not_pile_up_behind_one_that_waits():
    queue = queue_of(0)
    for arrival in range(1, 10_000):
        seq = sequence(arrival)
        queue.add(seq)
        queue.remove(seq)
    assert len(queue._heap) < 100
    assert drained(queue) == [0]


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


def test_a_request_whose_samples_wait_is_one_request_that_waits(engine):
    made = engine()
    made.ask(1, [5] * 6, n=4)
    made.ask(2, [5] * 6)
    made.step()
    assert made.scheduler.get_stats().num_queued_requests == 0
    made.scheduler.lose_epoch()
    stats = made.scheduler.get_stats()
    assert (stats.num_waiting, stats.num_queued_requests) == (5, 2)
    made.scheduler.cancel(1)
    assert made.scheduler.get_stats().num_queued_requests == 1
    made.run()
    assert made.scheduler.get_stats().num_queued_requests == 0
