"""Rows are computed with their slots' adapters: what is checked, what the executor is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from compute_plane.errors import InvalidBatch
from compute_plane.executor.step import SlotPrefix
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, start, step

WITH_ADAPTERS = replace(LIMITS, num_adapters=2)


def plane() -> Plane:
    """Return one on which slot 0 has no adapter and slot 1 the second."""
    made = Plane(WITH_ADAPTERS)
    starts = [start(0, b"hello", [7, 2]), replace(start(1, b"hello", [8, 3]), adapter=2)]
    made.run(step([(0, 0, 5), (1, 0, 5)], starts=starts))
    return made


def test_every_row_has_that_of_its_slot_also_in_steps_that_go_on_from_the_last() -> None:
    made = plane()
    made.run(step([(0, 5, 1), (1, 5, 1)]))
    made.run(step([(0, 6, 1), (1, 6, 1)]))
    made.run(step([(1, 7, 1), (0, 7, 1)]))
    assert [batch.adapters.tolist() for batch in made.batches] == [[0, 2], [0, 2], [0, 2], [2, 0]]


def test_steps_in_which_no_row_has_one_say_nothing_of_any() -> None:
    made = plane()
    made.run(step([(0, 5, 1)]))
    assert made.batches[-1].adapters.size == 0


def test_a_slot_that_is_started_anew_has_the_adapter_that_its_start_says() -> None:
    made = plane()
    made.run(step([(1, 0, 5)], starts=[replace(start(1, b"other", [9, 4]), adapter=1)]))
    made.run(step([(1, 5, 1)]))
    assert [batch.adapters.tolist() for batch in made.batches[1:]] == [[1], [1]]
    made.run(step([(1, 0, 5)], starts=[start(1, b"other", [9, 4])]))
    assert made.batches[-1].adapters.size == 0


def test_what_begins_as_another_slot_does_not_take_its_adapter() -> None:
    made = plane()
    begun = replace(start(2, b"!", []), prefix=SlotPrefix(1, 5, 2), num_prompt_tokens=6)
    made.run(step([(2, 5, 1)], starts=[begun]))
    assert made.batches[-1].adapters.size == 0


def test_an_adapter_that_the_plane_does_not_have_is_refused_and_leaves_no_trace() -> None:
    made = plane()
    wrong = step([(3, 0, 5)], starts=[replace(start(3, b"hello", [5, 6]), adapter=3)])
    message = r"starts\[0\].adapter must be at most 2, got 3"
    with pytest.raises(InvalidBatch, match=message):
        made.run(wrong)
    with pytest.raises(InvalidBatch, match="at most 0, got 1"):
        Plane().run(step([(0, 0, 1)], starts=[replace(start(0, b"a", [1]), adapter=1)]))
    made.run(step([(0, 5, 1), (1, 5, 1)]))


def test_texts_differ_by_adapter_and_blocks_of_another_one_are_noticed() -> None:
    """By the simulated executor, which other tests rely on for that."""

    def said(adapter: int, read_with: int) -> list[int]:
        made = Plane(WITH_ADAPTERS)
        filled = replace(start(0, b"hellohel", [7, 2]), adapter=adapter)
        made.run(step([(0, 0, 8)], starts=[filled]))
        reading = replace(start(1, b"hellohello", [7, 2, 3]), adapter=read_with)
        return made.tokens(step([(1, 8, 2)], starts=[reading]))

    texts = [said(adapter, read_with) for adapter in range(3) for read_with in range(3)]
    assert len({tuple(text) for text in texts}) == len(texts)
