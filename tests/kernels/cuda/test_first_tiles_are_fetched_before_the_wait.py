"""Kernels that begin early have the first tiles that they read fetched before they wait."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.gpu.case import Array, Case
from bench.gpu.cases import attention_decode as decode_cases
from bench.gpu.cases import dense_matmul as dense_cases
from bench.gpu.cases import latent_attention as latent_cases
from bench.gpu.cases import quantized_matmul as quantized_cases
from kernels.cuda.attention_chunks import SHARERS, TILE_TOKENS, least_chunk_tiles, tiles_of_chunk
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.attention_wide import WideDecodeVariant
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.latent_attention import LatentDecodeVariant
from kernels.cuda.quantized_formats import FORMATS, packed_bytes
from kernels.cuda.quantized_kv import head_bytes
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from tests.kernels.cuda.simulation import simulate
from tests.kernels.cuda.test_launches_that_begin_early import (
    ADDED,
    DECODE,
    DECODE_OF_512,
    LATENT_DECODE,
    MINIMA,
    WIDE_DECODE,
)
from tests.simt.memory import CheckedArray

ZEROS = QuantizedMatmulVariant("Q4_Z_G64", "bfloat16", 8)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "variant",
    [DenseMatmulVariant("bfloat16", 8, "gated", normalises=True), ADDED, MINIMA, ZEROS],
    ids=lambda variant: variant.name,
)
def test_what_is_fetched_ahead_is_the_first_round_of_the_weights(variant, monkeypatch):
    """Here that is all of them: no strand is longer than the ring."""
    fetched = np.zeros(1 << 20, np.int64)
    fetch = CheckedArray.fetch

    def noted(array: CheckedArray, element, num_bytes) -> None:
        fetch(array, element, num_bytes)
        first = int(element) * array._flat.itemsize
        fetched[first : first + int(num_bytes)] += 1

    monkeypatch.setattr(CheckedArray, "fetch", noted)
    if isinstance(variant, DenseMatmulVariant):
        outputs = 2 * variant.panel_outputs
        case = dense_cases.draw_case(variant, 3, outputs, 2 * variant.ring, 1, alone=0)
        size = case.arrays["weights"].nbytes
    else:
        spans = 2 * variant.round_spans
        case = quantized_cases.draw_case(variant, 3, 64, spans, 1, alone=0)
        form = FORMATS[variant.weights]
        size = packed_bytes(variant.weights, 64, spans * form.span)
    simulate(case)

    assert (fetched[:size] == 1).all()
    assert not fetched[size:].any()


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [
        QuantizedMatmulVariant("Q4_K", "bfloat16", 8),
        QuantizedMatmulVariant("Q5_K", "float16", 32),
        QuantizedMatmulVariant("Q6_K", "float16", 8),
    ],
    ids=lambda variant: variant.name,
)
def test_what_is_fetched_of_a_unit_are_its_first_tiles_their_spans_and_what_they_share(
    variant, monkeypatch
):
    """Of each strand: two of a unit, in two panels."""
    form, (ring, _) = FORMATS[variant.weights], variant.rings
    fetched, fetch = [], CheckedArray.fetch

    def noted(array: CheckedArray, element, num_bytes) -> None:
        fetch(array, element, num_bytes)
        fetched.append((int(element), int(num_bytes)))

    monkeypatch.setattr(CheckedArray, "fetch", noted)
    case = quantized_cases.draw_case(variant, 3, 64, 2, 1, alone=0)
    assert case.faults(simulate(case)) == []

    expected = []
    for panel, unit in itertools.product(range(2), range(2)):
        tiles = panel * form.panel_bytes(2 * form.unit)
        spans = tiles + form.scales_at(2 * form.unit)
        shared = spans + 2 * form.unit_spans * form.span_bytes
        first = unit * form.unit_spans  # tile and span
        expected += [
            (tiles + first * form.tile_bytes, ring * form.tile_bytes),
            (spans + first * form.span_bytes, variant.scale_ring * form.span_bytes),
            (shared + unit * form.shared_bytes, form.shared_bytes),
        ]
    assert sorted(fetched) == sorted(expected)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("variant", "window"),
    [
        (DECODE, None),
        (DecodeVariant("float16", 96, 9, 32, "int8"), None),
        (DecodeVariant("bfloat16", 64, 2, 16, None, True), 40),
        (WIDE_DECODE, 40),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_attention_has_the_first_tile_of_each_warp_fetched(variant, window, monkeypatch):
    kv_heads, splits = 2, 2
    case = decode_cases.draw_case(
        variant, (19, 0, 150, 1), num_kv_heads=kv_heads, splits=splits, window=window
    )
    pool, tables, lengths = (case.arrays[name] for name in ("pool", "block_tables", "seq_lens"))
    stride, *offsets = case.launches[0].arguments[-6:-3]
    head = head_bytes(variant.head_size, variant.block_size)
    if variant.kv_dtype is None:
        head = variant.head_size * variant.block_size
    expected = np.zeros(pool.size, np.int64)
    for table, length in zip(tables, lengths, strict=True):
        first = max(length - window, 0) // TILE_TOKENS if window else 0
        tiles = -(-int(length) // TILE_TOKENS) - first
        chunk_tiles = tiles_of_chunk(tiles, least_chunk_tiles(variant.kv_dtype))
        for split, warp in itertools.product(range(splits), range(SHARERS)):
            tile = split * chunk_tiles + warp
            if tile >= tiles:
                continue
            block, slot = divmod((first + tile) * TILE_TOKENS, variant.block_size)
            for offset, kv_head in itertools.product(offsets, range(kv_heads)):
                at = table[block] * stride + offset + kv_head * head + slot * variant.head_size
                expected[at : at + TILE_TOKENS * variant.head_size] += 1
    assert expected.max() == 1
    np.testing.assert_array_equal(fetched_of_the_pool(case, monkeypatch), expected)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "variant",
    [LATENT_DECODE, LatentDecodeVariant("float16", 20, 256, 64, 32)],
    ids=lambda one: one.name,
)
def test_attention_over_latents_has_the_first_tile_of_each_block_of_threads_fetched(
    variant, monkeypatch
):
    splits = 2
    case = latent_cases.draw_decode(variant, (19, 0, 150, 1), splits=splits)
    pool, tables, lengths = (case.arrays[name] for name in ("pool", "block_tables", "seq_lens"))
    stride, offset = case.launches[0].arguments[-2:]
    expected = np.zeros(pool.size, np.int64)
    for table, length in zip(tables, lengths, strict=True):
        tiles = -(-int(length) // TILE_TOKENS)
        for split in range(splits):
            tile = split * tiles_of_chunk(tiles, least_chunk_tiles(None))
            if tile >= tiles:
                continue
            block, slot = divmod(tile * TILE_TOKENS, variant.block_size)
            at = table[block] * stride + offset + slot * variant.row_elements
            expected[at : at + TILE_TOKENS * variant.row_elements] += variant.units
    assert expected.any()
    np.testing.assert_array_equal(fetched_of_the_pool(case, monkeypatch), expected)


@pytest.mark.wide
@pytest.mark.parametrize(
    "variant",
    [DECODE_OF_512, WideDecodeVariant("float16", 512, 9, 32)],
    ids=lambda one: one.name,
)
def test_attention_with_heads_of_512_has_the_first_tile_of_each_block_of_threads_fetched(
    variant, monkeypatch
):
    kv_heads, splits = 2, 2
    case = decode_cases.draw_case(variant, (131, 0), num_kv_heads=kv_heads, splits=splits)
    pool, tables, lengths = (case.arrays[name] for name in ("pool", "block_tables", "seq_lens"))
    stride, *offsets = case.launches[0].arguments[-6:-3]
    expected = np.zeros(pool.size, np.int64)
    for table, length in zip(tables, lengths, strict=True):
        tiles = -(-int(length) // TILE_TOKENS)
        for split in range(splits):
            tile = split * tiles_of_chunk(tiles, least_chunk_tiles(None))
            if tile >= tiles:
                continue
            block, slot = divmod(tile * TILE_TOKENS, variant.block_size)
            for offset, kv_head in itertools.product(offsets, range(kv_heads)):
                head = kv_head * variant.block_size + slot
                at = table[block] * stride + offset + head * variant.head_size
                expected[at : at + TILE_TOKENS * variant.head_size] += 1
    assert expected.max() == 1
    np.testing.assert_array_equal(fetched_of_the_pool(case, monkeypatch), expected)


def fetched_of_the_pool(case: Case, monkeypatch) -> Array:
    """Run a case; return how often each element of its pool was fetched before the wait."""
    pool = case.arrays["pool"]
    fetched, fetch = np.zeros(pool.size, np.int64), CheckedArray.fetch

    def noted(array: CheckedArray, element, num_bytes) -> None:
        fetch(array, element, num_bytes)
        assert array._flat.size == pool.size
        fetched[int(element) : int(element) + int(num_bytes) // pool.itemsize] += 1

    monkeypatch.setattr(CheckedArray, "fetch", noted)
    assert case.faults(simulate(case)) == []
    return fetched
