"""What a decode step sends to its graph's inputs: what is new, and what may lie there no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compute_plane.cuda import decode_steps
from compute_plane.cuda.decode_inputs import MAX_VIEWS, GraphInputs, InputMemory
from compute_plane.executor.interface import ExecutionBatch, SamplingRow
from tests.compute_plane.cuda.drawn_steps import Counted, decode_batch, shared_tables, with_graphs
from tests.compute_plane.cuda.torch_executors import BLOCK_SIZE, RecordingDriver
from tests.golden.batch_driver import int32


class SizedDriver(RecordingDriver):
    """Notes how many bytes each copy to the device has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: list[int] = []
        self.copy_failure: str | None = None

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.sizes.append(len(target))
        super().copy(target, source)
        if self.copy_failure is not None:
            raise RuntimeError(self.copy_failure)

    def take_sizes(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


def test_a_step_like_the_one_before_sends_nothing_but_what_moves() -> None:
    device = SizedDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    batch = shared_tables(decode_batch())
    whole = executor._graphs.inputs(2).layout.num_bytes
    moving = whole - executor._graphs.inputs(2).first_moving

    def sizes(batch: ExecutionBatch) -> list[int]:
        device.take_sizes()
        executor.execute(batch)
        return device.take_sizes()

    assert sizes(batch) == [whole + 16]
    assert sizes(batch) == [moving]
    writable = replace(batch, block_tables=batch.block_tables.copy())
    assert sizes(writable) == [moving + 16]
    assert sizes(writable) == [moving + 16]  # what can be written may have been another
    assert sizes(batch) == [moving + 16]
    other = [row._replace(seed=9) for row in batch.sampling]
    assert sizes(replace(batch, sampling=other)) == [whole]
    assert sizes(batch) == [whole]
    larger = shared_tables(decode_batch(rows=3))
    assert sizes(larger) == [executor._graphs.inputs(4).layout.num_bytes + 24]
    assert sizes(batch) == [whole + 16]  # the graph of four rows reads the same memory
    asks = [row._replace(num_logprobs=0) for row in batch.sampling]
    assert sizes(replace(batch, sampling=asks)) == [whole]
    assert sizes(batch) == [whole]


def test_like_samples_of_other_rows_or_in_another_graph_are_sent_again() -> None:
    executor = with_graphs()
    executor._pools.device.zero_()
    alike = [SamplingRow(0.0, 1.0, 0, 0, 6)] * 2
    pair = shared_tables(replace(decode_batch(), sampling=alike))
    three = shared_tables(decode_batch(rows=3))
    of_three = executor.execute(three).next_tokens.tolist()
    assert len(set(of_three)) == 3
    for batch, sampled in ((pair, [0, 1]), (pair, [1, 0]), (three, [1, 0]), (three, [2, 1])):
        one = replace(batch, sampled_rows=int32(sampled), sampling=alike)
        assert executor.execute(one).next_tokens.tolist() == [of_three[row] for row in sampled]


def test_a_graph_captured_between_two_like_steps_makes_the_second_send_everything() -> None:
    """The inputs of graphs share a memory, and capturing writes there."""
    device = SizedDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    batch = shared_tables(decode_batch())
    expected = executor.execute(batch).next_tokens.tolist()
    device.take_sizes()
    executor.capture_decode_graph(1)
    assert executor.execute(batch).next_tokens.tolist() == expected
    assert device.take_sizes() == [executor._graphs.inputs(2).layout.num_bytes + 16]


def test_views_of_tables_are_kept_for_a_bounded_number_of_shapes() -> None:
    inputs = GraphInputs(InputMemory(RecordingDriver(), 2, MAX_VIEWS + 9), 2, longest=1)
    for width in range(1, MAX_VIEWS + 10):
        inputs.take_tables(0, 2, width)
    assert len(inputs._sent_tables) == 9


def test_a_copy_that_fails_leaves_nothing_to_rely_on() -> None:
    """Another graph's inputs may lie there by then."""
    device = SizedDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    drawn = [SamplingRow(1.5, 1.0, 7 + row, 0, 6) for row in range(2)]
    batch = shared_tables(replace(decode_batch(), sampling=drawn))
    expected = executor.execute(batch).next_tokens.tolist()
    device.copy_failure = "an illegal memory access"
    with pytest.raises(RuntimeError, match="an illegal"):
        executor.execute(replace(decode_batch(rows=3), sampled_rows=int32([2, 0]), sampling=drawn))
    device.copy_failure = None
    assert executor.execute(batch).next_tokens.tolist() == expected


def test_shared_tables_may_hold_blocks_that_a_later_step_is_the_first_to_read() -> None:
    found = []
    for may in (True, False):
        executor = with_graphs()
        counted = Counted(executor, may=may)
        executor._pools.device.normal_(generator=torch.Generator().manual_seed(7))
        before = shared_tables(decode_batch(BLOCK_SIZE - 1))
        after = decode_batch(BLOCK_SIZE)
        # Blocks that a graph which never got them would not read.
        later = replace(after, block_tables=before.block_tables)
        found.append([executor.execute(one).next_tokens.tolist() for one in (before, later)])
        found[-1].append(executor._pools.device.double().sum().item())
        assert counted.num_short == 2 * may
    assert found[0] == found[1]


def test_what_is_kept_for_steps_of_many_kinds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_steps, "MAX_WORKS", 3)
    executor = with_graphs()
    executor._pools.device.zero_()
    memories = set()
    for rows in range(1, 6):
        executor.execute(decode_batch(rows=rows))
        works = executor._decode._works.values()
        assert len(works) <= 3
        memories |= {work.memory.data_ptr() for work in works}
    assert len(memories) == 1  # results of all kinds lie in their berth's
