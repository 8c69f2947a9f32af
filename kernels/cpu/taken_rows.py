"""Rows of tokens that go on alone, copied to a piece of their own. A chunk is a run of rows."""

from __future__ import annotations

from kernels.cpu.compiled import int64_at, operation, word
from kernels.cpu.memory_words import copy_bytes
from kernels.cpu.operands import TakenRows
from kernels.cpu.operation import StepWord


@operation()
def take_rows(record: int, header: int, chunk: int, num_chunks: int, worker: int) -> None:
    """Copy the rows of TAKEN_TOKENS to those from FIRST_TOKEN on, which are none of them."""
    rows, row_bytes = word(record, TakenRows.ROWS), word(record, TakenRows.ROW_BYTES)
    num_rows, first = word(header, StepWord.NUM_TOKENS), word(header, StepWord.FIRST_TOKEN)
    taken = int64_at(word(header, StepWord.TAKEN_TOKENS))
    for row in range(num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks):
        copy_bytes(rows + row_bytes * taken[row], rows + row_bytes * (first + row), row_bytes)
