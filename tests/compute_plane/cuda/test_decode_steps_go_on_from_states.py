"""Decode steps of models with states: by the short way and from graphs, nobody can tell."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.decode_graphs import bytes_of_graphs
from compute_plane.cuda.decode_inputs import STATE_ROWS, GraphInputs, InputMemory, bytes_of_inputs
from compute_plane.cuda.drivers import CpuDriver
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.state_pool import OwnStates, StatePool, state_bytes
from compute_plane.executor.interface import ExecutionBatch, StateCopy
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.cuda.drawn_steps import (
    RUNGS,
    SPEC,
    Counted,
    decode_batch,
    drawn_batches,
    pipelined,
    tokens_of,
    with_graphs,
)
from tests.compute_plane.cuda.played_cuda import played_cuda, played_device
from tests.compute_plane.cuda.torch_executors import BLOCK_SIZE, RecordingDriver, torch_executor
from tests.compute_plane.executor.tiny_llama import (
    with_convolutions,
    with_delta_net,
    with_mamba2,
    with_states_beside,
)
from tests.golden.batch_driver import NUM_STATES, int32

RECURRENT = with_delta_net(SPEC)
KINDS = {
    "Gated DeltaNet": RECURRENT,
    "convolutions": with_convolutions(SPEC),
    "Mamba-2": with_mamba2(SPEC),
    "Mamba-2 beside attention": with_states_beside(SPEC),
}


def recurrent(spec: ModelSpec = RECURRENT) -> CudaExecutor:
    return with_graphs(spec=spec)


def states_of(executor: CudaExecutor) -> torch.Tensor:
    states = executor._pools.states
    assert states is not None
    return states.device


def drawn_states(executor: CudaExecutor) -> torch.Tensor:
    """Fill keys, values and states with numbers; return the states."""
    random = torch.Generator().manual_seed(7)
    executor._pools.device.normal_(generator=random)
    return states_of(executor).normal_(generator=random)


def with_states(batch: ExecutionBatch, states: list[int]) -> ExecutionBatch:
    return replace(batch, states=int32(states))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_drawn_steps_give_the_tokens_of_the_ordinary_way(seed: int, kind: str) -> None:
    batches = drawn_batches(seed, 40)
    found = []
    for may in (True, False):
        executor = recurrent(KINDS[kind])
        counted = Counted(executor, may=may)
        found.append(tokens_of(pipelined(executor, batches)))
        assert (counted.num_short > 10) == may
    assert found[0] == found[1]


@pytest.mark.spread(6)
@pytest.mark.parametrize("position", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_leaves_the_states_that_the_ordinary_way_leaves_and_no_others(
    position: int, kind: str
) -> None:
    """Also where rows begin, and rows of padding go on from nothing."""
    found = []
    for may in (True, False):
        executor = recurrent(KINDS[kind])
        counted = Counted(executor, may=may)
        states = drawn_states(executor)
        before = states.clone()
        batch = with_states(decode_batch(position, rows=3), [200, 0, 9])
        executor.execute(with_states(decode_batch(rows=4), [1, 2, 3, 4]))
        others = [*range(5, 9), *range(10, 200), *range(201, NUM_STATES)]
        tokens = executor.execute(batch).next_tokens.tolist()
        assert counted.num_short == 2 * may
        assert torch.equal(states[others], before[others])
        assert not (states[[0, 9, 200]] == before[[0, 9, 200]]).all(1).any()
        found.append((tokens, states[[0, 9, 200]].clone()))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=1e-4)


def test_states_are_copied_before_a_graph_runs() -> None:
    found = []
    for may in (True, False):
        executor = recurrent()
        counted = Counted(executor, may=may)
        states = drawn_states(executor)
        states[:8].zero_()
        batch = with_states(decode_batch(), [3, 5])
        copies = [StateCopy(100, 3), StateCopy(3, 5), StateCopy(101, 3)]
        output = executor.execute(replace(batch, state_copies=copies))
        assert counted.num_short == may
        found.append(output.next_tokens.tolist())
        assert states[[3, 5]].any(1).all()
        # The same again from what was copied there.
        states[3], states[5] = states[101], states[100]
        assert executor.execute(batch).next_tokens.tolist() == found[-1]
    assert found[0] == found[1]


class NotedCopies(CpuDriver):
    """Notes the copies of bytes that are asked of it: to, from, how many."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, int, int]] = []

    def copy_part(
        self, target: torch.Tensor, first: int, source: torch.Tensor, begin: int, num_bytes: int
    ) -> None:
        assert target is source
        self.copies.append((first, begin, num_bytes))
        super().copy_part(target, first, source, begin, num_bytes)


