"""The device operations on CPU tensors against the functions of `kernels.reference`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compute_plane.cuda.operands import LayerAttention, PrefillRows
from compute_plane.cuda.reference_blocks import floats
from compute_plane.cuda.reference_operations import ReferenceOperations
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rope import rope_write_kv

OPERATIONS = ReferenceOperations()
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, LAYERS = 6, 2, 8, 4, 12, 3
DTYPES = [torch.float32, torch.bfloat16]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(values).to(dtype)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return drawn(NUM_BLOCKS, LAYERS, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_and_values_go_to_their_slots_of_one_layer_and_padding_nowhere(
    dtype: torch.dtype,
) -> None:
    qkv = drawn(3, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=dtype)
    angles = (drawn(20, HEAD_DIM // 2, seed=1), drawn(20, HEAD_DIM // 2, seed=2))
    positions = int32(7, 0, 13)
    found, expected = pool(dtype), floats(pool(dtype)).copy()
    queries = torch.empty(3, HEADS, HEAD_DIM, dtype=dtype)
    slots = torch.tensor([5, -1, 47])
    OPERATIONS.rope_write_kv(queries, found, 1, qkv, angles, positions, slots)
    kept = [0, 2]
    rotated = np.empty((3, HEADS, HEAD_DIM), dtype=np.float32)
    tables = [table.numpy()[positions.numpy()] for table in angles]
    trash = np.zeros((3, *expected.shape[1:]), dtype=np.float32)
    rope_write_kv(floats(qkv), *tables, trash, 1, np.arange(3), rotated)
    rope_write_kv(
        floats(qkv)[kept], tables[0][kept], tables[1][kept], expected, 1, slots.numpy()[kept],
        np.empty((2, HEADS, HEAD_DIM), dtype=np.float32),
    )  # fmt: skip
    assert queries.equal(torch.from_numpy(rotated).to(dtype))
    assert found.equal(torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_prefills_and_of_decodes_is_the_paged_attention_of_the_reference(
    dtype: torch.dtype,
) -> None:
    blocks = pool(dtype)
    blocks[0] = float("nan")  # unused entries of tables are 0
    blocks[3, :, :, :, 2:] = float("nan")  # behind the end of row 1
    tables = torch.tensor([[4, 2, 9], [7, 3, 0]], dtype=torch.int32)
    lengths, counts = int32(11, 6), [4, 2]
    query = drawn(6, HEADS, HEAD_DIM, dtype=dtype, seed=3)
    rows = PrefillRows(tables, lengths, int32(0, 4, 6), ())
    found = torch.empty_like(query)
    OPERATIONS.attention_prefill(found, query, blocks, 2, rows)

    expected = np.empty(query.shape, dtype=np.float32)
    token_rows = np.repeat(np.arange(2, dtype=np.int32), counts)
    positions = np.array([7, 8, 9, 10, 4, 5], dtype=np.int32)
    paged_attention(
        floats(query), floats(blocks), 2, tables.numpy(), token_rows, positions,
        HEAD_DIM**-0.5, 0, 6 * KV_HEADS, expected,
    )  # fmt: skip
    assert found.equal(torch.from_numpy(expected).to(dtype))

    last = query[[3, 5, 0]]
    decoded = torch.full_like(last, float("nan"))
    padded = torch.cat([tables, torch.full((1, 3), -7, dtype=torch.int32)])
    OPERATIONS.attention_decode(decoded, last, blocks, 2, padded, int32(11, 6, 0), 11)
    assert decoded[:2].equal(found[[3, 5]])
    assert not decoded[2].any()


@pytest.mark.parametrize("window", [1, 3, 5, 40])
def test_attention_with_a_window_reads_no_block_before_it(window: int) -> None:
    blocks = pool()
    lengths, counts = int32(11, 6), [4, 2]
    tables = torch.tensor([[4, 2, 9], [7, 3, 0]], dtype=torch.int32)
    known = tables.clone()
    for row, (length, count) in enumerate(zip(lengths.tolist(), counts, strict=True)):
        known[row, : max(length - count + 1 - window, 0) // BLOCK_SIZE] = -7
    query = drawn(6, HEADS, HEAD_DIM, seed=3)
    rows = PrefillRows(known, lengths, int32(0, 4, 6), ())
    found = torch.empty_like(query)
    OPERATIONS.attention_prefill(found, query, blocks, 2, rows, LayerAttention(window))

    expected = np.empty(query.shape, dtype=np.float32)
    token_rows = np.repeat(np.arange(2, dtype=np.int32), counts)
    positions = np.array([7, 8, 9, 10, 4, 5], dtype=np.int32)
    paged_attention(
        floats(query), floats(blocks), 2, tables.numpy(), token_rows, positions,
        HEAD_DIM**-0.5, 0, 6 * KV_HEADS, expected, window,
    )  # fmt: skip
    assert found.equal(torch.from_numpy(expected))

    last, decoded = query[[3, 5, 0]], torch.empty(3, HEADS, HEAD_DIM)
    padded = torch.cat([tables, torch.full((1, 3), -7, dtype=torch.int32)])
    for row, length in enumerate(lengths.tolist()):
        padded[row, : max(length - window, 0) // BLOCK_SIZE] = -7
    own = LayerAttention(window)
    OPERATIONS.attention_decode(decoded, last, blocks, 2, padded, int32(11, 6, 0), 11, own)
    assert decoded[:2].equal(found[[3, 5]])
    assert not decoded[2].any()


def test_a_row_longer_than_the_longest_that_was_planned_for_is_an_error() -> None:
    query = drawn(1, HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="a row has 5 tokens, longest is 4"):
        OPERATIONS.attention_decode(query, query, pool(), 0, int32(1, 2)[None], int32(5), 4)


def test_sums_are_rounded_before_they_are_normalised() -> None:
    residual = torch.full((1, 2), 256.0, dtype=torch.bfloat16)
    out, weight = torch.empty_like(residual), torch.ones(2, dtype=torch.bfloat16)
    OPERATIONS.add_rms_norm(out, residual, torch.tensor([[0.9, -256.0]]).bfloat16(), weight, 1e-5)
    assert residual.tolist() == [[256.0, 0.0]]  # 256.9 is not a bfloat16
    assert out.tolist() == [[float(torch.tensor(2.0).sqrt().bfloat16()), 0.0]]


def test_padding_of_a_list_of_copies_copies_nothing() -> None:
    blocks = pool()
    before = blocks.clone()
    pairs = torch.tensor([[-1, 3], [2, 5]], dtype=torch.int32)
    OPERATIONS.copy_blocks(blocks, blocks, pairs)
    before[5] = before[2]
    assert blocks.equal(before)
