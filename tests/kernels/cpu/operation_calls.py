"""Calls of operations on NumPy arrays: records, headers, rows and quantised weights for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType as GgmlType

from kernels.cpu import row_inputs
from kernels.cpu.catalogue import INT8_PRODUCTS
from kernels.cpu.int8_packing import INT8_FORMATS, packed_int8_bytes
from kernels.cpu.int8_pair_tile import PAIR_OFFSET, PARTNER_OFFSET
from kernels.cpu.int8_sizes import int8_scratch_bytes
from kernels.cpu.int8_turning import pack_int8_rows
from kernels.cpu.int8_weights import BEGINS_OFFSET, BIAS_BITS
from kernels.cpu.operands import Product, RowFormat, RowInput
from kernels.cpu.operation import HEADER_WORDS, RECORD_WORDS, Operation, StepWord

Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]
UInt8Array = npt.NDArray[np.uint8]

KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)
BEHIND_SCRATCH = 4096
"""Bytes that no operation may write."""


def run(
    operation: Operation, record: Int64Array, header: Int64Array, chunks: Iterable[int] = (0,),
    worker: int = 0,
) -> None:  # fmt: skip
    """Run the given chunks, in this order, of as many as are given."""
    order, addresses = list(chunks), (record.ctypes.data, header.ctypes.data)
    for chunk in order:
        KERNEL(operation.address)(*addresses, chunk, len(order), worker)


@dataclass
class Int8Rows:
    """Quantised rows; `extra` rows behind them are garbage."""

    values: npt.NDArray[np.int8]
    scales: Float32Array
    scaled_sums: Float32Array
    sums: npt.NDArray[np.int16]
    pair_sums: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, rows: int, k: int, extra: int = 3) -> Int8Rows:
        shape = (rows + extra, k // 32)
        return cls(
            np.full((rows + extra, k), 77, np.int8),
            np.full(shape, np.nan, np.float32),
            np.full(shape, np.nan, np.float32),
            np.full((rows + extra, k // 16), 12345, np.int16),
            np.full(shape, 54321, np.int32),
            np.full(shape, 64321, np.int32),
        )

    @classmethod
    def of(cls, values: npt.NDArray[np.int8], scales: Float32Array) -> Int8Rows:
        """Return rows of integers, [R, K], times scales, [R, K/32]; pairs take ±PAIR_OFFSET."""
        groups = values.reshape(*scales.shape, 2, 16).astype(np.int32)
        first, partner = groups[:, :, 0], groups[:, :, 1]
        sums = groups.sum(axis=(2, 3), dtype=np.int32)
        half_sums = groups.sum(axis=3, dtype=np.int16).reshape(len(values), -1)
        pair_sums = (first * partner + PAIR_OFFSET * first + PARTNER_OFFSET * partner).sum(
            axis=2, dtype=np.int32
        )
        scaled_sums = scales * sums.astype(np.float32)
        begins = np.int32(BIAS_BITS) - BEGINS_OFFSET * sums
        return cls(values.copy(), scales, scaled_sums, half_sums, pair_sums, begins)

    def rows(self, first: int, end: int) -> Int8Rows:
        return Int8Rows(
            self.values[first:end].copy(),
            self.scales[first:end].copy(),
            self.scaled_sums[first:end].copy(),
            self.sums[first:end].copy(),
            self.pair_sums[first:end].copy(),
            self.begins[first:end].copy(),
        )

    def decoded(self, rows: int) -> npt.NDArray[np.float64]:
        scales = np.repeat(self.scales[:rows].astype(np.float64), 32, axis=1)
        return self.values[:rows] * scales


def step_header(rows: int, k: int = 32, first: int = 0) -> tuple[Int64Array, UInt8Array]:
    """Return a header of `rows` tokens, and the scratch memory it names, with BEHIND_SCRATCH bytes
    behind it: full of NaN."""
    header = np.zeros(HEADER_WORDS, np.int64)
    size = int8_scratch_bytes(k)
    scratch = np.full(64 + size + BEHIND_SCRATCH, 0xFF, np.uint8)
    scratch = scratch[-scratch.ctypes.data % 64 :][: size + BEHIND_SCRATCH]
    header[StepWord.NUM_TOKENS] = rows
    header[StepWord.FIRST_TOKEN] = first
    header[StepWord.SCRATCH] = scratch.ctypes.data
    header[StepWord.SCRATCH_BYTES] = size
    return header, scratch


def row_record(
    source: Float32Array, k: int, row_format: RowFormat, out: Int8Rows | npt.NDArray[np.generic],
    weight: Float32Array | None = None, epsilon: float = 1e-5,
) -> Int64Array:  # fmt: skip
    record = np.zeros(RECORD_WORDS, np.int64)
    record[RowInput.SOURCE] = source.ctypes.data
    record[RowInput.SOURCE_STRIDE] = source.shape[1]
    record[RowInput.SOURCE_FIRST_WORD] = StepWord.FIRST_TOKEN
    record[RowInput.ROWS_WORD] = StepWord.NUM_TOKENS
    record[RowInput.K], record[RowInput.FORMAT] = k, row_format
    if isinstance(out, Int8Rows):
        record[RowInput.OUT] = out.values.ctypes.data
        record[RowInput.OUT_SCALES] = out.scales.ctypes.data
        record[RowInput.OUT_SCALED_SUMS] = out.scaled_sums.ctypes.data
        record[RowInput.OUT_SUMS] = out.sums.ctypes.data
        record[RowInput.OUT_PAIR_SUMS] = out.pair_sums.ctypes.data
        record[RowInput.OUT_BEGINS] = out.begins.ctypes.data
    else:
        record[RowInput.OUT] = out.ctypes.data
    if weight is not None:
        record[RowInput.WEIGHT] = weight.ctypes.data
        record[RowInput.EPSILON] = int(np.float32(epsilon).view(np.int32))
    return record


def quantised(x: Float32Array) -> Int8Rows:
    """Return int8 rows of float rows."""
    rows, k = x.shape
    out = Int8Rows.empty(rows, k)
    header, _ = step_header(rows)
    run(row_inputs.plain_rows, row_record(x, k, RowFormat.INT8, out), header)
    return out


def product(
    label: str, packed: UInt8Array, rows: Int8Rows, num_rows: int, n: int, out: Float32Array,
    *, first: int = 0, accumulate: bool = False, chunks: Iterable[int] = (0,), worker: int = 0,
) -> None:  # fmt: skip
    """Multiply into rows `first` … of `out`, whose rows may be longer than `n`."""
    k = rows.values.shape[1]
    record = np.zeros(RECORD_WORDS, np.int64)
    record[Product.INPUT] = rows.values.ctypes.data
    record[Product.INPUT_SCALES] = rows.scales.ctypes.data
    record[Product.INPUT_SCALED_SUMS] = rows.scaled_sums.ctypes.data
    record[Product.INPUT_SUMS] = rows.sums.ctypes.data
    record[Product.INPUT_PAIR_SUMS] = rows.pair_sums.ctypes.data
    record[Product.INPUT_BEGINS] = rows.begins.ctypes.data
    record[Product.WEIGHTS] = packed.ctypes.data
    record[Product.K], record[Product.N] = k, n
    record[Product.OUT], record[Product.OUT_STRIDE] = out.ctypes.data, out.shape[1]
    record[Product.ACCUMULATE] = int(accumulate)
    record[Product.ROWS_WORD] = StepWord.NUM_TOKENS
    record[Product.OUT_FIRST_WORD] = StepWord.FIRST_TOKEN
    header, scratch = step_header(num_rows, k, first)
    # Every worker's scratch memory is the same: they do not run at once.
    header[StepWord.SCRATCH_BYTES] = 0
    run(INT8_PRODUCTS[label], record, header, chunks, worker)
    assert (scratch[-BEHIND_SCRATCH:] == 0xFF).all()


SCALES_AT = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where the float16 of a block of the file are: d, and m or dmin; others have d at 0."""


