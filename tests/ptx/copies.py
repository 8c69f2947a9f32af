"""Asynchronous copies: started, closed into groups, waited for.

What a copy brings is there once its thread has waited for its group, and not before: until then
nobody may touch the place. Source: PTX ISA 9.0, chapter 9.7.9.25.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.accesses import pointer
from tests.ptx.faults import InFlight, Unsupported
from tests.ptx.lanes import Crowd, Mask, Step
from tests.ptx.memory import Lanes
from tests.ptx.program import Constant, Instruction

Array = npt.NDArray[Any]

_COPY = re.compile(r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::(?:64|128|256)B)?")


@dataclass(slots=True)
class _Flight:
    """Copies of one instruction that are under way, one a lane."""

    where: Instruction
    lanes: Array  # indices in the crowd
    groups: Array  # which of its groups each lane put it into
    offsets: Array
    values: Array

    def of(self, chosen: Array) -> _Flight:
        """Return the copies of some of the lanes."""
        parts = (self.lanes, self.groups, self.offsets, self.values)
        return _Flight(self.where, *(part[chosen] for part in parts))


class AsyncCopies:
    """The copies of a crowd that are under way."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._flights: list[_Flight] = []

    def make(self, one: Instruction, index: int) -> Step | None:
        """Return an instruction as a step; None if it is none of these."""
        if match := _COPY.fullmatch(one.opcode):
            return self._start(one, index, match[1])
        if one.opcode == "cp.async.commit_group":
            return self._close
        if one.opcode == "cp.async.wait_all":
            return lambda mask: self._wait(mask, -1)
        if one.opcode == "cp.async.wait_group" and isinstance(one.operands[0], Constant):
            allowed = one.operands[0].value
            return lambda mask: self._wait(mask, allowed)
        return None

    def refuse_left(self) -> None:
        """Raise InFlight where a thread has ended with copies under way."""
        for flight in self._flights:
            raise InFlight(f"{flight.where}: lane {flight.lanes[0]} of the crowd never waited")

    def _start(self, one: Instruction, index: int, cache: str) -> Step:
        crowd = self._crowd
        to, source, size_operand, *given = one.operands
        if not isinstance(size_operand, Constant) or len(given) > 1:
            raise Unsupported(str(one))
        size = size_operand.value
        if size not in ((16,) if cache == "cg" else (4, 8, 16)):
            raise Unsupported(f"{one}: {size} bytes")
        target = pointer(to, "shared", one, index, crowd)
        origin = pointer(source, "global", one, ~index, crowd)
        wanted = crowd.registers.read(given[0], "u32", one) if given else None

        def step(mask: Mask) -> None:
            chosen, who = crowd.some(mask)
            lanes = np.arange(crowd.size) if mask is True else chosen
            offsets, _ = target.locate(target.addresses(chosen), size, chosen, who, writes=True)
            target.space.note_write(offsets, size, who, one, flight=True)
            values = np.zeros((len(lanes), size), np.uint8)
            num_bytes = np.full(len(lanes), size) if wanted is None else wanted[chosen]
            read = np.flatnonzero(num_bytes)
            if (num_bytes > size).any():
                raise Unsupported(f"{one}: more bytes than the copy has")
            if read.size:
                readers = Lanes(who.numbers[read], who.clocks[read])
                address = origin.addresses(lanes[read])
                from_, may_change = origin.locate(address, size, lanes[read], readers, writes=False)
                if may_change:
                    origin.space.note_read(from_, size, readers, one)
                found = origin.space.words(from_, np.dtype(np.uint8), size)
                kept = np.arange(size) < num_bytes[read][:, None]
                values[read] = np.where(kept, found, 0)
            flight = _Flight(one, lanes, crowd.groups[lanes].copy(), offsets, values)
            self._flights.append(flight)

        return step

    def _close(self, mask: Mask) -> None:
        self._crowd.groups[slice(None) if mask is True else mask] += 1

    def _wait(self, mask: Mask, allowed: int) -> None:
        """Land what is in no group but the newest `allowed`; all, closed or not, below zero."""
        crowd, left = self._crowd, []
        space = crowd.spaces["shared"]
        for flight in self._flights:
            lands = crowd.groups[flight.lanes] - allowed > flight.groups
            if mask is not True:
                lands &= mask[flight.lanes]
            if lands.any():
                landed = flight.of(lands)
                who = Lanes(crowd.numbers[landed.lanes], crowd.clocks[landed.lanes])
                space.put(landed.offsets, landed.values)
                space.land(landed.offsets, landed.values.shape[1], who)
                if lands.all():
                    space.end_flight()
            if not lands.all():
                left.append(flight.of(~lands))
        self._flights = left
