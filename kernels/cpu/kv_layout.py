"""Where the keys and values of a token lie in the KV pool.

    pool      block 0 │ block 1 │ …                     one block is contiguous: a copy is one copy
    block     layer 0 │ layer 1 │ …
    layer     kv head 0 │ kv head 1 │ …
    kv head   sub-block 0 │ sub-block 1 │ …             16 tokens each, the last one padded
    sub-block K │ V │ scales (int8, float8)             a multiple of 64 bytes

A lane of a vector is a token in K and an element of the head in V, so neither scores nor sums need
a step across lanes. With D' = D, the elements of a key, rounded up to a multiple of 16, and V' of
those of a value, which are as many unless they are said to be fewer:

                 K                                       V
    float32      [D'][16 tokens]                         [16 tokens][V']
    bfloat16     [D'/2][16 tokens][2]                    [8 token pairs][V'][2]
    int8, float8 [D'/2][16 tokens][2]                    [8 token pairs][V'][2]
                 and after both: scale of K [16 tokens], scale of V [16 tokens], float32

The last axis of 2 is what the bfloat16 instructions want: two neighbours along the summed axis in
one 32-bit lane, elements 2i and 2i + 1 of a head in K, tokens 2i and 2i + 1 in V. Sixteen pairs of
elements of K are one AMX tile as they stand.

int8, float8: a token's K (and its V) of one kv head is a row of `kernels.reference.quantized_kv`,
with one scale. Elements D to D' of K are written as zeros, those of V as anything.

Padding: a block of B tokens takes ⌈B / 16⌉ sub-blocks. B a multiple of 16 wastes nothing; B = 24
takes 4/3, B = 8 takes 2 times and B = 1 takes 16 times the memory of its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kernels.interface import Float32Array
from kernels.reference.quantized_kv import LARGEST, dequantize_rows, quantize_rows
from planes.errors import ConfigError

UInt8Array = npt.NDArray[np.uint8]
UInt16Array = npt.NDArray[np.uint16]

SUB_BLOCK_TOKENS: Final = 16
LANES: Final = 16
MAX_BLOCK_SIZE: Final = 1024
VALUE_BYTES: Final = {"float32": 4, "bfloat16": 2, "int8": 1, "float8": 1}
"""Types a pool can have, and the bytes of one value."""
SCALE_BYTES: Final = 2 * SUB_BLOCK_TOKENS * 4


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The layout of a pool; raises ConfigError, naming the field, for what cannot be laid out.

    `dtype`: a key of VALUE_BYTES. `block_size`: B, 1 to 1024. `head_dim`: D, even. `value_dim`: of
    values that are shorter than keys, even; None: they are not.
    """

    dtype: str
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in VALUE_BYTES:
            names = ", ".join(VALUE_BYTES)
            raise ConfigError(
                f"kv_cache_dtype must be one of {names}, got {self.dtype}", field="kv_cache_dtype"
            )
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise ConfigError(
                f"block_size must be 1 to {MAX_BLOCK_SIZE}, got {self.block_size}",
                field="block_size",
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(
                f"head_dim must be even and at least 2, got {self.head_dim}", field="head_dim"
            )
        if not 2 <= self.own_value_dim <= self.head_dim or self.own_value_dim % 2:
            raise ConfigError(
                f"value_dim must be even, 2 to head_dim ({self.head_dim}), got {self.value_dim}",
                field="value_dim",
            )

    @property
    def own_value_dim(self) -> int:
        """Elements of a value, V."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def padded_head_dim(self) -> int:
        """D rounded up to whole vectors, D'."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def padded_value_dim(self) -> int:
        """V rounded up to whole vectors, V'."""
        return -(-self.own_value_dim // LANES) * LANES

    @property
    def sub_blocks(self) -> int:
        """Sub-blocks of a block."""
        return -(-self.block_size // SUB_BLOCK_TOKENS)

    @property
    def key_bytes(self) -> int:
        """Bytes of a sub-block's K."""
        return SUB_BLOCK_TOKENS * self.padded_head_dim * VALUE_BYTES[self.dtype]

    @property
    def value_bytes(self) -> int:
        """Bytes of a sub-block's V."""
        return SUB_BLOCK_TOKENS * self.padded_value_dim * VALUE_BYTES[self.dtype]

    @property
    def sub_block_bytes(self) -> int:
        """Bytes of one sub-block of one kv head."""
        scale_bytes = SCALE_BYTES if self.dtype in LARGEST else 0
        return self.key_bytes + self.value_bytes + scale_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes of one kv head of one layer of a block."""
        return self.sub_blocks * self.sub_block_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of a block."""
        return self.num_kv_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: K and V of `block_size` tokens in all layers, padding included."""
        return self.num_layers * self.layer_bytes


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The layout of a pool whose layers may have heads of several kinds.

        block     layers of part 0 │ layers of part 1 │ …

    `parts`: one for each kind, of one type and block size.
    """

    parts: tuple[KvLayout, ...]

    @property
    def dtype(self) -> str:
        """Type of the pool, a key of VALUE_BYTES."""
        return self.parts[0].dtype

    @property
    def block_size(self) -> int:
        """Tokens of a block, B."""
        return self.parts[0].block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: K and V of `block_size` tokens in all layers, padding included."""
        return sum(part.block_bytes for part in self.parts)

    def bytes_before(self, part: int) -> int:
        """Return where in a block a part begins."""
        return sum(before.block_bytes for before in self.parts[:part])


def encode_blocks(layout: KvLayout, keys_values: Float32Array) -> UInt8Array:
    """Return blocks in the pool's layout, [N, block_bytes], of values [N, L, 2, G, B, D].

    This is the specification of the layout and of its rounding; unused tokens become zeros. Of
    values the first V elements are there.
    """
    num_blocks, dim = len(keys_values), layout.padded_head_dim
    shape = (num_blocks, layout.num_layers, layout.num_kv_heads, layout.sub_blocks)
    padded = np.zeros(
        (*shape[:2], 2, shape[2], layout.sub_blocks * SUB_BLOCK_TOKENS, dim), np.float32
    )
    padded[..., : layout.block_size, : layout.head_dim] = keys_values
    tokens = padded.reshape(*shape[:2], 2, *shape[2:], SUB_BLOCK_TOKENS, dim)
    # [N, L, G, sub-blocks, 16, D'] and V'
    keys, values = tokens[:, :, 0], tokens[:, :, 1, ..., : layout.padded_value_dim].copy()
    values[..., layout.own_value_dim :] = 0
    parts: list[npt.NDArray[np.generic]]
    if layout.dtype == "float32":
        parts = [keys.swapaxes(-1, -2), values]
    elif layout.dtype == "bfloat16":
        parts = [_key_pairs(to_bfloat16(keys)), _value_pairs(to_bfloat16(values))]
    else:
        (key_codes, key_scales), (value_codes, value_scales) = (
            quantize_rows(layout.dtype, x) for x in (keys, values)
        )
        parts = [_key_pairs(key_codes), _value_pairs(value_codes), key_scales, value_scales]
    flat = [np.ascontiguousarray(part).view(np.uint8).reshape(*shape, -1) for part in parts]
    return np.concatenate(flat, axis=-1).reshape(num_blocks, layout.block_bytes)


def decode_blocks(layout: KvLayout, blocks: UInt8Array) -> Float32Array:
    """Return the values [N, L, 2, G, B, D] that blocks [N, block_bytes] of a pool stand for.

    Of values shorter than keys the elements behind are 0.
    """
    dim, width = layout.padded_head_dim, layout.padded_value_dim
    size = layout.key_bytes
    scales_at = size + layout.value_bytes
    shape = (len(blocks), layout.num_layers, layout.num_kv_heads, layout.sub_blocks)
    subs = np.ascontiguousarray(blocks).reshape(*shape, layout.sub_block_bytes)
    element = {4: np.float32, 2: np.uint16, 1: np.uint8}[VALUE_BYTES[layout.dtype]]
    keys, values = (
        np.ascontiguousarray(subs[..., first:end]).view(element)
        for first, end in ((0, size), (size, scales_at))
    )
    if layout.dtype == "float32":
        keys = keys.reshape(*shape, dim, SUB_BLOCK_TOKENS).swapaxes(-1, -2)
        values = values.reshape(*shape, SUB_BLOCK_TOKENS, width)
    else:
        keys = keys.reshape(*shape, dim // 2, SUB_BLOCK_TOKENS, 2).swapaxes(-2, -3)
        keys = keys.reshape(*shape, SUB_BLOCK_TOKENS, dim)
        values = values.reshape(*shape, SUB_BLOCK_TOKENS // 2, width, 2).swapaxes(-1, -2)
        values = values.reshape(*shape, SUB_BLOCK_TOKENS, width)
    if layout.dtype == "bfloat16":
        keys, values = from_bfloat16(keys), from_bfloat16(values)
    elif layout.dtype in LARGEST:
        scales = np.ascontiguousarray(subs[..., scales_at:]).view(np.float32)
        keys = dequantize_rows(layout.dtype, keys, scales[..., :SUB_BLOCK_TOKENS])
        values = dequantize_rows(layout.dtype, values, scales[..., SUB_BLOCK_TOKENS:])
    whole = np.zeros_like(keys)
    whole[..., : layout.own_value_dim] = values[..., : layout.own_value_dim]
    both = np.stack((keys, whole), axis=2)
    both = both.reshape(*shape[:2], 2, shape[2], layout.sub_blocks * SUB_BLOCK_TOKENS, dim)
    return both[..., : layout.block_size, : layout.head_dim].astype(np.float32)


def to_bfloat16(x: Float32Array) -> UInt16Array:
    """Return float32 rounded to bfloat16 (to nearest, ties to even), as its bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))
    return (np.where(np.isnan(x), bits | np.uint32(0x00400000), rounded) >> 16).astype(np.uint16)


def from_bfloat16(bits: UInt16Array) -> Float32Array:
    """Return bfloat16 bits as float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _key_pairs(keys: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return [..., 16, D'] as [..., D'/2, 16, 2]."""
    return keys.reshape(*keys.shape[:-1], -1, 2).swapaxes(-2, -3)


def _value_pairs(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return [..., 16, D'] as [..., 8, D', 2]."""
    return values.reshape(*values.shape[:-2], SUB_BLOCK_TOKENS // 2, 2, -1).swapaxes(-1, -2)
