"""Whether accesses to memory are in an order: vector clocks of the host and of streams.

Each of them has a clock that says how far it knows the others to be (Mattern, 1988). A race is: two
accesses of one memory, one of them a write, of which neither's clock knows the other; and memory
given back while another stream than its own uses it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

HOST = "host"
Clock = dict[str, int]


@dataclass
class Access:
    """Bytes `first` to `end` of a storage, by somebody at a time of theirs."""

    first: int
    end: int
    writes: bool
    who: str
    time: int
    what: str

    def meets(self, other: Access) -> bool:
        return self.first < other.end and other.first < self.end and (self.writes or other.writes)


@dataclass
class Memory:
    """What is known of a storage. `owner`: the stream that was current when it was taken."""

    owner: str
    is_pinned: bool
    accesses: list[Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class MemoryOrder:
    """Who did what with which memory; `races`: what was found, in words.

    `owner`: the stream that memory belongs to which is taken now.
    """

    def __init__(self) -> None:
        super().__init__()
        self.races: list[str] = []
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.memories: dict[int, Memory] = {}
        self.owner = ""
        self.is_paused = False

    # --- clocks ---

    def clock(self, who: str) -> Clock:
        return self.clocks[who]

    def join(self, who: str, other: Clock) -> None:
        mine = self.clocks[who]
        for name, time in other.items():
            mine[name] = max(mine.get(name, 0), time)

    def queue(self, stream: str) -> int:
        """Begin something on a stream, behind what the host did; return its time."""
        self.join(stream, self.clocks[HOST])
        return self.tick(stream)

    def tick(self, who: str) -> int:
        clock = self.clocks[who]
        clock[who] = clock.get(who, 0) + 1
        return clock[who]

    # --- memory ---

    def memory(self, tensor: Tensor, *, is_pinned: bool = False) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.memories:
            self.memories[key] = Memory(self.owner, is_pinned)
            weakref.finalize(storage, self._free, key)
        return self.memories[key]

    def touch(self, tensor: Tensor, who: str, *, writes: bool, what: str) -> None:
        """Note an access that was just begun by `who`."""
        if self.is_paused or not tensor.numel():
            return
        memory = self.memory(tensor)
        first = tensor.storage_offset()
        last = first + sum(
            (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        size, clock = tensor.element_size(), self.clocks[who]
        new = Access(first * size, (last + 1) * size, writes, who, clock[who], what)
        left = []
        for old in memory.accesses:
            if new.meets(old) and not self._is_before(old, clock):
                self.races.append(f"{new.what} on {who} does not wait for {old.what} on {old.who}")
            covers = new.first <= old.first and old.end <= new.end
            if not (covers and (writes or (old.who == who and not old.writes))):
                left.append(old)
        memory.accesses = [*left, new]

    @staticmethod
    def _is_before(old: Access, clock: Clock) -> bool:
        return clock.get(old.who, 0) >= old.time

    def _free(self, key: int) -> None:
        memory = self.memories.pop(key)
        if memory.is_pinned:
            return  # torch waits for the copies of what is pinned
        for access in memory.accesses:
            is_safe = access.who in (HOST, memory.owner, *memory.recorded)
            if not is_safe and not any(
                self._is_before(access, self.clocks[who]) for who in (HOST, memory.owner)
            ):
                self.races.append(f"memory is given back before {access.what} on {access.who}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before
