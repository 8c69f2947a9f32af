"""Mamba-2 layers: what comes out, and the states that are left behind."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kernels.cpu.mamba2_sizes import SUB_BLOCK
from kernels.reference import mamba2 as reference
from tests.amx.sets import sets_that_run
from tests.kernels.cpu.delta_net_driver import Float32Array, Row
from tests.kernels.cpu.mamba2_driver import Layer, Shape, digest

SMALL = Shape(3, 32, 32, 4)
SHAPES = [
    SMALL,
    Shape(1, 64, 96, 2),
    Shape(2, 32, 256, 3),
    Shape(5, 64, 128, 4),
    Shape(1, 128, 32, 8),
    Shape(6, 32, 64, 4, num_groups=3),
    Shape(2, 64, 32, 2, num_groups=2),
    Shape(4, 80, 64, 4, num_groups=2),
    Shape(2, 16, 32, 4),
]


def check(layer: Layer, found: Float32Array, expected: Float32Array) -> None:
    scale = np.abs(expected).max()
    np.testing.assert_allclose(layer.normed(found), expected, rtol=2e-5, atol=2e-5 * scale)


def check_state(layer: Layer, state: int, expected: reference.Mamba2State) -> None:
    found = layer.reference_state(state)
    np.testing.assert_array_equal(found.inputs, expected.inputs)
    scale = np.abs(expected.memory).max()
    np.testing.assert_allclose(found.memory, expected.memory, rtol=1e-5, atol=2e-6 * scale)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 2, SUB_BLOCK, 2 * SUB_BLOCK + 3])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_rows_tokens_give_what_the_reference_gives(
    shape: Shape, num_tokens: int, is_new: bool
) -> None:
    layer = Layer(shape)
    rows, steps = layer.drawn(num_tokens)
    state = reference.Mamba2State.empty(layer.weights)
    if not is_new:
        layer.draw_state(0)
        state = layer.reference_state(0)
    expected = reference.mamba2(rows, steps, layer.weights, state)
    check(layer, layer.run(rows, steps, [Row(num_tokens, 0, is_new)]), expected)
    check_state(layer, 0, state)


def test_a_thousand_tokens_do_not_add_up_errors() -> None:
    layer = Layer(Shape(1, 32, 64, 4))
    rows, steps = layer.drawn(1000)
    state = reference.Mamba2State.empty(layer.weights)
    expected = reference.mamba2(rows, steps, layer.weights, state)
    check(layer, layer.run(rows, steps, [Row(1000, 0, is_new=True)]), expected)
    check_state(layer, 0, state)


def test_rows_go_on_from_their_own_states_and_touch_no_other() -> None:
    layer = Layer(SMALL, num_states=6)
    for state in (1, 4):
        layer.draw_state(state)
    pieces = [Row(5, 4), Row(1, 3, is_new=True), Row(1, 1), Row(40, 0, is_new=True)]
    rows, steps = layer.drawn(50)
    before = layer.states.copy()
    expected = {row.state: layer.reference_state(row.state) for row in pieces}
    for row in pieces:
        if row.is_new:
            expected[row.state] = reference.Mamba2State.empty(layer.weights)
    out = layer.run(rows.copy(), steps, pieces, first_token=2)
    assert np.isnan(out[[0, 1, 49]]).all()
    first = 2
    for row in pieces:
        end = first + row.num_tokens
        own = expected[row.state]
        wanted = reference.mamba2(rows[first:end], steps[first:end], layer.weights, own)
        check(layer, out[first:end], wanted)
        check_state(layer, row.state, own)
        first = end
    np.testing.assert_array_equal(before[[2, 5]], layer.states[[2, 5]])
    np.testing.assert_array_equal(before[:, 1], layer.states[:, 1])  # another layer's part


@pytest.mark.parametrize("sizes", [[1] * 71, [70, 1], [2, 1, 33, 32, 3], [SUB_BLOCK, 39]])
def test_the_bits_do_not_depend_on_how_tokens_are_cut_into_rows(sizes: list[int]) -> None:
    whole, cut = Layer(SMALL), Layer(SMALL)
    rows, steps = whole.drawn(71)
    expected = whole.run(rows.copy(), steps, [Row(71, 0, is_new=True)])
    first = 0
    for size in sizes:
        end = first + size
        piece = rows[first:end].copy(), steps[first:end]
        out = cut.run(*piece, [Row(size, 0, is_new=first == 0)])
        np.testing.assert_array_equal(out, expected[first:end])
        first = end
    np.testing.assert_array_equal(cut.states, whole.states)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 64])
def test_the_bits_do_not_depend_on_how_work_is_cut_into_chunks(num_chunks: int) -> None:
    layer, other = Layer(SHAPES[3], num_states=2), Layer(SHAPES[3], num_states=2)
    pieces = [Row(3, 1, is_new=True), Row(9, 0, is_new=True)]
    rows, steps = layer.drawn(12)
    expected = layer.run(rows.copy(), steps, pieces, range(1))
    out = other.run(rows.copy(), steps, pieces, range(num_chunks))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(other.states, layer.states)


def test_a_gate_or_a_step_that_is_not_a_number_stays_in_its_head() -> None:
    layer = Layer(SMALL)
    rows, steps = layer.drawn(10)
    rows[4, SMALL.channels + 33] = np.nan  # z of head 1
    steps[6, 2] = np.nan
    out = layer.run(rows, steps, [Row(10, 0, is_new=True)])
    found = np.argwhere(np.isnan(out))
    expected = [[4, 33], *([token, at] for token in range(6, 10) for at in range(64, 96))]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("step", [-200.0, 200.0, -np.inf])
def test_steps_of_any_size_are_those_of_the_reference(step: float) -> None:
    layer = Layer(SMALL)
    rows, steps = layer.drawn(8)
    steps[3] = step
    state = reference.Mamba2State.empty(layer.weights)
    expected = reference.mamba2(rows, steps, layer.weights, state)
    check(layer, layer.run(rows, steps, [Row(8, 0, is_new=True)]), expected)


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits() -> None:
    answers = {digest()}
    for chosen in sets_that_run():
        program = [sys.executable, "-m", "tests.kernels.cpu.mamba2_driver", chosen.name]
        done = subprocess.run(program, check=True, capture_output=True, text=True)
        answers.add(done.stdout.strip())
    assert len(answers) == 1
