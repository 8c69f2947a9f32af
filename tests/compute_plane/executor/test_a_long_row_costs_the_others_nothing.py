"""What a step's checks look at is what its rows have, not rows times the longest of them."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import pytest

from compute_plane.errors import InvalidBatch
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import StepBatch, TableCopy
from compute_plane.executor.write_checks import WriteChecker
from tests.compute_plane.executor.slot_batches import LIMITS, start, step

NUM_ROWS = 64
LONG, SHORT = 8192, 16  # blocks of a row
BLOCK = LIMITS.block_size
ROOMY = replace(
    LIMITS,
    max_slots=NUM_ROWS,
    max_rows=NUM_ROWS,
    max_tokens=2 * NUM_ROWS,
    num_blocks=LONG + NUM_ROWS * SHORT + 1,
    context_length=LONG * BLOCK,
)


def started() -> StepBatch:
    """One long row and many short ones, each with a prefix that the cache had."""
    starts, rows, first = [], [], 0
    for slot in range(NUM_ROWS):
        count = LONG if slot == 0 else SHORT
        num_tokens = count * BLOCK - 1
        starts.append(start(slot, [65] * num_tokens, range(first, first + count)))
        rows.append((slot, num_tokens - 1, 1))
        first += count
    return step(rows, starts=starts)


def test_one_long_row_among_short_ones_takes_no_rectangle(monkeypatch) -> None:
    peaks = []
    check = WriteChecker.check

    def measured(self: WriteChecker, *given: object) -> None:
        tracemalloc.start()
        check(self, *given)  # type: ignore[arg-type]
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(WriteChecker, "check", measured)
    batch = started()
    num_entries = LONG + (NUM_ROWS - 1) * SHORT
    SlotTable(ROOMY).prepare(batch)
    (peak,) = peaks
    assert peak < 32 * num_entries < 8 * NUM_ROWS * LONG / 10


@pytest.mark.parametrize("holder", [1, 2, NUM_ROWS - 1])
def test_who_holds_what_is_written_is_found_among_rows_of_any_length(holder: int) -> None:
    slots, batch = SlotTable(ROOMY), started()
    slots.prepare(batch)
    tables = [item.block_ids.tolist() for item in batch.starts]
    rows = [(slot, len(table) * BLOCK - 1, 1) for slot, table in enumerate(tables)]
    others = [[65]] * (NUM_ROWS - 1)
    wanted = tables[holder][3]
    copy = TableCopy(0, LONG - 1, tables[0][-1], wanted)
    with pytest.raises(InvalidBatch, match=f"block {wanted} is in the table of slot {holder}"):
        slots.prepare(step(rows[1:], tokens=others, copies=[copy]))
    wrong = start(0, [65] * (2 * BLOCK), [ROOMY.num_blocks - 1, wanted])
    rows[0] = (0, BLOCK, BLOCK)
    with pytest.raises(
        InvalidBatch, match=f"block {wanted} is entry 3 of the table of row {holder}"
    ):
        slots.prepare(step(rows, starts=[wrong], tokens=[[], *others]))
