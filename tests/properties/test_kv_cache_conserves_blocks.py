"""A state machine over `KVCacheManager`: whatever is asked of it, every block is accounted for.

The model remembers what each block holds, so a block that is found again under a wrong name shows.
"""

from __future__ import annotations

from collections import Counter

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
from planes.errors import SchedulerError

# Few tokens and lengths, so that beginnings meet.
texts = st.lists(st.integers(1, 2), min_size=1, max_size=14)


class KVCacheMachine(RuleBasedStateMachine):
    """The model: a table and the text of each sequence, and what each block holds for whom."""

    sequences = Bundle("sequences")

    def __init__(self):
        super().__init__()
        self.tables: dict[int, list[int]] = {}
        self.texts: dict[int, tuple[list[int], list[int], str]] = {}  # prompt, output, salt
        self.content: dict[int, tuple] = {}  # block → everything up to its end, as it was written
        self.next_id = 0

    @initialize(
        num_blocks=st.integers(1, 20),
        block_size=st.integers(1, 4),
        prefix_cache=st.booleans(),
        roles_matter=st.booleans(),
    )
    def make(self, num_blocks, block_size, prefix_cache, roles_matter):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.roles_matter = roles_matter
        self.kv = KVCacheManager(
            num_blocks, block_size, prefix_cache=prefix_cache, roles_matter=roles_matter
        )

    def wanted(self, text, index):
        """What full block `index` of a text must hold."""
        prompt, output, salt = text
        end = (index + 1) * self.block_size
        roles = tuple(i < len(prompt) for i in range(end)) if self.roles_matter else ()
        return salt, tuple((prompt + output)[:end]), roles

    @property
    def held(self):
        return Counter(block for table in self.tables.values() for block in table)

    def expect(self, num_new, call):
        """The blocks `call` hands out: `num_new` that no table holds, or none of all."""
        held = self.held
        num_free = self.num_blocks - len(held)
        assert self.kv.can_allocate(num_new) == (num_new <= num_free)
        if num_new > num_free:
            with pytest.raises(OutOfBlocksError):
                call()
            return []
        new = call()
        assert len(new) == num_new == len(set(new))
        assert not held.keys() & set(new)
        for block in new:
            self.content.pop(block, None)
        return new

    @rule(target=sequences, prompt=texts, output=texts, salt=st.sampled_from(["", "b"]))
    def allocate_with_prefix(self, prompt, output, salt):
        seq_id, self.next_id = self.next_id, self.next_id + 1
        text = (prompt, output, salt)
        num_tokens = len(prompt) + len(output)
        chain = self.kv.make_chain(prompt, output, salt)
        found = self.kv.find_prefix(chain, num_tokens - 1) if chain else []
        assert len(found) <= (num_tokens - 1) // self.block_size
        for index, block in enumerate(found):
            assert self.content[block] == self.wanted(text, index)
        idle = [block for block in found if block not in self.held]
        assert self.kv.count_in_use(found) == len(found) - len(idle)
        num_own = -(-num_tokens // self.block_size) - len(found)
        if num_own + len(idle) > self.num_blocks - len(self.held):
            with pytest.raises(OutOfBlocksError):
                self.kv.allocate_with_prefix(seq_id, num_tokens, found)
            return seq_id
        table = self.kv.allocate_with_prefix(seq_id, num_tokens, found)
        assert table[: len(found)] == found
        assert not self.held.keys() & set(table[len(found) :])
        assert len(table) == len(found) + num_own
        self.tables[seq_id], self.texts[seq_id] = table, text
        for index in range(len(found), num_tokens // self.block_size):
            self.content[table[index]] = self.wanted(text, index)
        if chain:
            self.kv.remember(seq_id, chain, len(found), num_tokens // self.block_size)
        return seq_id

    @rule(target=sequences, parent=sequences, share=st.integers(1, 30))
    def fork_sequence(self, parent, share):
        child, self.next_id = self.next_id, self.next_id + 1
        if parent in self.tables:
            num_tokens = min(share, len(self.tables[parent]) * self.block_size)
            before = self.kv.get_memory_stats().used_blocks
            table = self.kv.fork_sequence(parent, child, num_tokens)
            assert table == self.tables[parent][: -(-num_tokens // self.block_size)]
            assert self.kv.get_memory_stats().used_blocks == before
            self.tables[child] = table
        return child

    @rule(seq_id=sequences, place=st.integers(0, 20))
    def unshare(self, seq_id, place):
        if seq_id not in self.tables:
            return
        table = self.tables[seq_id]
        index = place % len(table)
        is_shared = self.held[table[index]] > 1
        assert self.kv.is_shared(seq_id, index) == is_shared
        if not is_shared:
            with pytest.raises(SchedulerError, match="is not shared"):
                self.kv.unshare(seq_id, index)
            self.kv.claim(seq_id, index)
            self.content.pop(table[index], None)
            return
        source = table[index]

        def call():
            copy = self.kv.unshare(seq_id, index)
            assert (copy.logical_index, copy.source) == (index, source)
            return [copy.destination]

        table[index : index + 1] = self.expect(1, call) or [source]

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
            del self.tables[seq_id]

    @rule()
    def forget_all(self):
        self.kv.forget_all()
        self.content.clear()
        assert self.kv.get_memory_stats().cached_blocks == 0

    @invariant()
    def every_block_is_accounted_for(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        stats = self.kv.get_memory_stats()
        assert stats.total_blocks == self.num_blocks == stats.used_blocks + stats.free_blocks
        assert stats.used_blocks == len(self.held)
        assert stats.cached_blocks <= stats.free_blocks
        assert stats.num_sequences == len(self.tables)
        for seq_id, table in self.tables.items():
            assert self.kv.get_block_table(seq_id) == table


def test_blocks_are_conserved_under_any_sequence_of_calls():
    run_state_machine_as_test(
        KVCacheMachine, settings=settings(max_examples=80, stateful_step_count=30, deadline=None)
    )


@pytest.mark.slow
def test_blocks_are_conserved_under_any_long_sequence_of_calls():
    run_state_machine_as_test(
        KVCacheMachine, settings=settings(max_examples=3000, stateful_step_count=80, deadline=None)
    )
