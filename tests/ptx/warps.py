"""Instructions that a whole warp executes together, as steps.

A step gets only lanes whose warps are complete: the machine has seen to that. Fragments are those
of the manual's drawings, with group = lane / 4 and quad = lane % 4.

Source: PTX ISA 9.0, chapters 9.7.9.6 (shfl), 9.7.13 (vote, match), 9.7.14.5 (mma, ldmatrix,
movmatrix; figures for m16n8k16 with .f16 and .bf16).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.ptx.accesses import pointer
from tests.ptx.faults import Undefined, Unsupported
from tests.ptx.floats import WIDEN
from tests.ptx.lanes import WARP, Crowd, Mask, Step
from tests.ptx.program import Group, Instruction, Operand, Pair

Array = npt.NDArray[Any]

_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32")
_LDMATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
_MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"
_SHUFFLE = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
_VOTE = re.compile(r"vote\.sync\.(ballot\.b32|any\.pred|all\.pred)")
_ALIGNED = re.compile(r".*\.sync\.aligned\..*")


def named_lanes(one: Instruction, crowd: Crowd) -> Array | None:
    """Return the mask of the lanes that must come, as each lane says it.

    None if the instruction is none of a warp.
    """
    if _ALIGNED.fullmatch(one.opcode):
        return crowd.registers.constant(0xFFFF_FFFF, "u32")
    if _SHUFFLE.fullmatch(one.opcode) or _VOTE.fullmatch(one.opcode):
        return crowd.registers.read(one.operands[-1], "u32", one)
    if one.opcode == "bar.warp.sync":
        return crowd.registers.read(one.operands[0], "u32", one)
    return None


def make_warp_step(one: Instruction, index: int, crowd: Crowd) -> Step | None:
    """Return an instruction as a step; None if it is none of a warp."""
    if match := _SHUFFLE.fullmatch(one.opcode):
        return _shuffle(one, crowd, match[1])
    if match := _VOTE.fullmatch(one.opcode):
        return _vote(one, crowd, match[1])
    if match := _MMA.fullmatch(one.opcode):
        if match[1] != match[2]:
            raise Unsupported(str(one))
        return _multiply(one, crowd, WIDEN[match[1]])
    if match := _LDMATRIX.fullmatch(one.opcode):
        return _load_tiles(one, index, crowd, int(match[1]), transposed=bool(match[2]))
    if one.opcode == _MOVMATRIX:
        return _transpose(one, crowd)
    if one.opcode == "bar.warp.sync":
        return lambda mask: crowd.pass_barrier(mask, of_block=False)
    return None


def _shuffle(one: Instruction, crowd: Crowd, mode: str) -> Step:
    target, *operands, _ = one.operands
    registers = crowd.registers
    in_range = None
    if isinstance(target, Pair):
        in_range = registers.write(target.second, "pred", one)
        target = target.first
    place = registers.write(target, "b32", one)
    a, b, c = (registers.read(operand, "u32", one) for operand in operands)
    lane = np.arange(crowd.size, dtype=np.int64) % WARP
    first = np.arange(crowd.size, dtype=np.int64) - lane

    def step(mask: Mask) -> None:
        offset = (b & 31).astype(np.int64)
        clamp, segment = (c & 31).astype(np.int64), (c >> 8 & 31).astype(np.int64)
        most = (lane & segment) | (clamp & ~segment)
        if mode == "up":
            source = lane - offset
            inside = source >= most
        else:
            source = {
                "down": lane + offset,
                "bfly": lane ^ offset,
                "idx": (lane & segment) | (offset & ~segment),
            }[mode]
            inside = source <= most
        source = first + np.where(inside, source, lane)
        if mask is not True and not (mask[source] | ~mask).all():
            raise Undefined(f"{one}: a lane takes the register of one that is not there")
        values = a[source]
        np.copyto(place, values, where=mask)
        if in_range is not None:
            np.copyto(in_range, inside, where=mask)

    return step


def _vote(one: Instruction, crowd: Crowd, mode: str) -> Step:
    target, source, _ = one.operands
    kind = mode.split(".")[1]
    place = crowd.registers.write(target, kind, one)
    claims = crowd.registers.read(source, "pred", one)

    def step(mask: Mask) -> None:
        votes = (claims & mask).reshape(-1, WARP)
        if kind == "b32":
            words = np.packbits(votes, axis=1, bitorder="little").view(np.uint32)[:, 0]
            result: Array = words
        elif mode.startswith("any"):
            result = votes.any(axis=1)
        else:
            result = (claims | ~np.asarray(mask)).reshape(-1, WARP).all(axis=1)
        np.copyto(place, np.repeat(result, WARP), where=mask)

    return step


# --- tensor cores ---------------------------------------------------------------------------------


def _items(operand: Operand, count: int, one: Instruction) -> tuple[Any, ...]:
    if not isinstance(operand, Group) or len(operand.items) != count:
        raise Unsupported(str(one))
    return operand.items


def _multiply(one: Instruction, crowd: Crowd, widen: Callable[[Array], Array]) -> Step:
    registers = crowd.registers
    d, a, b, c = one.operands
    targets = [registers.write(x, "f32", one) for x in _items(d, 4, one)]
    left = [registers.read(x, "b32", one) for x in _items(a, 4, one)]
    right = [registers.read(x, "b32", one) for x in _items(b, 2, one)]
    sums = [registers.read(x, "f32", one) for x in _items(c, 4, one)]

    def step(mask: Mask) -> None:
        # A word is two neighbours of k, the first below. a0: row group, low k; a1: row group + 8,
        # low k; a2, a3: the same of high k.
        words = np.stack(left).reshape(2, 2, -1, 8, 4)  # [k half, row half, warp, group, quad]
        values = widen(words.view(np.uint16)).reshape(2, 2, -1, 8, 4, 2)
        tile_a = values.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        # b0: column group, low k; b1: high k.
        words = np.stack(right).reshape(2, -1, 8, 4)  # [k half, warp, group, quad]
        values = widen(words.view(np.uint16)).reshape(2, -1, 8, 4, 2)
        tile_b = values.transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        # c0, c1: row group, columns 2 quad and the next; c2, c3: row group + 8.
        tile_c = np.stack(sums).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1)
        product = tile_a.astype(np.float64) @ tile_b.astype(np.float64)
        total = product.reshape(-1, 2, 8, 4, 2) + tile_c
        spread = total.astype(np.float32).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        for i, place in enumerate(targets):
            np.copyto(place, spread[i], where=mask)

    return step


def _load_tiles(
    one: Instruction, index: int, crowd: Crowd, count: int, *, transposed: bool
) -> Step:
    targets = [crowd.registers.write(x, "b32", one) for x in _items(one.operands[0], count, one)]
    place = pointer(one.operands[1], "shared", one, index, crowd)

    def step(mask: Mask) -> None:
        # Lanes 8t … 8t + 7 have the addresses of the rows of tile t.
        gives = np.arange(crowd.size) % WARP < 8 * count
        chosen, who = crowd.some(True if mask is True and count == 4 else gives & mask)
        address = place.addresses(chosen)
        offsets, _ = place.locate(address, 16, chosen, who, writes=False)
        place.space.note_read(offsets, 16, who, one)
        rows = place.space.words(offsets, np.dtype(np.uint16), 8).reshape(-1, count, 8, 8)
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        # Lane 4r + q gets of tile t, in register t, elements 2q and 2q + 1 of row r.
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, count, WARP)
        for i, register in enumerate(targets):
            register[slice(None) if mask is True else mask] = words[:, i].reshape(-1)

    return step


def _transpose(one: Instruction, crowd: Crowd) -> Step:
    place = crowd.registers.write(one.operands[0], "b32", one)
    source = crowd.registers.read(one.operands[1], "b32", one)

    def step(mask: Mask) -> None:
        tiles = np.ascontiguousarray(source).view(np.uint16).reshape(-1, 8, 8)
        turned = np.ascontiguousarray(tiles.transpose(0, 2, 1)).view(np.uint32).reshape(-1)
        np.copyto(place, turned, where=mask)

    return step
