"""Gated DeltaNet layers: what comes out, and the states that are left behind."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kernels.cpu.delta_net_sizes import SUB_BLOCK
from kernels.reference import delta_net as reference
from tests.amx.sets import sets_that_run
from tests.kernels.cpu.delta_net_driver import Float32Array, Layer, Row, Shape, digest, gate

SMALL = Shape(2, 4, 32, 32, 4)
SHAPES = [
    SMALL,
    Shape(1, 1, 32, 64, 2),
    Shape(3, 3, 64, 32, 3),
    Shape(2, 8, 32, 64, 4),
    Shape(1, 2, 128, 128, 4),
    Shape(1, 1, 256, 32, 8),
]


def check_state(layer: Layer, state: int, expected: reference.DeltaNetState) -> None:
    found = layer.reference_state(state)
    np.testing.assert_array_equal(found.inputs, expected.inputs)
    scale = np.abs(expected.memory).max()
    np.testing.assert_allclose(found.memory, expected.memory, rtol=1e-5, atol=1e-6 * scale)


def check_out(found: Float32Array, expected: Float32Array, bound: float = 1e-5) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=bound, atol=bound * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, SUB_BLOCK, 2 * SUB_BLOCK + 3])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_rows_tokens_give_what_the_reference_gives(
    shape: Shape, num_tokens: int, is_new: bool
) -> None:
    layer = Layer(shape)
    rows, gates = layer.drawn(num_tokens)
    expected_state = reference.DeltaNetState.empty(layer.weights)
    if not is_new:
        layer.draw_state(0)
        expected_state = layer.reference_state(0)
    out = layer.run(rows, gates, [Row(num_tokens, 0, is_new)])
    check_out(out, reference.delta_net(rows, gates, layer.weights, expected_state))
    check_state(layer, 0, expected_state)


@pytest.mark.parametrize("num_value_heads", [3, 6, 12])
def test_value_heads_may_be_tiled(num_value_heads: int) -> None:
    layer = Layer(Shape(3, num_value_heads, 32, 32, 3), are_tiled=True)
    rows, gates = layer.drawn(40)
    expected_state = reference.DeltaNetState.empty(layer.weights)
    expected = reference.delta_net(rows, gates, layer.weights, expected_state)
    check_out(layer.run(rows[:3].copy(), gates[:3].copy(), [Row(3, 0, is_new=True)]), expected[:3])
    check_out(layer.run(rows[3:].copy(), gates[3:].copy(), [Row(37, 0)]), expected[3:])
    check_state(layer, 0, expected_state)


def test_a_thousand_tokens_do_not_add_up_errors() -> None:
    layer = Layer(Shape(1, 1, 64, 32, 4))
    rows, gates = layer.drawn(1000)
    state = reference.DeltaNetState.empty(layer.weights)
    out = layer.run(rows, gates, [Row(1000, 0, is_new=True)])
    check_out(out, reference.delta_net(rows, gates, layer.weights, state))
    check_state(layer, 0, state)


def test_rows_go_on_from_their_own_states_and_touch_no_other() -> None:
    layer = Layer(SMALL, num_states=6)
    for state in (1, 4):
        layer.draw_state(state)
    pieces = [Row(5, 4), Row(1, 3, is_new=True), Row(1, 1), Row(40, 0, is_new=True)]
    rows, gates = layer.drawn(50)
    before = layer.states.copy()
    expected = {row.state: layer.reference_state(row.state) for row in pieces}
    for row in pieces:
        if row.is_new:
            expected[row.state] = reference.DeltaNetState.empty(layer.weights)
    out = layer.run(rows, gates, pieces, first_token=2)
    assert np.isnan(out[[0, 1, 49]]).all()
    first = 2
    for row in pieces:
        end = first + row.num_tokens
        wanted = reference.delta_net(
            rows[first:end], gates[first:end], layer.weights, expected[row.state]
        )
        check_out(out[first:end], wanted)
        check_state(layer, row.state, expected[row.state])
        first = end
    size = 6 * layer.state_bytes
    old, new = (states[:size].reshape(6, 2, -1) for states in (before, layer.states))
    np.testing.assert_array_equal(old[[2, 5]], new[[2, 5]])
    np.testing.assert_array_equal(old[:, 1], new[:, 1])  # another layer's part


@pytest.mark.parametrize("shape", [SMALL, Shape(1, 2, 64, 64, 8)], ids=str)
@pytest.mark.parametrize("sizes", [[1] * 71, [70, 1], [2, 1, 33, 32, 3], [SUB_BLOCK, 39]])
def test_the_bits_do_not_depend_on_how_tokens_are_cut_into_rows(
    shape: Shape, sizes: list[int]
) -> None:
    whole, cut = Layer(shape), Layer(shape)
    rows, gates = whole.drawn(71)
    expected = whole.run(rows, gates, [Row(71, 0, is_new=True)])
    first = 0
    for size in sizes:
        end = first + size
        piece = rows[first:end], gates[first:end]
        out = cut.run(*piece, [Row(size, 0, is_new=first == 0)])
        np.testing.assert_array_equal(out, expected[first:end])
        first = end
    np.testing.assert_array_equal(cut.states, whole.states)


def test_the_bits_do_not_depend_on_company_chunks_and_their_order() -> None:
    pieces = [Row(3, 1), Row(1, 0), Row(35, 2, is_new=True)]
    found = []
    for order in (None, [5, 0, 3, 1, 4, 2], [0], [1, 0], range(40)):
        layer = Layer(SMALL, num_states=3)
        for state in (0, 1):
            layer.draw_state(state)
        rows, gates = layer.drawn(39)
        found.append((layer.run(rows, gates, pieces, order), layer.states))
    alone = Layer(SMALL, num_states=3)
    alone.draw_state(0)
    out = alone.run(rows[3:4].copy(), gates[3:4].copy(), [Row(1, 0)])
    np.testing.assert_array_equal(out, found[0][0][3:4])
    for out, states in found[1:]:
        np.testing.assert_array_equal(out, found[0][0])
        np.testing.assert_array_equal(states, found[0][1])


def test_step_sizes_hold_to_their_ends() -> None:
    """b and a from where nothing is learnt or kept to where all is, and what exp cannot reach."""
    layer = Layer(SMALL)
    ends = np.float32([-np.inf, -3e38, -1000, -88.5, -87, -20, -1e-30, 0, 1e-30, 20, 87, 89, 3e38])
    ends = np.append(ends, np.float32(np.inf))
    rows, gates = layer.drawn(len(ends) ** 2)
    gates[:, :4] = np.repeat(ends, len(ends))[:, None]
    gates[:, 4:] = np.tile(ends, len(ends))[:, None]
    state = reference.DeltaNetState.empty(layer.weights)
    with np.errstate(over="ignore"):
        expected = reference.delta_net(rows, gates, layer.weights, state)
    assert np.isfinite(expected).all()
    check_out(layer.run(rows, gates, [Row(len(rows), 0, is_new=True)]), expected)
    check_state(layer, 0, state)


@pytest.mark.parametrize("rate", [-1e-6, -16.0, -3e4])
def test_small_steps_and_slow_and_fast_rates_lose_nothing(rate: float) -> None:
    layer = Layer(SMALL)
    layer.weights = replace(layer.weights, rates=np.full(4, rate, np.float32))
    rows, gates = layer.drawn(61)
    gates[:, 4:] = np.linspace(-30, 30, 61, dtype=np.float32)[:, None]
    state = reference.DeltaNetState.empty(layer.weights)
    expected = reference.delta_net(rows, gates, layer.weights, state)
    check_out(layer.run(rows, gates, [Row(61, 0, is_new=True)]), expected)
    check_state(layer, 0, state)


def test_keys_and_gates_may_be_large_small_and_nothing() -> None:
    layer = Layer(SMALL)
    rows, gates = layer.drawn(12)
    rows *= np.float32([1e-30, 1e-12, 1e-4, 0, 1e2, 1e4, 1e-4, 1, 1e6, 1, 0, 1])[:, None]
    state = reference.DeltaNetState.empty(layer.weights)
    expected = reference.delta_net(rows, gates, layer.weights, state)
    out = layer.run(rows, gates, [Row(12, 0, is_new=True)])
    assert np.isfinite(out).all()
    for found, wanted in zip(out, expected, strict=True):
        check_out(found, wanted)


@pytest.mark.parametrize("name", ["b", "a"])
def test_a_gate_that_is_no_number_spoils_its_head_alone(name: str) -> None:
    layer = Layer(SMALL)
    rows, gates = layer.drawn(3)
    layer.draw_state(0)
    gates[1, (0 if name == "b" else 4) + 1] = np.nan
    out = layer.run(rows, gates, [Row(3, 0)]).reshape(3, 4, 32)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:, 1]).all()
    assert np.isfinite(out[1:, [0, 2, 3]]).all()


@pytest.mark.parametrize("spoiled", [np.nan, np.inf])
def test_an_input_that_is_not_finite_spoils_its_row_and_key_head_alone(spoiled: float) -> None:
    layer = Layer(SMALL, num_states=2)
    rows, gates = layer.drawn(6)
    rows[1, 2 * 32 + 5] = spoiled  # the first head's key
    out = layer.run(rows, gates, [Row(3, 1, is_new=True), Row(3, 0, is_new=True)])
    out = out.reshape(6, 4, 32)
    assert np.isnan(out[1:3, :2]).all()
    assert np.isfinite(out[:, 2:]).all()
    assert np.isfinite(out[3:]).all()
    assert np.isfinite(layer.reference_state(0).memory).all()


@pytest.mark.parametrize("n", [1, 16, 33, 256])
def test_what_attention_gave_is_multiplied_by_the_sigmoids_of_its_gates(n: int) -> None:
    random = np.random.default_rng(n)
    attended = random.standard_normal((7, n), np.float32)
    gates = 4 * random.standard_normal((5, n + 3), np.float32)
    gates[2], gates[3] = 3e38, -np.inf
    expected = attended.copy()
    expected[:5] = reference.gate_attended(attended[:5], gates[:, :n])
    gate(attended, gates, [2, 0, 1])
    np.testing.assert_allclose(attended, expected, rtol=2e-6, atol=1e-37)
    gates[1, 0] = np.nan
    gate(attended, gates)
    assert np.flatnonzero(np.isnan(attended)).tolist() == [n]


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits() -> None:
    answers = {digest()}
    for chosen in sets_that_run():
        program = [sys.executable, "-m", "tests.kernels.cpu.delta_net_driver", chosen.name]
        done = subprocess.run(program, check=True, capture_output=True, text=True)
        answers.add(done.stdout.strip())
    assert len(answers) == 1
