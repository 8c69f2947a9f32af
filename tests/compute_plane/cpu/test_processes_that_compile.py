"""How many processes compile kernels: as many as there are threads, and memory for."""

from __future__ import annotations

import pytest

from compute_plane.cpu import step_table
from compute_plane.cpu.step_table import StepTable, num_compilers
from compute_plane.cpu.thread_team import ThreadTeam
from kernels.cpu.load_ahead import WORKER_BYTES
from kernels.cpu.operation import Operation


@pytest.mark.parametrize(
    ("free_bytes", "expected"),
    [(None, 6), (100 * WORKER_BYTES, 6), (3 * WORKER_BYTES - 1, 2), (0, 0)],
)
def test_no_more_than_threads_and_than_there_is_memory_for(
    free_bytes: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_table, "available_memory_bytes", lambda: free_bytes)
    assert num_compilers(6) == expected


def test_a_table_loads_its_operations_and_others_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[Operation], int]] = []
    monkeypatch.setattr(step_table, "available_memory_bytes", lambda: 2 * WORKER_BYTES)
    monkeypatch.setattr(step_table, "load_all", lambda *given: asked.append(given))
    first, second, third = ThreadTeam.OPERATIONS
    table = StepTable()
    for operation in (first, second, first):
        table.add(operation, 1, {})

    table.load([third], 4)

    assert asked == [([first, second, first, third], 2)]
    assert [int(record[0]) for record in table._records] == [
        first.address, second.address, first.address,
    ]  # fmt: skip
