"""Products of experts: one matrix product for each expert that has rows, by any of the products.

The operation makes no sums of its own. For each expert it calls the product that a record names
(`matrix_product`), with a copy of that record and of the step's header in which the addresses are
the expert's and the rows are those of its run (`routing`). So experts take every format of weights
and of rows, and every instruction set, that other matrices take, and a row's sums are the same bits
as if its expert were the only one.

    items     expert 0: part 0 1 2 3 │ expert 3: part 0 1 2 3 │ …    parts: the chunks of a product
    chunks    ├──────────────┤├──────────────┤ …                     runs of items

Experts differ in their rows, so chunks differ in their work: threads claim one after the other.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.called_records import RECORD_BYTES, move, move_rows
from kernels.cpu.compiled import inlined, operation, scratch, word
from kernels.cpu.memory_words import copy_bytes, read_int32, write_int64
from kernels.cpu.operands import ExpertProduct, Product
from kernels.cpu.operation import CHUNKS, HEADER_WORDS, KERNEL, StepWord
from kernels.cpu.routing_sizes import EXPERT_CALL_BYTES
from kernels.cpu.step import invoke

HEADER_BYTES: Final = 8 * HEADER_WORDS


@inlined()
def parts_at_once(part: int, parts: int, most: int) -> int:
    """Return how many parts from this one are one of a product cut into fewer: all, or 2^n.

    Few rows take less time where they go through more panels at once.
    """
    if part == 0 and most >= parts:
        return parts
    count = 1
    while (part | parts) & count == 0 and 2 * count <= most:
        count *= 2
    return count


@operation()
def expert_product(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Do a run of the items of all experts' products."""
    shared, runs = word(record, ExpertProduct.RECORD), word(record, ExpertProduct.RUNS)
    parts = word(shared, CHUNKS)
    num_items = read_int32(runs, 0) * parts
    item, end = num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks
    if item == end:
        return
    called = scratch(header, worker) + word(header, StepWord.SCRATCH_BYTES) - EXPERT_CALL_BYTES
    its_header = called + RECORD_BYTES
    copy_bytes(shared, called, RECORD_BYTES)
    copy_bytes(header, its_header, HEADER_BYTES)
    input_bytes = word(record, ExpertProduct.INPUT_BYTES)
    group_bytes = word(record, ExpertProduct.GROUP_BYTES)
    while item < end:
        run, part = item // parts, item % parts
        expert, first = read_int32(runs, 1 + 3 * run), read_int32(runs, 2 + 3 * run)
        weights = word(shared, Product.WEIGHTS) + expert * word(record, ExpertProduct.WEIGHTS_BYTES)
        write_int64(called, Product.WEIGHTS, weights)
        along, beside = first * input_bytes, first * group_bytes
        move_rows(shared, called, along, beside)
        move(shared, called, Product.OUT, first * word(record, ExpertProduct.OUT_BYTES))
        write_int64(its_header, StepWord.NUM_TOKENS, read_int32(runs, 3 + 3 * run))
        count = parts_at_once(part, parts, end - item)
        invoke(word(shared, KERNEL), called, its_header, part // count, parts // count, worker)
        item += count
