"""Whatever is sent of block tables, the device has what a step uses of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from compute_plane.cuda import table_updates
from compute_plane.cuda.decode_inputs import GraphInputs, InputMemory
from compute_plane.cuda.executor import CudaExecutor
from compute_plane.cuda.table_updates import KnownTables, known_after, update_tables
from compute_plane.errors import GraphReplayError
from compute_plane.executor import block_tables
from compute_plane.executor.interface import ExecutionBatch
from compute_plane.executor.step import StepBatch
from tests.compute_plane.cuda.drawn_steps import (
    NUM_SLOTS,
    Counted,
    drawn_batches,
    pipelined,
    tokens_of,
    with_graphs,
)
from tests.compute_plane.cuda.test_decode_steps_send_what_is_new import SizedDriver
from tests.compute_plane.cuda.torch_executors import BLOCK_SIZE, RecordingDriver
from tests.compute_plane.executor.slot_batches import start, step

MOST_ROWS, MOST_ENTRIES = 8, 60
ENTRY_BYTES, BLOCK_BYTES = 12, 4


@pytest.fixture(params=[0, 16384])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many entries are sent all again, and not those that are new."""
    for module in (block_tables, table_updates):
        monkeypatch.setattr(module, "FEW_ENTRIES", request.param)
    return int(request.param)


class Device:
    """The tables of graphs of several sizes in one memory, and what they are told."""

    def __init__(self) -> None:
        self.memory = InputMemory(RecordingDriver(), MOST_ROWS, MOST_ENTRIES)
        self.inputs = [GraphInputs(self.memory, rows, longest=1) for rows in (MOST_ROWS, 4, 2)]
        self.memory.tables.fill_(-7)
        self.num_bytes = 0

    def take(self, inputs: GraphInputs, tables: np.ndarray, used: np.ndarray) -> None:
        known = self.memory.tables_known
        update = update_tables(known, tables, used, MOST_ENTRIES)
        self.num_bytes = 0
        if update is not None:
            sent = b"".join(part.tobytes() for part in update.parts)
            self.num_bytes = len(sent)
            first = inputs.layout.num_bytes
            target = self.memory.columns[first : first + len(sent)]
            target.numpy()[...] = np.frombuffer(sent, dtype=np.uint8)
            inputs.take_tables(update.num_entries, update.rows, update.width)
        self.memory.tables_known = known_after(tables, used)


@pytest.mark.parametrize("seed", range(12))
def test_the_device_has_what_a_step_uses_however_tables_change(seed: int, few: int) -> None:
    """Tables that grow, others, ones that can be written, rows that go back, a memory forgotten."""
    drawn, device = random.Random(seed), Device()
    tables, used = np.zeros((0, 0), dtype=np.int32), np.zeros(0, dtype=np.int32)
    num_small = 0
    for _ in range(150):
        kind = drawn.randrange(12)
        if kind == 0 or not len(tables):
            rows = drawn.randint(1, MOST_ROWS)
            longest = drawn.choice([3, MOST_ENTRIES])
            used = np.array([drawn.randint(1, 3) for _ in range(rows)], dtype=np.int32)
            used[drawn.randrange(rows)] = longest
            tables = np.random.default_rng(drawn.randrange(99)).integers(
                0, 1 << 20, (rows, MOST_ENTRIES), dtype=np.int32
            )
            tables.flags.writeable = kind == 0 and drawn.randrange(4) == 0
        elif kind == 1 and tables.flags.writeable:
            tables[...] += 1
        elif kind == 2:
            used = np.maximum(used - drawn.randint(1, 5), 1).astype(np.int32)
        elif kind == 3:
            used = np.minimum(used + drawn.randint(1, 40), MOST_ENTRIES).astype(np.int32)
        elif kind == 4:
            device.memory.forget()
            device.memory.tables.fill_(-7)
        else:
            enter = np.array([drawn.randrange(3) == 0 for _ in used])
            used = np.minimum(used + enter, MOST_ENTRIES).astype(np.int32)
        fits = [one for one in device.inputs if one.num_rows >= len(used)]
        device.take(drawn.choice(fits), tables, used)
        found = device.memory.tables.numpy()
        for row, count in enumerate(used.tolist()):
            assert found[row, :count].tolist() == tables[row, :count].tolist()
        whole = BLOCK_BYTES * len(used) * int(used.max())
        assert device.num_bytes <= whole
        num_small += 0 < device.num_bytes < whole
    assert (num_small > 0) == (few == 0)


def test_entries_that_rows_entered_are_sent_and_no_others(few: int) -> None:
    tables = np.arange(24, dtype=np.int32).reshape(3, 8)
    tables.flags.writeable = False
    known = KnownTables(tables, np.array([4, 6, 5]))
    assert update_tables(known, tables, np.array([4, 6, 5]), 100) is None
    assert update_tables(known, tables, np.array([3, 6, 1]), 100) is None
    update = update_tables(known, tables, np.array([5, 6, 6]), 100)
    assert update is not None
    if few:
        assert (update.num_entries, update.rows, update.width) == (0, 3, 6)
        return
    assert (update.num_entries, update.width) == (2, 0)
    assert [part.tolist() for part in update.parts[:2]] == [[4, 205], [4, 21]]


