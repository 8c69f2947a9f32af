from __future__ import annotations

import numpy as np
import pytest

from kernels.registry import load_kernels
from planes.errors import ConfigError

reference, cpu = load_kernels("reference"), load_kernels("cpu")


@pytest.mark.parametrize("vocab", [1, 2, 127, 49152])
def test_log_probabilities_agree_with_the_reference(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((5, vocab), dtype=np.float32) * 8
    tokens = random.integers(0, vocab, 5).astype(np.int32)
    expected, actual = np.empty((2, 5), dtype=np.float32)
    reference.token_logprobs(logits, tokens, expected)
    cpu.token_logprobs(logits, tokens, actual)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=2e-6)


def test_the_probabilities_of_all_tokens_sum_to_one() -> None:
    logits = np.random.default_rng(1).standard_normal((1, 50), dtype=np.float32) * 5
    out = np.empty(50, dtype=np.float32)
    cpu.token_logprobs(np.repeat(logits, 50, axis=0), np.arange(50, dtype=np.int32), out)
    assert np.exp(out.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("kernels", [reference, cpu], ids=lambda kernels: kernels.name)
def test_an_embedding_is_the_row_of_its_token(kernels) -> None:
    table = np.arange(20, dtype=np.float32).reshape(5, 4)
    out = np.empty((3, 4), dtype=np.float32)
    kernels.embedding(table, np.array([4, 0, 4], dtype=np.int32), out)
    np.testing.assert_array_equal(out, table[[4, 0, 4]])


def test_a_kernel_refuses_arrays_of_another_type_instead_of_compiling_for_them() -> None:
    with pytest.raises(TypeError, match="No matching definition"):
        cpu.rms_norm(np.ones((2, 4)), np.ones(4), 1e-5, np.ones((2, 4)))


def test_an_unknown_kernel_set_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="one of cpu, reference, got 'quantum'"):
        load_kernels("quantum")
