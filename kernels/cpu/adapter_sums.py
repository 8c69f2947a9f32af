"""What adapters add to a product, for each run of tokens that have one.

    rows [T, K]  ─ down [r, K] ─→  between [T, r]  ─ up [N, r] ─→  added to what is in OUT

The operation makes no sums of its own. For each tensor that a run's adapter changes it calls the
two products that a record names (`matrix_product`), with copies of their records and of the step's
header in which the addresses are the adapter's and the rows are those of the run; what is between
stays in the worker's scratch memory. So a row's sums are the same bits whatever other adapters
there are.

    items     run 0: tensor 0: part 0 1 … │ tensor 1: part 0 1 … │ run 1: …
    chunks    ├──────────────┤├──────────────┤ …                              runs of items

Where there are few items each tensor is cut into parts, runs of columns of `up`, and `down`, if it
is small, is multiplied for each of them: so nobody waits for it.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.adapter_operands import (
    CALL_BYTES,
    PAIR_WORDS,
    RUN_WORDS,
    AdapterPair,
    AdapterRun,
    AdapterSums,
)
from kernels.cpu.called_records import RECORD_BYTES, move, move_rows
from kernels.cpu.compiled import operation, scratch, word
from kernels.cpu.memory_words import copy_bytes, read_int32, write_int64
from kernels.cpu.operands import Product
from kernels.cpu.operation import HEADER_WORDS, KERNEL, StepWord
from kernels.cpu.step import invoke

HEADER_BYTES: Final = 8 * HEADER_WORDS
PAIR_BYTES: Final = 8 * PAIR_WORDS


@operation()
def adapter_sums(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Do a run of the items of all runs of tokens."""
    matrices, table = word(record, AdapterSums.MATRICES), word(record, AdapterSums.TABLE)
    runs, num_runs = word(header, StepWord.ADAPTER_RUNS), word(header, StepWord.NUM_ADAPTER_RUNS)
    parts = max(1, word(record, AdapterSums.LEAST_ITEMS) // (num_runs * matrices))
    num_items = num_runs * matrices * parts
    first_item, end = num_items * chunk // num_chunks, num_items * (chunk + 1) // num_chunks
    if first_item == end:
        return
    of_down, of_up = word(record, AdapterSums.DOWN), word(record, AdapterSums.UP)
    down = scratch(header, worker) + word(header, StepWord.SCRATCH_BYTES) - CALL_BYTES
    up = down + RECORD_BYTES
    its_header = up + RECORD_BYTES
    between = down - word(record, AdapterSums.BETWEEN_BYTES)
    copy_bytes(of_down, down, RECORD_BYTES)
    copy_bytes(of_up, up, RECORD_BYTES)
    copy_bytes(header, its_header, HEADER_BYTES)
    write_int64(down, Product.OUT, between)
    write_int64(up, Product.INPUT, between)
    input_bytes = word(record, AdapterSums.INPUT_BYTES)
    group_bytes = word(record, AdapterSums.GROUP_BYTES)
    row_bytes = 4 * word(of_up, Product.OUT_STRIDE)
    for item in range(first_item, end):
        run, rest = item // (matrices * parts), item % (matrices * parts)
        adapter = read_int32(runs, RUN_WORDS * run + AdapterRun.ADAPTER)
        first = read_int32(runs, RUN_WORDS * run + AdapterRun.FIRST)
        pair = table + PAIR_BYTES * (adapter * matrices + rest // parts)
        if word(pair, AdapterPair.DOWN) == 0:
            continue
        rank = word(pair, AdapterPair.RANK)
        count = read_int32(runs, RUN_WORDS * run + AdapterRun.COUNT)
        write_int64(its_header, StepWord.NUM_TOKENS, count)
        write_int64(down, Product.WEIGHTS, word(pair, AdapterPair.DOWN))
        write_int64(down, Product.N, rank)
        write_int64(down, Product.OUT_STRIDE, rank)
        beside = first * group_bytes
        move_rows(of_down, down, first * input_bytes, beside)
        invoke(word(of_down, KERNEL), down, its_header, 0, 1, worker)
        write_int64(up, Product.WEIGHTS, word(pair, AdapterPair.UP))
        write_int64(up, Product.N, word(pair, AdapterPair.N))
        write_int64(up, Product.K, rank)
        move(of_up, up, Product.OUT, word(pair, AdapterPair.OUT_OFFSET) + first * row_bytes)
        invoke(word(of_up, KERNEL), up, its_header, rest % parts, parts, worker)
