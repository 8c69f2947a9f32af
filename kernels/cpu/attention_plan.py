"""Which contexts of a piece are cut into segments: what rows have in common, what threads share.

Where contexts of several rows lie in the same blocks, as behind one system prompt or of several
samples, one item has a segment of them for all of those rows: keys and values are read once, and
the rows of a tile are there.

    row 0   ┌─ segment 0 ─┐┌─ segment 1 ─┐┌ segment 2 …      items: segment 0 of rows 0, 1, 2
    row 1   │    as in    ││   as in 0   │┌ segment 2 …             segment 1 of rows 0, 1
    row 2   └─    row 0  ─┘┌─ segment 1 …                           segment 2 of 0, of 1, 1 of 2

Where there is little work, contexts are cut so that threads find enough to do. Either way every
segment of such a row leaves a partial result, and they are folded in their order: the bits are
those of a context that is left whole (`kernels.cpu.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from kernels.cpu.attention_items import attention_items, tokens_per_item
from kernels.cpu.attention_sizes import SEGMENT, SUB_BLOCKS
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS
from kernels.interface import BoolArray, Int32Array, Int64Array

WORK_A_THREAD: Final = 4
"""Pieces of work a thread should find, at least: with fewer, contexts are cut."""
USUAL_SLOTS: Final = 2048
"""Segments of a piece that may leave partials (`num_slots`)."""
USUAL_BYTES: Final = 1 << 27
"""Of their memory, at most; it is the system's until it is written."""
LEAST_SLOTS: Final = 256
SEGMENT_SUB_BLOCKS: Final = SEGMENT * SUB_BLOCKS

NO_MERGES: Final = np.zeros((0, 2), np.int32)
NO_MERGES.flags.writeable = False


