"""Layers with a gated convolution: what comes out, and the states that are left behind."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kernels.reference.gated_convolution import gated_convolution
from tests.amx.sets import sets_that_run
from tests.kernels.cpu.convolution_driver import Convolution, digest
from tests.kernels.cpu.delta_net_driver import Float32Array, Row

SHAPES = [(32, 2), (96, 3), (256, 4), (288, 3), (800, 8)]


def check(found: Float32Array, expected: Float32Array) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("channels", "kernel_size"), SHAPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 40])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_rows_tokens_give_what_the_reference_gives(
    channels: int, kernel_size: int, num_tokens: int, is_new: bool
) -> None:
    layer = Convolution(channels, kernel_size)
    rows = layer.drawn(num_tokens)
    expected = np.zeros_like(layer.state(0))
    if not is_new:
        layer.draw_state(0)
        expected = layer.state(0).copy()
    out = layer.run(rows, [Row(num_tokens, 0, is_new)])
    check(out, gated_convolution(rows, layer.weights, expected))
    np.testing.assert_array_equal(layer.state(0), expected)


def test_rows_go_on_from_their_own_states_and_touch_no_other() -> None:
    layer = Convolution(288, 3, num_states=6)
    for state in (1, 4):
        layer.draw_state(state)
    pieces = [Row(5, 4), Row(1, 3, is_new=True), Row(1, 1), Row(40, 0, is_new=True)]
    rows, before = layer.drawn(50), layer.states.copy()
    out = layer.run(rows, pieces, first_token=2)
    assert np.isnan(out[[0, 1, 49]]).all()
    first = 2
    for row in pieces:
        end = first + row.num_tokens
        state = np.zeros_like(before[0, 0]) if row.is_new else before[row.state, 0].copy()
        check(out[first:end], gated_convolution(rows[first:end], layer.weights, state))
        np.testing.assert_array_equal(layer.state(row.state), state)
        first = end
    np.testing.assert_array_equal(before[[2, 5]], layer.states[[2, 5]])
    np.testing.assert_array_equal(before[:, 1], layer.states[:, 1])  # another layer's part


@pytest.mark.parametrize("sizes", [[1] * 71, [70, 1], [2, 1, 33, 32, 3]])
def test_the_bits_do_not_depend_on_how_tokens_are_cut_into_rows(sizes: list[int]) -> None:
    whole, cut = Convolution(288, 4), Convolution(288, 4)
    rows = whole.drawn(71)
    expected = whole.run(rows, [Row(71, 0, is_new=True)])
    first = 0
    for size in sizes:
        end = first + size
        out = cut.run(rows[first:end].copy(), [Row(size, 0, is_new=first == 0)])
        np.testing.assert_array_equal(out, expected[first:end])
        first = end
    np.testing.assert_array_equal(cut.states, whole.states)


@pytest.mark.parametrize("num_chunks", [1, 2, 5, 64])
def test_the_bits_do_not_depend_on_how_work_is_cut_into_chunks(num_chunks: int) -> None:
    layer, other = Convolution(800, 3, num_states=2), Convolution(800, 3, num_states=2)
    pieces = [Row(3, 1, is_new=True), Row(9, 0, is_new=True)]
    rows = layer.drawn(12)
    expected = layer.run(rows, pieces, range(1))
    out = other.run(rows, pieces, range(num_chunks))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(other.states, layer.states)


def test_what_is_not_a_number_stays_in_its_channel_and_behind_its_token() -> None:
    layer = Convolution(64, 3)
    rows = layer.drawn(10)
    rows[4, 64 + 64 + 5] = np.nan  # x of channel 5
    out = layer.run(rows, [Row(10, 0, is_new=True)])
    found = np.argwhere(np.isnan(out))
    np.testing.assert_array_equal(found, [[4, 5], [5, 5], [6, 5]])


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits() -> None:
    answers = {digest()}
    for chosen in sets_that_run():
        program = [sys.executable, "-m", "tests.kernels.cpu.convolution_driver", chosen.name]
        done = subprocess.run(program, check=True, capture_output=True, text=True)
        answers.add(done.stdout.strip())
    assert len(answers) == 1
