"""Runs all lanes of some blocks together: a step is one instruction for every lane that is there.

A lane has a place in the program. The lanes at the lowest place go on, up to where others wait or
until they part at a branch; so lanes that have parted meet again as early as they can. At a barrier
of the block, or an instruction of the warp, those who come first wait for the others; if those
never come the launch ends with a Divergence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.accesses import make_access
from tests.ptx.copies import AsyncCopies
from tests.ptx.early import make_early
from tests.ptx.elementwise import make_elementwise
from tests.ptx.faults import Divergence, Endless, Unsupported
from tests.ptx.front import Front
from tests.ptx.lanes import WARP, Crowd, Mask, Step
from tests.ptx.program import Constant, Instruction
from tests.ptx.warps import make_warp_step, named_lanes

Array = npt.NDArray[Any]

MOST_STEPS = 20_000_000

_EVERYBODY = 0xFFFF_FFFF  # of a warp

_PLAIN, _BRANCH, _RETURN, _MEETING = range(4)


class Machine:
    """A crowd with its program made into steps."""

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._program = crowd.program
        self._copies = AsyncCopies(crowd)
        self._left = MOST_STEPS
        self._named: dict[int, Array | None] = {}  # of meetings; None: the whole block
        self._kinds: list[int] = []
        self._steps: list[Step] = []
        self._targets: dict[int, int] = {}
        for index, one in enumerate(self._program.instructions):
            kind, step = self._decode(index, one)
            self._kinds.append(kind)
            self._steps.append(step)
        # Where the run of plain instructions that begins at a place ends.
        count = len(self._kinds)
        self._plain_until = [count] * (count + 1)
        for index in range(count - 1, -1, -1):
            is_plain = self._kinds[index] == _PLAIN
            self._plain_until[index] = self._plain_until[index + 1] if is_plain else index

    def _decode(self, index: int, one: Instruction) -> tuple[int, Step]:
        if one.opcode in ("bra", "bra.uni"):
            self._targets[index] = self._program.labels[one.label]
            return _BRANCH, _nothing
        if one.opcode in ("ret", "exit"):
            return _RETURN, _nothing
        if one.opcode in ("bar.sync", "barrier.sync"):
            if one.guard is not None or one.operands != (Constant(0),):
                raise Unsupported(str(one))
            self._named[index] = None
            return _MEETING, lambda mask: self._crowd.pass_barrier(mask, of_block=True)
        named = named_lanes(one, self._crowd)
        if named is not None:
            step = make_warp_step(one, index, self._crowd)
            if step is None or one.guard is not None:
                raise Unsupported(str(one))
            self._named[index] = named
            return _MEETING, step
        for step in (
            make_elementwise(one, self._crowd),
            make_access(one, index, self._crowd),
            self._copies.make(one, index),
            make_early(one, index, self._crowd),
        ):
            if step is not None:
                return _PLAIN, self._guarded(one, step)
        raise Unsupported(str(one))

    def _guarded(self, one: Instruction, step: Step) -> Step:
        if one.guard is None:
            return step
        holds = self._crowd.registers.read(type(one.guard)(one.guard.name), "pred", one)
        negated = one.guard.negated

        def guarded(mask: Mask) -> None:
            chosen = (holds ^ negated) & mask
            if chosen.any():
                step(chosen)

        return guarded

    def run(self) -> None:
        """Run every lane to its end. Raises a Fault."""
        with np.errstate(all="ignore"):
            self._run()
        self._copies.refuse_left()

    def _run(self) -> None:
        front = Front(self._crowd.size, len(self._steps))
        while front.choose():
            self._advance(front)
        if front.waits.any():
            places = np.unique(front.at[front.waits])
            lines = "; ".join(str(self._program.instructions[place]) for place in places)
            message = f"{int(front.waits.sum())} lanes wait for others that never come: {lines}"
            raise Divergence(message)

    def _advance(self, front: Front) -> None:
        """Let the lanes on their way go on for as long as they are together."""
        ends = {_BRANCH: self._branch, _RETURN: self._return, _MEETING: self._meet}
        together = True
        while together and front.here < front.limit:
            start, mask = front.here, front.mask
            end = min(self._plain_until[start], front.limit)
            for index in range(start, end):
                self._steps[index](mask)
            self._note(start, end, mask)
            self._left -= end - start + 1
            if self._left < 0:
                raise Endless(f"{self._program.instructions[start]}: {MOST_STEPS} steps")
            front.here = end
            if end == len(self._steps):
                raise Unsupported("the program runs on behind its last instruction")
            if end < front.limit:
                together = ends[self._kinds[end]](front)
        if together:
            front.halt(front.here)

    def _branch(self, front: Front) -> bool:
        """Follow a branch; return whether the lanes stay together."""
        here, mask = front.here, front.mask
        self._note(here, here + 1, mask)
        taken = self._where_guard_holds(here, mask)
        target = self._targets[here]
        if taken is mask or (taken.all() if mask is True else np.array_equal(taken, mask)):
            front.here = target
        elif not taken.any():
            front.here += 1
        else:
            front.halt(np.where(taken, target, here + 1))
            return False
        return True

    def _return(self, front: Front) -> bool:
        self._note(front.here, front.here + 1, front.mask)
        front.halt(front.here + 1)
        front.done |= self._where_guard_holds(front.here, front.mask)
        return False

    def _note(self, start: int, end: int, mask: Mask) -> None:
        if self._crowd.meter is not None and end > start:
            lanes = np.broadcast_to(mask, self._crowd.size).reshape(-1, WARP)
            self._crowd.meter.note_executed(range(start, end), int(lanes.any(axis=1).sum()))

    def _where_guard_holds(self, index: int, mask: Mask) -> Mask:
        one = self._program.instructions[index]
        if one.guard is None:
            return mask
        holds = self._crowd.registers.read(type(one.guard)(one.guard.name), "pred", one)
        return (holds ^ one.guard.negated) & mask

    def _meet(self, front: Front) -> bool:
        """Let those whose company is complete go on together; the others wait."""
        here = front.here
        if front.mask is True and self._is_for_all(here):
            come: Mask = True
            go: Mask = True
        else:
            come = np.broadcast_to(front.mask, front.at.shape) | (front.waits & (front.at == here))
            go = self._complete(here, come)
        if go is True or go.any():
            self._note(here, here + 1, go)
            self._steps[here](go)
        if go is True or np.array_equal(go, come):
            front.waits[come if go is not True else slice(None)] = False
            front.mask = go
            front.here += 1
            return True
        front.waits[come], front.at[come] = True, here
        front.waits[go], front.at[go] = False, here + 1
        return False

    def _is_for_all(self, index: int) -> bool:
        named = self._named[index]
        return named is None or bool((named == _EVERYBODY).all())

    def _complete(self, index: int, come: Array) -> Mask:
        """Return which of the lanes that have come need wait for no others."""
        named = self._named[index]
        if named is None:
            threads = self._program.threads
            go = np.repeat(come.reshape(-1, threads).all(axis=1), threads)
        else:
            by_warp = come.reshape(-1, WARP)
            there = np.packbits(by_warp, axis=1, bitorder="little").view(np.uint32)[:, 0]
            called = np.where(come, named, np.uint32(0)).reshape(-1, WARP)
            if (by_warp & (called >> np.arange(WARP, dtype=np.uint32) & 1 == 0)).any():
                one = self._program.instructions[index]
                raise Divergence(f"{one}: by a lane that its own mask leaves out")
            missing = np.bitwise_or.reduce(called, axis=1) & ~there
            go = np.repeat(missing == 0, WARP) & come
        return True if go.all() else go


def _nothing(mask: Mask) -> None:
    del mask