def test_copies_of_states_are_the_drivers_one_after_the_other() -> None:
    driver = NotedCopies()
    pool = StatePool(RECURRENT, driver, 10)
    pool.device[4] = 1
    size = state_bytes(RECURRENT)
    pool.run([StateCopy(4, 9), StateCopy(9, 2), StateCopy(9, 9)])
    assert driver.copies == [(9 * size, 4 * size, size), (2 * size, 9 * size, size)]
    assert pool.device[[2, 4, 9]].all()
    assert pool.device.any(1).sum() == 3


def test_rows_of_a_run_change_their_states_with_their_slots() -> None:
    """Of two steps that differ in nothing else the second one sends the other states."""
    executor = recurrent()
    counted = Counted(executor)
    states = drawn_states(executor)
    kept = states.clone()
    found = []
    for numbers in ([3, 5], [5, 3], [7, 8], [3, 5]):
        states.copy_(kept)
        batch = with_states(decode_batch(), numbers)
        batch.states.flags.writeable = False
        executor.execute(batch)
        found.append(states[numbers].clone())
    assert counted.num_short == 4
    assert torch.equal(found[0], found[3])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_what_is_read_of_rows_is_looked_at_once_a_run() -> None:
    own = OwnStates(10)
    batch = with_states(decode_batch(), [3, 4])
    batch.states.flags.writeable = False
    assert own.has(batch)
    assert own.has(batch)
    assert not own.has(replace(decode_batch(rows=3), states=batch.states))
    assert not own.has(replace(batch, state_copies=[StateCopy(3, 10)]))
    writable = with_states(batch, [3, 4])
    assert own.has(writable)
    writable.states[1] = 3
    assert not own.has(writable)
    assert OwnStates(0).has(decode_batch())


def test_inputs_of_graphs_have_rows_of_states_only_where_there_are_any() -> None:
    for has_states in (False, True):
        memory = InputMemory(RecordingDriver(), 4, 3, has_states=has_states)
        inputs = GraphInputs(memory, 2, longest=9)
        assert (STATE_ROWS in inputs.columns) == has_states
        assert (inputs.step.states is not None) == has_states
        needed = bytes_of_inputs(4, 3, has_states=has_states)
        assert needed - bytes_of_inputs(4, 3) == 4 * (16 + 4) * has_states
    plain = bytes_of_graphs(SPEC, [1, 4], BLOCK_SIZE)
    assert bytes_of_graphs(RECURRENT, [1, 4], BLOCK_SIZE) == plain + 4 * (16 + 4)
    rows = inputs.step.states
    assert rows is not None
    assert not rows.rows.any()  # of padding, which is no row
    assert rows.token_rows.tolist() == [0, 1]


def test_padding_that_was_a_row_is_none_again() -> None:
    executor = recurrent()
    states = drawn_states(executor)
    executor.execute(with_states(decode_batch(rows=4), [1, 2, 3, 4]))
    after = states[3:5].clone()
    executor.execute(with_states(decode_batch(rows=3), [1, 2, 7]))
    assert torch.equal(states[3:5], after)


@pytest.mark.wide
@pytest.mark.parametrize("spec", KINDS.values(), ids=KINDS)
def test_accesses_to_states_are_in_order(spec: ModelSpec) -> None:
    batches = drawn_batches(3, 30)
    with played_cuda() as world:
        driver, operations = played_device(world)
        with driver.computing():
            executor = torch_executor(spec, driver, operations=operations)
        for rung in RUNGS:
            executor.capture_decode_graph(rung)
        counted = Counted(executor)
        found = tokens_of(pipelined(executor, batches))
    assert world.races == []
    assert counted.num_short > 5
    assert found == tokens_of(pipelined(torch_executor(spec), batches))


def test_a_row_that_is_not_finite_fails_alone_and_its_state_is_cleared_by_who_begins_there() -> (
    None
):
    executor = recurrent()
    states = drawn_states(executor)
    states[3].fill_(torch.nan)
    output = executor.execute(with_states(decode_batch(), [3, 5]))
    assert list(output.failed_rows) == [0]
    begun = with_states(decode_batch(0), [3, 5])
    assert not executor.execute(begun).failed_rows
    assert np.isfinite(states[3].numpy()).all()
