"""Decode steps that want nothing but tokens take a short way to the graph; nobody can tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from compute_plane.cuda.executor import CudaExecutor
from compute_plane.errors import GraphReplayError
from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import BlockCopy, ExecutionBatch, SamplingRow
from compute_plane.executor.sessions import SessionLedger
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import SamplingKey, StepBatch, StepHeader, StepReply
from compute_plane.executor.step_pipeline import StepPipeline
from compute_plane.executor.work import Answer, Work
from planes.errors import ValidationError
from tests.compute_plane.cuda.played_cuda import played_cuda, played_device
from tests.compute_plane.cuda.torch_executors import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    SPEC,
    RecordingDriver,
    torch_executor,
)
from tests.compute_plane.executor.slot_batches import start, step
from tests.golden.batch_driver import int32

LIMITS = SlotLimits(
    max_slots=8, max_rows=8, max_tokens=64, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS,
    vocab_size=SPEC.vocab_size, context_length=SPEC.context_length,
)  # fmt: skip
NUM_SLOTS = 6
BLOCKS_A_SLOT = 40
RUNGS = (8, 4, 2)
"""The largest first, as a plane captures them: they share the memory of their inputs then."""


class SizedDriver(RecordingDriver):
    """Notes how many bytes each copy to the device has."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: list[int] = []

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.sizes.append(len(target))
        super().copy(target, source)

    def take_sizes(self) -> list[int]:
        sizes, self.sizes = self.sizes, []
        return sizes


class Counted:
    """Lets an executor take the short way, or never, and counts."""

    def __init__(self, executor: CudaExecutor, *, may: bool = True) -> None:
        self.num_short = 0
        self._take, self._may = executor._decode.take, may
        executor._decode.take = self  # type: ignore[assignment,method-assign]

    def __call__(self, batch: ExecutionBatch) -> object:
        taken = self._take(batch) if self._may else None
        self.num_short += taken is not None
        return taken