def whole_blocks(label: str, k: int) -> int:
    """Return a number of inputs, at least k, that a format can have."""
    size = INT8_FORMATS[label].block_elements
    return -(-k // size) * size


def random_blocks(label: str, n: int, k: int, random: np.random.Generator) -> UInt8Array:
    """Return rows of blocks as a model file holds them, every byte of the weights drawn."""
    fmt = INT8_FORMATS[label]
    shape = (n, k // fmt.block_elements)
    blocks = random.integers(0, 256, (*shape, fmt.block_bytes), dtype=np.uint8)
    d_at, *m_at = SCALES_AT.get(label, (0,))
    d = random.uniform(0.001, 0.01, (*shape, 1)) * random.choice([-1, 1], (*shape, 1))
    blocks[:, :, d_at : d_at + 2] = (d / (16 if fmt.is_shared else 1)).astype("<f2").view(np.uint8)
    for at in m_at:
        m = random.uniform(-0.1, 0.1, (*shape, 1)) / (16 if fmt.is_shared else 1)
        blocks[:, :, at : at + 2] = m.astype("<f2").view(np.uint8)
    return blocks.reshape(n, -1)


def packed_weights(label: str, blocks: UInt8Array, k: int) -> UInt8Array:
    out = np.full(packed_int8_bytes(label, len(blocks), k), 0xFF, np.uint8)
    pack_int8_rows(label, blocks, k, out)
    return out


def decoded_weights(label: str, blocks: UInt8Array) -> npt.NDArray[np.float64]:
    """Return the weights of rows of blocks, [n, k], as the gguf package has them.

    It has no Q4_F, whose nibbles lie as those of Q4_0.
    """
    if label == "Q4_F":
        each = blocks.reshape(-1, 18)
        nibbles = np.concatenate((each[:, 2:] & 15, each[:, 2:] >> 4), axis=1)
        codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * np.where(nibbles > 7, -2, 2)
        d = np.ascontiguousarray(each[:, :2]).view("<f2").astype(np.float64)
        return (codes * d).reshape(len(blocks), -1)
    values = gguf.quants.dequantize(blocks, GgmlType[label])
    return values.reshape(len(blocks), -1).astype(np.float64)
