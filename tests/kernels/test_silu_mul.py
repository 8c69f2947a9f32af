from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.cpu.exponential import exp32
from kernels.registry import load_kernels

reference, cpu = load_kernels("reference"), load_kernels("cpu")


@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 300),
    spread=st.sampled_from([0.1, 5.0, 200.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_silu_mul_agrees_with_the_reference(
    tokens: int, width: int, spread: float, seed: int
) -> None:
    random = np.random.default_rng(seed)
    gate_up = random.standard_normal((tokens, 2 * width), dtype=np.float32) * np.float32(spread)
    expected = np.empty((tokens, width), dtype=np.float32)
    actual = np.empty_like(expected)
    reference.silu_mul(gate_up, expected)
    cpu.silu_mul(gate_up, actual)
    np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=1e-30)


def test_silu_mul_of_a_row_is_the_same_bits_alone_and_in_a_batch() -> None:
    gate_up = np.random.default_rng(2).standard_normal((11, 2 * 333), dtype=np.float32)
    together = np.empty((11, 333), dtype=np.float32)
    alone = np.empty_like(together)
    cpu.silu_mul(gate_up, together)
    for t in range(len(gate_up)):
        cpu.silu_mul(gate_up[t : t + 1], alone[t : t + 1])
    np.testing.assert_array_equal(alone, together)


def test_a_nan_gate_stays_nan_and_spoils_only_its_row() -> None:
    gate_up = np.ones((3, 40), dtype=np.float32)
    gate_up[1, 7] = np.nan
    out = np.empty((3, 20), dtype=np.float32)
    cpu.silu_mul(gate_up, out)
    assert np.isnan(out[1, 7])
    assert np.isfinite(out[[0, 2]]).all()


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 20_001, dtype=np.float32)
    actual = np.array([exp32(value) for value in x], dtype=np.float32)
    np.testing.assert_array_max_ulp(actual, np.exp(x.astype(np.float64)).astype(np.float32), 2)


def test_the_exponential_of_zero_is_one_and_of_nan_is_nan() -> None:
    assert exp32(np.float32(0)) == 1
    assert np.isnan(exp32(np.float32(np.nan)))
    assert exp32(np.float32(-1e30)) < 1e-37