class Controller:
    """Draws steps: all slots or some, in any order, now and then one that begins anew."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._has_one_key = seed % 3 == 0
        self._lengths = [0] * NUM_SLOTS
        self._held = [0] * NUM_SLOTS

    def _key(self) -> SamplingKey:
        drawn = self._random
        if self._has_one_key:  # so that only the tokens tell slots apart
            return SamplingKey(0.0, 1.0, 5, 0)
        key = SamplingKey(drawn.choice([0.0, 0.7, 1.2]), 0.9, drawn.randrange(1 << 63), 0)
        kind = drawn.randrange(48)
        if kind == 0:
            return replace(key, repetition_penalty=1.5)
        return replace(key, top_k=5, min_p=0.01) if kind < 16 else key

    def _begin(self, slot: int) -> tuple[object, tuple[int, int, int]]:
        length = self._random.randint(1, 9)
        self._lengths[slot] = length
        self._held[slot] = -(-length // BLOCK_SIZE)
        prompt = self._random.choices(range(SPEC.vocab_size), k=length)
        blocks = range(BLOCKS_A_SLOT * slot, BLOCKS_A_SLOT * slot + self._held[slot])
        return start(slot, prompt, blocks, self._key()), (slot, 0, length)

    def first(self) -> StepBatch:
        begun = [self._begin(slot) for slot in range(NUM_SLOTS)]
        return step([row for _, row in begun], starts=[one for one, _ in begun])  # type: ignore[misc]

    def next(self) -> StepBatch:
        drawn = self._random
        slots = list(range(NUM_SLOTS))
        kind = drawn.randrange(16)
        if kind == 0:
            drawn.shuffle(slots)
        elif kind == 1:
            slots = sorted(drawn.sample(slots, drawn.randint(1, NUM_SLOTS)))
        starts, rows, new_blocks = [], [], []
        restarted = drawn.choice(slots) if kind == 2 else None
        for slot in slots:
            if slot == restarted or self._lengths[slot] == BLOCKS_A_SLOT * BLOCK_SIZE:
                begun, row = self._begin(slot)
                starts.append(begun)
                new_blocks.append([])
            else:
                row = (slot, self._lengths[slot], 1)
                grows = self._lengths[slot] == self._held[slot] * BLOCK_SIZE
                new_blocks.append([BLOCKS_A_SLOT * slot + self._held[slot]] if grows else [])
                self._held[slot] += grows
                self._lengths[slot] += 1
            rows.append(row)
        return step(rows, starts=starts, new_blocks=new_blocks if any(new_blocks) else [])  # type: ignore[arg-type]


def pipelined(executor: CudaExecutor, batches: list[StepBatch]) -> list[list[int]]:
    """Send everything as fast as it is taken, two under way; the tokens."""
    sessions, answers = SessionLedger(), list[Answer]()
    pipeline = StepPipeline(executor, SlotTable(LIMITS), sessions, lambda _: None)
    session = sessions.open("test", take_over=False).session
    for step_id, batch in enumerate(batches, 1):
        header = StepHeader(session, sessions.epoch, step_id, step_id - 1)
        pipeline.take(Work(header, batch, answers.append, 0))
    pipeline.finish_all()
    tokens = []
    for answer in answers:
        assert isinstance(answer, StepReply)
        assert answer.result is not None, answer
        assert not answer.result.row_failures
        tokens.append(answer.result.sampled_token_ids.tolist())
    return tokens


def drawn_batches(seed: int, count: int) -> list[StepBatch]:
    controller = Controller(seed)
    return [controller.first(), *(controller.next() for _ in range(count))]


def with_graphs(driver: RecordingDriver | None = None) -> CudaExecutor:
    executor = torch_executor(driver=driver or RecordingDriver())
    for rung in RUNGS:
        executor.capture_decode_graph(rung)
    return executor


@pytest.mark.parametrize("seed", range(6))
def test_drawn_steps_give_the_tokens_of_the_ordinary_way(seed: int) -> None:
    batches = drawn_batches(seed, 60)
    found = []
    for may in (True, False):
        executor = with_graphs()
        counted = Counted(executor, may=may)
        found.append(pipelined(executor, batches))
        assert (counted.num_short > 15) == may
    assert found[0] == found[1]


def test_accesses_of_both_ways_to_one_memory_are_in_order() -> None:
    batches = drawn_batches(3, 40)
    with played_cuda() as world:
        driver, operations = played_device(world)
        with driver.computing():
            executor = torch_executor(driver=driver, operations=operations)
        for rung in RUNGS:
            executor.capture_decode_graph(rung)
        counted = Counted(executor)
        found = pipelined(executor, batches)
    assert world.races == []
    assert counted.num_short > 10
    assert found == pipelined(torch_executor(), batches)


def decode_batch(position: int = 5, rows: int = 2) -> ExecutionBatch:
    """Rows in two blocks of their own each."""
    ones = np.ones(rows, dtype=np.int32)
    return ExecutionBatch(
        input_tokens=int32(range(1, rows + 1)),
        positions=ones * position,
        seq_lens=ones * (position + 1),
        block_tables=np.arange(2 * rows, dtype=np.int32).reshape(rows, 2),
        is_prefill=np.zeros(rows, dtype=np.bool_),
        prompt_lens=ones,
        query_lens=ones,
        sampled_rows=int32(range(rows)),
        sampling=[SamplingRow(0.0, 1.0, row, 0, position + 1) for row in range(rows)],
    )


def shared_tables(batch: ExecutionBatch) -> ExecutionBatch:
    """As the steps of a run share them."""
    batch.block_tables.flags.writeable = False
    return batch


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
    assert sizes(replace(batch, block_tables=batch.block_tables.copy())) == [moving + 16]
    assert sizes(batch) == [moving + 16]  # an array that can be written may have been another
    other = [row._replace(seed=9) for row in batch.sampling]
    assert sizes(replace(batch, sampling=other)) == [whole]
    assert sizes(batch) == [whole]
    larger = shared_tables(decode_batch(rows=3))
    assert sizes(larger) == [executor._graphs.inputs(4).layout.num_bytes + 24]
    assert sizes(batch) == [whole + 16]  # the graph of four rows reads the same memory
    asks = [row._replace(num_logprobs=0) for row in batch.sampling]
    sizes(replace(batch, sampling=asks))  # the ordinary way
    assert sizes(batch) == [whole + 16]


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


def changed(name: str, row: int, value: int) -> Callable[[ExecutionBatch], ExecutionBatch]:
    def change(batch: ExecutionBatch) -> ExecutionBatch:
        column = getattr(batch, name).copy()
        column[row] = value
        return replace(batch, **{name: column})

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (changed("input_tokens", 1, SPEC.vocab_size), "input_tokens"),
        (changed("input_tokens", 1, -1), "input_tokens"),
        (changed("positions", 0, 4), "positions"),
        (changed("positions", 0, -1), "positions"),
        (changed("seq_lens", 0, 99), "seq_lens"),
        (changed("query_lens", 1, 0), "query_lens"),
        (changed("sampled_rows", 0, 2), "sampled_rows"),
        (lambda b: replace(b, block_tables=b.block_tables + NUM_BLOCKS), "block_tables"),
        (lambda b: replace(b, block_tables=b.block_tables[[0, 0]]), "block_tables"),
        (lambda b: replace(b, block_tables=b.block_tables[:1]), "block_tables"),
        (lambda b: replace(b, input_tokens=b.input_tokens[:1]), "input_tokens"),
        (lambda b: replace(b, sampling=b.sampling[:1]), "sampling"),
        (lambda b: replace(b, input_sources=int32([0, 5])), "input_sources"),
        (lambda b: replace(b, input_sources=int32([-2, 0])), "input_sources"),
        (lambda b: replace(b, input_sources=int32([0])), "input_sources"),
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
        {"copies": [BlockCopy(9, 10)]},
        {"digest_blocks": [9]},
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
    device = SizedDriver()
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
