"""Products with the matrices of adapters: for each run of tokens with one, those of that adapter.

The operation makes no sums of its own. For each matrix of each run's adapter it calls the product
that a record names (`matrix_product`), with a copy of that record and of the step's header in which
the addresses are the matrix's and the rows are those of the run. So a row's sums are the same bits
whatever other adapters there are in its step.

An adapter changes a matrix by two products, of which this is called for each (`adapter_records`):

    rows [T, K]  ─ down [r, K] ─→  [T, r]  ─ up [N, r] ─→  added to what the model's matrix gave

    items     run 0: matrix 0: part 0 1 … │ matrix 1: part 0 1 … │ run 1: …
    chunks    ├──────────────┤├──────────────┤ …                      runs of items
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.adapter_operands import (
    ADAPTER_CALL_BYTES,
    MATRIX_WORDS,
    RUN_WORDS,
    AdapterMatrix,
    AdapterProduct,
    AdapterRun,
)
from kernels.cpu.called_records import RECORD_BYTES, move
from kernels.cpu.compiled import operation, scratch, word
from kernels.cpu.memory_words import copy_bytes, read_int32, write_int64
from kernels.cpu.operands import Product
from kernels.cpu.operation import CHUNKS, HEADER_WORDS, KERNEL, StepWord
from kernels.cpu.step import invoke

HEADER_BYTES: Final = 8 * HEADER_WORDS
MATRIX_BYTES: Final = 8 * MATRIX_WORDS


@operation()
def adapter_product(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Do a run of the items of all runs' products."""
    shared, table = word(record, AdapterProduct.RECORD), word(record, AdapterProduct.TABLE)
    matrices, parts = word(record, AdapterProduct.MATRICES), word(shared, CHUNKS)
    runs = word(header, StepWord.ADAPTER_RUNS)
    num_items = word(header, StepWord.NUM_ADAPTER_RUNS) * matrices * parts
    first_item, end = num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks
    if first_item == end:
        return
    called = scratch(header, worker) + word(header, StepWord.SCRATCH_BYTES) - ADAPTER_CALL_BYTES
    its_header = called + RECORD_BYTES
    copy_bytes(shared, called, RECORD_BYTES)
    copy_bytes(header, its_header, HEADER_BYTES)
    input_bytes = word(record, AdapterProduct.INPUT_BYTES)
    out_bytes = word(record, AdapterProduct.OUT_BYTES)
    for item in range(first_item, end):
        run, rest = item // (matrices * parts), item % (matrices * parts)
        adapter = read_int32(runs, RUN_WORDS * run + AdapterRun.ADAPTER)
        first = read_int32(runs, RUN_WORDS * run + AdapterRun.FIRST)
        matrix = table + MATRIX_BYTES * (adapter * matrices + rest // parts)
        weights = word(matrix, AdapterMatrix.WEIGHTS)
        if weights == 0:
            continue
        write_int64(called, Product.WEIGHTS, weights)
        write_int64(called, Product.N, word(matrix, AdapterMatrix.N))
        write_int64(called, Product.K, word(matrix, AdapterMatrix.K))
        write_int64(called, Product.OUT_STRIDE, word(matrix, AdapterMatrix.OUT_STRIDE))
        along = word(matrix, AdapterMatrix.INPUT_OFFSET) + first * input_bytes
        move(shared, called, Product.INPUT, along)
        along = word(matrix, AdapterMatrix.OUT_OFFSET) + first * out_bytes
        move(shared, called, Product.OUT, along)
        count = read_int32(runs, RUN_WORDS * run + AdapterRun.COUNT)
        write_int64(its_header, StepWord.NUM_TOKENS, count)
        invoke(word(shared, KERNEL), called, its_header, rest % parts, parts, worker)
