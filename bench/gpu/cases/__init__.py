"""What to run each kernel on: one module an operation, and `draw_cases` for a variant of any.

block_pool          a pool with scattered, shared and poisoned blocks
attention_decode    decode attention
rope_write_kv       rotation and the write of K and V
row_operations      normalisation, gate, embedding, block copies
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.gpu.case import Case
from bench.gpu.cases import attention_decode, rope_write_kv, row_operations
from kernels.cuda.attention_decode import DecodeVariant
from kernels.cuda.copy_blocks import CopyBlocksVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.cuda.rope_write_kv import RopeWriteKvVariant
from kernels.cuda.silu_mul import SiluMulVariant

# Class of a variant → what draws the cases it is checked on.
_DRAWERS: dict[type, Callable[[Any, int], list[Case]]] = {
    DecodeVariant: attention_decode.draw_cases,
    CopyBlocksVariant: row_operations.draw_copy_blocks,
    EmbeddingVariant: row_operations.draw_embedding,
    RmsNormVariant: row_operations.draw_rms_norm,
    RopeWriteKvVariant: rope_write_kv.draw_cases,
    SiluMulVariant: row_operations.draw_silu_mul,
}


def draw_cases(variant: object, *, seed: int = 0) -> list[Case]:
    """Return the cases a variant of any operation is checked on."""
    return _DRAWERS[type(variant)](variant, seed)
