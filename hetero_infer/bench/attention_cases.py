"""Attention and the write of keys and values, for each type of KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

import numpy as np

from compute_plane.cpu.thread_team import Entry
from hetero_infer.bench.kernel_cases import (
    BLOCK_SIZE,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    KernelCase,
)
from hetero_infer.bench.kernel_workbench import Workbench
from kernels.cpu.attention import merge_attention
from kernels.cpu.attention_items import attention_items, rows_per_item
from kernels.cpu.attention_plan import AttentionShape, plan_attention
from kernels.cpu.attention_sizes import (
    attention_partial_floats,
    attention_scratch_bytes,
    rope_scratch_bytes,
)
from kernels.cpu.catalogue import ATTENTION, ROPE_WRITE
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kv_layout import VALUE_BYTES, KvLayout, encode_blocks
from kernels.cpu.operands import Attention, RopeWrite
from kernels.cpu.operation import StepWord

GROUP: Final = HEADS // KV_HEADS
QUERY_SIZE: Final = HEADS * HEAD_DIM
QKV_SIZE: Final = (HEADS + 2 * KV_HEADS) * HEAD_DIM
DECODES: Final = ((1, 512, 0), (1, 2048, 0), (32, 512, 0), (32, 1500, 0), (32, 2112, 2048))
"""Sequences, the tokens each attends to, and how many of them lie in the same blocks for all."""
PREFILLS: Final = (256, 1024)
ROPE_TOKENS: Final = (32, 256)


def attention_cases() -> list[KernelCase]:
    """Return decode and prefill, and rope with the write of K and V."""
    return [
        *(
            _attention(dtype, rows, 1, length, common)
            for dtype in VALUE_BYTES
            for rows, length, common in DECODES
        ),
        *(_attention(dtype, 1, length, length) for dtype in VALUE_BYTES for length in PREFILLS),
        *(_rope(dtype, tokens) for dtype in VALUE_BYTES for tokens in ROPE_TOKENS),
    ]


def layout_of(dtype: str) -> KvLayout:
    """Return the layout of a pool of one layer."""
    return KvLayout(dtype, 1, KV_HEADS, BLOCK_SIZE, HEAD_DIM)


def _peak(dtype: str) -> str:
    chosen = selected_instruction_set()
    if dtype != "float32" and chosen.has_amx:
        return "bf16_tile"
    return "bf16_dot" if dtype != "float32" and chosen.has_bf16_dot else "fma"


def _attention(
    dtype: str, num_rows: int, query_len: int, length: int, common: int = 0
) -> KernelCase:
    """`num_rows` sequences of `length` tokens; the last `query_len` of each ask.

    `common`: tokens of their beginning that all have in the same blocks.
    """
    tokens = num_rows * query_len
    blocks = num_rows * (-(-length // BLOCK_SIZE) - common // BLOCK_SIZE) + common // BLOCK_SIZE
    first = length - query_len + 1
    seen = num_rows * sum(range(first, length + 1))
    kind = "decode" if query_len == 1 else "prefill"
    return KernelCase(
        name=f"attention {dtype} {kind} {num_rows} × {length}"
        + (common > 0) * f", {common} common",
        num_bytes=blocks * layout_of(dtype).block_bytes + 2 * 4 * tokens * QUERY_SIZE,
        num_operations=4 * HEADS * HEAD_DIM * seen,
        peak=_peak(dtype),
        prepare=partial(_prepare_attention, dtype, num_rows, query_len, length, common),
    )


def _prepare_attention(
    dtype: str, num_rows: int, query_len: int, length: int, common: int, bench: Workbench
) -> list[Entry]:
    layout = layout_of(dtype)
    tokens, width = num_rows * query_len, -(-length // BLOCK_SIZE)
    positions = np.tile(np.arange(length - query_len, length, dtype=np.int32), num_rows)
    tables = bench.random.permutation(num_rows * width).astype(np.int32).reshape(num_rows, width)
    tables[:, : common // BLOCK_SIZE] = tables[0, : common // BLOCK_SIZE]
    items, places, merges, slots = plan_attention(
        attention_items(np.full(num_rows, query_len, np.int32), GROUP),
        positions,
        tables,
        AttentionShape(GROUP, BLOCK_SIZE, KV_HEADS, bench.team.num_threads),
    )
    operands: Mapping[int, int] = {
        Attention.QUERIES: bench.floats(tokens * QUERY_SIZE),
        Attention.OUT: bench.zeros(4 * tokens * QUERY_SIZE),
        Attention.POOL: _pool(layout, num_rows * width, bench),
        Attention.BLOCK_BYTES: layout.block_bytes,
        Attention.HEAD_BYTES: layout.head_bytes,
        Attention.BLOCK_SIZE: BLOCK_SIZE,
        Attention.HEAD_DIM: HEAD_DIM,
        Attention.NUM_HEADS: HEADS,
        Attention.NUM_KV_HEADS: KV_HEADS,
        Attention.VALUE_DIM: HEAD_DIM,
        Attention.HEAD_STRIDE: layout.head_bytes,
        Attention.QUERIES_FIRST_WORD: StepWord.FIRST_TOKEN,
        Attention.PARTIALS: bench.zeros(
            4 * int(merges[:, 1].sum()) * attention_partial_floats(HEADS, HEAD_DIM)
        ),
    }
    header = bench.header(
        {
            StepWord.NUM_TOKENS: tokens,
            StepWord.POSITIONS: bench.place(positions),
            StepWord.BLOCK_TABLES: bench.place(tables),
            StepWord.TABLE_WIDTH: width,
            StepWord.ATTENTION_ITEMS: bench.place(items),
            StepWord.NUM_ATTENTION_ITEMS: len(items),
            StepWord.ATTENTION_TOKENS: bench.place(places),
            StepWord.PARTIAL_SLOTS: bench.place(slots),
            StepWord.ATTENTION_MERGES: bench.place(merges),
            StepWord.NUM_ATTENTION_MERGES: len(merges),
        },
        scratch_bytes=attention_scratch_bytes(HEAD_DIM, HEAD_DIM, rows_per_item(GROUP)),
    )
    attend = bench.record(ATTENTION[dtype], len(items) * KV_HEADS, operands)
    entries = [(attend, header)]
    if len(merges):
        entries.append((bench.record(merge_attention, len(merges), operands), header))
    return entries


def _pool(layout: KvLayout, num_blocks: int, bench: Workbench) -> int:
    """Return a pool whose blocks all hold the same drawn keys and values."""
    shape = (1, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    block = encode_blocks(layout, bench.random.standard_normal(shape, np.float32))
    return bench.place(np.tile(block, (num_blocks, 1)))


def _rope(dtype: str, tokens: int) -> KernelCase:
    layout = layout_of(dtype)
    written = -(-tokens // BLOCK_SIZE) * layout.block_bytes + 4 * tokens * QUERY_SIZE
    return KernelCase(
        name=f"rope and write {dtype} {tokens}",
        num_bytes=4 * tokens * (QKV_SIZE + HEAD_DIM) + written,
        num_operations=0,
        peak=None,
        prepare=partial(_prepare_rope, dtype, tokens),
    )


def _prepare_rope(dtype: str, tokens: int, bench: Workbench) -> list[Entry]:
    layout = layout_of(dtype)
    num_blocks = -(-tokens // BLOCK_SIZE)
    places = np.arange(tokens, dtype=np.int64)
    operands: Mapping[int, int] = {
        RopeWrite.QKV: bench.floats(tokens * QKV_SIZE),
        RopeWrite.COSINES: bench.floats(tokens * HEAD_DIM // 2),
        RopeWrite.SINES: bench.floats(tokens * HEAD_DIM // 2),
        RopeWrite.QUERIES: bench.zeros(4 * tokens * QUERY_SIZE),
        RopeWrite.POOL: bench.zeros(num_blocks * layout.block_bytes),
        RopeWrite.BLOCK_BYTES: layout.block_bytes,
        RopeWrite.HEAD_BYTES: layout.head_bytes,
        RopeWrite.BLOCK_SIZE: BLOCK_SIZE,
        RopeWrite.HEAD_DIM: HEAD_DIM,
        RopeWrite.NUM_HEADS: HEADS,
        RopeWrite.NUM_KV_HEADS: KV_HEADS,
    }
    record = bench.record(ROPE_WRITE[dtype], min(tokens, bench.num_chunks), operands)
    header = bench.header(
        {
            StepWord.NUM_TOKENS: tokens,
            StepWord.POSITIONS: bench.place(places.astype(np.int32)),
            StepWord.KV_PLACES: bench.place(places),
        },
        scratch_bytes=rope_scratch_bytes(HEAD_DIM),
    )
    return [(record, header)]
