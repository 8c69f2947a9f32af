"""Proof that the tests of attention over latents notice: sums and places broken, and the merge."""

from __future__ import annotations

import pytest

from bench.gpu.cases.latent_attention import draw_decode, draw_prefill
from kernels.cuda import (
    attention_chunks,
    attention_merge,
    attention_shared_float32,
    attention_shared_float32_tile,
    attention_shared_layout,
    attention_shared_results,
    attention_shared_tile,
    latent_attention_tensor,
)
from kernels.cuda.latent_attention import LatentDecodeVariant, LatentPrefillVariant
from tests.kernels.cuda.simulation import Source, simulate
from tests.simt import Fault, Race

pytestmark = pytest.mark.usefixtures("short_chunks")

DECODE = LatentDecodeVariant("bfloat16", 1, 256, 32, 16)
TWELVE = LatentDecodeVariant("bfloat16", 12, 256, 32, 16)
LARGE_BLOCKS = LatentDecodeVariant("bfloat16", 1, 256, 32, 32)
FLOAT32 = LatentDecodeVariant("float32", 1, 256, 32, 16)
LARGE_FLOAT32 = LatentDecodeVariant("float32", 1, 256, 32, 32)
PREFILL = LatentPrefillVariant("bfloat16", 3, 256, 32, 16)
PREFILL_UNITS = LatentPrefillVariant("bfloat16", 40, 256, 32, 16)
PREFILL_FLOAT32 = LatentPrefillVariant("float32", 3, 256, 32, 16)

MAKERS = {
    (False, LatentDecodeVariant): "make_tensor_latent_decode",
    (False, LatentPrefillVariant): "make_tensor_latent_prefill",
    (True, LatentDecodeVariant): "make_float32_latent_decode",
    (True, LatentPrefillVariant): "make_float32_latent_prefill",
}


def source(variant, library=None):
    """Return the source of a variant's kernel, or of a module that it is made with."""
    module = attention_shared_float32 if variant.is_float32 else latent_attention_tensor
    return Source(module, MAKERS[variant.is_float32, type(variant)], variant, library)


def draw(variant, rows, splits=1):
    if isinstance(variant, LatentDecodeVariant):
        return draw_decode(variant, rows, splits=splits)
    return draw_prefill(variant, rows)


@pytest.mark.wide
@pytest.mark.parametrize("variant", [DECODE, FLOAT32], ids=lambda one: one.name)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_no_step_of_the_merge_can_be_left_out(variant, seed):
    """Before the merge's memory is that of the stages, all threads have left the last tile."""
    broken = source(variant, attention_merge)
    case = draw_decode(variant, (130, 69), splits=2)
    assert case.faults(simulate(case, kernels=broken.unbroken(), seed=seed)) == []
    lines = broken.synchronisations()
    assert len(lines) == 4

    for line in lines:
        with pytest.raises(Race):
            simulate(case, kernels=broken.without(line), seed=seed)


TILE, RESULTS, LAYOUT = attention_shared_tile, attention_shared_results, attention_shared_layout
PLAIN, PLAIN_TILE = attention_shared_float32, attention_shared_float32_tile
HEADS = "heads[r] = (first_query + token) * num_heads + head if is_any"

