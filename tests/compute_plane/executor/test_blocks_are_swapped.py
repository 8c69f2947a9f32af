from __future__ import annotations

from dataclasses import replace

import pytest

from compute_plane.errors import BatchRefused, InvalidBatch, UnsupportedBatch
from compute_plane.executor.step import StepBatch, TableCopy
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, alone, start, step

WITH_HOST_POOL = replace(LIMITS, num_host_blocks=4)


def test_a_sequence_goes_on_from_blocks_that_were_swapped_out_and_in():
    plane = Plane(WITH_HOST_POOL)
    expected = alone(b"texts", 3)
    plane.tokens(step([(0, 0, 5)], starts=[start(0, b"texts", [0, 1])]))
    swapped = step(
        [(1, 0, 8)], starts=[start(1, b"stranger", [0, 1])], released=[0],
        swap_out=[(0, 3), (1, 2)],
    )  # fmt: skip
    plane.tokens(swapped)
    known = [*b"texts", expected[0]]
    back = step([(0, 5, 1)], starts=[start(0, known, [7, 5])], swap_in=[(3, 7), (2, 5)])
    assert plane.tokens(back) == expected[1:2]
    assert plane.tokens(step([(0, 6, 1)])) == expected[2:]


def test_blocks_leave_before_they_are_overwritten_and_come_back_after_copies():
    plane = Plane(WITH_HOST_POOL)
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"AAAA", [0, 1])]))
    plane.tokens(step([(1, 0, 4)], starts=[start(1, b"BBBB", [2, 3])]))
    # Block 2 leaves, becomes a copy of block 0; then the host's block comes back into block 0.
    batch = step(
        [(0, 4, 1)], swap_out=[(2, 0)], copies=[TableCopy(0, 0, 0, 2)], released=[1],
        swap_in=[(0, 0)],
    )  # fmt: skip
    assert plane.tokens(batch) == alone(b"AAAA", 2)[1:]
    assert plane.executor.pool[0].tolist() == [*b"BBBB"]
    assert plane.executor.pool[2].tolist() == [*b"AAAA"]


def test_swaps_of_a_step_without_rows_are_made_in_order_before_the_next():
    plane = Plane(WITH_HOST_POOL)
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"AAAA", [0, 1])]))
    plane.tokens(step([(1, 0, 4)], starts=[start(1, b"BBBB", [2, 3])]))
    plane.tokens(step(swap_out=[(0, 1)], swap_in=[(1, 9)]))
    plane.tokens(step(swap_out=[(2, 1)]))
    plane.tokens(step([(1, 4, 1)]))
    assert plane.executor.pool[9].tolist() == [*b"AAAA"]
    assert plane.executor.host_pool[1].tolist() == [*b"BBBB"]


@pytest.mark.parametrize(
    ("batch", "field"),
    [
        (step(swap_out=[(64, 0)]), "swap_out[0].source_block"),
        (step(swap_out=[(0, 4)]), "swap_out[0].destination_block"),
        (step(swap_out=[(0, 1), (1, 1)]), "swap_out[1].destination_block"),
        (step(swap_in=[(4, 0)]), "swap_in[0].source_block"),
        (step(swap_in=[(0, 64)]), "swap_in[0].destination_block"),
        (step(swap_in=[(0, 5), (1, 5)]), "swap_in[1].destination_block"),
        (step(swap_in=[(0, 9)], copies=[TableCopy(0, 0, 0, 9)]), "swap_in[0].destination_block"),
    ],
)
def test_a_swap_that_leaves_a_pool_or_writes_a_block_twice_is_refused(
    batch: StepBatch, field: str
) -> None:
    plane = Plane(WITH_HOST_POOL)
    plane.tokens(step([(0, 0, 4)], starts=[start(0, b"text", [0, 1])]))
    with pytest.raises(InvalidBatch) as refusal:
        plane.run(batch)
    assert refusal.value.field == field


@pytest.mark.parametrize("batch", [step(swap_out=[(0, 0)]), step(swap_in=[(0, 0)])])
def test_a_plane_without_a_host_pool_refuses_swaps(batch: StepBatch) -> None:
    with pytest.raises(UnsupportedBatch, match="no host pool") as refusal:
        Plane().run(batch)
    assert isinstance(refusal.value, BatchRefused)
