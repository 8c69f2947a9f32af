"""Every chunk of every operation runs exactly once, after all of the operation before it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from compute_plane.cpu.thread_team import ThreadTeam
from kernels.cpu.operation import CHUNKS, HEADER_WORDS, KERNEL, RECORD_WORDS, StepWord

sys.path.insert(0, str(Path(__file__).parent))
from counting_operation import BEFORE, COUNTS, EARLY, NUM_BEFORE, NUM_PARTS, count_chunk


class CountedStep:
    """A list of operations of given numbers of chunks, each checking the one before."""

    def __init__(self, chunks: list[int]) -> None:
        self.header = np.zeros(HEADER_WORDS, dtype=np.int64)
        self.records = np.zeros((len(chunks), RECORD_WORDS), dtype=np.int64)
        self.counts = [np.zeros(max(n, 1), dtype=np.int64) for n in chunks]
        self.early = [np.zeros(max(n, 1), dtype=np.int64) for n in chunks]
        nothing = np.zeros(1, dtype=np.int64)
        self.keep = nothing
        for i, n in enumerate(chunks):
            before, num_before = (self.counts[i - 1], chunks[i - 1]) if i else (nothing, 0)
            record = self.records[i]
            record[KERNEL], record[CHUNKS] = count_chunk.address, n
            record[NUM_PARTS] = n
            record[COUNTS] = self.counts[i].ctypes.data
            record[EARLY] = self.early[i].ctypes.data
            record[BEFORE], record[NUM_BEFORE] = before.ctypes.data, num_before

    @property
    def entries(self) -> npt.NDArray[np.int64]:
        places = np.empty((len(self.records), 2), dtype=np.int64)
        places[:, 0] = self.records.ctypes.data + 8 * RECORD_WORDS * np.arange(len(self.records))
        places[:, 1] = self.header.ctypes.data
        return places


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_every_chunk_runs_once_and_after_the_operation_before(num_threads: int) -> None:
    random = np.random.default_rng(num_threads)
    steps = [CountedStep([int(n) for n in random.integers(0, 9, size)]) for size in (1, 40, 7, 90)]
    rounds = 200
    with ThreadTeam(num_threads) as team:
        for _ in range(rounds):
            for step in steps:
                team.run(step.entries)
    for step in steps:
        for i, record in enumerate(step.records):
            assert (step.counts[i][: record[CHUNKS]] == rounds).all()
            assert not step.early[i].any()


def test_a_header_word_gives_the_number_of_chunks() -> None:
    step = CountedStep([3, 8])
    step.records[1][CHUNKS] = -StepWord.TOKEN_CHUNKS
    with ThreadTeam(2) as team:
        for chunks in (1, 8, 0, 5):
            step.header[StepWord.TOKEN_CHUNKS] = chunks
            team.run(step.entries)
    # Every part of the work once a step, but where the header says that there is nothing to do.
    assert step.counts[1].tolist() == [3] * 8


@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_chunks_that_are_claimed_together_are_each_done_once(num_threads: int) -> None:
    counts = [1, 16, 17, 54, 7, 64, 4095, 23, 30, 96, 100, 33]
    step = CountedStep(counts)
    rounds = 50
    with ThreadTeam(num_threads) as team:
        for _ in range(rounds):
            team.run(step.entries)
    for i in range(len(counts)):
        assert (step.counts[i] == rounds).all()
        assert not step.early[i].any()


def test_a_step_longer_than_any_before_runs_whole() -> None:
    long = CountedStep([2] * 3000)
    with ThreadTeam(2) as team:
        team.run(CountedStep([1]).entries)
        team.run(long.entries)
    assert all((counts == 1).all() for counts in long.counts)


def test_a_team_that_slept_wakes_for_a_step_and_ends_when_closed() -> None:
    step = CountedStep([4, 4])
    team = ThreadTeam(3)
    workers = list(team._threads)
    team.run(step.entries)
    team.close()
    assert not any(worker.is_alive() for worker in workers)
    assert all((counts == 1).all() for counts in step.counts)
