"""Attention over latents: what is written, what queries become, and what is attended to."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from kernels.cpu.catalogue import LATENT_WRITE, latent_queries
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.kv_layout import VALUE_BYTES, KvLayout, decode_blocks, encode_blocks
from kernels.cpu.latent_operands import LatentQueries, LatentWrite
from kernels.cpu.operation import RECORD_WORDS
from kernels.reference.latent_attention import latent_attention, write_latents
from tests.kernels.cpu.attention_driver import Setting, run_chunks

DTYPES = list(VALUE_BYTES)
LAYER = 1
EPS = 1e-5
EDGES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 128]
SHAPES = [(4, 2, 64, 32, 16), (5, 5, 32, 16, 24), (6, 2, 96, 6, 8), (16, 2, 512, 64, 16)]
"""Heads, parts of them, R, P, B."""


def tolerance(dtype: str) -> float:
    chosen = selected_instruction_set()
    rounds = dtype != "float32" and (chosen.has_amx or chosen.has_bf16_dot)
    return 2e-2 if rounds else 2e-5


class Latents:
    """Sequences whose latents are written to shuffled blocks of a pool that is full of NaN."""

    def __init__(
        self, dtype: str, heads: int, parts: int, rank: int, turning: int, block_size: int,
        lengths: list[int],
    ) -> None:  # fmt: skip
        random = np.random.default_rng([heads, rank, turning, block_size, *lengths])
        self.lengths = lengths
        self.rank, self.turning = rank, turning
        size = rank + turning
        layout = KvLayout(dtype, 2, 1, block_size, size, rank)
        counts = [-(-length // block_size) for length in lengths]
        self.setting = Setting(layout, heads, sum(counts) + 3, parts=parts)
        blocks = random.permutation(self.setting.num_blocks)
        self.tables = np.full((len(lengths), max(counts) + 1), 2**30, np.int32)
        for row, (count, end) in enumerate(zip(counts, np.cumsum(counts), strict=True)):
            self.tables[row, :count] = blocks[end - count : end]
        self.positions = np.concatenate([np.arange(length) for length in lengths])
        self.rows = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.places = self.tables[self.rows, self.positions // block_size].astype(np.int64)
        self.places = self.places * block_size + self.positions % block_size
        count = len(self.positions)

        def drawn(*shape: int) -> np.ndarray:
            return random.standard_normal(shape).astype(np.float32)

        self.inputs, self.made = 3 * drawn(count, size), drawn(count, heads, 32 + turning)
        self.plain = drawn(count, heads, rank)
        self.weight = (1 + 0.1 * drawn(rank)).astype(np.float32)
        angles = self.positions[:, None] * (0.5 ** np.arange(turning // 2))
        self.cosines = np.cos(angles).astype(np.float32)
        self.sines = np.sin(angles).astype(np.float32)
        self.scale = 1 / math.sqrt(rank)
        self.expected = np.full((self.setting.num_blocks, 1, block_size, size), np.nan, np.float32)
        self.turned = np.zeros((count, heads, size), np.float32)
        self.turned[:, :, :rank] = self.plain
        write_latents(
            self.inputs, self.made[:, :, 32:], self.cosines, self.sines, self.weight, EPS,
            self.expected, 0, self.places, self.turned,
        )  # fmt: skip

    def write(self, chunks: int = 1, first: int = 0, end: int | None = None) -> None:
        end = len(self.positions) if end is None else end
        setting, layout = self.setting, self.setting.layout
        inputs = np.ascontiguousarray(self.inputs[first:end])
        header = setting.header(
            first, NUM_TOKENS=end - first, KV_PLACES=self.places[first:end].copy()
        )
        words: dict[int, Any] = {
            LatentWrite.INPUTS: inputs.ctypes.data,
            LatentWrite.RANK: self.rank,
            LatentWrite.TURNING: self.turning,
            LatentWrite.WEIGHT: self.weight.ctypes.data,
            LatentWrite.EPSILON: np.float32(EPS).view(np.uint32),
            LatentWrite.COSINES: self.cosines.ctypes.data,
            LatentWrite.SINES: self.sines.ctypes.data,
            LatentWrite.POOL: setting.layer_address(LAYER),
            LatentWrite.BLOCK_BYTES: layout.block_bytes,
            LatentWrite.HEAD_BYTES: layout.head_bytes,
            LatentWrite.BLOCK_SIZE: layout.block_size,
        }
        run_chunks(LATENT_WRITE[layout.dtype], record_of(words), header, chunks, 1)

    def queries(self, chunks: int = 1) -> np.ndarray:
        """Return the queries of all tokens as attention wants them, [T, H·(R + P)]."""
        setting = self.setting
        out = np.full(self.turned.shape, np.nan, np.float32)
        out[:, :, : self.rank] = self.plain
        header = setting.header(0, NUM_TOKENS=len(out))
        words: dict[int, Any] = {
            LatentQueries.SOURCE: self.made.ctypes.data,
            LatentQueries.QUERIES: out.ctypes.data,
            LatentQueries.NUM_HEADS: setting.num_heads,
            LatentQueries.PLAIN: 32,
            LatentQueries.RANK: self.rank,
            LatentQueries.TURNING: self.turning,
            LatentQueries.SCALE: np.float32(self.scale * math.log2(math.e)).view(np.uint32),
            LatentQueries.COSINES: self.cosines.ctypes.data,
            LatentQueries.SINES: self.sines.ctypes.data,
        }
        run_chunks(latent_queries, record_of(words), header, chunks, 1)
        return out.reshape(len(out), -1)

    def held(self) -> np.ndarray:
        """Return what the pool holds of the layer, [N, 2, B, R + P]: as keys, as values."""
        return decode_blocks(self.setting.layout, self.setting.data)[:, LAYER, :, 0]

    def attended(self) -> np.ndarray:
        """Return what the reference attends to, keys and values as the pool holds them."""
        keys, values = self.held()[:, :1], self.held()[:, 1:, :, : self.rank]
        out = np.empty((len(self.positions), self.setting.num_heads, self.rank), np.float32)
        for token in range(len(out)):
            # Where they are rounded apart, values are not the first elements of keys.
            row, length = self.rows[token], int(self.positions[token]) + 1
            blocks = self.tables[row, : -(-length // keys.shape[2])]
            own = keys[blocks, 0].reshape(-1, keys.shape[3])[:length]
            given = values[blocks, 0].reshape(-1, self.rank)[:length]
            scores = self.scale * (self.turned[token].astype(np.float64) @ own.T)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = (weights @ given) / weights.sum(axis=1, keepdims=True)
        return out

    def attend(self, first: int, end: int, row: int = 0, **options: Any) -> np.ndarray:
        """Return what some tokens of a sequence are given, [t, H, R]."""
        begin = sum(self.lengths[:row])
        some = slice(begin + first, begin + end)
        given = self.setting.attend(
            np.ascontiguousarray(self.queries()[some]), self.tables[[row]], [end - first],
            self.positions[some], layer=LAYER, **options,
        )  # fmt: skip
        return given.reshape(end - first, self.setting.num_heads, self.rank)


def record_of(words: dict[int, Any]) -> np.ndarray:
    record = np.zeros(RECORD_WORDS, np.int64)
    for at, value in words.items():
        record[at] = value
    return record


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_leave_what_the_reference_says_once_as_keys_and_once_as_values(
    dtype: str, shape: tuple[int, ...]
) -> None:
    case = Latents(dtype, *shape, [33, 1, 16])
    before = case.setting.data.copy()
    case.write()
    layout = case.setting.layout
    both = np.zeros((len(before), 2, 2, 1, layout.block_size, layout.head_dim), np.float32)
    both[:, LAYER, 0, 0] = both[:, LAYER, 1, 0] = np.nan_to_num(case.expected[:, 0])
    exact = decode_blocks(layout, encode_blocks(layout, both))[:, LAYER, :, 0]
    written = ~np.isnan(case.expected[:, 0, :, 0])
    # A sum of squares in another order may round otherwise: by one unit of what is stored.
    step = {"float32": 1e-6, "bfloat16": 2**-7, "int8": 1 / 100, "float8": 1 / 8}[dtype]
    for mine, theirs, width in ((0, 0, layout.head_dim), (1, 1, case.rank)):
        found = case.held()[:, mine][written][:, :width]
        wanted = exact[:, theirs][written][:, :width]
        bound = step * np.abs(wanted).max() if dtype in ("int8", "float8") else 0
        np.testing.assert_allclose(found, wanted, rtol=step, atol=bound + 1e-6)
    # What no token of the layer is written to is as it was.
    blocks = np.unique(case.places // layout.block_size)
    others = np.setdiff1d(np.arange(len(before)), blocks)
    np.testing.assert_array_equal(case.setting.data[others], before[others])
    np.testing.assert_array_equal(
        case.setting.data[:, : layout.layer_bytes], before[:, : layout.layer_bytes]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_leave_the_same_bits_however_they_are_cut(dtype: str) -> None:
    whole, parts = (Latents(dtype, 4, 2, 64, 32, 16, [40]) for _ in range(2))
    whole.write()
    parts.write(chunks=3, first=0, end=17)
    parts.write(first=17, end=18)
    parts.write(chunks=2, first=18)
    np.testing.assert_array_equal(whole.setting.data, parts.setting.data)


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_are_turned_and_scaled(shape: tuple[int, ...]) -> None:
    case = Latents("float32", *shape, [9])
    expected = case.turned * np.float32(case.scale * math.log2(math.e))
    found = case.queries(chunks=4).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_reference_on_what_the_pool_holds(
    dtype: str, shape: tuple[int, ...]
) -> None:
    """Unused slots, unused blocks and the other layer are NaN."""
    case = Latents(dtype, *shape, EDGES if shape[2] < 512 else [70, 3])
    case.write()
    expected = case.attended()
    for row, length in enumerate(case.lengths):
        begin = sum(case.lengths[:row])
        found = case.attend(0, length, row)
        np.testing.assert_allclose(
            found, expected[begin : begin + length], rtol=0, atol=tolerance(dtype)
        )


def test_the_reference_of_these_tests_is_that_of_the_kernels() -> None:
    case = Latents("float32", *SHAPES[0], [40, 7])
    case.write()
    keys = case.held()[:, :1].copy()
    out = np.empty((47, 4, 64), np.float32)
    latent_attention(
        case.turned, keys, 0, case.tables, case.rows, case.positions.astype(np.int32), case.scale,
        out,
    )  # fmt: skip
    np.testing.assert_allclose(case.attended(), out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tokens_bits_depend_on_neither_parts_of_heads_nor_chunks_nor_threads(dtype: str) -> None:
    """Of a context of two segments, which threads may share."""
    case = Latents(dtype, 4, 2, 64, 32, 16, [1100])
    case.write()
    whole = case.attend(1060, 1100)
    for position in (1060, 1071, 1099):
        for options in ({}, {"threads": 4, "workers": 2}):
            alone = case.attend(position, position + 1, **options)
            np.testing.assert_array_equal(alone[0], whole[position - 1060])
    for parts in (1, 4):
        case.setting.parts = parts
        np.testing.assert_array_equal(case.attend(1060, 1100, chunks=2), whole)
