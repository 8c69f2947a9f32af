"""The executor's own threads: started once, inside compiled code without the interpreter lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from kernels.cpu.board import ENTRY_WORDS, LINE_BYTES, LINE_WORDS, READ_END, WRITE_END, BoardWord
from kernels.cpu.catalogue import dismiss, lead_step, work

IDLE_SPINS: Final = 2000
"""Looks for the next step before an idle worker sleeps, ≈ 50 µs: longer than the way from one step
to the next when batches wait, short enough to leave the processor to others when none does."""

Words = npt.NDArray[np.int64]

FIRST_CAPACITY: Final = 1024

Entry = tuple[int, int]
"""Addresses of an operation record and of a step header (`kernels.cpu.operation`)."""


class ThreadTeam:
    """`num_threads` threads that run steps: the caller of `run` and `num_threads` − 1 workers.

    One thread at a time may call `run`. `close` ends the workers; so does leaving a `with`.
    """

    OPERATIONS: ClassVar = (lead_step, dismiss, work)
    """What a team runs by itself, whatever its steps are made of."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        words = BoardWord.SLEEP + num_threads * LINE_WORDS
        self._kept: list[Words] = []
        self._board = self._zeroed(words)
        self._board[BoardWord.NUM_WORKERS] = num_threads
        self._board[BoardWord.SPINS] = IDLE_SPINS
        self._address = self._board.ctypes.data
        self._lead_step, self._dismiss = lead_step.to_function(1), dismiss.to_function(1)
        self._capacity = 0
        self._grow(FIRST_CAPACITY)
        self._pipes: list[int] = []
        for worker in range(1, num_threads):
            ends = os.pipe()
            self._pipes += ends
            line = BoardWord.SLEEP + worker * LINE_WORDS
            self._board[line + READ_END], self._board[line + WRITE_END] = ends
        self._threads = [
            threading.Thread(
                target=work.to_function(2),
                args=(self._address, worker),
                name=f"worker-{worker}",
                daemon=True,
            )
            for worker in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, entries: Sequence[Entry] | Words) -> None:
        """Run a step: all entries, in order. What they point to must outlive the team."""
        table = np.asarray(entries, dtype=np.int64).reshape(-1, ENTRY_WORDS)
        if len(table) > self._capacity:
            self._grow(len(table))
        self._entries[: len(table)] = table
        self._board[BoardWord.NUM_ENTRIES] = len(table)
        self._lead_step(self._address)

    def close(self) -> None:
        """End the workers. Nothing may be run any more."""
        if self._threads:
            self._dismiss(self._address)
        for thread in self._threads:
            thread.join()
        self._threads = []
        for descriptor in self._pipes:
            os.close(descriptor)
        self._pipes = []

    def __enter__(self) -> ThreadTeam:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _grow(self, capacity: int) -> None:
        """Make room for entries. The arrays before stay: a late worker may still read them."""
        self._capacity = max(capacity, 2 * self._capacity)
        self._entries = self._zeroed(self._capacity * ENTRY_WORDS).reshape(-1, ENTRY_WORDS)
        progress = self._zeroed(self._capacity * LINE_WORDS)
        self._board[BoardWord.ENTRIES] = self._entries.ctypes.data
        self._board[BoardWord.PROGRESS] = progress.ctypes.data

    def _zeroed(self, num_words: int) -> Words:
        """Return int64 words that begin on a cache line and live as long as the team."""
        memory = np.zeros(num_words + LINE_WORDS, dtype=np.int64)
        self._kept.append(memory)
        first = -memory.ctypes.data % LINE_BYTES // 8
        return memory[first : first + num_words]
