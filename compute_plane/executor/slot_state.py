"""The memory of the slots: per-slot numbers that can be staged, tokens and tables that only grow.

A slot's tokens and block table lie in one *line* of two wide arrays. What the per-slot numbers do
not count is invisible, so a batch under check may write tokens and blocks behind them, and builds a
started slot in a free line: until its numbers are adopted, nothing has changed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from compute_plane.executor.batch_checks import SlotLimits
from compute_plane.executor.interface import BoolArray, Int32Array
from compute_plane.executor.sampling_rows import SamplingKeys
from compute_plane.executor.step import SamplingKey

Int64Array = npt.NDArray[np.int64]

GREEDY = SamplingKey(temperature=0.0, top_p=1.0, seed=0, sample_index=0)


@dataclass(slots=True)
class SlotNumbers:
    """One entry a slot, [max_slots] each.

    `line`: where its tokens and table lie. `num_tokens`: tokens known. `num_given`: of these, how
    many were told by the control plane rather than sampled here. `num_prompt`: of these, how many
    are the prompt; the others are output, for penalties. `num_computed`: tokens whose KV is
    in the pool. `num_blocks`: length of the block table. `is_known`: started and not released.
    `adapter`: what its tokens are computed with, as in `ExecutionBatch.adapters`.
    `is_fresh`: started and not computed since, so the next row says how much is computed (a prefix
    may have been found in the cache). `is_poisoned`: unusable until the next start.
    `state_tokens`: [num_states], of how many tokens each state is.
    """

    line: Int64Array
    num_tokens: Int64Array
    num_given: Int64Array
    num_prompt: Int64Array
    num_computed: Int64Array
    num_blocks: Int64Array
    adapter: Int64Array
    is_known: BoolArray
    is_fresh: BoolArray
    is_poisoned: BoolArray
    state_tokens: Int64Array

    @classmethod
    def empty(cls, max_slots: int, num_states: int = 0) -> SlotNumbers:
        """Slots that know nothing."""
        line, tokens, given, prompt, computed, blocks, adapter = np.zeros(
            (7, max_slots), dtype=np.int64
        )
        known, fresh, poisoned = np.zeros((3, max_slots), dtype=np.bool_)
        states = np.zeros(num_states, dtype=np.int64)
        return cls(
            line, tokens, given, prompt, computed, blocks, adapter, known, fresh, poisoned, states
        )

    def copy(self) -> SlotNumbers:
        """Return the same numbers, to be changed apart."""
        return SlotNumbers(*[getattr(self, item.name).copy() for item in fields(self)])


class SlotMemory:
    """The lines of all slots.

    `tokens`: [2 · max_slots, longest sequence + 1] int32. `tables`: [2 · max_slots, longest table]
    int32. Twice as many lines as slots, so that every slot can be started anew in one batch while
    its old line still stands. The memory is reserved lazily: a line never used costs nothing.
    `sampling[line]`: how the tokens of the slot in that line are drawn; of a line never used,
    greedily.
    """

    def __init__(self, limits: SlotLimits) -> None:
        num_lines = 2 * limits.max_slots
        self.tokens: Int32Array = np.zeros(
            (num_lines, limits.max_sequence_tokens + 1), dtype=np.int32
        )
        self.tables: Int32Array = np.zeros((num_lines, limits.max_table_len), dtype=np.int32)
        self.sampling = [GREEDY] * num_lines
        self.free_lines = list(range(num_lines - 1, -1, -1))
        self._last_keys = SamplingKeys(())

    def keys_of(self, lines: Int64Array) -> SamplingKeys:
        """Return how tokens are drawn in some lines; the same object again while that is so."""
        keys = tuple([self.sampling[line] for line in lines.tolist()])
        if keys != self._last_keys.keys:
            self._last_keys = SamplingKeys(keys)
        return self._last_keys


def ragged_index(firsts: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return (item, value) of all values `firsts[i] … firsts[i] + counts[i] − 1`, item by item."""
    items = np.repeat(np.arange(counts.size), counts)
    offsets = np.cumsum(counts) - counts
    return items, firsts[items] + np.arange(items.size) - offsets[items]
