"""Products of heads: each head's part of a row, multiplied with a matrix of its own.

    rows of tokens   │ head 0 │ head 1 │ …       SOURCE, a part of K elements of each
                          ↓        ↓
    rows of heads    head 0: T rows of K │ head 1: T rows of K │ …     in a product's format
                          ↓        ↓
    OUT              │ head 0 │ head 1 │ …       N elements of each, in rows of tokens again

Neither makes numbers of its own: for each head the operation is called that a record names, a row
input or a product (`row_inputs`, `matrix_product`), with a copy of the record in which addresses
are the head's. So these matrices take every format of weights, on every instruction set.
"""

from __future__ import annotations

from kernels.cpu.called_records import RECORD_BYTES, move, move_rows
from kernels.cpu.compiled import inlined, operation, scratch, word
from kernels.cpu.latent_operands import HEAD_CALL_BYTES, HeadCalls
from kernels.cpu.memory_words import copy_bytes
from kernels.cpu.operands import Product, RowInput
from kernels.cpu.operation import CHUNKS, KERNEL, StepWord
from kernels.cpu.step import invoke


@inlined()
def copied(shared: int, header: int, worker: int) -> int:
    """Copy a record to the end of a worker's scratch memory, and return where it lies."""
    place: int = scratch(header, worker) + word(header, StepWord.SCRATCH_BYTES) - HEAD_CALL_BYTES
    copy_bytes(shared, place, RECORD_BYTES)
    return place


@operation()
def rows_of_heads(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Make the rows of all heads of a run of tokens."""
    shared = word(record, HeadCalls.RECORD)
    called = copied(shared, header, worker)
    for head in range(word(record, HeadCalls.NUM_HEADS)):
        beside = head * word(record, HeadCalls.BESIDE_BYTES)
        move(shared, called, RowInput.SOURCE, head * word(record, HeadCalls.SOURCE_BYTES))
        move(shared, called, RowInput.OUT, head * word(record, HeadCalls.ROWS_BYTES))
        move(shared, called, RowInput.OUT_SCALES, beside)
        move(shared, called, RowInput.OUT_SCALED_SUMS, beside)
        move(shared, called, RowInput.OUT_SUMS, beside)
        move(shared, called, RowInput.OUT_PAIR_SUMS, beside)
        move(shared, called, RowInput.OUT_BEGINS, beside)
        invoke(word(shared, KERNEL), called, header, chunk, num_chunks, worker)


@operation()
def products_of_heads(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Do a run of the parts of all heads' products."""
    shared = word(record, HeadCalls.RECORD)
    called = copied(shared, header, worker)
    parts = word(shared, CHUNKS)
    items = word(record, HeadCalls.NUM_HEADS) * parts
    for item in range(items * chunk // num_chunks, items * (chunk + 1) // num_chunks):
        head, part = item // parts, item % parts
        beside = head * word(record, HeadCalls.BESIDE_BYTES)
        move(shared, called, Product.WEIGHTS, head * word(record, HeadCalls.SOURCE_BYTES))
        move_rows(shared, called, head * word(record, HeadCalls.ROWS_BYTES), beside)
        move(shared, called, Product.OUT, head * word(record, HeadCalls.OUT_BYTES))
        invoke(word(shared, KERNEL), called, header, part, parts, worker)
