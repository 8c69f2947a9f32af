"""A launch that begins before the one ahead of it has ended, as steps: the wait, and fetching.

Source: PTX ISA 9.0, chapters 9.7.13 (griddepcontrol), 9.7.9 (cp.async.bulk.prefetch.L2).
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from tests.ptx.accesses import pointer
from tests.ptx.faults import Misaligned, OutOfBounds, TooEarly, Unsupported
from tests.ptx.lanes import Crowd, Mask, Step
from tests.ptx.memory import Space
from tests.ptx.program import Constant, Instruction, Register

_LET: Final = "griddepcontrol.launch_dependents"
_WAIT: Final = "griddepcontrol.wait"
_FETCH: Final = re.compile(r"cp\.async\.bulk\.prefetch\.L2\.global")

UNIT: Final = 16
"""Bytes: what place and length of a fetch are multiples of."""


def make_early(one: Instruction, index: int, crowd: Crowd) -> Step | None:
    """Return an instruction as a step; None if it is none of these."""
    if one.opcode == _LET:
        return lambda mask: None  # noqa: ARG005 - what the next launch does is another's matter
    if one.opcode == _WAIT:
        return _wait(crowd)
    if _FETCH.fullmatch(one.opcode):
        return _fetch(one, index, crowd)
    return None


def refuse_left(space: Space) -> None:
    """Raise TooEarly where a lane of the launch has ended without having waited."""
    if space.to_wait is not None and space.to_wait.any():
        lane = int(np.flatnonzero(space.to_wait)[0])
        raise TooEarly(f"lane {lane} of the launch has ended and never waited for the one ahead")


def _wait(crowd: Crowd) -> Step:
    space = crowd.spaces["global"]

    def step(mask: Mask) -> None:
        if space.to_wait is not None:
            _, who = crowd.some(mask)
            space.to_wait[who.numbers] = False

    return step


def _fetch(one: Instruction, index: int, crowd: Crowd) -> Step:
    source, length = one.operands
    origin = pointer(source, "global", one, index, crowd)
    if not isinstance(length, (Register, Constant)):
        raise Unsupported(str(one))
    num_bytes = crowd.registers.read(length, "u32", one)

    def step(mask: Mask) -> None:
        chosen, who = crowd.some(mask)
        first = origin.addresses(chosen)
        length = np.broadcast_to(num_bytes, crowd.size)[chosen].astype(np.int64)
        if (length % UNIT).any():
            raise Misaligned(f"{one}: {int(length[length % UNIT != 0][0])} bytes")
        if (length == 0).any():
            raise OutOfBounds(f"{one}: nothing is to be fetched")
        # Buffers have gaps between them: what begins and ends in one lies in it.
        for place in (first, first + length - UNIT):
            origin.space.locate(place, UNIT, who, one, writes=False, is_fetched=True)

    return step
