"""Operands of `adapter_sums`, and the memory it needs; without the compiler."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kernels.cpu.operation import FIRST_OPERAND, HEADER_WORDS, RECORD_WORDS

FLOAT_BYTES: Final = 4


class AdapterRun(IntEnum):
    """The int32 words of a run of tokens with one adapter (StepWord.ADAPTER_RUNS)."""

    ADAPTER = 0
    """Its number, from 0 on."""
    FIRST = 1
    """Its first token in the piece."""
    COUNT = 2


RUN_WORDS: Final = len(AdapterRun)
RUN_TOKENS: Final = 64
"""Tokens of a run, at most: a chunk's work."""
LEAST_ITEMS: Final = 4
"""Into so many items, about, the work of a piece is cut, so that threads can share what few tokens
read of `up`; each makes what is between anew, which must be little."""
FEW_WEIGHTS: Final = 1 << 17
"""Of a `down`: what a thread multiplies in some ten microseconds."""


class AdapterSums(IntEnum):
    """Operands of `adapter_sums`."""

    DOWN = FIRST_OPERAND
    """Address of the record of a product of rows of tokens, without WEIGHTS, N, OUT, OUT_STRIDE."""
    UP = 3
    """The same of one that adds to OUT, without INPUT, WEIGHTS, K and N."""
    TABLE = 4
    """Address of int64 [adapters, MATRICES, PAIR_WORDS]."""
    MATRICES = 5
    """How many tensors are changed that read these rows."""
    INPUT_BYTES = 6
    """Of a row of tokens."""
    GROUP_BYTES = 7
    """Of each of what stands beside it, if it is int8."""
    BETWEEN_BYTES = 8
    """What a worker needs for what is between, `between_bytes`."""
    LEAST_ITEMS = 9
    """As above; 1 where a `down` has more than FEW_WEIGHTS."""


class AdapterPair(IntEnum):
    """The words of a tensor in TABLE, of one adapter."""

    DOWN = 0
    """0: the adapter does not change it."""
    UP = 1
    RANK = 2
    N = 3
    OUT_OFFSET = 4
    """Its columns begin so many bytes behind OUT."""


PAIR_WORDS: Final = len(AdapterPair)

CALL_BYTES: Final = 8 * (2 * RECORD_WORDS + HEADER_WORDS)
"""At the end of a worker's scratch memory: what both products are called with."""


def between_bytes(max_rank: int) -> int:
    """Return the bytes of what is between: float32 rows of a run."""
    return FLOAT_BYTES * RUN_TOKENS * max_rank


def adapter_scratch_bytes(max_rank: int) -> int:
    """Return the scratch memory a worker needs behind whatever the products need."""
    return CALL_BYTES + between_bytes(max_rank)
