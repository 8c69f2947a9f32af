"""Blocks of host memory to which preempted sequences are swapped out."""

from __future__ import annotations

from collections.abc import Sequence

from control_plane.core.batch import BlockMove


class HostPool:
    """The host blocks `0 … num_blocks − 1` of the compute plane, and the moves of the next step.

    A batch runs its swap-outs before its swap-ins. So a host block that is swapped in is not given
    out again before that batch is complete (`take_moves`); a device block that is swapped out is
    free at once.
    """

    __slots__ = ("_free", "_leaving", "_num_blocks", "_swap_in", "_swap_out", "_tables")

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._free: list[int] = []
        self._tables: dict[int, list[int]] = {}  # by seq_id
        self.reset()

    @property
    def num_used(self) -> int:
        """Host blocks that hold something."""
        return self._num_blocks - len(self._free)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; 0: nothing is swapped."""
        return self._num_blocks

    def reset(self) -> None:
        """Forget everything: the compute plane has."""
        self._free = list(range(self._num_blocks - 1, -1, -1))
        self._tables.clear()
        self._leaving: list[int] = []
        self._swap_out: list[BlockMove] = []
        self._swap_in: list[BlockMove] = []

    def swap_out(self, seq_id: int, block_ids: Sequence[int]) -> bool:
        """Save a sequence's blocks, in order, with the next step; False: there is no room."""
        if len(block_ids) > len(self._free):
            return False
        table = [self._free.pop() for _ in block_ids]
        self._tables[seq_id] = table
        self._swap_out.extend(map(BlockMove, block_ids, table))
        return True

    def holds(self, seq_id: int) -> bool:
        """Whether blocks of the sequence are saved."""
        return seq_id in self._tables

    def swap_in(self, seq_id: int, block_ids: Sequence[int], first: int) -> None:
        """Bring saved blocks from entry `first` on back, into `block_ids`, with the next step."""
        table = self._tables.pop(seq_id)
        self._swap_in.extend(map(BlockMove, table[first:], block_ids))
        self._leaving.extend(table)

    def forget(self, seq_id: int) -> None:
        """Give up what is saved of the sequence, if anything is."""
        table = self._tables.pop(seq_id, None)
        if table is not None:
            # Not at once: a move of the next step may still name it.
            self._leaving.extend(table)

    def take_moves(self) -> tuple[tuple[BlockMove, ...], tuple[BlockMove, ...]]:
        """Return the swap-outs and swap-ins of the step that is complete now."""
        moves = tuple(self._swap_out), tuple(self._swap_in)
        self._swap_out.clear()
        self._swap_in.clear()
        self._free.extend(self._leaving)
        self._leaving.clear()
        return moves
