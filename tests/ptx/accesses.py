"""Instructions that touch memory, as steps.

Source: PTX ISA 9.0, chapters 9.7.9 (ld, st, cp.async), 9.7.13 (atom).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.faults import Unsupported
from tests.ptx.lanes import Crowd, Mask, Step
from tests.ptx.memory import BLOCK_BITS, Lanes, Space, barriers_of
from tests.ptx.program import SIZES, Address, Constant, Group, Instruction, Operand, Register
from tests.ptx.registers import DTYPES

Array = npt.NDArray[Any]

_LOAD = re.compile(
    r"ld(?:\.relaxed\.gpu)?\.(global|shared)(\.nc)?(?:\.L[12]::\w+)*(?:\.v([24]))?\.([usbf]\d+)"
)
_STORE = re.compile(r"st\.(global|shared)(?:\.v([24]))?\.([usbf]\d+)")
_PARAMETER = re.compile(r"ld\.param\.([usbf]\d+)")
_COPY = re.compile(r"cp\.async\.(ca|cg)\.shared\.global(?:\.L2::(?:64|128|256)B)?")
_FENCE = "fence.acq_rel.gpu"
_ATOMIC = re.compile(r"(atom|red)(?:\.relaxed\.gpu)?\.(global|shared)\.(\w+)\.([usb](?:32|64))")
_LDMATRIX = re.compile(r"ldmatrix\.")


def smallest_access(program_instructions: tuple[Instruction, ...], space: str) -> int:
    """Return the bytes of the smallest access that a program makes to a space."""
    sizes = [16]
    for one in program_instructions:
        if match := _LOAD.fullmatch(one.opcode):
            size = SIZES[match[4]] * int(match[3] or 1)
        elif match := _STORE.fullmatch(one.opcode):
            size = SIZES[match[3]] * int(match[2] or 1)
        elif match := _ATOMIC.fullmatch(one.opcode):
            size = SIZES[match[4]]
            match = re.match(r"\w+(?:\.relaxed\.gpu)?\.(\w+)", one.opcode)
        elif _COPY.fullmatch(one.opcode) and isinstance(one.operands[2], Constant):
            sizes.append(one.operands[2].value)
            continue
        else:
            continue
        if match is not None and match[1] == space:
            sizes.append(size)
    return min(sizes)


@dataclass(slots=True)
class Pointer:
    """An operand between brackets: makes addresses, and what belongs to them."""

    space: Space
    base: Array
    offset: int
    crowd: Crowd
    where: Instruction
    index: int

    def addresses(self, chosen: Any) -> Array:
        """Return the addresses of some lanes."""
        found: Array = self.base[chosen].astype(np.int64) + self.offset
        return found

    def locate(self, address: Array, size: int, chosen: Any, who: Lanes, *, writes: bool) -> Any:
        """Return the offsets behind addresses, and whether what lies there may be written."""
        offsets, may_change = self.space.locate(address, size, who, self.where, writes=writes)
        meter = self.crowd.meter
        if self.space.name == "shared":
            offsets = offsets + self.crowd.copies[chosen] * self.space.stride
            if meter is not None:
                meter.note_shared(self.index, who.numbers, address, size)
        elif meter is not None:
            meter.note_global(self.index, who.numbers, address, size)
        return offsets, may_change


def pointer(operand: Operand, space: str, one: Instruction, index: int, crowd: Crowd) -> Pointer:
    """Return what is between brackets as a pointer into a space."""
    if not isinstance(operand, Address):
        raise Unsupported(str(one))
    if isinstance(operand.base, Register):
        wide = crowd.program.registers.get(operand.base.name) == "b64"
        if not wide and space == "global":
            raise Unsupported(f"{one}: an address of 32 bits")
        base = crowd.registers.read(operand.base, "u64" if wide else "u32", one)
    elif operand.base.name in crowd.addresses:
        base = crowd.registers.constant(crowd.addresses[operand.base.name], "u64")
    else:
        raise Unsupported(str(one))
    return Pointer(crowd.spaces[space], base, operand.offset, crowd, one, index)


def make_access(one: Instruction, index: int, crowd: Crowd) -> Step | None:
    """Return an instruction as a step; None if it does not touch memory."""
    if match := _LOAD.fullmatch(one.opcode):
        space, constant, count, kind = match.groups()
        return _load(one, index, crowd, (space, kind, int(count or 1)), is_constant=bool(constant))
    if match := _STORE.fullmatch(one.opcode):
        space, count, kind = match.groups()
        return _store(one, index, crowd, (space, kind, int(count or 1)))
    if match := _PARAMETER.fullmatch(one.opcode):
        return _parameter(one, crowd, match[1])
    if match := _ATOMIC.fullmatch(one.opcode):
        return _atomic(one, index, crowd, match)
    if one.opcode == _FENCE:
        return _fence(crowd)
    return None


def _fence(crowd: Crowd) -> Step:
    order = crowd.spaces["global"].order

    def step(mask: Mask) -> None:
        _, who = crowd.some(mask)
        for lane, clock in zip(who.numbers.tolist(), who.clocks.tolist(), strict=True):
            order.fence(lane, clock >> BLOCK_BITS, barriers_of(clock))

    return step


def _parameter(one: Instruction, crowd: Crowd, kind: str) -> Step:
    source = one.operands[1]
    if not isinstance(source, Address) or source.offset or isinstance(source.base, Register):
        raise Unsupported(str(one))
    name = source.base.name
    if name not in crowd.parameters or SIZES[crowd.program.parameters[name]] < SIZES[kind]:
        raise Unsupported(str(one))
    values = crowd.registers.constant(crowd.parameters[name], kind)
    target = crowd.registers.write(one.operands[0], kind, one)
    return lambda mask: np.copyto(target, values, where=mask)


def _vector(operand: Operand, count: int, one: Instruction) -> tuple[Any, ...]:
    items = operand.items if isinstance(operand, Group) else (operand,)
    if len(items) != count:
        raise Unsupported(str(one))
    return items


def _load(
    one: Instruction, index: int, crowd: Crowd, form: tuple[str, str, int], *, is_constant: bool
) -> Step:
    space, kind, count = form
    target, source = one.operands
    targets = [crowd.registers.write(x, kind, one) for x in _vector(target, count, one)]
    place = pointer(source, space, one, index, crowd)
    dtype, size = DTYPES[kind], SIZES[kind] * count
    is_fresh = ".relaxed.gpu." in one.opcode

    def step(mask: Mask) -> None:
        chosen, who = crowd.some(mask)
        address = place.addresses(chosen)
        offsets, may_change = place.locate(address, size, chosen, who, writes=False)
        if may_change:
            place.space.note_read(offsets, size, who, one, constant=is_constant, fresh=is_fresh)
        values = place.space.words(offsets, dtype, count)
        for i, register in enumerate(targets):
            register[chosen] = values[:, i]

    return step


def _store(one: Instruction, index: int, crowd: Crowd, form: tuple[str, str, int]) -> Step:
    space, kind, count = form
    target, source = one.operands
    sources = [crowd.registers.read(x, kind, one) for x in _vector(source, count, one)]
    place = pointer(target, space, one, index, crowd)
    size = SIZES[kind] * count

    def step(mask: Mask) -> None:
        chosen, who = crowd.some(mask)
        address = place.addresses(chosen)
        offsets, _ = place.locate(address, size, chosen, who, writes=True)
        place.space.note_write(offsets, size, who, one)
        place.space.put(offsets, np.stack([x[chosen] for x in sources], axis=-1))

    return step


# --- atomics --------------------------------------------------------------------------------------

_OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "min": min,
    "max": max,
    "exch": lambda _old, new: new,
    "and": lambda old, new: old & new,
    "or": lambda old, new: old | new,
    "xor": lambda old, new: old ^ new,
    "inc": lambda old, last: 0 if old >= last else old + 1,
}


def _atomic(one: Instruction, index: int, crowd: Crowd, match: re.Match[str]) -> Step:
    verb, space, operation, kind = match.groups()
    operands = list(one.operands)
    result = operands.pop(0) if verb == "atom" else None
    place = pointer(operands.pop(0), space, one, index, crowd)
    values = [crowd.registers.read(x, kind, one) for x in operands]
    if len(values) != (2 if operation == "cas" else 1):
        raise Unsupported(str(one))
    if operation not in ("add", "cas", *_OPERATIONS):
        raise Unsupported(str(one))
    target = None if result is None else crowd.registers.write(result, kind, one)
    dtype, size = DTYPES[kind], SIZES[kind]

    def step(mask: Mask) -> None:
        chosen, who = crowd.some(mask)
        address = place.addresses(chosen)
        offsets, _ = place.locate(address, size, chosen, who, writes=True)
        place.space.note_addition(offsets, size, who, one)
        cells = place.space.bytes.view(dtype)
        cell, given = offsets // size, [x[chosen] for x in values]
        if operation == "add":
            old = _add(cells, cell, given[0])
        else:
            old = _one_by_one(cells, cell, given, operation)
        if target is not None:
            target[chosen] = old

    return step


def _add(cells: Array, cell: Array, values: Array) -> Array:
    """Add, lane after lane; return what each lane found."""
    order = np.argsort(cell, kind="stable")
    sorted_cells, sorted_values = cell[order], values[order]
    is_first = np.ones(len(cell), np.bool_)
    is_first[1:] = sorted_cells[1:] != sorted_cells[:-1]
    before = np.cumsum(sorted_values, dtype=values.dtype) - sorted_values
    starts = np.flatnonzero(is_first)
    run = np.cumsum(is_first) - 1
    found = cells[sorted_cells] + before - before[starts][run]
    old: Array = np.empty_like(found)
    old[order] = found
    ends = np.append(starts[1:], len(cell)) - 1
    cells[sorted_cells[ends]] = found[ends] + sorted_values[ends]
    return old


def _one_by_one(cells: Array, cell: Array, given: list[Array], operation: str) -> Array:
    old = np.empty(len(cell), cells.dtype)
    for i, where in enumerate(cell):
        old[i] = cells[where]
        if operation == "cas":
            cells[where] = given[1][i] if old[i] == given[0][i] else old[i]
        else:
            cells[where] = _OPERATIONS[operation](old[i], given[0][i])
    return old
