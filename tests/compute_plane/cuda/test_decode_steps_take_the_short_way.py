"""Steps in which all rows decode take a short way to their graph; nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from compute_plane.cuda.decode_wants import keys_of
from compute_plane.errors import GraphReplayError
from compute_plane.executor.interface import (
    BlockCopy,
    ExecutionBatch,
    LogitBias,
    Penalties,
    SamplingRow,
)
from compute_plane.executor.sampling_rows import SamplingKeys, SamplingRows
from planes.errors import ValidationError
from tests.compute_plane.cuda.drawn_steps import (
    RUNGS,
    Counted,
    decode_batch,
    drawn_batches,
    pipelined,
    shared_tables,
    tokens_of,
    with_graphs,
)
from tests.compute_plane.cuda.played_cuda import played_cuda, played_device
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    RecordingDriver,
    torch_executor,
)
from tests.golden.batch_driver import int32


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_drawn_steps_give_the_tokens_of_the_ordinary_way(seed: int) -> None:
    batches = drawn_batches(seed, 60)
    found = []
    for may in (True, False):
        executor = with_graphs()
        counted = Counted(executor, may=may)
        found.append(tokens_of(pipelined(executor, batches)))
        assert (counted.num_short > 15) == may
    assert found[0] == found[1]


def test_steps_with_a_mask_go_the_ordinary_way_and_change_no_other_row() -> None:
    executor = with_graphs()
    executor._pools.device.zero_()
    counted = Counted(executor)
    batch = decode_batch()
    free = executor.execute(batch).next_tokens
    assert counted.num_short == 1
    allowed = np.packbits(np.arange(SPEC.vocab_size) == (free[1] + 1), bitorder="little")
    rows = [batch.sampling[0], batch.sampling[1]._replace(allowed_tokens=allowed)]
    found = executor.execute(replace(batch, sampling=rows)).next_tokens
    assert found.tolist() == [free[0], free[1] + 1]
    assert counted.num_short == 1
    of_slots = SamplingRows(
        SamplingKeys(tuple(keys_of(batch.sampling))), np.array([6, 6]), None, {1: allowed}
    )
    found = executor.execute(replace(batch, sampling=of_slots)).next_tokens
    assert found.tolist() == [free[0], free[1] + 1]
    assert counted.num_short == 1
    rows[1] = batch.sampling[1]._replace(allowed_tokens=allowed[:-1])
    with pytest.raises(ValidationError, match="a bit for each of"):
        executor.execute(replace(batch, sampling=rows))
    assert executor.execute(batch).next_tokens.tolist() == free.tolist()


def test_drafts_are_rows_of_one_table_and_go_the_short_way() -> None:
    found = []
    for may in (True, False):
        executor = with_graphs()
        executor._pools.device.zero_()
        counted = Counted(executor, may=may)
        batch = decode_batch(rows=3)
        tables = batch.block_tables[[0, 0, 1]]
        positions = batch.positions[[0, 0, 1]] - int32([1, 0, 0])
        drafted = replace(
            batch, block_tables=tables, positions=positions, seq_lens=positions + int32([1])
        )
        found.append(executor.execute(drafted).next_tokens.tolist())
        assert counted.num_short == may
        single = replace(decode_batch(rows=1), positions=positions[:1], seq_lens=positions[:1] + 1)
        single = replace(single, input_tokens=drafted.input_tokens[:1])
        assert executor.execute(single).next_tokens.tolist() == found[-1][:1]
    assert found[0] == found[1]


@pytest.mark.wide
def test_accesses_of_both_ways_to_one_memory_are_in_order() -> None:
    batches = drawn_batches(3, 40)
    with played_cuda() as world:
        driver, operations = played_device(world)
        with driver.computing():
            executor = torch_executor(driver=driver, operations=operations)
        for rung in RUNGS:
            executor.capture_decode_graph(rung)
        counted = Counted(executor)
        found = tokens_of(pipelined(executor, batches))
    assert world.races == []
    assert counted.num_short > 10
    assert found == tokens_of(pipelined(torch_executor(), batches))


@pytest.mark.parametrize("poisoned", [0, 1])
def test_a_row_without_finite_logits_fails_alone(poisoned: int) -> None:
    found = []
    for may in (True, False):
        executor = with_graphs()
        executor._pools.device.zero_()
        executor._pools.device[2 * poisoned].fill_(torch.nan)
        counted = Counted(executor, may=may)
        output = executor.execute(decode_batch())
        found.append((output.failed_rows, output.next_tokens.tolist()[1 - poisoned]))
        assert counted.num_short == may
    assert found[0] == found[1]
    assert list(found[0][0]) == [poisoned]


def changed(
    name: str, row: int | tuple[int, int], value: int
) -> Callable[[ExecutionBatch], ExecutionBatch]:
    def change(batch: ExecutionBatch) -> ExecutionBatch:
        column = getattr(batch, name).copy()
        column[row] = value
        return replace(batch, **{name: column})

    return change


BEYOND = LogitBias(int32([SPEC.vocab_size]), np.ones(1, dtype=np.float32))


def wanting(**wants: object) -> Callable[[ExecutionBatch], ExecutionBatch]:
    return lambda b: replace(b, sampling=[b.sampling[0], b.sampling[1]._replace(**wants)])


def wrapped(batch: ExecutionBatch) -> ExecutionBatch:
    """With a length that is one more than the largest number."""
    return changed("seq_lens", 0, -(2**31))(batch)


def too_long(_: ExecutionBatch) -> ExecutionBatch:
    """One row at a position that the model does not take, in a table that has room for it."""
    tables = np.arange(SPEC.context_length // BLOCK_SIZE + 1, dtype=np.int32)
    length = int32([SPEC.context_length + 1])
    one = replace(decode_batch(rows=1), block_tables=tables[None], seq_lens=length)
    return replace(one, positions=length - 1)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed("input_tokens", 1, SPEC.vocab_size), "input_tokens"),
        (changed("input_tokens", 1, -1), "input_tokens"),
        (changed("positions", 0, 4), "positions"),
        (changed("positions", 0, -1), "positions"),
        (changed("seq_lens", 0, 99), "seq_lens"),
        (lambda b: changed("positions", 0, 2**31 - 1)(wrapped(b)), "seq_lens"),
        (lambda b: changed("positions", 0, -1)(changed("seq_lens", 0, 0)(b)), "positions"),
        (lambda _: decode_batch(2 * BLOCK_SIZE), "seq_lens"),  # no block for it
        (too_long, "seq_lens"),
        (changed("query_lens", 1, 0), "query_lens"),
        (changed("sampled_rows", 0, 2), "sampled_rows"),
        (lambda b: replace(b, block_tables=b.block_tables + NUM_BLOCKS), "block_tables"),
        (changed("block_tables", 0, -1), "block_tables"),
        (changed("block_tables", (0, 1), NUM_BLOCKS), "block_tables"),  # the last one, half filled
        (lambda b: replace(b, block_tables=b.block_tables[[0, 0]]), "block_tables"),
        (lambda b: replace(b, block_tables=b.block_tables[:1]), "block_tables"),
        (lambda b: replace(b, input_tokens=b.input_tokens[:1]), "input_tokens"),
        (lambda b: replace(b, sampling=b.sampling[:1]), "sampling"),
        (lambda b: replace(b, input_sources=int32([0, 2])), "input_sources"),
        (lambda b: replace(b, input_sources=int32([-2, 0])), "input_sources"),
        (lambda b: replace(b, input_sources=int32([0])), "input_sources"),
        (lambda b: replace(b, copies=[BlockCopy(0, NUM_BLOCKS)]), "copies"),
        (wanting(logit_bias=BEYOND), "sampling.logit_bias.token_ids"),
        (wanting(num_logprobs=21), "sampling.num_logprobs"),
        (wanting(penalties=Penalties(1.1, 0.0, 0.0, int32([-1]), 1)), "sampling.penalties.history"),
    ],
)
def test_what_is_wrong_is_left_to_the_ordinary_way_which_says_so(
    change: Callable[[ExecutionBatch], ExecutionBatch], field: str
) -> None:
    executor = with_graphs()
    executor._pools.device.zero_()
    executor.execute(decode_batch())
    counted = Counted(executor)
    with pytest.raises(ValidationError) as info:
        executor.execute(change(decode_batch()))
    assert info.value.field == field
    assert executor.execute(decode_batch()).next_tokens.size == 2
    assert counted.num_short == 1


@pytest.mark.parametrize(
    "unusual",
    [
        {"prompt_logprob_rows": [0], "prompt_logprob_targets": [int32([1])]},
        {"sampled_rows": int32([]), "sampling": []},
        {"positions": np.array([5, 5])},
    ],
)
def test_what_is_unusual_takes_the_ordinary_way(unusual: dict[str, object]) -> None:
    executor = with_graphs()
    executor._pools.device.zero_()
    counted = Counted(executor)
    executor.execute(replace(decode_batch(), **unusual))  # type: ignore[arg-type]
    assert counted.num_short == 0


def test_a_failing_replay_leaves_the_buffers_free_and_the_memory_unknown() -> None:
    device = RecordingDriver()
    executor = with_graphs(device)
    executor._pools.device.zero_()
    batch = shared_tables(decode_batch())
    expected = executor.execute(batch).next_tokens.tolist()
    device.replay_failure = "an illegal memory access"
    for _ in range(3):
        with pytest.raises(GraphReplayError, match="2 rows failed: an illegal"):
            executor.execute(batch)
    device.replay_failure = None
    assert executor.execute(batch).next_tokens.tolist() == expected


def test_parameters_that_no_column_holds_are_refused_every_time() -> None:
    executor = with_graphs()
    executor._pools.device.zero_()
    batch = shared_tables(decode_batch())
    expected = executor.execute(batch).next_tokens.tolist()
    wrong = replace(batch, sampling=[row._replace(seed=-1) for row in batch.sampling])
    for _ in range(2):
        with pytest.raises(OverflowError):
            executor.execute(wrong)
    assert executor.execute(batch).next_tokens.tolist() == expected


def test_samples_count_as_rows_where_there_are_more_of_them() -> None:
    found = []
    for may in (True, False):
        executor = with_graphs()
        executor._pools.device.zero_()
        counted = Counted(executor, may=may)
        for sampled in ([0, 1, 1], [0, 1] * 5):  # more than any graph has rows
            ways = [SamplingRow(1.5, 1.0, 7 + k, 0, 6) for k in range(len(sampled))]
            batch = replace(decode_batch(), sampled_rows=int32(sampled), sampling=ways)
            found.append(executor.execute(batch).next_tokens.tolist())
        assert counted.num_short == may
    assert found[:2] == found[2:]


def test_blocks_of_which_a_digest_is_wanted_have_it_once_the_step_has_written_them() -> None:
    found = []
    for may in (True, False):
        executor = with_graphs()
        executor._pools.device.zero_()
        counted = Counted(executor, may=may)
        batch = replace(decode_batch(), digest_blocks=[1, 3, 5])
        found.append(executor.execute(batch).block_digests)
        assert counted.num_short == may
    assert found[0] == found[1] == [executor._pools.digest(block) for block in (1, 3, 5)]
    assert len(set(found[0])) == 3
