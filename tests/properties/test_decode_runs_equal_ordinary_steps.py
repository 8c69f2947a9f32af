"""Steps that continue the one before take a short way through `SlotTable`; nobody can tell."""

from __future__ import annotations

import random
from dataclasses import astuple, fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compute_plane.errors import BatchRefused, InvalidBatch
from compute_plane.executor.decode_run import DecodeRun, PreparedStep
from compute_plane.executor.interface import ExecutionBatch
from compute_plane.executor.sampling_rows import SamplingRows
from compute_plane.executor.simulated import SimulatedExecutor
from compute_plane.executor.slots import SlotTable
from compute_plane.executor.step import SamplingKey, StepBatch
from tests.compute_plane.executor.slot_batches import LIMITS, Plane, start, step

NUM_SLOTS = 4
BLOCKS_A_SLOT = 10
PENALISED = SamplingKey(0.7, 0.9, 5, 0, repetition_penalty=1.5)

DISTURBANCES = (
    "position",
    "order",
    "missing row",
    "unsampled row",
    "given token",
    "two tokens",
    "twice the same slot",
    "surplus block",
    "missing block",
    "misplaced block",
    "held block",
    "same block",
    "block outside",
    "restart",
    "release",
    "row fails",
    "executor fails",
)


class OrdinaryTable(SlotTable):
    """A table that knows no short way."""

    def _begin_run(self, prepared: PreparedStep) -> DecodeRun | None:  # noqa: ARG002
        return None


class Side:
    """One table with an executor behind it; `run` says all that can be seen of a step."""

    def __init__(self, table: SlotTable) -> None:
        self.table = table
        self.num_short = 0
        self._executor = SimulatedExecutor(
            num_blocks=LIMITS.num_blocks, block_size=LIMITS.block_size
        )

    def run(self, batch: StepBatch, disturbance: str) -> list[object]:
        try:
            prepared = self.table.prepare(batch)
        except BatchRefused as refusal:
            return [type(refusal), refusal.field, refusal.message]
        self.num_short += prepared.run is not None
        if prepared.batch is None:
            return ["nothing to run", _plain(self.table.complete(prepared, None))]
        if disturbance == "executor fails":
            self.table.poison(prepared)
            return ["failed", _plain(prepared.batch)]
        output = self._executor.execute(prepared.batch)
        if disturbance == "row fails":
            output = replace(output, failed_rows={0: "not finite"})
        return [_plain(prepared.batch), _plain(self.table.complete(prepared, output))]


