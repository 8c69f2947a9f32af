from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.registry import load_kernels

reference, cpu = load_kernels("reference"), load_kernels("cpu")


@given(tokens=st.integers(1, 9), width=st.integers(1, 700), seed=st.integers(0, 2**32 - 1))
def test_rms_norm_agrees_with_the_reference(tokens: int, width: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, width), dtype=np.float32) * 10
    weight = random.standard_normal(width, dtype=np.float32)
    expected, actual = np.empty_like(x), np.empty_like(x)
    reference.rms_norm(x, weight, 1e-5, expected)
    cpu.rms_norm(x, weight, 1e-5, actual)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernels", [reference, cpu], ids=lambda kernels: kernels.name)
def test_rms_norm_may_write_over_its_input(kernels) -> None:
    x = np.random.default_rng(0).standard_normal((3, 65), dtype=np.float32)
    weight = np.full(65, 2, dtype=np.float32)
    expected = np.empty_like(x)
    kernels.rms_norm(x, weight, 1e-6, expected)
    kernels.rms_norm(x, weight, 1e-6, x)
    np.testing.assert_array_equal(x, expected)


def test_rms_norm_of_a_row_is_the_same_bits_alone_and_in_a_batch() -> None:
    x = np.random.default_rng(1).standard_normal((17, 577), dtype=np.float32)
    weight = np.ones(577, dtype=np.float32)
    together, alone = np.empty_like(x), np.empty_like(x)
    cpu.rms_norm(x, weight, 1e-5, together)
    for t in range(len(x)):
        cpu.rms_norm(x[t : t + 1], weight, 1e-5, alone[t : t + 1])
    np.testing.assert_array_equal(alone, together)
