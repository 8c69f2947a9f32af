from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.registry import load_kernels

reference, cpu = load_kernels("reference"), load_kernels("cpu")


@given(
    tokens=st.integers(1, 7),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    half=st.integers(1, 40),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rope_and_kv_write_agree_with_the_reference(
    tokens: int, kv_heads: int, group: int, half: int, block_size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    num_blocks, num_layers, head_dim, heads = 9, 2, 2 * half, kv_heads * group
    qkv = random.standard_normal((tokens, (heads + 2 * kv_heads) * head_dim), dtype=np.float32)
    angles = random.uniform(0, 100, (tokens, half)).astype(np.float32)
    slots = random.permutation(num_blocks * block_size)[:tokens].astype(np.int64)
    pool = random.standard_normal(
        (num_blocks, num_layers, 2, kv_heads, block_size, head_dim), dtype=np.float32
    )
    results = []
    for kernels in (reference, cpu):
        q = np.empty((tokens, heads, head_dim), dtype=np.float32)
        written = pool.copy()
        kernels.rope_write_kv(qkv, np.cos(angles), np.sin(angles), written, 1, slots, q)
        results.append((q, written))
    (expected_q, expected_pool), (q, written) = results
    np.testing.assert_allclose(q, expected_q, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(written, expected_pool, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(written[:, 0], pool[:, 0])  # the other layer is untouched


def test_the_angle_between_two_rotated_heads_depends_on_their_distance_only() -> None:
    random = np.random.default_rng(3)
    frequencies = np.float32(10_000) ** (-np.arange(8, dtype=np.float32) / 8)
    x, y = random.standard_normal((2, 16), dtype=np.float32)

    def product(p: int, q: int) -> float:
        angles = np.array([[p], [q]], dtype=np.float32) * frequencies
        qkv = np.zeros((2, 48), dtype=np.float32)
        qkv[0, :16], qkv[1, :16] = x, y
        out = np.empty((2, 1, 16), dtype=np.float32)
        pool = np.zeros((1, 1, 2, 1, 2, 16), dtype=np.float32)
        cpu.rope_write_kv(qkv, np.cos(angles), np.sin(angles), pool, 0, np.arange(2), out)
        return float(out[0, 0] @ out[1, 0])

    np.testing.assert_allclose(product(5, 9), product(105, 109), rtol=1e-4)
