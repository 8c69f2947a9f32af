"""Forgetting a batch's released slots and building those it starts, from others' tokens too.

A start may begin as another slot does (`SlotPrefix`): samples of one prompt and beams of one text
have all but a few tokens in common, and a long text sent once a step and beam is most of a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compute_plane.errors import InvalidBatch
from compute_plane.executor.samples_ahead import SampleAwaited, SamplesAhead
from compute_plane.executor.slot_state import SlotMemory, SlotNumbers
from compute_plane.executor.step import SlotPrefix, StepBatch

if TYPE_CHECKING:
    from compute_plane.executor.interface import BoolArray


def stage_slots(
    batch: StepBatch,
    staged: SlotNumbers,
    memory: SlotMemory,
    ahead: SamplesAhead | None,
    taken: list[int],
) -> list[int]:
    """Forget the released slots, build the started ones; return the lines that become free.

    `ahead`: of the step launched last, if that is under way. `taken` gets each line a start was
    built in. Raises InvalidBatch for a prefix that its slot does not have, SampleAwaited for one
    of a slot in that step, of which is not known yet what it has and whether it is sound.
    """
    released = np.unique(batch.released)
    released = released[staged.is_known[released]]  # to forget what is not known is no fault
    freed: list[int] = staged.line[released].tolist()
    can_be_read = staged.is_known.copy()  # what is released here still stands in its line
    staged.is_known[released] = False
    for index, start in enumerate(batch.starts):
        slot, prefix = start.slot, start.prefix
        line = memory.free_lines.pop()
        taken.append(line)
        num_tokens = num_blocks = 0
        is_poisoned = False
        if prefix is not None:
            _check_prefix(f"starts[{index}].prefix", prefix, staged, can_be_read)
            of = int(staged.line[prefix.slot])
            num_tokens, num_blocks = prefix.num_tokens, prefix.num_blocks
            if ahead is not None and ahead.involves(of):
                raise SampleAwaited
            memory.tokens[line, :num_tokens] = memory.tokens[of, :num_tokens]
            memory.tables[line, :num_blocks] = memory.tables[of, :num_blocks]
            is_poisoned = bool(staged.is_poisoned[prefix.slot])
        if staged.is_known[slot]:
            freed.append(int(staged.line[slot]))
        memory.tokens[line, num_tokens : start.num_tokens] = start.token_ids
        memory.tables[line, num_blocks : start.num_blocks] = start.block_ids
        memory.sampling[line] = start.sampling
        staged.line[slot] = line
        staged.num_tokens[slot] = staged.num_given[slot] = start.num_tokens
        staged.num_prompt[slot] = start.num_prompt_tokens
        staged.num_computed[slot] = 0
        staged.num_blocks[slot] = start.num_blocks
        staged.adapter[slot] = start.adapter
        staged.is_known[slot] = staged.is_fresh[slot] = can_be_read[slot] = True
        staged.is_poisoned[slot] = is_poisoned
    return freed


def _check_prefix(
    field: str, prefix: SlotPrefix, staged: SlotNumbers, can_be_read: BoolArray
) -> None:
    """Raise InvalidBatch unless the slot has so many tokens and blocks."""
    slot = prefix.slot
    if not can_be_read[slot]:
        raise InvalidBatch(f"{field}.slot {slot} is not started", field=f"{field}.slot")
    if staged.is_poisoned[slot]:  # what it has is not said
        return
    for name, given, held in (
        ("num_tokens", prefix.num_tokens, staged.num_tokens),
        ("num_blocks", prefix.num_blocks, staged.num_blocks),
    ):
        if given > held[slot]:
            raise InvalidBatch(
                f"{field}.{name} must be at most that of slot {slot} ({held[slot]}), got {given}",
                field=f"{field}.{name}",
            )
