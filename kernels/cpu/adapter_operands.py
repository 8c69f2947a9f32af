"""Operands of `adapter_product`, and the memory it needs; without the compiler."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from kernels.cpu.operation import FIRST_OPERAND, HEADER_WORDS, RECORD_WORDS

ADAPTER_CALL_BYTES: Final = 8 * (RECORD_WORDS + HEADER_WORDS)
"""At the end of a worker's scratch memory: what a product is called with, behind whatever that
product needs."""


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


class AdapterProduct(IntEnum):
    """Operands of `adapter_product`."""

    RECORD = FIRST_OPERAND
    """Address of the record of a product of rows of tokens, without WEIGHTS, N, K and OUT_STRIDE.
    Its CHUNKS are the parts that each matrix is cut into."""
    TABLE = 3
    """Address of int64 [adapters, MATRICES, MATRIX_WORDS]."""
    MATRICES = 4
    """How many matrices of an adapter read these rows."""
    INPUT_BYTES = 5
    """From a token's part of the product's INPUT to that of the next."""
    OUT_BYTES = 6
    """The same of OUT."""


class AdapterMatrix(IntEnum):
    """The words of a matrix in TABLE."""

    WEIGHTS = 0
    """0: the adapter has none."""
    N = 1
    K = 2
    INPUT_OFFSET = 3
    """What it reads begins so many bytes behind INPUT."""
    OUT_OFFSET = 4
    """The same of OUT."""
    OUT_STRIDE = 5
    """In elements."""


MATRIX_WORDS: Final = len(AdapterMatrix)
