"""Steps that no graph holds: of tables in which one row is long, what rows use is sent."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.batch_layout import BatchLayout, StepTensors
from compute_plane.cuda.columns import Layout
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.staging import StagingRing
from compute_plane.executor import block_tables
from compute_plane.executor.interface import ExecutionBatch, SamplingRow
from compute_plane.executor.token_layout import PoolShape
from tests.compute_plane.cuda.test_decode_steps_send_what_is_new import SizedDriver
from tests.compute_plane.cuda.torch_executors import torch_executor
from tests.golden.batch_driver import int32

BLOCK_SIZE = 4
SHAPE = PoolShape(num_blocks=4000, block_size=BLOCK_SIZE, vocab_size=131)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is so little that all of it is sent."""
    monkeypatch.setattr(block_tables, "FEW_ENTRIES", 0)


def mixed_batch(lengths: list[int], query_lens: list[int]) -> ExecutionBatch:
    """Rows of such lengths, in blocks of their own; entries that they do not use are none."""
    width = -(-max(lengths) // BLOCK_SIZE)
    tables = np.full((len(lengths), width), -1, dtype=np.int32)
    used = [-(-length // BLOCK_SIZE) for length in lengths]
    for row, count in enumerate(used):
        tables[row, :count] = np.arange(count) + sum(used[:row])
    spans = [range(end - count, end) for end, count in zip(lengths, query_lens, strict=True)]
    positions = [position for span in spans for position in span]
    return ExecutionBatch(
        input_tokens=np.zeros(len(positions), dtype=np.int32),
        positions=int32(positions),
        seq_lens=int32(lengths),
        block_tables=tables,
        is_prefill=np.array(query_lens) > 1,
        prompt_lens=int32(lengths),
        query_lens=int32(query_lens),
        sampled_rows=int32([]),
    )


def step_of(batch: ExecutionBatch) -> tuple[StepTensors, int, BatchLayout]:
    """The step on the device, and how many bytes were sent for it."""
    layout = BatchLayout(batch, SHAPE, max_tokens=4096, tile_tokens=(16,))
    late = layout.late_tokens(np.arange(layout.num_decode))
    columns = layout.columns(late)
    ring = StagingRing(CpuDriver(), 1)
    inputs = Layout.of(columns)
    sent = ring.upload(ring.take(), inputs, columns, layout.rooms)
    return layout.tensors(sent), inputs.num_bytes, layout


def assert_has_tables(found: torch.Tensor, batch: ExecutionBatch, rows: list[int]) -> None:
    assert found.shape[0] == len(rows)
    assert found.is_contiguous()
    for table, row in zip(found.tolist(), rows, strict=True):
        count = -(-int(batch.seq_lens[row]) // BLOCK_SIZE)
        assert table[:count] == batch.block_tables[row, :count].tolist()


LONG = 1600
CASES = [
    ([5, 9, LONG, 7, 3, 12, 1, 2, 3, 9, 30], [1] * 9 + [3, 5]),
    ([5, 1, 9, 7, 1, 12, 6, 2, LONG, 30, 8, 9], [1, 1, 3, 5, 1, 2, 3, 2, 7, 7, 8, 9]),
    ([LONG, 9, 8, 7, 5, 12, 6, 2, 1, 30, 8, 3, 3, 3, 3, LONG], [1] * 7 + [2, 1, 3, 1] + [3] * 5),
    ([9, 3, 4, 4, 2, 2, 2, 2, LONG], [2] * 8 + [7]),
    ([9, 3, 4, 4, 2, 2, 2, 2, LONG], [1] * 9),
]


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(("lengths", "query_lens"), CASES)
def test_rows_of_every_kind_find_their_tables(lengths: list[int], query_lens: list[int]) -> None:
    batch = mixed_batch(lengths, query_lens)
    step, _, layout = step_of(batch)
    decode = [row for row, count in enumerate(query_lens) if count == 1]
    prefill = [row for row, count in enumerate(query_lens) if count > 1]
    assert layout.rooms
    assert_has_tables(step.decode_tables, batch, decode)
    if prefill:
        assert step.prefill is not None
        assert_has_tables(step.prefill.block_tables, batch, prefill)
        assert step.late is not None
        assert_has_tables(step.late.step.decode_tables, batch, decode)


def test_what_is_sent_is_no_rectangle_of_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed_batch([5] * 30 + [LONG] + [8] * 3, [1] * 31 + [4] * 3)
    _, whole, layout = step_of(batch)
    assert not layout.rooms
    monkeypatch.setattr(block_tables, "FEW_ENTRIES", 0)
    _, num_bytes, layout = step_of(batch)
    # The rows that decode, and as those that go on alone.
    assert layout.rooms == dict.fromkeys(("decode_tables", "late_tables"), (31, LONG // BLOCK_SIZE))
    assert whole - num_bytes > 2 * 4 * 31 * LONG // BLOCK_SIZE - 2 * 12 * (LONG // BLOCK_SIZE + 31)


@pytest.mark.usefixtures("few")
def test_what_is_sent_and_what_it_is_put_together_in_are_half_as_much_again_at_most() -> None:
    # As many long rows as make a rectangle just the dearer choice.
    for num_long in range(1, 9):
        lengths = [LONG] * num_long + [4] * 8
        _, num_bytes, layout = step_of(mixed_batch(lengths, [1] * len(lengths)))
        whole = 4 * len(lengths) * LONG // BLOCK_SIZE
        room = 4 * sum(rows * width for rows, width in layout.rooms.values())
        assert num_bytes + room <= whole * 3 // 2 + 2000
        assert bool(layout.rooms) == (num_long <= 1)


def test_answers_are_the_same_however_tables_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, query_lens = [5, 9, 200, 7, 3, 12, 1, 2, 3, 9, 30], [1] * 9 + [3, 5]
    batch = replace(
        mixed_batch(lengths, query_lens),
        sampled_rows=int32(range(11)),
        sampling=[SamplingRow(0.0, 1.0, row, 0, length) for row, length in enumerate(lengths)],
    )
    found = []
    for few_entries in (0, 16384):
        monkeypatch.setattr(block_tables, "FEW_ENTRIES", few_entries)
        device = SizedDriver()
        executor = torch_executor(driver=device)
        executor._pools.device.normal_(generator=torch.Generator().manual_seed(7))
        tokens = executor.execute(batch).next_tokens.tolist()
        found.append((tokens, sum(device.take_sizes())))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1]
    assert len(set(found[0][0])) > 3
