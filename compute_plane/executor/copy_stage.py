"""Taking a batch's block copies and swaps in, in the order in which they must run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from compute_plane.errors import InvalidBatch
from compute_plane.executor.interface import BlockCopy, CopyKind
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers
from compute_plane.executor.step import BlockMove, StepBatch


class StagedCopy(NamedTuple):
    """A copy to run, and the slot in whose table its destination stands; −1 for a swap."""

    copy: BlockCopy
    slot: int


class ReplacedEntry(NamedTuple):
    """What stood in a block table before a copy's destination was put there."""

    line: int
    place: int
    block: int


def stage_copies(
    batch: StepBatch, staged: SlotNumbers, memory: SlotMemory, replaced: list[ReplacedEntry]
) -> list[StagedCopy]:
    """Put the copies' destinations into the tables; return what is to run, in order.

    Blocks are swapped out before a copy or a swap in may overwrite them. `replaced` gets each entry
    overwritten, also where InvalidBatch is raised.
    """
    copies = _moves(batch.swap_out, CopyKind.SWAP_OUT)
    tables = memory.tables
    for index, copy in enumerate(batch.copies):
        field = f"copies[{index}]"
        if not staged.is_known[copy.slot]:
            raise InvalidBatch(f"{field}.slot {copy.slot} is not started", field=f"{field}.slot")
        if staged.is_poisoned[copy.slot]:
            continue
        if not 0 <= copy.logical_index < staged.num_blocks[copy.slot]:
            raise InvalidBatch(
                f"{field}.logical_index must be below the slot's number of blocks "
                f"({staged.num_blocks[copy.slot]}), got {copy.logical_index}",
                field=f"{field}.logical_index",
            )
        line = int(staged.line[copy.slot])
        held = int(tables[line, copy.logical_index])
        if held != copy.source:
            raise InvalidBatch(
                f"{field}.source_block must be entry {copy.logical_index} of the slot's "
                f"table ({held}), got {copy.source}",
                field=f"{field}.source_block",
            )
        replaced.append(ReplacedEntry(line, copy.logical_index, held))
        tables[line, copy.logical_index] = copy.destination
        copies.append(StagedCopy(BlockCopy(copy.source, copy.destination), copy.slot))
    return copies + _moves(batch.swap_in, CopyKind.SWAP_IN)


def _moves(moves: Sequence[BlockMove], kind: CopyKind) -> list[StagedCopy]:
    return [StagedCopy(BlockCopy(move.source, move.destination, kind), -1) for move in moves]
