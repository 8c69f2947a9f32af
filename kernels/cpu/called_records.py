"""Records that an operation calls others with: copies of a shared one, with addresses moved on.

Of products of experts, of heads and of adapters, where one record stands for many matrices.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.compiled import inlined, word
from kernels.cpu.memory_words import write_int64
from kernels.cpu.operands import Product
from kernels.cpu.operation import RECORD_WORDS

RECORD_BYTES: Final = 8 * RECORD_WORDS


@inlined()
def move(shared: int, called: int, at: int, by: int) -> None:
    """Write an address of the shared record, `by` bytes further on, to the one that is called."""
    write_int64(called, at, word(shared, at) + by)


@inlined()
def move_rows(shared: int, called: int, by: int, beside: int) -> None:
    """Let a product read rows `by` bytes further on; `beside`: of what stands beside int8 rows."""
    move(shared, called, Product.INPUT, by)
    move(shared, called, Product.INPUT_SCALES, beside)
    move(shared, called, Product.INPUT_SCALED_SUMS, beside)
    move(shared, called, Product.INPUT_SUMS, beside)
    move(shared, called, Product.INPUT_PAIR_SUMS, beside)
    move(shared, called, Product.INPUT_BEGINS, beside)
