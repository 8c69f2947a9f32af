"""The specification against other ways to say the same."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.reference.embedding import embedding
from kernels.reference.logprobs import token_logprobs
from kernels.reference.paged_attention import paged_attention
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rope_write_kv
from kernels.reference.silu_mul import silu_mul

RANDOM = np.random.default_rng(0)


def test_attention_is_the_softmax_of_scores_over_the_blocks_of_a_table() -> None:
    block_size, head_dim, length = 4, 16, 37
    num_blocks = -(-length // block_size)
    pool = RANDOM.standard_normal((num_blocks + 3, 2, 2, 1, block_size, head_dim), np.float32)
    table = RANDOM.permutation(len(pool))[:num_blocks].astype(np.int32)
    positions = np.arange(length - 5, length, dtype=np.int32)
    q = RANDOM.standard_normal((5, 1, head_dim), np.float32)
    out = np.empty_like(q)
    paged_attention(
        q, pool, 1, table[None], np.zeros(5, np.int32), positions, head_dim**-0.5, 0, 5, out
    )
    keys, values = (
        pool[table, 1, which, 0].reshape(-1, head_dim)[:length].astype(np.float64)
        for which in (0, 1)
    )
    for result, query, position in zip(out, q, positions, strict=True):
        scores = keys[: position + 1] @ query[0] / 4
        weights = np.exp(scores - scores.max())
        expected = weights @ values[: position + 1] / weights.sum()
        np.testing.assert_allclose(result[0], expected, rtol=1e-5, atol=1e-6)


def test_the_product_of_two_rotated_heads_depends_on_their_distance_only() -> None:
    frequencies = np.float32(10_000) ** (-np.arange(8, dtype=np.float32) / 8)
    x, y = RANDOM.standard_normal((2, 16), np.float32)

    def product(p: int, q: int) -> float:
        angles = np.array([[p], [q]], dtype=np.float32) * frequencies
        qkv = np.zeros((2, 48), dtype=np.float32)
        qkv[0, :16], qkv[1, :16] = x, y
        out = np.empty((2, 1, 16), dtype=np.float32)
        pool = np.zeros((1, 1, 2, 1, 2, 16), dtype=np.float32)
        rope_write_kv(qkv, np.cos(angles), np.sin(angles), pool, 0, np.arange(2), out)
        return float(out[0, 0] @ out[1, 0])

    assert product(5, 9) == pytest.approx(product(105, 109), rel=1e-4)


def test_the_probabilities_of_all_tokens_sum_to_one() -> None:
    logits = RANDOM.standard_normal((1, 50), np.float32) * 5
    out = np.empty(50, dtype=np.float32)
    token_logprobs(np.repeat(logits, 50, axis=0), np.arange(50, dtype=np.int32), out)
    assert np.exp(out.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_a_normalised_row_has_a_mean_square_of_one() -> None:
    x = RANDOM.standard_normal((3, 40), np.float32) * 7
    out = np.empty_like(x)
    rms_norm(x, np.ones(40, np.float32), 1e-12, out)
    np.testing.assert_allclose((out.astype(np.float64) ** 2).mean(axis=1), 1, rtol=1e-5)


def test_silu_is_x_times_its_logistic() -> None:
    gate_up = RANDOM.standard_normal((4, 20), np.float32) * 4
    out = np.empty((4, 10), np.float32)
    silu_mul(gate_up, out)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-6)


def test_an_embedding_is_the_row_of_its_token() -> None:
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    out = np.empty((3, 4), dtype=np.float32)
    embedding(table, np.array([4, 0, 4], dtype=np.int32), out)
    np.testing.assert_array_equal(out, table[[4, 0, 4]])
