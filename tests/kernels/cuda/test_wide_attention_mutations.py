"""Proof that the tests of attention with heads of 512 notice: what orders it, and what it sums."""

from __future__ import annotations

import pytest

from bench.gpu.cases.attention_decode import draw_case as draw_decode
from bench.gpu.cases.attention_prefill import draw_case as draw_prefill
from kernels.cuda import (
    attention_merge,
    attention_shared_float32,
    attention_shared_float32_tile,
    attention_shared_results,
    attention_shared_tile,
    attention_wide_tensor,
)
from kernels.cuda.attention_wide import WideDecodeVariant, WidePrefillVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

pytestmark = pytest.mark.usefixtures("short_chunks")

DECODE = WideDecodeVariant("bfloat16", 512, 2, 16)
TWELVE = WideDecodeVariant("bfloat16", 512, 12, 16)
LARGE_BLOCKS = WideDecodeVariant("bfloat16", 512, 2, 32)
FLOAT32 = WideDecodeVariant("float32", 512, 2, 16)
FLOAT32_PARTS = WideDecodeVariant("float32", 512, 5, 32)
PREFILL = WidePrefillVariant("bfloat16", 512, 8, 16)
PREFILL_FLOAT32 = WidePrefillVariant("float32", 512, 2, 16)
PREFILL_PARTS = WidePrefillVariant("float32", 512, 5, 16)

MAKERS = {
    (False, WideDecodeVariant): "make_tensor_wide_decode",
    (False, WidePrefillVariant): "make_tensor_wide_prefill",
    (True, WideDecodeVariant): "make_float32_wide_decode",
    (True, WidePrefillVariant): "make_float32_wide_prefill",
}


def source(variant, library=None):
    """Return the source of a variant's kernel, or of a module that it is made with."""
    module = attention_shared_float32 if variant.is_float32 else attention_wide_tensor
    return Source(module, MAKERS[variant.is_float32, type(variant)], variant, library)


def draw(variant, rows, splits=1, num_kv_heads=1):
    if isinstance(variant, WideDecodeVariant):
        return draw_decode(variant, rows, splits=splits, num_kv_heads=num_kv_heads)
    return draw_prefill(variant, rows, num_kv_heads=num_kv_heads)


SOURCES = {
    "decode": (source(DECODE), DECODE, (132,), 2),
    "prompts": (source(PREFILL), PREFILL, ((2, 50),), 1),
    "float32": (source(FLOAT32), FLOAT32, (20,), 1),
    "copies": (source(DECODE, attention_shared_tile), DECODE, (33,), 1),
}
DELETED = [(name, line) for name, (one, *_) in SOURCES.items() for line in one.synchronisations()]


def test_there_are_so_many_barriers_commits_and_waits():
    counts = {name: len(one.synchronisations()) for name, (one, *_) in SOURCES.items()}
    assert counts == {"decode": 7, "prompts": 6, "float32": 1, "copies": 1}


@pytest.mark.wide
@pytest.mark.parametrize(("name", "line"), DELETED)
def test_a_deleted_barrier_commit_or_wait_is_noticed(name: str, line: int):
    broken, *shape = SOURCES[name]
    with pytest.raises(Fault):
        simulate(draw(*shape), kernels=broken.without(line))


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant", [DECODE, pytest.param(FLOAT32, marks=pytest.mark.slow)], ids=lambda one: one.name
)
def test_no_step_of_the_merge_can_be_left_out(variant):
    """Before its memory is that of keys and values, all threads have left the last tile."""
    broken = source(variant, attention_merge)
    case = draw(variant, (130,), splits=2)
    assert case.faults(simulate(case, kernels=broken.unbroken())) == []
    lines = broken.synchronisations()
    assert len(lines) == 4

    for line in lines:
        with pytest.raises(Race):
            simulate(case, kernels=broken.without(line))


TILE, RESULTS = attention_shared_tile, attention_shared_results
PLAIN, PLAIN_TILE = attention_shared_float32, attention_shared_float32_tile
OF_HEAD = "(kv_head * group + head) * head_size"
OF_ALL = "kv_head_of_all * group + head if is_any"

