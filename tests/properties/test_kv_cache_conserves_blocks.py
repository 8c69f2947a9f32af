"""A state machine over `KVCacheManager`: whatever is asked of it, every block is accounted for."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from control_plane.core.errors import OutOfBlocksError
from control_plane.core.kv_cache import KVCacheManager


class KVCacheMachine(RuleBasedStateMachine):
    """The model is a table of block ids per sequence, and the set of free blocks."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.tables: dict[int, list[int]] = {}
        self.next_id = 0

    @initialize(num_blocks=st.integers(1, 20), block_size=st.integers(1, 5))
    def make(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.kv = KVCacheManager(num_blocks, block_size)
        self.free = set(range(num_blocks))

    def expect(self, num_new, call):
        """The blocks `call` hands out: `num_new` free ones, or none of all."""
        assert self.kv.can_allocate(num_new) == (num_new <= len(self.free))
        if num_new > len(self.free):
            with pytest.raises(OutOfBlocksError):
                call()
            return []
        new = call()
        assert len(new) == num_new
        assert self.free.issuperset(new)
        self.free.difference_update(new)
        return new

    @rule(target=sequences, num_tokens=st.integers(1, 60))
    def allocate_sequence(self, num_tokens):
        seq_id, self.next_id = self.next_id, self.next_id + 1
        num_new = -(-num_tokens // self.block_size)
        new = self.expect(num_new, lambda: self.kv.allocate_sequence(seq_id, num_tokens))
        if new:
            self.tables[seq_id] = new
        return seq_id

    @rule(seq_id=sequences, num_tokens=st.integers(1, 80))
    def grow_sequence(self, seq_id, num_tokens):
        if seq_id in self.tables:
            table = self.tables[seq_id]
            num_new = max(0, -(-num_tokens // self.block_size) - len(table))
            table += self.expect(num_new, lambda: self.kv.grow_sequence(seq_id, num_tokens))

    @rule(seq_id=sequences)
    def allocate_block(self, seq_id):
        if seq_id in self.tables:
            self.tables[seq_id] += self.expect(1, lambda: [self.kv.allocate_block(seq_id)])

    @rule(seq_id=consumes(sequences))
    def free_sequence(self, seq_id):
        if seq_id in self.tables:
            self.kv.free_sequence(seq_id)
            self.free.update(self.tables.pop(seq_id))

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        stats = self.kv.get_memory_stats()
        assert stats.total_blocks == self.num_blocks == stats.used_blocks + stats.free_blocks
        assert stats.free_blocks == len(self.free)
        assert stats.num_sequences == len(self.tables)
        for seq_id, table in self.tables.items():
            assert self.kv.get_block_table(seq_id) == table


def test_blocks_are_conserved_under_any_sequence_of_calls():
    run_state_machine_as_test(
        KVCacheMachine, settings=settings(max_examples=150, stateful_step_count=30, deadline=None)
    )


@pytest.mark.slow
def test_blocks_are_conserved_under_any_long_sequence_of_calls():
    run_state_machine_as_test(
        KVCacheMachine, settings=settings(max_examples=3000, stateful_step_count=80, deadline=None)
    )
