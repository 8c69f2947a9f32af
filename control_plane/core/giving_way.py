"""Who gives slot and blocks up for a newcomer of a lower priority number."""

from __future__ import annotations

from control_plane.core.kv_interface import KVCacheManagerProtocol
from control_plane.core.request import Sequence
from control_plane.core.running import RunningSet


class GivingWay:
    """Preempts running sequences for waiting ones that are more urgent."""

    __slots__ = ("_kv", "_running")

    def __init__(self, kv_cache: KVCacheManagerProtocol, running: RunningSet) -> None:
        self._kv = kv_cache
        self._running = running

    def less_urgent(self, newcomer: Sequence) -> list[Sequence]:
        """Return those that would be preempted for a newcomer: of higher priority numbers."""
        priority = newcomer.request.priority
        return [
            seq
            for seq in self._running.sequences()
            if seq.request.priority > priority and not seq.draining
        ]

    def make_way(self, newcomer: Sequence, num_blocks: int) -> bool:
        """Preempt the last sequence by `order` for one of a lower priority number.

        Whether it has gone: one with a step in flight goes when that has come. Nobody is preempted
        where a slot and `num_blocks` come by themselves with the next result, or where those of all
        that are less urgent would not be enough.
        """
        running, others = self._running, self.less_urgent(newcomer)
        is_coming = num_blocks <= running.num_draining_blocks and any(
            seq.draining for seq in running.sequences()
        )
        if not others or is_coming or not self._hold(others, num_blocks):
            return False
        running.preempt(max(others, key=lambda seq: seq.order))
        return not running.is_preempting

    def _hold(self, sequences: list[Sequence], num_blocks: int) -> bool:
        """Whether so many fewer blocks were in use and promised without these sequences."""
        running, blocks_for = self._running, self._running.blocks_for
        num_promised = sum(
            blocks_for(seq.num_tokens + 1) - blocks_for(seq.num_computed_tokens)
            for seq in sequences
        )
        num_missing = num_blocks - num_promised
        if sum(blocks_for(seq.num_computed_tokens) for seq in sequences) < num_missing:
            return False
        if running.sharing is None or num_missing <= 0:
            return True
        # What is shared goes with the last of those that share it.
        leaving = {seq.seq_id for seq in sequences}
        held: set[int] = set()
        for seq_id in leaving:
            held.update(self._kv.get_block_table(seq_id) or ())
        for seq in running.sequences():
            if seq.seq_id not in leaving:
                held.difference_update(self._kv.get_block_table(seq.seq_id) or ())
        return len(held) >= num_missing
