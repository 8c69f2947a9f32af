"""Who failed by itself, and who by what it took from others.

What a failed row wrote may not be numbers. Whoever shares a block that a failed sequence filled, or
began with a state that came from one, may have failed by that alone, or be about to.
"""

from __future__ import annotations

from control_plane.core.batch import RowFailure
from control_plane.core.kv_interface import KVCacheManagerProtocol
from control_plane.core.request import Sequence
from control_plane.core.running import RunningSet
from control_plane.core.step import Step


class Suspects:
    """What is not to be trusted: blocks, and slots and states that came through stays."""

    __slots__ = ("_kv", "_running", "blocks", "stays")

    def __init__(self, kv_cache: KVCacheManagerProtocol, running: RunningSet) -> None:
        self._kv = kv_cache
        self._running = running
        self.blocks: set[int] = set()
        self.stays: set[int] = set()

    def add(self, seq: Sequence) -> None:
        """Suspect all that a sequence has filled itself."""
        self.blocks |= self.blocks_of(seq)[0]
        self.stays.add(seq.stay)

    def have_reached(self, seq: Sequence) -> bool:
        """Whether the sequence took something suspected from another."""
        if seq.begun_from != seq.stay and seq.begun_from in self.stays:
            return True  # its slot was poisoned with the other's, if that had failed by then
        states = self._running.states
        return not self.blocks.isdisjoint(self.blocks_of(seq)[1]) or (
            states is not None and states.came_through(seq.slot, self.stays)
        )

    def blocks_of(self, seq: Sequence) -> tuple[set[int], list[int]]:
        """Return the blocks that a sequence filled itself, and those that it borrowed.

        Also those that it has a copy of by now: what it copied may have been no numbers.
        """
        table = self._kv.get_block_table(seq.seq_id) or []
        num_borrowed = seq.num_borrowed_blocks
        own, borrowed = set(table[num_borrowed:]), table[:num_borrowed]
        for left in self._running.left_blocks(seq):
            if left.is_own:
                own.add(left.block_id)
            else:
                borrowed.append(left.block_id)
        return own, borrowed


class Failures:
    """Contains what rows that failed have spoilt."""

    __slots__ = ("_kv", "_running")

    def __init__(self, kv_cache: KVCacheManagerProtocol, running: RunningSet) -> None:
        self._kv = kv_cache
        self._running = running

    def contain(self, step: Step, failures: tuple[RowFailure, ...]) -> list[tuple[Sequence, str]]:
        """Return the sequences that failed by themselves, and why; compute the others anew.

        The blocks of those that failed are found no more. Who took something from them is sent back
        to the queue, and what its steps in flight bring is not used.
        """
        running = self._running
        failed = {
            seq.seq_id: seq
            for seq in (step.rows[failure.row] for failure in failures)
            if not seq.discards  # one that has ended may share with others what it wrote
        }
        messages = {step.rows[f.row].seq_id: f.message for f in failures}
        suspects = Suspects(self._kv, running)
        for seq in failed.values():
            suspects.add(seq)
        culprits = [seq for seq in failed.values() if not suspects.have_reached(seq)]
        suspects = Suspects(self._kv, running)
        for seq in culprits:
            suspects.add(seq)
            if running.sharing is not None:
                running.sharing.forget(suspects.blocks_of(seq)[1])
        if running.states is not None:
            # Which of them came through a failed sequence that has ended since, or through rows
            # whose numbers nobody looked at, is not known; failures are rare.
            running.states.forget_kept()
        self._spread(suspects, {seq.seq_id for seq in culprits})
        return [(seq, messages[seq.seq_id]) for seq in culprits]

    def _spread(self, suspects: Suspects, culprits: set[int]) -> None:
        """Recall every sequence that took something suspected, and suspect what it filled."""
        running = self._running
        victims: list[Sequence] = []
        has_spread = True
        while has_spread:
            has_spread = False
            for seq in running.sequences():
                if seq.discards or seq.seq_id in culprits or not suspects.have_reached(seq):
                    continue
                seq.discards = has_spread = True
                victims.append(seq)
                suspects.add(seq)
        if running.sharing is not None:
            running.sharing.forget(list(suspects.blocks))
        for seq in victims:
            if not seq.is_done:
                running.recall(seq)