def test_of_one_long_row_among_short_ones_only_that_one_is_sent_to_its_end(few: int) -> None:
    tables = np.arange(4 * 50, dtype=np.int32).reshape(4, 50)
    update = update_tables(None, tables, np.array([2, 50, 3, 3]), 100)
    assert update is not None
    if few:
        assert (update.num_entries, update.rows, update.width) == (0, 4, 50)
    else:
        assert (update.num_entries, update.rows, update.width) == (47, 4, 3)
    assert sum(part.nbytes for part in update.parts) == (
        BLOCK_BYTES * 4 * 50 if few else BLOCK_BYTES * 4 * 3 + ENTRY_BYTES * 47
    )


class WatchedTables:
    """Compares the device's tables with those of a step whenever its graph is about to run."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.num_seen = 0
        self._executor = executor
        self._batch: ExecutionBatch | None = None
        self._launch, self._run = executor._decode.launch, executor._graphs.run
        executor._decode.launch = self._note  # type: ignore[method-assign]
        executor._graphs.run = self._compare  # type: ignore[method-assign]

    def _note(self, taken, berth):  # type: ignore[no-untyped-def]
        self._batch = taken.batch
        return self._launch(taken, berth)

    def _compare(self, rung: int):  # type: ignore[no-untyped-def]
        batch = self._batch
        assert batch is not None
        found = self._executor._graphs.inputs(rung).step.decode_tables.numpy()
        for row, length in enumerate(batch.seq_lens.tolist()):
            count = -(-length // BLOCK_SIZE)
            assert found[row, :count].tolist() == batch.block_tables[row, :count].tolist()
        self.num_seen += 1
        return self._run(rung)


@pytest.mark.spread(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_drawn_steps_find_their_tables_on_the_device(seed: int, *, asks: bool) -> None:
    """Rows join, leave and change places, copy blocks before they write, and some are refused."""
    executor = with_graphs()
    watched = WatchedTables(executor)
    assert pipelined(executor, drawn_batches(seed, 150, asks=asks))
    assert watched.num_seen > 40


def run_of_steps(lengths: list[int], count: int) -> list[StepBatch]:
    """Rows that begin together and decode, each in blocks of its own."""
    held = [-(-length // BLOCK_SIZE) for length in lengths]
    free = iter(range(255))
    starts = [
        start(slot, [slot + 1] * length, [next(free) for _ in range(held[slot])])
        for slot, length in enumerate(lengths)
    ]
    batches = [
        step([(slot, 0, length) for slot, length in enumerate(lengths)], starts=starts),
    ]
    for n in range(count):
        new = [[next(free)] if (at + n) % BLOCK_SIZE == 0 else [] for at in lengths]
        rows = [(slot, at + n, 1) for slot, at in enumerate(lengths)]
        batches.append(step(rows, new_blocks=new if any(new) else []))
    return batches


LENGTHS = [2 * BLOCK_SIZE + slot for slot in range(NUM_SLOTS)]


def sizes_of_steps(executor: CudaExecutor, device: SizedDriver) -> list[int]:
    """Note the bytes of the inputs of each step that goes to a graph."""
    sizes: list[int] = []
    upload = executor._decode._upload

    def counted(*given, **named):  # type: ignore[no-untyped-def]
        device.take_sizes()
        upload(*given, **named)
        sizes.extend(device.take_sizes())

    executor._decode._upload = counted  # type: ignore[method-assign]
    return sizes


@pytest.mark.spread(1)
def test_steps_that_enter_blocks_send_one_entry_for_each_row_that_does(few: int) -> None:
    device = SizedDriver()
    executor = with_graphs(device)
    watched = WatchedTables(executor)
    sizes = sizes_of_steps(executor, device)
    count = 80  # more than there is room for behind a row's table
    pipelined(executor, run_of_steps(LENGTHS, count))
    assert watched.num_seen == count
    inputs = executor._graphs.inputs(8)
    moving, whole = inputs.layout.num_bytes - inputs.first_moving, inputs.layout.num_bytes
    tables = [size - (whole if size >= whole else moving) for size in sizes]
    # Rows begin one behind the other: one or two enter a block in every step.
    entering = [sum((at + n) % BLOCK_SIZE == 0 for at in LENGTHS) for n in range(count)]
    as_entered = [ENTRY_BYTES * rows for rows in entering]
    assert tables[0] == BLOCK_BYTES * NUM_SLOTS * 4
    if few:
        assert min(tables[1:]) > max(as_entered)
    else:
        assert tables[1:] == as_entered[1:]
    assert executor._decode._checks._sound_tables is not None


@pytest.mark.spread(1)
@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("failing", ["copy", "replay"])
def test_after_a_step_that_failed_the_next_finds_its_tables(failing: str) -> None:
    device = SizedDriver()
    executor = with_graphs(device)
    batches = run_of_steps(LENGTHS, 30)
    watched = WatchedTables(executor)
    launch = executor.launch
    taken: list[ExecutionBatch] = []

    def failing_at_times(batch: ExecutionBatch):  # type: ignore[no-untyped-def]
        taken.append(batch)
        if len(taken) % 7 == 6:
            setattr(device, f"{failing}_failure", "something")
            with pytest.raises((RuntimeError, GraphReplayError)):
                launch(batch)
            setattr(device, f"{failing}_failure", None)
        return launch(batch)

    executor.launch = failing_at_times  # type: ignore[method-assign]
    found = tokens_of(pipelined(executor, batches))
    assert watched.num_seen >= 30
    ordinary = with_graphs()
    Counted(ordinary, may=False)
    assert found == tokens_of(pipelined(ordinary, batches))
