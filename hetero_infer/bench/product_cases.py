"""Matrix products of every weight format, from one row to a long prompt."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from compute_plane.cpu.product_records import CHUNK_WEIGHTS, MOST_PRODUCT_CHUNKS
from compute_plane.cpu.row_buffers import product_of, row_format_of
from compute_plane.cpu.thread_team import Entry
from compute_plane.model.quantize import SCALES_AT
from compute_plane.model.tensor import TensorFormat
from hetero_infer.bench.kernel_cases import HIDDEN, INTERMEDIATE, VOCAB, KernelCase
from hetero_infer.bench.kernel_workbench import Workbench
from kernels.cpu.float_packing import FLOAT_TYPES, pack_float_rows, packed_float_bytes
from kernels.cpu.instruction_set import selected_instruction_set
from kernels.cpu.int8_packing import GROUP, INT8_FORMATS, packed_int8_bytes
from kernels.cpu.int8_turning import pack_int8_rows
from kernels.cpu.int8_weights import BEGINS_OFFSET, BIAS_BITS
from kernels.cpu.kv_layout import to_bfloat16
from kernels.cpu.operands import Product, RowFormat, group_bytes, row_bytes
from kernels.cpu.operation import StepWord
from kernels.cpu.row_values import LARGEST_INT8

UInt8Array = npt.NDArray[np.uint8]

FORMATS: Final = (
    "Q4_1",
    "Q4_0",
    "Q4_F",
    "Q8_0",
    "Q4_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "BF16",
    "F16",
    "F32",
)
ROWS: Final = (1, 8, 32, 256)
GATE_UP: Final = (2 * INTERMEDIATE, HIDDEN)
LM_HEAD: Final = (VOCAB, HIDDEN)

LARGEST: Final = int(LARGEST_INT8)
SCALE: Final = 0.01
DISTINCT_ROWS: Final = 256
"""Rows that are drawn; the others repeat them."""


def product_cases() -> list[KernelCase]:
    """Return gate · up for each format and number of rows, and the logits of one and of 32."""
    cases = [_case(label, GATE_UP, rows) for label in FORMATS for rows in ROWS]
    cases += [
        _case(label, GATE_UP, ROWS[-1], of_prompt=True)
        for label in FORMATS
        if row_format_of(label, of_prompt=True) != row_format_of(label, of_prompt=False)
    ]
    cases += [_case(label, LM_HEAD, rows) for label in ("Q4_1", "Q8_0", "BF16") for rows in (1, 32)]
    return cases


def _case(label: str, shape: tuple[int, int], rows: int, *, of_prompt: bool = False) -> KernelCase:
    n, k = shape
    if label in INT8_FORMATS:
        block = INT8_FORMATS[label].block_elements
        k = -(-k // block) * block
    row_format = row_format_of(label, of_prompt=of_prompt)
    kind = ", prompt" if of_prompt else ""
    num_bytes = packed_bytes(label, n, k) + row_bytes(row_format, rows, k) + 4 * rows * n
    if row_format == RowFormat.INT8:
        num_bytes += 3 * group_bytes(rows, k)
    return KernelCase(
        name=f"product {label} {rows} × {k} → {n}{kind}",
        num_bytes=num_bytes,
        num_operations=2 * rows * n * k,
        peak=peak_of(label, row_format),
        prepare=partial(_prepare, label, n, k, rows, row_format),
    )


def peak_of(label: str, row_format: RowFormat) -> str:
    """Return the fastest arithmetic the instruction set has for weights and rows of a format."""
    chosen = selected_instruction_set()
    if row_format == RowFormat.INT8:
        if chosen.has_amx:
            return "int8_half_tile"
        return "int8_dot" if INT8_FORMATS[label].is_signed else "nibble_dot"
    if row_format == RowFormat.BF16:
        return "bf16_tile" if chosen.has_amx else "bf16_dot"
    return "fma"


def packed_bytes(label: str, n: int, k: int) -> int:
    """Return the bytes of a packed matrix of any format."""
    size = packed_float_bytes if label in FLOAT_TYPES else packed_int8_bytes
    return size(label, n, k)


def _prepare(
    label: str, n: int, k: int, rows: int, row_format: RowFormat, bench: Workbench
) -> list[Entry]:
    operation, scratch_bytes, width = product_of(label, k, row_format)
    chunks = max(1, min(n * k // CHUNK_WEIGHTS, MOST_PRODUCT_CHUNKS, -(-n // width)))
    out = bench.zeros(4 * rows * n)
    record = bench.record(
        operation,
        chunks,
        {
            **_input(row_format, rows, k, bench),
            Product.WEIGHTS: bench.place(packed_weights(label, n, k, bench.random)),
            Product.K: k,
            Product.N: n,
            Product.OUT: out,
            Product.OUT_STRIDE: n,
            Product.ROWS_WORD: StepWord.NUM_TOKENS,
            Product.OUT_FIRST_WORD: StepWord.ZERO,
        },
    )
    header = bench.header({StepWord.NUM_TOKENS: rows}, scratch_bytes=scratch_bytes)
    return [(record, header)]


def _input(row_format: RowFormat, rows: int, k: int, bench: Workbench) -> dict[int, int]:
    """Return rows in the format that the product reads."""
    values = bench.random.standard_normal((rows, k), np.float32)
    if row_format == RowFormat.FLOAT32:
        return {Product.INPUT: bench.place(values)}
    if row_format == RowFormat.BF16:
        return {Product.INPUT: bench.place(to_bfloat16(values))}
    integers = bench.random.integers(-LARGEST, LARGEST + 1, (rows, k), np.int8)
    sums = integers.reshape(rows, -1, GROUP).sum(axis=2, dtype=np.int32)
    half_sums = integers.reshape(rows, -1, GROUP // 2).sum(axis=2, dtype=np.int16)
    scales = np.full(sums.shape, SCALE, np.float32)
    return {
        Product.INPUT: bench.place(integers),
        Product.INPUT_SCALES: bench.place(scales),
        Product.INPUT_SCALED_SUMS: bench.place(scales * sums),
        Product.INPUT_SUMS: bench.place(half_sums),
        Product.INPUT_PAIR_SUMS: bench.place(sums),
        Product.INPUT_BEGINS: bench.place(np.int32(BIAS_BITS) - BEGINS_OFFSET * sums),
    }


def packed_weights(label: str, n: int, k: int, random: np.random.Generator) -> UInt8Array:
    """Return a drawn matrix as it lies in memory: finite numbers of ordinary size."""
    out = np.empty(packed_bytes(label, n, k), np.uint8)
    count = min(n, DISTINCT_ROWS)
    rows = _stored_rows(label, count, k, random)
    repeated = np.tile(rows, (-(-n // count), 1))[:n]
    pack = pack_float_rows if label in FLOAT_TYPES else pack_int8_rows
    pack(label, repeated, k, out)
    return out


def _stored_rows(label: str, n: int, k: int, random: np.random.Generator) -> UInt8Array:
    """Return rows as model files store them, uint8 [n, bytes of k elements]."""
    if label in FLOAT_TYPES:
        values = SCALE * random.standard_normal((n, k), np.float32)
        stored: npt.NDArray[Any] = values
        if label == "F16":
            stored = values.astype(np.float16)
        elif label == "BF16":
            stored = to_bfloat16(values)
        return stored.view(np.uint8)
    fmt = INT8_FORMATS[label]
    blocks = random.integers(0, 256, (n, k // fmt.block_elements, fmt.block_bytes), np.uint8)
    first, end = SCALES_AT.get(TensorFormat[label], (0, 2))
    blocks[..., first:end] = np.full((end - first) // 2, SCALE, np.float16).view(np.uint8)
    return blocks.reshape(n, -1)