class AttentionPlan(NamedTuple):
    """What a step's header says of the attention of T tokens.

    `items`: [I, 4], `kernels.cpu.operands.Item`. `tokens`: [N], the tokens of items, by their
    places. `merges`: [R, 2], `kernels.cpu.operands.Merge`. `slots`: [T], where the partials of each
    token begin.
    """

    items: Int32Array
    tokens: Int32Array
    merges: Int32Array
    slots: Int32Array


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What decides how contexts are cut.

    `group`: query heads of a piece of work, at most. `num_kv_heads`: pieces of work of an item.
    `num_slots`: partials there is room for.
    """

    group: int
    block_size: int
    num_kv_heads: int
    num_threads: int
    num_slots: int = USUAL_SLOTS

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a block."""
        return -(-self.block_size // SUB_BLOCK_TOKENS)

    @property
    def least_position(self) -> int:
        """A position up to which no context has a whole segment before it."""
        return SEGMENT_SUB_BLOCKS // self.sub_blocks * self.block_size

    def num_segments(self, positions: Int32Array) -> Int32Array:
        """Return the segments of the contexts that end at these positions."""
        return (self._sub_block(positions) // SEGMENT_SUB_BLOCKS + 1).astype(np.int32)

    def whole_segments(self, positions: Int32Array) -> Int32Array:
        """Return how many segments lie before these positions, or end there."""
        return (self._sub_block(positions + 1) // SEGMENT_SUB_BLOCKS).astype(np.int32)

    def blocks_of(self, segment: int) -> slice:
        """Return the blocks in which a segment lies."""
        first, end = segment * SEGMENT_SUB_BLOCKS, (segment + 1) * SEGMENT_SUB_BLOCKS
        return slice(first // self.sub_blocks, -(-end // self.sub_blocks))

    def _sub_block(self, positions: Int32Array) -> Int32Array:
        block, within = np.divmod(positions, self.block_size)
        sub_block: Int32Array = block * self.sub_blocks + within // SUB_BLOCK_TOKENS
        return sub_block


def num_slots(context_length: int, block_size: int, partial_floats: int) -> int:
    """Return the partials a piece has room for, at least those of two of the longest contexts.

    `context_length`: tokens of the longest sequence. `partial_floats`: of a partial
    (`attention_partial_floats`).
    """
    shape = AttentionShape(1, block_size, 1, 1)
    [longest] = shape.num_segments(np.array([context_length - 1], np.int32))
    usual = min(USUAL_SLOTS, USUAL_BYTES // (4 * partial_floats))
    return max(LEAST_SLOTS, usual, 2 * int(longest))


def plan_attention(
    items: Int32Array, positions: Int32Array, block_tables: Int32Array, shape: AttentionShape
) -> AttentionPlan:
    """Return how the attention of a piece is cut.

    `items`: `attention_items`, contexts whole. `positions`: [T] of the piece. `block_tables`:
    [S, M].
    """
    if positions.max() < shape.least_position:
        return _whole(items, len(positions))
    return _Cut(items, positions, block_tables, shape).plan()


class LastingPlan:
    """The plan of steps of the same rows, each of one token; made anew where it holds no longer.

    It holds as long as no row begins or ends a segment, the positions keep their distances, and
    what rows have in common lies in the same blocks. Other entries of the tables are not looked at:
    rows whose segments become the same meanwhile are found when one of them ends the next.
    """

    def __init__(self, query_lens: Int32Array, shape: AttentionShape) -> None:
        self._shape = shape
        self._whole = _whole(attention_items(query_lens, shape.group), len(query_lens))
        self._plan = self._whole
        self._made_for = self._blocks = np.zeros((0, 0), np.int32)
        self._common: tuple[Int64Array, Int64Array] | None = None
        self._tables: Int32Array | None = None

    def plan(self, positions: Int32Array, block_tables: Int32Array) -> AttentionPlan:
        """Return the plan of a step, the same object for as long as it is the same."""
        shape = self._shape
        if positions.max() < shape.least_position:
            return self._whole
        made_for = np.stack(
            [
                shape.whole_segments(positions),
                shape.num_segments(positions),
                positions - positions[0],
            ]
        )
        if not (
            np.array_equal(made_for, self._made_for)
            and (
                self._common is None
                or block_tables is self._tables
                or np.array_equal(block_tables[self._common], self._blocks)
            )
        ):
            cut = _Cut(self._whole.items, positions, block_tables, shape)
            self._plan = cut.plan()
            self._made_for, self._common = made_for, cut.common_entries()
            if self._common is not None:
                self._blocks = block_tables[self._common]
        # Of tables that nobody can write, entries that a step has used stay as they are.
        self._tables = None if block_tables.flags.writeable else block_tables
        return self._plan


def _whole(items: Int32Array, num_tokens: int) -> AttentionPlan:
    tokens = np.arange(num_tokens, dtype=np.int32)
    return AttentionPlan(items, tokens, NO_MERGES, tokens)


class _Cut:
    """A piece in which some contexts may be cut; `alone`: items of one token, whose they are."""

    def __init__(
        self,
        items: Int32Array,
        positions: Int32Array,
        block_tables: Int32Array,
        shape: AttentionShape,
    ) -> None:
        self._items, self._positions, self._shape = items, positions, shape
        self._block_tables = block_tables
        self._alone = np.flatnonzero(items[:, 1] == 1)
        self._rows = items[self._alone, 2]
        self._at = positions[items[self._alone, 0]]
        self._segments = shape.num_segments(self._at)
        self._common = self._common_segments() if tokens_per_item(shape.group) > 1 else []

    def plan(self) -> AttentionPlan:
        shape, items, alone, common = self._shape, self._items, self._alone, self._common
        num_tokens = len(self._positions)
        is_cut = np.zeros(len(alone), bool)
        for _, members in common:
            is_cut[members] = True
        if shape.num_threads > 1 and len(items) * shape.num_kv_heads < (
            WORK_A_THREAD * shape.num_threads
        ):
            self._cut_longest(is_cut)
        if not is_cut.any():
            return _whole(items, num_tokens)
        # Which segments rows have to themselves: all but the common ones.
        is_own = np.arange(self._segments.max()) < np.where(is_cut, self._segments, 0)[:, None]
        tokens, made, place = [np.arange(num_tokens, dtype=np.int32)], [], num_tokens
        for segment, members in common:
            is_own[members, segment] = False
            # Tokens of an item go by in the order of their positions, as windows need them.
            ordered = members[np.argsort(self._at[members], kind="stable")]
            made.append(self._common_items(segment, ordered, place))
            tokens.append(items[alone[ordered], 0])
            place += len(ordered)
        rows, segments = np.nonzero(is_own)
        own = items[alone[rows]]
        own[:, 3] = segments + 1
        is_left = np.ones(len(items), bool)
        is_left[alone[is_cut]] = False
        cut = items[alone[is_cut], 0]
        counts = self._segments[is_cut]
        slots = np.zeros(num_tokens, np.int32)
        slots[cut] = np.cumsum(counts) - counts
        return AttentionPlan(
            np.concatenate([*made, own, items[is_left]]),
            np.concatenate(tokens),
            np.stack([cut, counts], axis=1),
            slots,
        )

    def common_entries(self) -> tuple[Int64Array, Int64Array] | None:
        """Return rows and columns of the block tables where common segments lie."""
        if not self._common:
            return None
        rows, columns = [], []
        for segment, members in self._common:
            blocks = self._shape.blocks_of(segment)
            every = np.arange(blocks.start, blocks.stop)
            rows.append(np.repeat(self._rows[members], len(every)))
            columns.append(np.tile(every, len(members)))
        return np.concatenate(rows), np.concatenate(columns)

    def _common_segments(self) -> list[tuple[int, Int64Array]]:
        """Return segments that lie in the same blocks for several rows, and those rows.

        Rows of which one segment is nobody else's have no later one in common with others, either.
        """
        whole = self._shape.whole_segments(self._at)
        found: list[tuple[int, Int64Array]] = []
        rows = np.flatnonzero(whole)
        for segment in range(int(whole.max(initial=0))):
            groups = self._sharing(segment, rows[whole[rows] > segment])
            if segment == 0:
                groups = self._with_room(groups)
            if not groups:
                break
            found += [(segment, members) for members in groups]
            rows = np.concatenate(groups)
        return found

    def _sharing(self, segment: int, rows: Int64Array) -> list[Int64Array]:
        """Return those of the rows whose segment lies in the same blocks, together."""
        if len(rows) < 2:
            return []
        blocks = self._block_tables[self._rows[rows], self._shape.blocks_of(segment)]
        # The last block tells most of them apart; all of them are compared where it does not.
        order = np.argsort(blocks[:, -1], kind="stable")
        rows, blocks = rows[order], blocks[order]
        firsts = np.flatnonzero(np.r_[True, blocks[1:, -1] != blocks[:-1, -1]])
        counts = np.diff(np.r_[firsts, len(rows)])
        is_same = (blocks == np.repeat(blocks[firsts], counts, axis=0)).all(axis=1)
        groups = (
            rows[first : first + count][is_same[first : first + count]]
            for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)
            if count > 1
        )
        return [members for members in groups if len(members) > 1]

    def _with_room(self, groups: list[Int64Array]) -> list[Int64Array]:
        """Return groups without the rows whose segments there is no room for, the last ones."""
        rows = np.sort(np.concatenate(groups)) if groups else np.zeros(0, np.int64)
        has_room = np.zeros(len(self._alone), bool)
        has_room[rows[np.cumsum(self._segments[rows]) <= self._shape.num_slots]] = True
        left = (members[has_room[members]] for members in groups)
        return [members for members in left if len(members) > 1]

    def _cut_longest(self, is_cut: BoolArray) -> None:
        """Cut contexts of several segments, too, the longest first, as long as there is room."""
        segments = np.where(is_cut, 0, self._segments)
        longest_first = np.argsort(-segments, kind="stable")
        free = self._shape.num_slots - int(self._segments[is_cut].sum())
        has_room = np.cumsum(segments[longest_first]) <= free
        is_cut[longest_first[has_room & (segments[longest_first] > 1)]] = True

    def _common_items(self, segment: int, members: Int64Array, place: int) -> Int32Array:
        """Return the items of a segment that rows have in common; `place`: of their first token."""
        most = tokens_per_item(self._shape.group)
        num_items = -(-len(members) // most)
        firsts = np.arange(num_items) * len(members) // num_items
        made = np.zeros((num_items, 4), np.int32)
        made[:, 0] = place + firsts
        made[:, 1] = np.diff(np.r_[firsts, len(members)])
        made[:, 2] = self._rows[members[0]]
        made[:, 3] = segment + 1
        return made
