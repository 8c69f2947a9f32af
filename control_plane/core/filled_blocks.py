"""Blocks that decode rows have filled up, made findable a few at a time.

Hashing a block takes microseconds, and sequences that began together fill theirs in the same step:
done at once, that step would wait for all of them. Nobody looks for these blocks before a sequence
goes on from tokens that were generated, which is rarely at once.
"""

from __future__ import annotations

from control_plane.core.kv_interface import SharingKVCacheManagerProtocol
from control_plane.core.request import Sequence

# At least so many sequences a step, and an eighth of those that wait: whatever the block size, no
# more of them come in than go out.
_LEAST_A_STEP = 16
_SHARE_DIVISOR = 8


class FilledBlocks:
    """Which entries of which tables are full of known tokens and not findable yet.

    `replaces_idle`: an idle block is found no more once another is full of the same tokens. In
    models with states a sequence fills blocks again that were found with no state behind them. The
    idle ones would be evicted first, and with them the way to the state that it leaves.
    """

    __slots__ = ("_replaces_idle", "_sharing", "_waiting")

    def __init__(
        self, sharing: SharingKVCacheManagerProtocol | None, *, replaces_idle: bool = False
    ) -> None:
        self._sharing = sharing
        self._replaces_idle = replaces_idle
        # By seq_id, oldest first: the sequence, and the first and the end of its entries.
        self._waiting: dict[int, tuple[Sequence, int, int]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence, index: int) -> None:
        """Note entry `index` of a sequence that runs; those of one sequence come in order."""
        waiting = self._waiting.get(seq.seq_id)
        first = index if waiting is None else waiting[1]
        self._waiting[seq.seq_id] = (seq, first, index + 1)

    def settle_some(self) -> None:
        """Make the blocks of the next few sequences findable."""
        waiting = self._waiting
        if not waiting:
            return
        for _ in range(min(len(waiting), max(_LEAST_A_STEP, len(waiting) // _SHARE_DIVISOR))):
            self.settle(waiting[next(iter(waiting))][0])

    def settle(self, seq: Sequence) -> None:
        """Make the sequence's blocks findable, unless what is in them is not what it should be."""
        _, first, end = self._waiting.pop(seq.seq_id, (seq, 0, 0))
        if not seq.discards:
            self.remember(seq, first, end)

    def remember(self, seq: Sequence, first: int, end: int) -> None:
        """Make entries `first` … `end` − 1 of the sequence's table findable now."""
        sharing, chain = self._sharing, seq.chain
        if first >= end or chain is None or sharing is None:
            return
        if self._replaces_idle:
            size = sharing.block_size
            for block_id in sharing.find_prefix(chain, end * size)[first:]:
                if sharing.count_in_use((block_id,)) == 0:
                    sharing.forget((block_id,))
        sharing.remember(seq.seq_id, chain, first, end)
