"""Lanes, warps and the block of threads that runs them.

A thread runs until it waits: for its warp (state WARP, with the instruction it is at) or for its
block (state BARRIER). The block lets every warp run as far as it can, in shuffled order, answers
warp instructions as soon as all lanes of a warp are at the same one, and opens the barrier when all
living threads are at the same one. Between barriers other blocks may run.

What threads of one block did is ordered before what those of another do only as PTX has it: by a
fence, something written behind it by an atomic instruction, which an atomic instruction of the
other sees, and a fence behind that. Barriers of either block hand it on among its threads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from greenlet import getcurrent, greenlet

from tests.simt.faults import Deadlock, Divergence

WARP_SIZE = 32

# A block, or one thread of it → how many barriers it had passed, or how many fences: what it did
# before the last of them is over.
Knowledge = dict[Any, int]

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
        "fences",
        "function",
        "greenlet",
        "has_waited",
        "index",
        "known",
        "lane",
        "latest_access",
        "operand",
        "released",
        "result",
        "seen",
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
        self.has_waited = False  # for the launch ahead
        self.barriers = 0  # block barriers passed
        self.warp_barriers = 0  # `syncwarp`s passed
        self.latest_access: object = None  # kept for `access.Access`
        # Of other blocks: what is known to be over, what will be known behind the next fence, and
        # what those will know who see what this thread writes.
        self.fences = 0
        self.known: Knowledge = {}
        self.seen: Knowledge = {}
        self.released: Knowledge = {}
        # What lands the asynchronous copies it has started: not yet in a group, and by group.
        self.copies: list[Callable[[], None]] = []
        self.copy_groups: list[list[Callable[[], None]]] = []

    def fence(self) -> None:
        """Order what this thread knows and sees before it, for all blocks."""
        self.known = everything_known((self.known, self.seen))
        self.fences += 1
        own = {self.block: self.barriers, self: self.fences}
        self.released = everything_known((self.known, own))

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
        self._warps = [
            self.threads[first : first + WARP_SIZE] for first in range(0, num_threads, WARP_SIZE)
        ]

    def __str__(self) -> str:
        return f"block ({self.index.x}, {self.index.y}, {self.index.z})"

    def advance(self) -> bool:
        """Run all threads up to the next barrier; return whether any has more to do.

        Raises a Fault.
        """
        main = getcurrent()
        for thread in self.threads:
            thread.greenlet.parent = main
        self._order.shuffle(self._warps)
        for warp in self._warps:
            self._run_warp(warp)
        self._open_barrier()
        return any(thread.state is not State.DONE for thread in self.threads)

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
        known = everything_known(thread.known for thread in living if thread.known)
        for thread in living:
            thread.state = State.READY
            thread.barriers += 1
            thread.known = known


def everything_known(parts: Iterable[Knowledge]) -> Knowledge:
    """Return what several know together."""
    together: Knowledge = {}
    for part in parts:
        for who, count in part.items():
            together[who] = max(count, together.get(who, 0))
    return together


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
