"""What to run each kernel on: one module an operation, and `draw_cases` for a variant of any.

block_pool          a pool with scattered, shared and poisoned blocks
attention_decode    decode attention
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.case import Case
from bench.gpu.cases import attention_decode
from kernels.cuda.attention_decode import DecodeVariant

# Class of a variant → what draws the cases it is checked on.
_DRAWERS: dict[type, Callable[[Any, int], list[Case]]] = {
    DecodeVariant: attention_decode.draw_cases,
}


def draw_cases(variant: object, *, seed: int = 0) -> list[Case]:
    """Return the cases a variant of any operation is checked on."""
    return _DRAWERS[type(variant)](variant, seed)
