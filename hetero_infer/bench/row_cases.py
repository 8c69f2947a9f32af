"""What stands between products: norms, activations, rounding of rows, the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np

from compute_plane.cpu.thread_team import Entry
from hetero_infer.bench.kernel_cases import HIDDEN, INTERMEDIATE, VOCAB, KernelCase
from hetero_infer.bench.kernel_workbench import Workbench
from hetero_infer.bench.product_cases import packed_bytes, packed_weights
from kernels.cpu.catalogue import EMBEDDINGS
from kernels.cpu.operands import EmbeddingRecord, RowFormat, RowInput, group_bytes, row_bytes
from kernels.cpu.operation import Operation, StepWord
from kernels.cpu.row_inputs import gated_rows, normed_rows, plain_rows
from kernels.cpu.row_values import PAIRS_PRODUCTS

ROWS: Final = (32, 256)
BESIDE: Final = 4 if PAIRS_PRODUCTS else 3
"""Numbers that are written beside a group of an int8 row."""
EPSILON_BITS: Final = int(np.array([1e-5], np.float32).view(np.uint32)[0])

MAKERS: Final = (
    ("norm", normed_rows, HIDDEN, 1),
    ("silu · up", gated_rows, INTERMEDIATE, 2),
    ("rounding", plain_rows, HIDDEN, 1),
)
"""Name, operation, elements of a row that is written, and how many are read for each."""


def row_cases() -> list[KernelCase]:
    """Return row inputs in every format, and the embedding."""
    cases = []
    for name, maker, k, sources in MAKERS:
        for row_format in RowFormat:
            for rows in ROWS:
                written = row_bytes(row_format, rows, k)
                if row_format == RowFormat.INT8:
                    written += BESIDE * group_bytes(rows, k)
                cases.append(
                    KernelCase(
                        name=f"{name} to {row_format.name.lower()} {rows} × {k}",
                        num_bytes=4 * rows * k * sources + written,
                        num_operations=0,
                        peak=None,
                        prepare=partial(_prepare_rows, maker, row_format, rows, k, sources),
                    )
                )
    cases += [_embedding(label, rows) for label in ("Q4_1", "BF16") for rows in ROWS]
    return cases


def _prepare_rows(
    maker: Operation, row_format: RowFormat, rows: int, k: int, sources: int, bench: Workbench
) -> Sequence[Entry]:
    record = bench.record(
        maker,
        min(rows, bench.num_chunks),
        {
            RowInput.SOURCE: bench.floats(rows * k * sources),
            RowInput.SOURCE_STRIDE: k * sources,
            RowInput.SOURCE_FIRST_WORD: StepWord.ZERO,
            RowInput.ROWS_WORD: StepWord.NUM_TOKENS,
            RowInput.K: k,
            RowInput.FORMAT: row_format,
            RowInput.OUT: bench.zeros(row_bytes(row_format, rows, k)),
            RowInput.OUT_SCALES: bench.zeros(group_bytes(rows, k)),
            RowInput.OUT_SCALED_SUMS: bench.zeros(group_bytes(rows, k)),
            RowInput.OUT_SUMS: bench.zeros(group_bytes(rows, k)),
            RowInput.OUT_PAIR_SUMS: bench.zeros(group_bytes(rows, k)),
            RowInput.OUT_BEGINS: bench.zeros(group_bytes(rows, k)),
            RowInput.WEIGHT: bench.floats(k),
            RowInput.EPSILON: EPSILON_BITS,
        },
    )
    tokens = bench.place(np.arange(rows, dtype=np.int64))
    header = bench.header({StepWord.NUM_TOKENS: rows, StepWord.OUT_TOKENS: tokens})
    return [(record, header)]


def _embedding(label: str, rows: int) -> KernelCase:
    row = packed_bytes(label, VOCAB, HIDDEN) // VOCAB
    return KernelCase(
        name=f"embedding {label} {rows}",
        num_bytes=rows * (row + 4 * HIDDEN),
        num_operations=0,
        peak=None,
        prepare=partial(_prepare_embedding, label, rows),
    )


def _prepare_embedding(label: str, rows: int, bench: Workbench) -> Sequence[Entry]:
    record = bench.record(
        EMBEDDINGS[label],
        min(rows, bench.num_chunks),
        {
            EmbeddingRecord.WEIGHTS: bench.place(
                packed_weights(label, VOCAB, HIDDEN, bench.random)
            ),
            EmbeddingRecord.K: HIDDEN,
            EmbeddingRecord.OUT: bench.zeros(4 * rows * HIDDEN),
        },
    )
    tokens = bench.random.integers(0, VOCAB, rows, np.int32)
    header = bench.header({StepWord.NUM_TOKENS: rows, StepWord.TOKEN_IDS: bench.place(tokens)})
    return [(record, header)]
