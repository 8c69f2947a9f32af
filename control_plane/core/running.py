"""The sequences that hold a slot and KV blocks, and who must give them up when they run out."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

from control_plane.core.batch import BlockCopy
from control_plane.core.filled_blocks import FilledBlocks
from control_plane.core.host_pool import HostPool
from control_plane.core.kv_interface import KVCacheManagerProtocol, SharingKVCacheManagerProtocol
from control_plane.core.queue import WaitingQueue
from control_plane.core.request import LeftBlock, Origin, RequestState, Sequence
from control_plane.core.slots import SlotPool
from control_plane.core.states import SequenceStates

if TYPE_CHECKING:
    from control_plane.core.arrivals import Arrival


class RunningSet:
    """All admitted sequences.

    Each is *decoding* (its only missing token is the newest one), *prefilling* (more is missing),
    or *draining*: scheduled no more, but a step in flight has a row of it and may still write its
    blocks, so slot and blocks are released with the commit of the last such step.

    Who must give way is always the last by `Sequence.order`, so the first by that order is never
    stopped by another and comes to its end.
    """

    __slots__ = (
        "_awaited_blocks",
        "_block_size",
        "_kv",
        "_preempting",
        "_queue",
        "_running",
        "_stays",
        "decoding",
        "filled",
        "host",
        "last_committed_step",
        "now",
        "num_draining_blocks",
        "num_kv_tokens",
        "num_preemptions",
        "num_swaps",
        "num_table_entries",
        "prefilling",
        "sharing",
        "slots",
        "start_prefixes",
        "states",
    )

    def __init__(
        self,
        kv_cache: KVCacheManagerProtocol,
        slots: SlotPool,
        queue: WaitingQueue,
        host: HostPool,
        states: SequenceStates | None = None,
        *,
        start_prefixes: bool = False,
    ) -> None:
        self._kv = kv_cache
        self.sharing = kv_cache if isinstance(kv_cache, SharingKVCacheManagerProtocol) else None
        self.filled = FilledBlocks(self.sharing, replaces_idle=states is not None)
        self._block_size = kv_cache.block_size
        self._queue = queue
        self.slots = slots
        self.host = host
        self.states = states
        self.start_prefixes = start_prefixes
        self._running: dict[int, Sequence] = {}  # by seq_id, as the next two
        # `decoding`: least recently served first; `prefilling`: in order of admission.
        self.decoding: dict[int, Sequence] = {}
        self.prefilling: dict[int, Sequence] = {}
        self._stays = count(1)
        self._preempting: set[int] = set()  # preempted while a step of theirs was in flight
        self.num_draining_blocks = 0
        self._awaited_blocks = 0  # that rows of the step being put together wait for
        self.last_committed_step = 0
        self.now = 0.0  # as of the last call that said
        self.num_preemptions = 0
        self.num_swaps = 0
        self.num_kv_tokens = 0  # computed tokens of all tables
        self.num_table_entries = 0

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._running

    def sequences(self) -> Iterable[Sequence]:
        """Return the running sequences, draining ones included."""
        return self._running.values()

    def begin_step(self) -> None:
        """Forget what the rows of the step before waited for."""
        self._awaited_blocks = 0

    @property
    def is_preempting(self) -> bool:
        """Whether a preempted sequence still drains and then takes its place in the queue."""
        return bool(self._preempting)

    @property
    def internal_fragmentation(self) -> float:
        """Share of the token places in block tables that hold no token."""
        num_places = self.num_table_entries * self._block_size
        return 1.0 - self.num_kv_tokens / num_places if num_places else 0.0

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` fill. A table has just those of the tokens sent."""
        return -(-num_tokens // self._block_size)

    # Entering

    def admit(self, seq: Sequence, arrival: Arrival, num_tokens: int) -> list[int]:
        """Give a sequence a slot and blocks for its next `num_tokens`; its block table."""
        block_ids, num_computed = arrival.block_ids, arrival.num_computed
        end = num_computed + num_tokens
        if self.sharing is not None and block_ids:
            table = self.sharing.allocate_with_prefix(seq.seq_id, end, block_ids)
        else:
            table = self._kv.allocate_sequence(seq.seq_id, end)
        if num_computed > len(block_ids) * self._block_size:
            saved = table[len(block_ids) : self.blocks_for(num_computed)]
            self.host.swap_in(seq.seq_id, saved, len(block_ids))
        else:
            self.host.forget(seq.seq_id)
        request = seq.request
        if not seq.was_admitted and seq.sample_index == 0:
            request.cached_tokens = min(num_computed, len(request.input_tokens))
        seq.was_admitted = True
        seq.num_saved_tokens = 0
        seq.num_borrowed_blocks = len(block_ids)
        seq.num_computed_tokens = num_computed
        seq.state_places = arrival.state_places
        self._enter(seq, len(table))
        if self.states is not None:
            self.states.begin(seq, len(block_ids))
        self.prefilling[seq.seq_id] = seq
        self.remember(seq, len(block_ids) * self._block_size)
        return table

    def fork(
        self, parent: Sequence, child: Sequence, num_tokens: int, num_sent: int | None = None
    ) -> list[int] | None:
        """Let a new sequence share the blocks of the parent's first `num_tokens`; its block table.

        `num_sent`: how many of them earlier steps have computed, where a row of the parent's in the
        step that is put together computes the others. None: all of them.
        Returns None, and nothing has changed, if there is no slot, the KV cache cannot share, or
        the parent's state is of more tokens.
        """
        if self.sharing is None or self.slots.num_free == 0:
            return None
        if self.states is not None and parent.num_computed_tokens != num_tokens:
            return None
        table = self.sharing.fork_sequence(parent.seq_id, child.seq_id, num_tokens)
        child.was_admitted = True
        child.num_computed_tokens = num_tokens
        child.num_borrowed_blocks = len(table)
        self._enter(child, len(table))
        self.set_origin(child, parent, num_tokens, num_tokens if num_sent is None else num_sent)
        if self.states is not None:
            self.states.fork(parent, child, is_behind_row=num_sent is not None)
        if num_tokens % self._block_size:
            for seq in (parent, child):
                seq.shares_tail = True
                seq.mark()
        return table

    def set_origin(self, seq: Sequence, parent: Sequence, num_tokens: int, num_sent: int) -> None:
        """Let a slot be started with the parent's first tokens, known there, and blocks sent."""
        if self.start_prefixes:
            num_blocks = num_sent // self._block_size  # of a half-full one there may be a copy
            seq.origin = Origin(parent, parent.stay, num_tokens, num_blocks)

    def _enter(self, seq: Sequence, table_len: int) -> None:
        seq.slot = self.slots.acquire()
        seq.stay = next(self._stays)
        self._running[seq.seq_id] = seq
        seq.group.num_running += 1
        if seq.request.state is RequestState.PENDING:
            seq.request.enter(RequestState.PREFILL, self.now)
        self.num_table_entries += table_len
        self.num_kv_tokens += seq.num_computed_tokens

    # Blocks

    def grow(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Give the sequence blocks for `num_tokens`: the new ids, or None if it must wait."""
        num_new = self.blocks_for(num_tokens) - self.blocks_for(seq.num_computed_tokens)
        if num_new == 0:
            return []
        if not self._secure(seq, num_new):
            return None
        self.num_table_entries += num_new
        return self._kv.grow_sequence(seq.seq_id, num_tokens)

    def grow_by_one(self, seq: Sequence) -> tuple[int, ...]:
        """Give the sequence one more block: its id, or nothing if it must wait."""
        if not self._kv.can_allocate(1) and not self._secure(seq, 1):
            return ()
        self.num_table_entries += 1
        return (self._kv.allocate_block(seq.seq_id),)

    def own_tail(self, seq: Sequence, step_id: int) -> BlockCopy | bool:
        """Make the half-full last block the sequence's own, from step `step_id` on.

        True: it is, as it is. A copy: it is once that is made. False: it must wait, for a block or
        because its slot is not started; copies name slots as they are before a step's starts.
        """
        sharing = self.sharing
        if sharing is None:
            return True
        index = seq.num_computed_tokens // self._block_size
        is_secured = False
        if sharing.is_shared(seq.seq_id, index):
            if not seq.is_on_plane:
                return False
            is_secured = self._secure(seq, 1)
        # Who was preempted for it may have been the one it was shared with.
        if not sharing.is_shared(seq.seq_id, index):
            sharing.claim(seq.seq_id, index)
            return True
        if not is_secured:
            return False
        copy = sharing.unshare(seq.seq_id, index)
        is_own = index >= seq.num_borrowed_blocks
        seq.left_blocks = [*self.left_blocks(seq), LeftBlock(step_id, copy.source, is_own)]
        seq.num_borrowed_blocks = min(seq.num_borrowed_blocks, index)
        return BlockCopy(seq.slot, *copy)

    def left_blocks(self, seq: Sequence) -> list[LeftBlock]:
        """Return those of its `left_blocks` that rows without a result may have filled."""
        return [left for left in seq.left_blocks if left.step_id > self.last_committed_step]

    def _secure(self, seq: Sequence, num_new: int) -> bool:
        """See to it that `num_new` blocks can be allocated; False: the sequence must wait.

        When too few are free, others are preempted, the last by `order` first; those with steps in
        flight free their blocks later. Only the last of all can be left with nothing to wait for
        and nobody to preempt, so the first always gets on.
        """
        while not self._kv.can_allocate(num_new):
            num_coming = self._kv.get_memory_stats().free_blocks + self.num_draining_blocks
            # What rows before this one wait for is not counted on twice.
            if num_coming >= num_new + self._awaited_blocks:
                self._awaited_blocks += num_new
                return False
            victim = max(
                (s for s in self._running.values() if not s.draining), key=lambda s: s.order
            )
            if victim is seq:
                return False
            self.preempt(victim)
        return True

    def remember(self, seq: Sequence, first_token: int) -> None:
        """Make the blocks findable that tokens `first_token` and later have filled or will fill."""
        size = self._block_size
        self.filled.remember(seq, first_token // size, seq.num_computed_tokens // size)

    # Leaving

    def preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a sequence; it goes on when its turn comes."""
        self.num_preemptions += 1
        self.recall(seq)

    def yield_beam(self) -> bool:
        """Preempt the last beam by `order` while somebody waits; whether there is one."""
        beams = [s for s in self._running.values() if s.is_beam and not s.draining]
        if not beams or not self._queue.has_next:
            return False
        self.preempt(max(beams, key=lambda s: s.order))
        return True

    def recall(self, seq: Sequence) -> None:
        """Send a sequence back to the queue, at once or when its steps in flight have come."""
        self.drain(seq)
        if seq.num_in_flight == 0:
            self.release(seq)
        else:
            self._preempting.add(seq.seq_id)

    def drain(self, seq: Sequence) -> None:
        """Schedule the sequence no more."""
        if seq.draining:
            return
        seq.draining = seq.is_special = True
        self.num_draining_blocks += self.blocks_for(seq.num_computed_tokens)
        self.decoding.pop(seq.seq_id, None)
        self.prefilling.pop(seq.seq_id, None)

    def release(self, seq: Sequence) -> None:
        """Free slot and blocks of a drained sequence and queue it again unless it has ended."""
        num_blocks = self.blocks_for(seq.num_computed_tokens)
        self.num_draining_blocks -= num_blocks
        self.num_table_entries -= num_blocks
        self.num_kv_tokens -= seq.num_computed_tokens
        self._preempting.discard(seq.seq_id)
        self.filled.settle(seq)
        if self.states is not None:
            self.states.end(seq)
        if not seq.is_done and not seq.discards:
            self._save(seq)
        self._kv.free_sequence(seq.seq_id)
        self.slots.release(seq.slot, was_started=seq.is_on_plane)
        del self._running[seq.seq_id]
        seq.stay = 0
        seq.origin = None
        seq.group.num_running -= 1
        if not seq.is_done:
            self._return(seq)

    def _save(self, seq: Sequence) -> None:
        """Save a preempted sequence's blocks on the host, if there is room."""
        if self.host.num_blocks:
            table = self._kv.get_block_table(seq.seq_id) or ()
            if self.host.swap_out(seq.seq_id, table):
                seq.num_saved_tokens = seq.num_computed_tokens
                self.num_swaps += 1

    def _return(self, seq: Sequence) -> None:
        """Queue a sequence again, as if it had never run but for what is saved of it."""
        seq.num_computed_tokens = 0
        seq.needs_start = True
        seq.is_on_plane = False
        seq.logprobs = None
        seq.left_blocks.clear()
        seq.draining = seq.discards = seq.shares_tail = False
        seq.mark()
        self._queue.add(seq)
        if seq.group.num_running == 0 and seq.request.state is not RequestState.PENDING:
            seq.request.enter(RequestState.PENDING, self.now)

    def release_all(self) -> None:
        """Free everything: the compute plane has forgotten all slots and blocks."""
        self.host.reset()
        for seq in list(self._running.values()):
            seq.num_in_flight = seq.num_pending_tokens = 0
            seq.discards = True  # there is nothing to save
            self.drain(seq)
            self.release(seq)
        self.slots.reset()
        if self.states is not None:
            self.states.reset()
        if self.sharing is not None:
            self.sharing.forget_all()
