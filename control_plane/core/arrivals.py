"""What waiting sequences bring with them, and whether there is room for them."""

from __future__ import annotations

from typing import NamedTuple

from control_plane.core.kv_interface import (
    KVCacheManagerProtocol,
    SharingKVCacheManagerProtocol,
)
from control_plane.core.prefix_cache import TokenChain
from control_plane.core.request import Sequence
from control_plane.core.running import RunningSet

DIGESTS_A_STEP = 512
"""Blocks of waiting sequences that are digested in a step while others run: some 4 ms."""


class Arrival(NamedTuple):
    """What a waiting sequence brings: tokens that need not be computed.

    `block_ids`: blocks that hold its first tokens. `num_in_use`: how many of them are in a table
    now, so that sharing them takes nothing from the pool. `num_computed`: tokens with KV, found or
    saved on the host. `num_missing`: known tokens without. `state_places`: of the sequence.
    """

    block_ids: list[int]
    num_in_use: int
    num_computed: int
    num_missing: int
    state_places: tuple[int, ...] = ()


class Arrivals:
    """Looks waiting sequences over before `RunningSet.admit` lets them in."""

    __slots__ = ("_block_size", "_kv", "_num_digests_left", "_running")

    def __init__(self, kv_cache: KVCacheManagerProtocol, running: RunningSet) -> None:
        self._kv = kv_cache
        self._block_size = kv_cache.block_size
        self._running = running
        self.begin_step()

    def begin_step(self) -> None:
        """Let sequences be digested anew."""
        self._num_digests_left = DIGESTS_A_STEP

    def projected_blocks(self) -> int:
        """Blocks in use once everything under way has computed its prompt and one more token."""
        blocks_for = self._running.blocks_for
        return self._kv.get_memory_stats().used_blocks + sum(
            blocks_for(seq.num_tokens + 1)
            - blocks_for(seq.num_computed_tokens)
            + len(seq.group.unborn)
            for seq in self._running.prefilling.values()
        )

    def look_up(self, seq: Sequence) -> Arrival | None:
        """Return what a waiting sequence would bring if it were admitted now.

        None: it is a beam, and another one is computing the prompt they are to share; or there is
        more of it to look up than a step has time for.
        """
        shared = self._shared_prompt(seq)
        if shared is None:
            return None
        num_known = seq.num_known_tokens
        sharing, host, states = self._running.sharing, self._running.host, self._running.states
        block_ids: list[int] = []
        state_places: tuple[int, ...] = ()
        num_in_use = 0
        if sharing is not None and seq.request.uses_cache:
            if seq.chain is None:
                seq.chain = sharing.make_chain(
                    seq.request.input_tokens, seq.output_tokens, seq.request.cache_scope
                )
            if seq.chain is not None:
                # The last token is always computed: its logits are wanted.
                found = self._find(sharing, seq.chain, num_known - 1)
                if found is None:
                    return None
                block_ids = found
                if states is not None:
                    num_found = len(block_ids)
                    num_used = states.num_found_blocks(seq.chain, num_found)
                    del block_ids[num_used:]
                    state_places = states.places(seq.request.num_prompt_tokens, num_used, num_found)
        if sharing is not None and (shared or block_ids):
            block_ids[: len(shared)] = shared
            num_in_use = sharing.count_in_use(block_ids)
        num_saved = 0
        if host.holds(seq.seq_id):  # a beam that waits for the others has them all
            num_saved = min(seq.num_saved_tokens, num_known - 1)
        num_computed = max(len(block_ids) * self._block_size, num_saved)
        num_missing = num_known - num_computed
        return Arrival(block_ids, num_in_use, num_computed, num_missing, state_places)

    def _find(
        self, sharing: SharingKVCacheManagerProtocol, chain: TokenChain, max_tokens: int
    ) -> list[int] | None:
        """Return the blocks that hold a sequence's first tokens; None: to be gone on with."""
        num_blocks = max_tokens // self._block_size
        num_before = chain.num_digested
        if len(self._running) > 0:
            reached = max(chain.num_reached, num_before)
            num_blocks = min(num_blocks, reached + self._num_digests_left)
        block_ids = sharing.find_prefix(chain, num_blocks * self._block_size)
        num_digests = chain.num_digested - num_before
        self._num_digests_left = max(0, self._num_digests_left - num_digests)
        if len(block_ids) == num_blocks < max_tokens // self._block_size:
            chain.num_reached = num_blocks
            return None
        return block_ids

    def _shared_prompt(self, seq: Sequence) -> list[int] | None:
        """Return the full blocks of its prompt that a beam finds in the table of another.

        So that a search holds its prompt once, also after it had to give way, with or without a
        prefix cache; `RequestLimits` counts on it. None: they are being filled, and worth the wait.

        Nothing in models with states, and nothing is counted on there: the states of the others are
        of more tokens.
        """
        running = self._running
        if running.sharing is None or running.states is not None or not seq.is_beam:
            return []
        num_tokens = min(seq.request.num_prompt_tokens, seq.num_known_tokens - 1)
        num_blocks = num_tokens // self._block_size
        others = [s for s in seq.group.sequences if s in running and not s.draining]
        if num_blocks == 0 or not others:
            return []
        for other in others:
            if other.num_computed_tokens >= num_blocks * self._block_size:
                return (self._kv.get_block_table(other.seq_id) or [])[:num_blocks]
        return None

    def num_lacking(self, arrival: Arrival, num_tokens: int) -> int:
        """Return how many blocks are missing for the next `num_tokens` of a sequence; 0: none.

        A block is kept for each sequence whose next decode row needs one: it would take it back
        from the newcomer, who would come again, and neither might get on.
        """
        running = self._running
        num_new = running.blocks_for(arrival.num_computed + num_tokens) - arrival.num_in_use
        if self._kv.can_allocate(num_new + len(running.decoding)):
            return 0
        size = self._block_size
        num_kept = sum(
            s.num_computed_tokens % size == 0 or s.shares_tail for s in running.decoding.values()
        )
        if self._kv.can_allocate(num_new + num_kept):
            return 0
        return max(1, num_new + num_kept - self._kv.get_memory_stats().free_blocks)
