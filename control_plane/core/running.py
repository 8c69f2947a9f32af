"""The sequences that hold a slot and KV blocks, and who must give them up when they run out."""

from __future__ import annotations

from collections import OrderedDict

from control_plane.core.kv_cache import KVCacheManagerProtocol
from control_plane.core.queue import Waiting, WaitingQueue
from control_plane.core.request import RequestState, Sequence
from control_plane.core.slots import SlotPool


class RunningSet:
    """All admitted sequences, in order of arrival.

    Each is *decoding* (its only missing token is the newest one), *prefilling* (more is missing),
    or *draining*: scheduled no more, but a step in flight has a row of it and may still write its
    blocks, so slot and blocks are released with the commit of the last such step.

    Invariant: every running sequence arrived before every waiting request. So the sequence
    admitted last is the youngest.
    """

    __slots__ = (
        "_awaited_blocks",
        "_block_size",
        "_by_request",
        "_draining_blocks",
        "_kv",
        "_preempting",
        "_queue",
        "decoding",
        "num_preemptions",
        "prefilling",
        "slots",
    )

    def __init__(
        self, kv_cache: KVCacheManagerProtocol, slots: SlotPool, queue: WaitingQueue
    ) -> None:
        self._kv = kv_cache
        self._block_size = kv_cache.block_size
        self._queue = queue
        self.slots = slots
        self._by_request: dict[int, Sequence] = {}
        # By seq_id; `decoding` least recently served first, `prefilling` in order of arrival.
        self.decoding: OrderedDict[int, Sequence] = OrderedDict()
        self.prefilling: dict[int, Sequence] = {}
        self._preempting: set[int] = set()  # preempted while a step of theirs was in flight
        self._draining_blocks = 0
        self.num_preemptions = 0
        self._awaited_blocks = 0  # that rows of the step being put together wait for

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._by_request

    def get(self, request_id: int) -> Sequence | None:
        """Return the request's sequence; None if it does not run."""
        return self._by_request.get(request_id)

    def begin_step(self) -> None:
        """Forget what the rows of the step before waited for."""
        self._awaited_blocks = 0

    @property
    def is_preempting(self) -> bool:
        """Whether a preempted sequence still drains and then takes its place in the queue."""
        return bool(self._preempting)

    @property
    def projected_blocks(self) -> int:
        """Blocks in use once everything under way has computed its prompt and one more token."""
        return self._kv.get_memory_stats().used_blocks + sum(
            self.blocks_for(seq.num_tokens + 1) - self.blocks_for(seq.num_computed_tokens)
            for seq in self.prefilling.values()
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that `num_tokens` fill. A table has just those of the tokens sent."""
        return -(-num_tokens // self._block_size)

    def can_admit(self, num_tokens: int) -> bool:
        """Whether there is a slot and blocks for the first `num_tokens` of a sequence.

        A block is kept for each sequence whose next decode row needs one: it would take it back
        from the newcomer, who would come again, and neither might get on.
        """
        if self.slots.num_free == 0:
            return False
        block_size = self._block_size
        num_kept = sum(s.num_computed_tokens % block_size == 0 for s in self.decoding.values())
        return self._kv.can_allocate(self.blocks_for(num_tokens) + num_kept)

    def admit(self, waiting: Waiting, num_tokens: int) -> tuple[Sequence, list[int]]:
        """Give a request a slot and blocks for `num_tokens`; the sequence and its block table."""
        arrival, request = waiting
        block_ids = self._kv.allocate_sequence(arrival, num_tokens)
        seq = Sequence(arrival, request, self.slots.acquire())
        self._by_request[request.id] = seq
        self.prefilling[arrival] = seq
        request.state = RequestState.PREFILL
        return seq, block_ids

    def grow(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Give the sequence blocks for `num_tokens`: the new ids, or None if it must wait.

        When too few are free, younger sequences are preempted, the youngest first; those with
        steps in flight free their blocks later. Only the youngest of all can be left with nothing
        to wait for and nobody to preempt, so the oldest always gets on.
        """
        num_new = self.blocks_for(num_tokens) - self.blocks_for(seq.num_computed_tokens)
        if num_new == 0:
            return []
        while not self._kv.can_allocate(num_new):
            num_coming = self._kv.get_memory_stats().free_blocks + self._draining_blocks
            # What rows before this one wait for is not counted on twice.
            if num_coming >= num_new + self._awaited_blocks:
                self._awaited_blocks += num_new
                return None
            victim = next(s for s in reversed(self._by_request.values()) if not s.draining)
            if victim is seq:
                return None
            self._preempt(victim)
        return self._kv.grow_sequence(seq.seq_id, num_tokens)

    def advance(self, seq: Sequence, num_tokens: int, step_id: int, *, samples: bool) -> None:
        """Note that step `step_id` computes the next `num_tokens`, and `samples` after them."""
        computed = seq.num_computed_tokens = seq.num_computed_tokens + num_tokens
        seq.num_in_flight += 1
        seq.last_scheduled_step = step_id
        if samples:
            seq.num_pending_tokens += 1
            if computed == seq.max_computed_tokens:
                self.drain(seq)  # its last token is on the way
            elif seq.seq_id in self.decoding:
                self.decoding.move_to_end(seq.seq_id)
            else:
                del self.prefilling[seq.seq_id]
                self.decoding[seq.seq_id] = seq

    def _preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a sequence; it is computed anew when its turn comes."""
        self.num_preemptions += 1
        self.drain(seq)
        if seq.num_in_flight == 0:
            self.release(seq)
        else:
            self._preempting.add(seq.seq_id)

    def drain(self, seq: Sequence) -> None:
        """Schedule the sequence no more."""
        if seq.draining:
            return
        seq.draining = True
        self._draining_blocks += self.blocks_for(seq.num_computed_tokens)
        self.decoding.pop(seq.seq_id, None)
        self.prefilling.pop(seq.seq_id, None)

    def release(self, seq: Sequence) -> None:
        """Free slot and blocks of a drained sequence and queue it again unless it has ended."""
        request = seq.request
        self._draining_blocks -= self.blocks_for(seq.num_computed_tokens)
        self._preempting.discard(seq.seq_id)
        self._kv.free_sequence(seq.seq_id)
        self.slots.release(seq.slot, was_started=not seq.needs_start)
        del self._by_request[request.id]
        if not request.state.is_final:
            request.state = RequestState.PENDING
            self._queue.put_back(seq.seq_id, request)

    def release_all(self) -> None:
        """Free everything: the compute plane has forgotten all slots and blocks."""
        for seq in list(self._by_request.values()):
            self.drain(seq)
            self.release(seq)
        self.slots.reset()