# Variant, rows, splits, kv heads, module, old, new.
BREAKAGES = [
    (DECODE, (19,), 1, 2, TILE, "0 if variant.HAS_KV_HEADS else variant", "variant"),
    (DECODE, (5,), 1, 2, None, "values = value_offset + kv_head * head_elements",
     "values = value_offset"),
    (DECODE, (19,), 1, 1, None, "pool, block, tile, seq_len, block_stride, values",
     "pool, next_block, tile, seq_len, block_stride, values"),
    (FLOAT32, (5,), 1, 1, PLAIN_TILE, "element + to_values + t", "element + t"),
    (PREFILL, ((5, 5),), 1, 1, None, "int32(context + first_token + 1)", "int32(context + 1)"),
    (PREFILL, ((2, 5),), 1, 2, None, "kv_head = int64(cuda.blockIdx.y)", "kv_head = int64(0)"),
]  # fmt: skip
MORE_BREAKAGES = [
    (DECODE, (5,), 1, 2, None, "keys = key_offset + kv_head * head_elements", "keys = key_offset"),
    (DECODE, (19,), 1, 1, None, "tiles, VALUES, lane, warp", "tiles, KEYS, lane, warp"),
    (DECODE, (19,), 1, 1, None, "fragments, tiles, KEYS", "fragments, tiles, VALUES"),
    (DECODE, (5,), 1, 2, None, OF_HEAD, "head * head_size"),
    (DECODE, (5, 5), 1, 1, None, "element = row * query_stride", "element = 0 * query_stride"),
    (DECODE, (5,), 1, 1, None, OF_ALL, "kv_head_of_all * group + head if True"),
    (DECODE, (5, 6), 1, 1, None, "row * cuda.gridDim.x + kv_head", "kv_head"),
    (DECODE, (133,), 2, 1, None, "next_tile = int32(next_chunk * chunk_tiles)",
     "next_tile = int32((chunk + 1) * chunk_tiles)"),
    (DECODE, (133,), 2, 1, None, "tile = int32(next_chunk * chunk_tiles)\n            for",
     "tile = end_tile\n            for"),
    (DECODE, (69,), 2, 1, RESULTS, "part = sums[v * rows + k // own", "part = sums[v * rows"),
    (DECODE, (69,), 2, 1, RESULTS, "total[v * rows + k // own", "total[v * rows"),
    (TWELVE, (20,), 1, 1, None, "find_place((lane >> 2) + 8 * slot, 1)",
     "find_place(lane >> 2, 1)"),
    (TWELVE, (20,), 1, 1, None, "mass[slot] = sums[mass_row, 2 * slot]",
     "mass[slot] = sums[mass_row, 0]"),
    (LARGE_BLOCKS, (33,), 1, 1, None, "next_tile * TILE_TOKENS // block_size", "next_tile"),
    (FLOAT32, (19,), 1, 1, PLAIN_TILE, "row, t < left, lane", "row, True, lane"),
    (FLOAT32, (5, 6), 1, 2, PLAIN, "int64(unit % parts * places), int64(num_units // parts)",
     "int64(unit % parts * places), int64(1)"),
    (FLOAT32_PARTS, (5,), 1, 2, PLAIN, "int64(unit // parts), int64(unit % parts * places)",
     "int64(unit), int64(unit % parts * places)"),
    (FLOAT32_PARTS, (5,), 1, 1, PLAIN, "int64(unit % parts * places)", "int64(0)"),
    (PREFILL, ((3, 20),), 1, 1, None, "find_place((lane >> 2) + 8 * r, end_token - first_token)\n"
     "            element", "find_place(lane >> 2, end_token - first_token)\n            element"),
    (PREFILL, ((3, 20),), 1, 1, None, OF_ALL, "kv_head_of_all * group + head if True"),
    (PREFILL, ((2, 5), (1, 9)), 1, 1, None, "(first_query + token) * query_stride",
     "token * query_stride"),
    (PREFILL, ((2, 33),), 1, 1, None, "next_tile * TILE_TOKENS // block_size", "0"),
    (PREFILL_FLOAT32, ((3, 9),), 1, 1, PLAIN, "seen = int32(context + token + 1)",
     "seen = int32(context + 1)"),
    (PREFILL_PARTS, ((4, 9),), 1, 2, PLAIN, "cuda.blockIdx.y, cuda.gridDim.y",
     "cuda.blockIdx.y, cuda.gridDim.x"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for variant, _, _, _, library, old, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        count = source(variant, library).text.count(old)
        assert count == 1, f"{old!r} is {count} times in the source"


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows", "splits", "num_kv_heads", "library", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_broken_arithmetic_gives_a_wrong_answer(
    variant, rows, splits, num_kv_heads, library, old, new
):
    case = draw(variant, rows, splits, num_kv_heads)
    try:
        outputs = simulate(case, kernels=source(variant, library).with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)
