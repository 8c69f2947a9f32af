"""The context of attention: its work items, and where the K and V of their super-blocks lie."""

from __future__ import annotations

from typing import Final

from kernels.cpu.attention_places import Place, set_positions, word32
from kernels.cpu.attention_sizes import SEGMENT, SUB_BLOCKS
from kernels.cpu.compiled import inlined, int64_at, word
from kernels.cpu.kv_layout import SUB_BLOCK_TOKENS
from kernels.cpu.operands import Attention, Item
from kernels.cpu.operation import StepWord

ITEM_BYTES: Final = 16
MERGE_BYTES: Final = 8


@inlined()
def sub_blocks_of(record: int) -> int:
    """Return the sub-blocks of a block."""
    blocks: int = (word(record, Attention.BLOCK_SIZE) + SUB_BLOCK_TOKENS - 1) // SUB_BLOCK_TOKENS
    return blocks


@inlined()
def item_at(header: int, index: int) -> int:
    """Return the address of an item."""
    address: int = word(header, StepWord.ATTENTION_ITEMS) + ITEM_BYTES * index
    return address


@inlined()
def token_at(header: int, item: int, number: int) -> int:
    """Return one of an item's tokens."""
    token: int = word32(word(header, StepWord.ATTENTION_TOKENS), word32(item, Item.FIRST) + number)
    return token


@inlined()
def table_of(header: int, item: int) -> int:
    """Return the address of an item's block table."""
    width: int = word(header, StepWord.TABLE_WIDTH)
    address: int = word(header, StepWord.BLOCK_TABLES) + 4 * width * word32(item, Item.TABLE)
    return address


@inlined()
def sub_block_at(record: int, position: int) -> int:
    """Return the sub-block of a position, counted from position 0."""
    block = position // word(record, Attention.BLOCK_SIZE)
    within = position - block * word(record, Attention.BLOCK_SIZE)
    sub_block: int = block * sub_blocks_of(record) + within // SUB_BLOCK_TOKENS
    return sub_block


@inlined()
def last_sub_block(record: int, header: int, item: int) -> int:
    """Return the sub-block of the item's last token."""
    last_token = token_at(header, item, word32(item, Item.NUM_TOKENS) - 1)
    last: int = sub_block_at(record, word32(word(header, StepWord.POSITIONS), last_token))
    return last


@inlined()
def first_seen(record: int, position: int) -> int:
    """Return the first position that a token at `position` sees."""
    window = word(record, Attention.WINDOW)
    first: int = max(position - window + 1, 0) if window > 0 else 0
    return first


@inlined()
def first_sub_block(record: int, header: int, token: int) -> int:
    """Return the first sub-block that a token of the piece sees."""
    if word(record, Attention.WINDOW) == 0:
        return 0
    position = word32(word(header, StepWord.POSITIONS), token)
    first: int = sub_block_at(record, first_seen(record, position))
    return first


@inlined()
def first_super_block(item: int, first: int) -> int:
    """Return where an item's part of the context begins; `first`: the sub-block its window does."""
    start: int = max(max(word32(item, Item.SEGMENT) - 1, 0) * SEGMENT, first // SUB_BLOCKS)
    return start


@inlined()
def find_next(
    record: int, header: int, item: int, head: int, super_block: int, first: int, last: int,
    places: int, key_bytes: int,
) -> None:  # fmt: skip
    """Set NEXT_KEYS and NEXT_VALUES to a super-block of an item.

    `first`, `last`: the item's sub-blocks. They stand for those before and behind them.
    """
    words = int64_at(places)
    table, sub_blocks = table_of(header, item), sub_blocks_of(record)
    head_bytes = word(record, Attention.HEAD_BYTES)
    first_block = word(record, Attention.POOL) + head * word(record, Attention.HEAD_STRIDE)
    for j in range(SUB_BLOCKS):
        sub_block = min(max(super_block * SUB_BLOCKS + j, first), last)
        block, within = sub_block, 0
        if sub_blocks > 1:
            block = sub_block // sub_blocks
            within = (sub_block - block * sub_blocks) * (head_bytes // sub_blocks)
        key = first_block + word32(table, block) * word(record, Attention.BLOCK_BYTES) + within
        words[Place.NEXT_KEYS + j] = key
        words[Place.NEXT_VALUES + j] = key + key_bytes


@inlined()
def take_next(
    record: int, super_block: int, last: int, places: int, positions: int, values_bytes: int
) -> None:
    """Make the super-block that was next the one at hand. `values_bytes`: of a sub-block's V."""
    words = int64_at(places)
    block_size, sub_blocks = word(record, Attention.BLOCK_SIZE), sub_blocks_of(record)
    for j in range(SUB_BLOCKS):
        key, value = words[Place.NEXT_KEYS + j], words[Place.NEXT_VALUES + j]
        words[Place.KEYS + j], words[Place.VALUES + j] = key, value
        words[Place.KEY_SCALES + j] = value + values_bytes
        words[Place.VALUE_SCALES + j] = value + values_bytes + 4 * SUB_BLOCK_TOKENS
        sub_block = super_block * SUB_BLOCKS + j
        block, within = sub_block, 0
        if sub_blocks > 1:
            block = sub_block // sub_blocks
            within = (sub_block - block * sub_blocks) * SUB_BLOCK_TOKENS
        size = min(SUB_BLOCK_TOKENS, block_size - within) if sub_block <= last else 0
        words[Place.STARTS + j] = block * block_size + within
        words[Place.SIZES + j] = size
        set_positions(positions, j, block * block_size + within, size)


@inlined()
def count_seen(places: int, first: int, limit: int) -> int:
    """Set Place.COUNTS for a row that sees positions from `first` to below `limit`.

    Returns their sum. Of a sub-block in which `first` lies the tokens before it count too.
    """
    words = int64_at(places)
    total = 0
    for j in range(SUB_BLOCKS):
        start, size = words[Place.STARTS + j], words[Place.SIZES + j]
        seen = min(max(limit - start, 0), size) if first < start + size else 0
        words[Place.COUNTS + j] = seen
        total += seen
    return total
