"""Decode rows with one adapter stand beside each other, and nobody is served less for it."""

from __future__ import annotations

from collections import Counter

from control_plane.core.generation_params import GenerationParams
from control_plane.core.request import Request


def add(engine, request_id: int, adapter: int, max_tokens: int = 40) -> None:
    params = GenerationParams(max_tokens=max_tokens, seed=1, ignore_eos=True)
    engine.scheduler.add_request(
        Request(request_id, [5] * 3, params, frozenset({0}), adapter=adapter)
    )


def test_rows_are_sorted_by_adapter_and_keep_their_order_within_one(engine) -> None:
    made = engine()
    for request_id, adapter in enumerate([2, 0, 1, 2, 0, 1]):
        add(made, request_id, adapter)
    made.step()
    for _ in range(3):
        assert made.step().decode_request_ids == [1, 4, 2, 5, 0, 3]


def test_without_adapters_the_order_is_that_of_service(engine) -> None:
    made = engine()
    for request_id in (3, 1, 2):
        add(made, request_id, 0)
    made.step()
    assert made.step().decode_request_ids == [3, 1, 2]


def test_where_not_all_find_room_the_longest_unserved_come_first_whatever_their_adapter(
    engine,
) -> None:
    made = engine(max_batch_size=3, max_num_seqs=8, num_blocks=512)
    for request_id in range(7):
        add(made, request_id, adapter=request_id % 4, max_tokens=200)
    begun: set[int] = set()
    while len(begun) < 7:
        begun.update(made.step().decode_request_ids)
    served: Counter[int] = Counter()
    for _ in range(14):
        ids = made.step().decode_request_ids
        assert ids == sorted(ids, key=lambda request_id: (request_id % 4, ids.index(request_id)))
        served.update(ids)
    assert max(served.values()) - min(served.values()) <= 1
    assert len(served) == 7


def test_a_row_that_makes_room_for_prompts_is_not_always_the_same(engine) -> None:
    made = engine(max_batch_size=4, max_num_seqs=64, num_blocks=512)
    for request_id in range(4):
        add(made, request_id, adapter=request_id, max_tokens=60)
    made.step()
    served: Counter[int] = Counter()
    for step in range(20):
        add(made, 100 + step, adapter=0, max_tokens=1)
        served.update(made.step().decode_request_ids)
    of_streams = [served[request_id] for request_id in range(4)]
    assert max(of_streams) - min(of_streams) <= 2