def _plain(value: object) -> object:
    """Return values that compare by content: arrays as lists, with their type."""
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, ExecutionBatch):
        tables = [
            value.block_tables[row, : -(-int(seq_len) // LIMITS.block_size)].tolist()
            for row, seq_len in enumerate(value.seq_lens)
        ]
        names = [item.name for item in fields(value) if item.name != "block_tables"]
        return [tables, *(_plain(getattr(value, name)) for name in names)]
    if isinstance(value, tuple | list | SamplingRows):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return _plain(astuple(value))
    return value


def disturb_blocks(new_blocks: list[list[int]], disturbance: str, newest: int) -> None:
    """Give rows that enter a block another one, or none. `newest`: block of some row."""
    growing = [slot for slot, blocks in enumerate(new_blocks) if blocks]
    match disturbance:
        case "missing block" if growing:
            new_blocks[growing[0]] = []
        case "misplaced block" if 0 < len(growing) < NUM_SLOTS:
            staying = next(slot for slot in range(NUM_SLOTS) if slot not in growing)
            new_blocks[staying], new_blocks[growing[0]] = new_blocks[growing[0]], []
        case "held block" if growing:
            new_blocks[growing[0]] = [newest]
        case "same block" if len(growing) > 1:
            new_blocks[growing[0]] = new_blocks[growing[1]]
        case "block outside" if growing:
            new_blocks[growing[0]] = [LIMITS.num_blocks]


class Controller:
    """Sends decode steps of all its slots, some of them disturbed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        # Rows that enter blocks together make longer runs.
        longest = self._random.choice([1, 6])
        self.lengths = [self._random.randint(1, longest) for _ in range(NUM_SLOTS)]
        self._held = [1] * NUM_SLOTS

    def first(self) -> StepBatch:
        rows = [(slot, 0, length) for slot, length in enumerate(self.lengths)]
        starts = []
        for slot, length in enumerate(self.lengths):
            self._held[slot] = -(-length // LIMITS.block_size)
            sampling = PENALISED if slot == 1 else SamplingKey(0.0, 1.0, slot, 0)
            starts.append(start(slot, b"prompt"[:length], self._blocks(slot), sampling))
        return step(rows, starts=starts)

    def _blocks(self, slot: int) -> list[int]:
        return [BLOCKS_A_SLOT * slot + i for i in range(self._held[slot])]

    def next(self, disturbance: str) -> StepBatch:
        """The next step, disturbed or not; the disturbed ones may be refused."""
        rows, new_blocks = [], []
        for slot, length in enumerate(self.lengths):
            grows = length == self._held[slot] * LIMITS.block_size or (
                disturbance == "surplus block" and slot == 2
            )
            rows.append([slot, length, 1])
            new_blocks.append([BLOCKS_A_SLOT * slot + self._held[slot]] if grows else [])
        victim = self._random.randrange(NUM_SLOTS)
        sampled = list(range(NUM_SLOTS))
        extra: dict[str, object] = {}
        newest = BLOCKS_A_SLOT * victim + self._held[victim] - 1
        disturb_blocks(new_blocks, disturbance, newest)
        match disturbance:
            case "position":
                rows[victim][1] += self._random.choice([-1, 1])
            case "order":
                rows.reverse()
                new_blocks.reverse()
            case "missing row":
                del rows[victim], new_blocks[victim]
                sampled.pop()
            case "unsampled row":
                del sampled[victim]
            case "given token":
                extra["tokens"] = [[65] if slot == victim else [] for slot in range(NUM_SLOTS)]
            case "two tokens":
                rows[victim][2] = 2
            case "twice the same slot":
                rows[victim][0] = rows[victim - 1][0]
            case "restart":
                extra["starts"] = [start(victim, b"again"[: self.lengths[victim]], [1])]
            case "release":
                extra["released"] = [victim]
        if not any(new_blocks):
            new_blocks = []
        return step([tuple(row) for row in rows], sampled=sampled, new_blocks=new_blocks, **extra)

    def note_taken(self, batch: StepBatch) -> None:
        """Follow a batch that was not refused."""
        for i, slot in enumerate(batch.slots.tolist()):
            self.lengths[slot] = int(batch.positions[i] + batch.query_lens[i])
            if batch.new_block_counts.size:
                self._held[slot] += int(batch.new_block_counts[i])


def compare(seed: int, disturbances: list[str]) -> Side:
    """Run the same steps both ways; the side that may take the short one."""
    short, ordinary = Side(SlotTable(LIMITS)), Side(OrdinaryTable(LIMITS))
    controller = Controller(seed)
    batch, disturbance = controller.first(), ""
    for following in [*disturbances, ""]:
        seen = short.run(batch, disturbance)
        assert seen == ordinary.run(batch, disturbance)
        if not isinstance(seen[0], type):
            controller.note_taken(batch)
        batch, disturbance = controller.next(following), following
    assert ordinary.num_short == 0
    return short


@pytest.mark.wide
@given(
    seed=st.integers(0, 2**32),
    disturbances=st.lists(st.sampled_from(["", "", "", *DISTURBANCES]), min_size=4, max_size=34),
)
@settings(max_examples=80, deadline=None)
def test_no_batch_and_no_answer_differs_from_the_ordinary_way(seed, disturbances):
    compare(seed, disturbances)


SEEDS = [range(4), pytest.param(range(4, 20), marks=pytest.mark.slow)]


@pytest.mark.spread(3)
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_a_disturbed_run_goes_on_as_the_ordinary_way_does(disturbance, seeds):
    for seed in seeds:
        for num_before in range(3, 8):
            compare(seed, [*[""] * num_before, disturbance, *[""] * 6])


@pytest.mark.wide
def test_a_surplus_block_behind_a_surplus_block_goes_where_the_ordinary_way_puts_it():
    for seed in range(8):
        for gap in range(6):
            between = [""] * gap
            compare(seed, ["", "", "surplus block", *between, "surplus block", *[""] * 6])


@pytest.mark.parametrize("num_before", range(5, 12, 2))
def test_a_block_that_a_row_got_on_the_way_is_held_like_any_other(num_before: int):
    for seed in range(8):
        compare(seed, [*[""] * num_before, "held block", *[""] * 6])


def test_steps_take_the_short_way_also_into_new_blocks():
    # The second step begins the run: it is the first one in which all rows decode.
    assert compare(3, [""] * 20).num_short == 19


def test_a_lone_row_takes_the_ordinary_way_only_where_it_enters_a_block_it_holds():
    plane = Plane()
    plane.tokens(step([(0, 0, 1)], starts=[start(0, b"x", list(range(8)))]))
    short = []
    for position in range(1, 24):
        prepared = plane.slots.prepare(step([(0, position, 1)]))
        short.append(prepared.run is not None)
        assert prepared.batch is not None
        plane.slots.complete(prepared, plane.executor.execute(prepared.batch))
    # Position 1 continues a prompt; 4, 8, … lie in the next block.
    assert [i for i, is_short in enumerate(short, 1) if not is_short] == [1, 4, 8, 12, 16, 20]


def test_a_run_ends_where_the_longest_sequence_does():
    limits = replace(LIMITS, context_length=6)
    plane = Plane(limits)
    plane.tokens(step([(0, 0, 1)], starts=[start(0, b"x", [0, 1])]))
    for position in range(1, 6):
        plane.tokens(step([(0, position, 1)]))
    with pytest.raises(InvalidBatch, match="must be below 6"):
        plane.slots.prepare(step([(0, 6, 1)]))


def test_a_sample_for_another_slot_begins_no_run():
    plane = Plane()
    known = [*b"x", *plane.tokens(step([(0, 0, 1)], starts=[start(0, b"x", [0])]))]
    # Slot 1 knows what slot 0 knows, and is given the token that follows.
    plane.tokens(step([(0, 1, 1)], sampled_slots=[1], starts=[start(1, known, [0])]))
    with pytest.raises(InvalidBatch, match="knows 2"):
        plane.slots.prepare(step([(0, 2, 1)]))


def test_what_the_steps_of_a_run_share_cannot_be_written_by_an_executor():
    plane = Plane()
    plane.tokens(step([(0, 0, 1)], starts=[start(0, b"x", [0])]))
    for position in (1, 2):
        plane.tokens(step([(0, position, 1)]))
    with pytest.raises(ValueError, match="read-only"):
        plane.batches[-1].block_tables[0, 0] = 7


@pytest.mark.parametrize("name", [item.name for item in fields(StepBatch)])
def test_a_batch_that_differs_in_any_part_continues_no_run(name):
    plane = Plane()
    plane.tokens(step([(0, 0, 1)], starts=[start(0, b"x", [0])]))
    plane.tokens(step([(0, 1, 1)]))
    run, batch = plane.slots._run, step([(0, 2, 1)])
    assert run is not None
    slots = plane.slots
    assert run.is_continued_by(batch, slots._numbers)
    is_column = isinstance(getattr(batch, name), np.ndarray)
    other = replace(batch, **{name: np.array([3]) if is_column else ("something",)})
    assert not run.is_continued_by(other, slots._numbers)
