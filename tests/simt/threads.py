"""Lanes, warps and the block of threads that runs them.

A thread runs until it waits: for its warp (state WARP, with the instruction it is at) or for its
block (state BARRIER). The block lets every warp run as far as it can, in shuffled order, answers
warp instructions as soon as all lanes of a warp are at the same one, and opens the barrier when all
living threads are at the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from greenlet import getcurrent, greenlet

from tests.simt.faults import Deadlock, Divergence

WARP_SIZE = 32

# What a warp instruction computes: the lanes' operands to the lanes' results.
WarpFunction = Callable[[list[Any]], list[Any]]


class State(Enum):
    """What a thread is doing."""

    READY = auto()
    WARP = auto()
    BARRIER = auto()
    DONE = auto()


@dataclass(frozen=True, slots=True)
class Dim3:
    """CUDA's three-dimensional index."""

    x: int
    y: int = 1
    z: int = 1


@dataclass(frozen=True, slots=True)
class Site:
    """The place in the kernel where a thread waits; two calls in one line are two places."""

    operation: str
    line: int
    instruction: int

    def __str__(self) -> str:
        return f"{self.operation} at line {self.line}"


class Thread:
    """One thread: its indices, its state, and how often it has been synchronised."""

    __slots__ = (
        "barriers",
        "block",
        "copies",
        "copy_groups",
        "function",
        "greenlet",
        "index",
        "lane",
        "latest_access",
        "operand",
        "result",
        "site",
        "state",
        "warp",
        "warp_barriers",
    )  # fmt: skip

    def __init__(self, block: Block, index: int, body: Callable[[], None]) -> None:
        self.block = block
        self.index = index
        self.warp, self.lane = divmod(index, WARP_SIZE)
        self.greenlet = greenlet(body)
        self.state = State.READY
        self.site: Site | None = None
        self.function: WarpFunction | None = None
        self.operand: Any = None
        self.result: Any = None
        self.barriers = 0  # block barriers passed
        self.warp_barriers = 0  # `syncwarp`s passed
        self.latest_access: object = None  # kept for `memory.Access`
        # What lands the asynchronous copies it has started: not yet in a group, and by group.
        self.copies: list[Callable[[], None]] = []
        self.copy_groups: list[list[Callable[[], None]]] = []

    def run(self) -> None:
        """Let the thread run until it waits or ends."""
        self.block.current = self
        self.greenlet.switch()
        if self.greenlet.dead:
            self.state = State.DONE

    def wait(self, state: State, site: Site) -> None:
        """Called by the thread itself: give way until the block lets it go on."""
        self.state = state
        self.site = site
        parent = self.greenlet.parent
        assert parent is not None
        parent.switch()

    def __str__(self) -> str:
        return f"thread {self.index} (warp {self.warp}, lane {self.lane}) of {self.block}"


class Block:
    """One block of threads of the grid."""

    def __init__(
        self,
        index: Dim3,
        grid: Dim3,
        num_threads: int,
        body: Callable[[], None],
        order: random.Random,
    ) -> None:
        self.index = index
        self.grid = grid
        self.size = Dim3(num_threads)
        self.shared: dict[Site, Any] = {}
        self.threads = [Thread(self, i, body) for i in range(num_threads)]
        self.current = self.threads[0]
        self._order = order

    def __str__(self) -> str:
        return f"block ({self.index.x}, {self.index.y}, {self.index.z})"

    def run(self) -> None:
        """Run all threads to their end. Raises a Fault."""
        main = getcurrent()
        for thread in self.threads:
            thread.greenlet.parent = main
        warps = [
            self.threads[first : first + WARP_SIZE]
            for first in range(0, len(self.threads), WARP_SIZE)
        ]
        while any(thread.state is not State.DONE for thread in self.threads):
            self._order.shuffle(warps)
            for warp in warps:
                self._run_warp(warp)
            self._open_barrier()

    def _run_warp(self, warp: list[Thread]) -> None:
        """Run a warp until all its threads wait at the barrier or have ended."""
        while True:
            ready = [thread for thread in warp if thread.state is State.READY]
            self._order.shuffle(ready)
            for thread in ready:
                thread.run()
            if all(thread.state in (State.BARRIER, State.DONE) for thread in warp):
                return
            _run_warp_instruction(warp)

    def _open_barrier(self) -> None:
        living = [thread for thread in self.threads if thread.state is not State.DONE]
        sites = {thread.site for thread in living}
        if len(sites) > 1:
            raise Deadlock(f"{self}: threads wait at different barriers: {_places(living)}")
        for thread in living:
            thread.state = State.READY
            thread.barriers += 1


def _run_warp_instruction(warp: Sequence[Thread]) -> None:
    """Answer the warp instruction that all lanes have reached."""
    if len(warp) < WARP_SIZE or any(thread.state is not State.WARP for thread in warp):
        raise Divergence(f"{warp[0].block}, warp {warp[0].warp}: {_places(warp)}")
    if len({thread.site for thread in warp}) > 1:
        raise Divergence(f"{warp[0].block}, warp {warp[0].warp}: {_places(warp)}")
    function = warp[0].function
    assert function is not None
    results = function([thread.operand for thread in warp])
    for thread, result in zip(warp, results, strict=True):
        thread.result = result
        thread.state = State.READY


def _places(threads: Sequence[Thread]) -> str:
    """Say where threads are: how many at which place."""
    counts: dict[str, int] = {}
    for thread in threads:
        place = "ended" if thread.state is State.DONE else str(thread.site)
        counts[place] = counts.get(place, 0) + 1
    return ", ".join(f"{count} × {place}" for place, count in counts.items())
