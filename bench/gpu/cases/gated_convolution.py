"""Gated convolutions: ragged rows that go on and that are new, cut in two; rows that are empty.

Rows are longer and shorter than what a state keeps. States lie apart, in an array that others' are
in, which are NaN, as are the state of a row that is new, the other layer's part of each, and what
lies behind a token's x. The same tokens in two steps must have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bench.gpu.case import Case, Launch, poison, to_float64, to_stored
from bench.gpu.cases.state_rows import (
    Row,
    judged,
    row_table,
    rows_with_tokens,
    token_rows,
    tokens_of,
)
from kernels.cuda.gated_convolution import PARTS, GatedConvolutionVariant
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.reference.gated_convolution import gated_convolution

NUM_STATES, LAYERS, LAYER = 7, 2, 1
BEHIND = 32
"""Elements of a token behind its x."""


def draw_cases(variant: GatedConvolutionVariant, seed: int) -> list[Case]:
    """Tokens that take one block of threads and a bit."""
    before = variant.width - 1
    rows = (
        Row(3, False, variant.width + 1, before + 1),
        Row(0, True, 1, 1),
        Row(2, True, 0, 0),
        Row(1, False, 1, 0),
        Row(4, True, before, before),
        Row(6, False, 0, max(1, before - 1)),
        Row(5, True, 1, 0),
    )
    channels = VECTOR_LENGTHS[variant.dtype] * (variant.threads + 3)
    return [draw_case(variant, rows, channels, seed)]


def draw_case(
    variant: GatedConvolutionVariant, rows: Sequence[Row], channels: int, seed: int
) -> Case:
    """Return a case of all tokens in one step; its part has them in two."""
    rng = np.random.default_rng(seed)
    dtype, before, num_tokens = variant.dtype, variant.width - 1, tokens_of(rows)
    drawn = rng.standard_normal((num_tokens, PARTS * channels + BEHIND))
    drawn[0, :4] = [0.0, -0.0, 1e-6, 5.0]
    drawn[:, PARTS * channels :] = np.nan
    projections = to_stored(dtype, drawn)
    weights = rng.standard_normal((channels, variant.width)) / np.sqrt(variant.width)
    weights = weights.astype(np.float32)
    layer_floats = before * channels
    states = poison("float32", (NUM_STATES, LAYERS * layer_floats))
    expected_states = states.astype(np.float64)
    out = np.full((num_tokens, channels), np.nan)
    for row, some in rows_with_tokens(rows):
        state = np.zeros((before, channels), np.float32)
        if not row.is_new:
            state[:] = rng.standard_normal(state.shape)
            states[row.state, LAYER * layer_floats :] = state.reshape(-1)
        tokens = to_float64(dtype, projections)[some, : PARTS * channels].astype(np.float32)
        out[some] = gated_convolution(tokens, weights, state)
        expected_states[row.state, LAYER * layer_floats :] = state.reshape(-1)

    def launch(step: int | None) -> Launch:
        places = states.shape[1], LAYER * layer_floats
        arguments = (
            "out", "projections", projections.shape[1], "weight", "token_rows", f"rows{step}",
            "states", *places, channels,
        )  # fmt: skip
        return Launch(variant, variant.grid(num_tokens, channels), arguments)

    def case(name: str, *steps: int | None) -> Case:
        arrays = {
            "out": poison(dtype, out.shape),
            "projections": projections,
            "weight": np.ascontiguousarray(weights.T),
            "token_rows": token_rows(rows),
            "states": states,
            **{f"rows{step}": row_table(rows, step) for step in steps},
        }
        expected = {
            "out": judged(dtype, out),
            "states": judged("float32", expected_states),
        }
        return Case(name, arrays, tuple(launch(step) for step in steps), expected)

    part = case(f"{variant.name} in two steps", 0, 1)
    return dataclasses.replace(case(variant.name, None), part=(part, dict))