# Variant, rows, splits, module, old, new.
BREAKAGES = [
    # Of rows that are past the end a copy is NaN.
    (DECODE, (3,), 1, TILE, "int32(first_token + row) < num_tokens", "True"),
    (DECODE, (3,), 1, TILE, "scores[r // 2 * 2 + n, r % 2 * 2 + c] = MINUS_INFINITY", "pass"),
    (DECODE, (16,), 1, TILE, "score if part == 0 else scores[n, c] + score", "score"),
    (DECODE, (19,), 1, TILE, "row_words + VECTOR * (lane >> 4)", "row_words"),
    (FLOAT32, (5,), 1, PLAIN_TILE, "score if t < left else MINUS_INFINITY", "score"),
    (PREFILL, ((3, 3),), 1, TILE, "seen + token - first_token", "seen - first_token"),
    (PREFILL, ((12, 12),), 1, None, "int32(context + first_token + 1)", "int32(context + 1)"),
    (PREFILL, ((12, 12),), 1, TILE, "cuda.blockIdx.y if units_are_second else ", ""),
]
MORE_BREAKAGES = [
    (DECODE, (16,), 1, TILE, "VECTOR * (lane >> 3 & 1)", "0"),
    (DECODE, (16,), 1, TILE, "first + STEP // 2 * warp", "first"),
    (DECODE, (16,), 1, TILE, "first + warp_words * warp", "first"),
    (DECODE, (16,), 1, TILE, "(lane >> 4 << 3) + (lane & 7)", "lane & 7"),
    (DECODE, (16,), 1, TILE, "element + STEP * warp + 2", "element + 2"),
    (DECODE, (16,), 1, TILE, "i + 8 * half)", "i)"),
    (DECODE, (16,), 1, TILE, "8 * i + 7 < vectors or 8 * i + vector < vectors", "8 * i < vectors"),
    (DECODE, (16,), 1, TILE, "top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 1 << bit))",
     "top = maximum(top, cuda.shfl_xor_sync(FULL_WARP, top, 4))"),
    (DECODE, (80,), 1, TILE, "peak[r] = top", "pass"),
    (DECODE, (80,), 1, TILE, "rises |= top > peak[r] + SLACK", "rises |= False"),
    (DECODE, (16,), 1, TILE, "uint32(ones), uint32(ones)", "uint32(ones), uint32(0)"),
    (DECODE, (16,), 1, TILE, "2 * n + r % 2] =", "n + r % 2 * 2] ="),
    (LARGE_BLOCKS, (20,), 1, TILE, "first_token % block_size + row", "row"),
    (LARGE_BLOCKS, (33,), 1, None, "next_tile * TILE_TOKENS // block_size", "next_tile"),
    (DECODE, (133,), 2, None, "next_tile = int32(next_chunk * chunk_tiles)",
     "next_tile = int32((chunk + 1) * chunk_tiles)"),
    (DECODE, (33,), 1, None, "tiles, stage ^ 1, pool", "tiles, stage, pool"),
    (DECODE, (33,), 1, None, "stage = int32(stage ^ 1)", "pass"),
    (DECODE, (5, 5), 1, None, "element = row * query_stride", "element = 0 * query_stride"),
    (DECODE, (3,), 1, None, "if is_any else int64(-1)", ""),
    (DECODE, (69,), 1, RESULTS, "scaled_sum(total[n, c], shrink", "scaled_sum(total[n, c], share"),
    (DECODE, (69,), 2, RESULTS, "part = sums[v * rows + k // own", "part = sums[v * rows"),
    (DECODE, (69,), 2, RESULTS, "if is_any:", "if False:"),
    (DECODE, (69,), 2, RESULTS, "slots * THREADS] = mass", "slots * THREADS] = peak"),
    (DECODE, (16,), 1, RESULTS, "warp_elements * warp + 8", "8"),
    (TWELVE, (16,), 1, RESULTS, "c = slot // 2 * stride + n, slot % 2 * 2",
     "c = slot // 2 * stride + n, 0 * slot"),
    (FLOAT32, (5,), 1, PLAIN_TILE, "32 * j + lane < vectors", "True"),
    (FLOAT32, (20,), 1, PLAIN_TILE, "element += at_once * row_elements", "pass"),
    (FLOAT32, (20,), 1, PLAIN_TILE, "mass[0] *= shrink", "pass"),
    (FLOAT32, (20,), 1, PLAIN_TILE, "sums[n, k] *= shrink", "pass"),
    (FLOAT32, (5,), 1, PLAIN_TILE, "element + t * row_elements, t < left",
     "element + t * row_elements, True"),
    (LARGE_FLOAT32, (20,), 1, PLAIN_TILE, "first_token % block_size * row_elements", "0"),
    (FLOAT32, (20,), 1, PLAIN_TILE, "* scale_log2e\n", "\n"),
    (FLOAT32, (69,), 2, RESULTS, "partials[state] = peak[slot]", "partials[state] = mass[slot]"),
    (FLOAT32, (16,), 1, RESULTS, "128 * n + 4 * lane", "4 * lane"),
    (PREFILL, ((2, 5), (1, 9)), 1, None, "* query_stride + head * row_elements", "+ head"),
    (PREFILL, ((12, 12),), 1, None, HEADS, HEADS.replace("if is_any", "if True")),
    (PREFILL, ((12, 12),), 1, LAYOUT, "found // heads, found % heads", "found % heads, found"),
    (PREFILL, ((12, 12),), 1, TILE, "n = r // 2 * own_steps + i", "n = i"),
    (PREFILL, ((12, 12),), 1, TILE, "n = m * own_steps + i", "n = i"),
    (PREFILL, ((12, 12),), 1, TILE, "(2 * row_tiles * part + n)", "(2 * row_tiles * part + n % 2)"),
    (PREFILL_UNITS, ((1, 3),), 1, None, "unit = int64(cuda.blockIdx.y)", "unit = int64(0)"),
    (PREFILL_FLOAT32, ((3, 9),), 1, PLAIN, "seen = int32(context + token + 1)",
     "seen = int32(context + 1)"),
    (PREFILL_FLOAT32, ((3, 9), (1, 2)), 1, PLAIN, "token += first_token", "pass"),
]  # fmt: skip
"""Noticed by the same comparison as those above: `make test-slow` does them, and `make test` sees
that they are pieces of the source still."""


def test_every_breakage_is_of_a_piece_of_the_source():
    for variant, _, _, library, old, _ in [*BREAKAGES, *MORE_BREAKAGES]:
        count = source(variant, library).text.count(old)
        assert count == 1, f"{old!r} is {count} times in the source"


@pytest.mark.wide
def test_sums_that_do_not_follow_their_peak_are_noticed(monkeypatch):
    monkeypatch.setattr(attention_chunks, "LEAST_CHUNK_TILES", 8)
    case = draw_decode(DECODE, (80,))  # of one chunk, in which scores rise
    broken = source(DECODE, TILE).with_replaced("c] *= shrink", "c] *= float32(1)")

    assert case.faults(simulate(case)) == []
    assert case.faults(simulate(case, kernels=broken))


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("variant", "rows", "splits", "library", "old", "new"),
    [*BREAKAGES, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE_BREAKAGES)],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_broken_arithmetic_gives_a_wrong_answer(variant, rows, splits, library, old, new):
    case = draw(variant, rows, splits)
    try:
        outputs = simulate(case, kernels=source(variant, library).with_replaced(old, new))
    except Fault:
        return
    assert case.faults(outputs)
