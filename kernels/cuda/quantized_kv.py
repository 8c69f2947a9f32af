"""A block pool of eight bits: how bytes and scales of `kernels.reference.quantized_kv` lie in it.

The pool is uint8 [N blocks, L layers, K|V, G kv heads, head_bytes], and what the kernels are told
about it (`block_stride`, `key_offset`, `value_offset`) is counted in bytes. One kv head of a block,
of K or of V:

    slot 0 │ slot 1 │ … │ slot B-1 ║ scale 0 │ scale 1 │ … │ scale B-1
    D bytes                          float32

so a block is contiguous still, for copies and swaps, and a kernel finds the scales without being
told more than D and B. With B a multiple of 16 each head begins at a multiple of 64 bytes, rows of
values at multiples of 16, and a tile of 16 tokens has its scales in 64 bytes in one piece. Beside
16-bit floats that is (D + 4) / 2·D of the memory: 53 % at D 64, 52 % at D 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from kernels.cuda.errors import UnsupportedVariantError
from kernels.cuda.variant import STORAGE_TYPES, require_one_of
from kernels.interface import Float32Array
from kernels.reference.quantized_kv import LARGEST, UInt8Array, dequantize_rows, quantize_rows

SCALE_BYTES: Final = 4
QUANTIZED_DTYPES: Final = tuple(LARGEST)
"""What a `kv_dtype` may be besides None, which means the model's own."""

VALUE_DTYPE_8_BITS: Final = "bfloat16"
"""In which weights times scales meet values of eight bits, which all are exact in it.

A weight times a scale may be of any size: float16 would lose the small ones."""

POOL_DTYPES: Final[tuple[tuple[str, str | None], ...]] = (
    *((dtype, None) for dtype in STORAGE_TYPES),
    *((dtype, kv_dtype) for kv_dtype in QUANTIZED_DTYPES for dtype in ("bfloat16", "float16")),
)
"""Every pair of a model's dtype and a pool's that kernels are written for."""


def require_pool_dtype(dtype: str, kv_dtype: str | None) -> None:
    """Raise UnsupportedVariantError where a pool of `kv_dtype` is not for models of `dtype`."""
    if kv_dtype is not None:
        require_one_of("kv_dtype", QUANTIZED_DTYPES, kv_dtype)
        if (dtype, kv_dtype) not in POOL_DTYPES:
            allowed = "the model's own, since that is no 16-bit float"
            raise UnsupportedVariantError("kv_dtype", allowed, kv_dtype)


def pool_pointer(dtype: str, kv_dtype: str | None) -> str:
    """Return the type of the kernels' parameter `pool`."""
    return f"{STORAGE_TYPES[dtype] if kv_dtype is None else 'uint8'}*"


def pool_suffix(kv_dtype: str | None) -> str:
    """Return what the name of a kernel says about the pool."""
    return "" if kv_dtype is None else f"_kv_{kv_dtype}"


def head_bytes(head_size: int, block_size: int) -> int:
    """Return the bytes of one kv head of a block, of K or of V, scales included."""
    return block_size * (head_size + SCALE_BYTES)


def pool_shape(leading: Sequence[int], head_size: int, block_size: int) -> tuple[int, ...]:
    """Return the shape of a pool whose axes before the head's bytes are [N, L, K|V, G]."""
    return (*leading, head_bytes(head_size, block_size))


def encode_heads(dtype: str, values: Float32Array) -> UInt8Array:
    """Return the bytes [..., B · (D + 4)] of kv heads [..., B, D]."""
    codes, scales = quantize_rows(dtype, values)
    leading = values.shape[:-2]
    parts = (codes, np.ascontiguousarray(scales, np.float32).view(np.uint8))
    return np.concatenate([part.reshape(*leading, -1) for part in parts], axis=-1)


def decode_heads(dtype: str, heads: UInt8Array, head_size: int) -> Float32Array:
    """Return the values [..., B, D] of kv heads [..., B · (D + 4)]."""
    leading = heads.shape[:-1]
    block_size = heads.shape[-1] // (head_size + SCALE_BYTES)
    split = block_size * head_size
    codes = heads[..., :split].reshape(*leading, block_size, head_size)
    scales = np.ascontiguousarray(heads[..., split:]).view(np.float32)
    return dequantize_rows(dtype, codes, scales)
