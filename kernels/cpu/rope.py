"""Rotary embedding and KV write; specification: `kernels.reference.rope`."""

from __future__ import annotations

from kernels.cpu.compiled import compiled
from kernels.interface import Float32Array, Int64Array


@compiled(
    "void(float32[:, ::1], float32[:, ::1], float32[:, ::1], float32[:, :, :, :, :, ::1], int64,"
    " int64[::1], float32[:, :, ::1])",
)
def rope_write_kv(
    qkv: Float32Array,
    cosines: Float32Array,
    sines: Float32Array,
    kv_pool: Float32Array,
    layer: int,
    kv_slots: Int64Array,
    out: Float32Array,
) -> None:
    """Rotate Q into `out`, write rotated K and plain V into the pool; each token by itself."""
    num_kv_heads, block_size, head_dim = kv_pool.shape[3], kv_pool.shape[4], kv_pool.shape[5]
    num_tokens, num_heads = out.shape[0], out.shape[1]
    half = head_dim // 2
    first_key = num_heads * head_dim
    first_value = first_key + num_kv_heads * head_dim
    for t in range(num_tokens):
        for h in range(num_heads):
            low, high = h * head_dim, h * head_dim + half
            for d in range(half):
                x, y, c, s = qkv[t, low + d], qkv[t, high + d], cosines[t, d], sines[t, d]
                out[t, h, d] = x * c - y * s
                out[t, h, half + d] = y * c + x * s
        block, offset = kv_slots[t] // block_size, kv_slots[t] % block_size
        for g in range(num_kv_heads):
            low, high = first_key + g * head_dim, first_key + g * head_dim + half
            for d in range(half):
                x, y, c, s = qkv[t, low + d], qkv[t, high + d], cosines[t, d], sines[t, d]
                kv_pool[block, layer, 0, g, offset, d] = x * c - y * s
                kv_pool[block, layer, 0, g, offset, half + d] = y * c + x * s
            for d in range(head_dim):
                kv_pool[block, layer, 1, g, offset, d] = qkv[t, first_value + g * head_dim + d]
