"""Records that an operation calls others with: copies of a shared one, with addresses moved on.

Of products of experts and of heads, where one record stands for many matrices.
"""

from __future__ import annotations

from typing import Final

from kernels.cpu.compiled import inlined, word
from kernels.cpu.memory_words import write_int64
from kernels.cpu.operation import RECORD_WORDS

RECORD_BYTES: Final = 8 * RECORD_WORDS


@inlined()
def move(shared: int, called: int, at: int, by: int) -> None:
    """Write an address of the shared record, `by` bytes further on, to the one that is called."""
    write_int64(called, at, word(shared, at) + by)
