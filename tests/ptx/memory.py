"""Memory that distrusts: bounds, alignment, what was never written, races, copies under way.

A `Space` is one state space: global memory, or the shared memories of all blocks of a launch, each
with the same layout. Its bytes lie in one array, with gaps that belong to nobody:

    buffer   address in the space (what a kernel sees)   →   offset in the array

What threads do to memory is remembered by *granules*, as large as the smallest access the program
makes there. A race is judged by what is ordered, not by what happened to be read: an access comes
after one of another thread only if a barrier of their block lies between, or one of their warp.
Threads of different blocks are ordered as `order` says, and then a read must be one that goes past
the first cache, which knows nothing of other multiprocessors. An asynchronous copy owns what it
writes until its thread has waited for it.

`Lanes` is who makes an access: numbers of lanes over the whole launch, and their clocks:

    block's number · 2^40 + barriers of the block · 2^20 + barriers of the warp since
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.faults import InFlight, Misaligned, OutOfBounds, Race, TooEarly, Uninitialised
from tests.ptx.order import Order

Array = npt.NDArray[Any]

GAP = 256  # bytes behind each buffer that belong to nobody
BARRIER_BITS, BLOCK_BITS = 20, 40  # where they begin in a clock

# Who wrote a granule last, or read it, where that is no lane.
NOBODY, BEFORE, MANY, ADDED = -1, -2, -3, -4


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes: from `address` on in the space, from `offset` on in the array."""

    name: str
    address: int
    size: int
    offset: int
    is_written: bool
    is_given: bool = False
    """No launch writes it, so one that begins early may read it before its wait."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """The lanes that make an access: their numbers and their clocks."""

    numbers: Array
    clocks: Array


class Space:
    """The bytes of one state space, `copies` times: once a block for shared memory.

    `granule` is in bytes. With `is_known` everything is written from the start.
    """

    def __init__(
        self, name: str, pieces: Sequence[Piece], granule: int, copies: int, *, is_known: bool
    ) -> None:
        self.name = name
        self.pieces = sorted(pieces, key=lambda piece: piece.address)
        ends = [piece.offset + piece.size for piece in pieces]
        self.stride = -(-max(ends, default=0) // GAP) * GAP + GAP
        self._addresses = np.array([piece.address for piece in self.pieces], np.int64)
        self._offsets = np.array([piece.offset for piece in self.pieces], np.int64)
        self._sizes = np.array([piece.size for piece in self.pieces], np.int64)
        self._may_write = np.array([piece.is_written for piece in self.pieces], np.bool_)
        self._is_given = np.array([piece.is_given for piece in self.pieces], np.bool_)
        # NaN in every type of float.
        self.bytes = np.full(self.stride * copies, 0xFF, np.uint8)
        self.granule = granule
        count = self.stride * copies // granule
        self._writer = np.full(count, BEFORE if is_known else NOBODY, np.int32)
        self._written = np.zeros(count, np.int64)
        self._reader = np.full(count, NOBODY, np.int32)
        self._read = np.zeros(count, np.int64)
        self._in_flight = np.zeros(count, np.bool_)
        self._flights = 0
        self._has_foreign_blocks = is_known  # global memory
        self.order = Order()
        self.to_wait: Array | None = None
        """Of a launch that begins early, by number: the lanes that have not waited so far."""

    # --- where ------------------------------------------------------------------------------------

    def locate(
        self,
        address: Array,
        size: int,
        lanes: Lanes,
        where: object,
        *,
        writes: bool,
        is_fetched: bool = False,
    ) -> tuple[Array, bool]:
        """Return the offsets of accesses in a block's copy; whether any may be written.

        `is_fetched`: into a cache only. Raises OutOfBounds, Misaligned, TooEarly.
        """
        at = address.astype(np.int64)
        if (at & (size - 1)).any():
            i = int(np.flatnonzero(at & (size - 1))[0])
            raise Misaligned(f"{where}: {size} bytes at {at[i]:#x} by {_lane(lanes, i)}")
        piece = np.searchsorted(self._addresses, at, side="right") - 1
        start = at - self._addresses[piece]
        outside = (piece < 0) | (start + size > self._sizes[piece])
        if outside.any():
            i = int(np.flatnonzero(outside)[0])
            raise OutOfBounds(f"{where}: {self._place(int(at[i]))} by {_lane(lanes, i)}")
        if self.to_wait is not None and not is_fetched:
            is_early = self.to_wait[lanes.numbers]
            if is_early.any() and (is_early := is_early & ~self._is_given[piece]).any():
                i = int(np.flatnonzero(is_early)[0])
                raise TooEarly(f"{where}: by {_lane(lanes, i)}, which has not waited")
        may_write = self._may_write[piece]
        if writes and not may_write.all():
            i = int(np.flatnonzero(~may_write)[0])
            message = f"{where}: {self._place(int(at[i]))} may not be written, by {_lane(lanes, i)}"
            raise OutOfBounds(message)
        return start + self._offsets[piece], bool(may_write.any())

    def _place(self, address: int) -> str:
        nearest = min(
            self.pieces,
            key=lambda piece: max(piece.address - address, address - piece.address - piece.size, 0),
            default=None,
        )
        if nearest is None:
            return f"address {address:#x}, where no {self.name} memory is"
        return f"byte {address - nearest.address} of {nearest.name} ({nearest.size} bytes)"

    # --- bytes ------------------------------------------------------------------------------------

    def words(self, offsets: Array, dtype: np.dtype[Any], count: int) -> Array:
        """Return `count` elements at each offset: an array [lanes, count]."""
        rows = self.bytes.view(dtype).reshape(-1, count)
        found: Array = rows[offsets // (dtype.itemsize * count)]
        return found

    def put(self, offsets: Array, values: Array) -> None:
        """Write values [lanes, count] at the offsets."""
        rows = self.bytes.view(values.dtype).reshape(-1, values.shape[1])
        rows[offsets // (values.itemsize * values.shape[1])] = values

    # --- who --------------------------------------------------------------------------------------

    def note_read(
        self,
        offsets: Array,
        size: int,
        lanes: Lanes,
        where: object,
        *,
        constant: bool = False,
        fresh: bool = False,
    ) -> None:
        """Remember reads. Raises Uninitialised, InFlight or Race.

        `constant`: nobody may write. `fresh`: past the first cache.
        """
        granules, who, clock = self._granules(offsets, size, lanes)
        writer = self._writer[granules]
        is_new = writer == NOBODY
        if is_new.any():
            i = int(np.flatnonzero(is_new)[0])
            raise Uninitialised(f"{where}: {self._shown(granules[i])} by {_number(who[i])}")
        self._refuse_flights(granules, who, where)
        raced = self._is_foreign(writer, self._written[granules], who, clock)
        if fresh and raced is not None:
            self._forgive_known(raced, self._written[granules], who, clock)
        if constant:
            raced = writer != BEFORE
        self._refuse_race(raced, granules, who, "read", "written", where)
        foreign = self._is_foreign(self._reader[granules], self._read[granules], who, clock)
        if foreign is not None:
            who = np.where(foreign, MANY, who)
        self._reader[granules] = who
        self._read[granules] = clock
        # Several lanes of this very instruction: one of them, or what was, stands there now.
        others = self._reader[granules] != who
        if others.any():
            self._reader[granules[others]] = MANY

    def note_write(
        self, offsets: Array, size: int, lanes: Lanes, where: object, *, flight: bool = False
    ) -> None:
        """Remember writes; with `flight` they stay under way. Raises InFlight or Race."""
        granules, who, clock = self._granules(offsets, size, lanes)
        self._refuse_flights(granules, who, where)
        raced = self._is_foreign(self._writer[granules], self._written[granules], who, clock)
        self._refuse_race(raced, granules, who, "written", "written", where)
        self._refuse_readers(granules, who, clock, "written", where)
        self._writer[granules] = who
        self._refuse_race(self._writer[granules] != who, granules, who, "written", "written", where)
        self._written[granules] = clock
        self._reader[granules] = NOBODY
        if flight:
            self._in_flight[granules] = True
            self._flights += 1

    def note_addition(self, offsets: Array, size: int, lanes: Lanes, where: object) -> None:
        """Remember atomic operations, which do not race with each other."""
        granules, who, clock = self._granules(offsets, size, lanes)
        writer = self._writer[granules]
        if (writer == NOBODY).any():
            raise Uninitialised(f"{where}: {self._shown(granules[0])}")
        self._refuse_flights(granules, who, where)
        raced = self._is_foreign(writer, self._written[granules], who, clock)
        if raced is not None:
            raced &= writer != ADDED
        if self.order.has_fences:
            for lane, place in zip(lanes.numbers.tolist(), offsets.tolist(), strict=True):
                self.order.meet(lane, place)
        self._refuse_race(raced, granules, who, "added to", "written", where)
        self._refuse_readers(granules, who, clock, "added to", where)
        self._writer[granules] = ADDED
        self._written[granules] = clock

    def land(self, offsets: Array, size: int, lanes: Lanes) -> None:
        """End copies that were under way: they are as if written now."""
        granules, who, clock = self._granules(offsets, size, lanes)
        self._in_flight[granules] = False
        self._writer[granules], self._written[granules] = who, clock

    def end_flight(self) -> None:
        """Note that an instruction's copies have all landed."""
        self._flights -= 1

    def _granules(self, offsets: Array, size: int, lanes: Lanes) -> tuple[Array, Array, Array]:
        first = offsets // self.granule
        count = -(-size // self.granule)
        if count == 1:
            return first, lanes.numbers, lanes.clocks
        granules = (first[:, None] + np.arange(count)).reshape(-1)
        return granules, np.repeat(lanes.numbers, count), np.repeat(lanes.clocks, count)

    def _is_foreign(self, other: Array, then: Array, who: Array, now: Array) -> Array | None:
        """Return where `other` is a lane that did it `then`, with nothing between then and now.

        None if that is so nowhere.
        """
        near: Array = then >> BARRIER_BITS == now >> BARRIER_BITS
        if self._has_foreign_blocks:
            near |= then >> BLOCK_BITS != now >> BLOCK_BITS
        near &= (other != who) & (other != NOBODY) & (other != BEFORE)
        if not near.any():
            return None
        # Lanes of one warp may be ordered by a barrier of the warp.
        near &= (other < 0) | (other // 32 != who // 32) | (then == now)
        return near

    def _forgive_known(self, raced: Array, then: Array, who: Array, now: Array) -> None:
        """Take out of `raced` what other blocks did and the lanes know to be over."""
        for i in np.flatnonzero(raced & (then >> BLOCK_BITS != now >> BLOCK_BITS)):
            other, barriers = int(then[i]) >> BLOCK_BITS, barriers_of(int(then[i]))
            block = int(now[i]) >> BLOCK_BITS
            raced[i] = not self.order.is_known(int(who[i]), block, other, barriers)

    def _refuse_readers(
        self, granules: Array, who: Array, clock: Array, now: str, where: object
    ) -> None:
        raced = self._is_foreign(self._reader[granules], self._read[granules], who, clock)
        self._refuse_race(raced, granules, who, now, "read", where)

    def _refuse_flights(self, granules: Array, who: Array, where: object) -> None:
        if self._flights and self._in_flight[granules].any():
            i = int(np.flatnonzero(self._in_flight[granules])[0])
            raise InFlight(
                f"{where}: {self._shown(granules[i])} by {_number(who[i])}, while the copy of "
                f"{_number(self._writer[granules[i]])} is under way"
            )

    def _refuse_race(
        self,
        raced: Array | None,
        granules: Array,
        who: Array,
        now: str,
        before: str,
        where: object,
    ) -> None:
        if raced is not None and raced.any():
            i = int(np.flatnonzero(raced)[0])
            other = self._writer[granules[i]] if before == "written" else self._reader[granules[i]]
            raise Race(
                f"{where}: {self._shown(granules[i])} is {now} by {_number(who[i])}, with nothing "
                f"between since it was {before} by {_number(other)}"
            )

    def _shown(self, granule: Any) -> str:
        offset = int(granule) * self.granule % self.stride
        for piece in self.pieces:
            if piece.offset <= offset < piece.offset + piece.size:
                return f"byte {offset - piece.offset} of {piece.name}"
        return f"byte {offset} of {self.name} memory"


def barriers_of(clock: int) -> int:
    """Return how many barriers a block had passed at a clock."""
    return clock >> BARRIER_BITS & ((1 << BLOCK_BITS - BARRIER_BITS) - 1)


def _lane(lanes: Lanes, i: int) -> str:
    return _number(lanes.numbers[i])


def _number(lane: Any) -> str:
    names = {NOBODY: "nobody", BEFORE: "the host", MANY: "several lanes", ADDED: "an atomic"}
    return names.get(int(lane), f"lane {int(lane)} of the launch")


def lay_out(
    sizes: Sequence[tuple[str, int, bool]], first_address: int, alignment: int
) -> list[Piece]:
    """Return pieces (name, size, may be written) one behind the other, with gaps."""
    pieces, offset = [], 0
    for name, size, is_written in sizes:
        pieces.append(Piece(name, first_address + offset, size, offset, is_written))
        offset = -(-(offset + size + GAP) // alignment) * alignment
    return pieces
