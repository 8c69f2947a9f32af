"""Mamba-2: ragged rows that go on and that are new, cut in two; rows and tokens of padding.

Rows are longer and shorter than what a state keeps, and than a stage. States lie apart, in an array
that others' are in, which are NaN, as are the state of a row that is new, the other layer's part of
each, and what a kernel need not read of a token. The same tokens in two steps must have the same
bits. Each kernel has cases of its own; together they run in `tests.compute_plane.cuda`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bench.gpu.case import Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases.state_rows import (
    Row,
    judged,
    row_table,
    rows_with_tokens,
    token_rows,
    tokens_of,
)
from kernels.cuda.gated_row_norm import GatedRowNormVariant
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.mamba2_inputs import Mamba2InputsVariant
from kernels.cuda.selective_scan import SelectiveScanVariant
from kernels.reference import mamba2 as reference
from kernels.reference.delta_net import silu

EPS = 1e-5
NUM_STATES, LAYERS, LAYER = 7, 2, 1
BEHIND = 32
"""Elements that are not read: of a token behind its last one, of a state behind its inputs."""


def of_width(width: int) -> tuple[Row, ...]:
    """Return rows around what a convolution keeps."""
    before = width - 1
    return (
        Row(3, False, width + 1, before + 1),
        Row(0, True, 1, 1),
        Row(2, True, 0, 0),
        Row(1, False, 1, 0),
        Row(4, True, before, before),
        Row(6, False, 0, max(1, before - 1)),
        Row(5, True, 1, 0),
    )


def draw_inputs(variant: Mamba2InputsVariant, seed: int) -> list[Case]:
    """Channels and heads that take one block of threads and a bit; one group and three."""
    length = VECTOR_LENGTHS[variant.dtype]
    head_dim = variant.threads + 32
    rows = of_width(variant.width)
    return [
        inputs_case(variant, rows, (length, head_dim, 32), seed),
        inputs_case(variant, rows[:3], (3 * length, 32, 32), seed, num_groups=3),
    ]


def inputs_case(
    variant: Mamba2InputsVariant,
    rows: Sequence[Row],
    sizes: tuple[int, int, int],
    seed: int,
    num_groups: int = 1,
) -> Case:
    """Return a case of all tokens in one step; its part has them in two. `sizes`: H, P, N."""
    rng = np.random.default_rng(seed)
    dtype, before, num_tokens = variant.dtype, variant.width - 1, tokens_of(rows)
    num_heads, head_dim, state_size = sizes
    inner = num_heads * head_dim
    of_groups = num_groups * state_size
    channels = inner + 2 * of_groups
    drawn = rng.standard_normal((num_tokens, channels + inner + num_heads + BEHIND))
    drawn[0, :4] = [0.0, -0.0, 1e-6, 5.0]
    drawn[0, channels + inner : channels + inner + 4] = [-200.0, 90.0, 0.0, -0.0]
    drawn[:, channels : channels + inner] = np.nan
    drawn[:, channels + inner + num_heads :] = np.nan
    projections = to_stored(dtype, drawn)
    rates = -np.exp(rng.uniform(-5, 2, num_heads))
    weights = reference.Mamba2Weights(
        (rng.standard_normal((channels, variant.width)) / np.sqrt(variant.width)).astype("f4"),
        rng.normal(0, 0.3, channels).astype("f4"),
        rates.astype("f4"),
        rng.normal(-1, 1, num_heads).astype("f4"),
        np.zeros(num_heads, np.float32),
        np.ones(inner, np.float32),
        EPS,
        num_groups,
    )
    layer_floats = before * channels + BEHIND
    states = poison("float32", (NUM_STATES, LAYERS * layer_floats))
    expected_states = states.astype(np.float64)
    kept = slice(LAYER * layer_floats, LAYER * layer_floats + before * channels)
    convolved = np.full((num_tokens, channels), np.nan)
    step_sizes = np.full((num_tokens, 2 * num_heads), np.nan)
    memory: Array = np.zeros((num_heads, state_size, head_dim))
    for row, some in rows_with_tokens(rows):
        inputs: Array = np.zeros((before, channels))
        state = reference.Mamba2State(inputs, memory)
        if not row.is_new:
            state.inputs[:] = rng.standard_normal(state.inputs.shape).astype("f4")
            states[row.state, kept] = state.inputs.reshape(-1)
        tokens = to_float64(dtype, projections)[some]
        x, b, c = reference.convolved(tokens[:, :channels], weights, state)
        convolved[some] = np.concatenate([part.reshape(len(x), -1) for part in (c, b, x)], 1)
        steps = tokens[:, channels + inner : channels + inner + num_heads]
        step_sizes[some] = np.concatenate(reference.time_steps(steps, weights), 1)
        expected_states[row.state, kept] = state.inputs.reshape(-1)

    def launch(step: int | None) -> Launch:
        arguments = (
            "convolved", "step_sizes", "projections", projections.shape[1], "weight", "bias",
            "rates", "time_bias", "token_rows", f"rows{step}", "states", states.shape[1],
            LAYER * layer_floats, num_heads, inner, of_groups,
        )  # fmt: skip
        grid = variant.grid(num_tokens, num_heads, head_dim, of_groups)
        return Launch(variant, grid, arguments)

    arrays = {
        "convolved": poison("float32", convolved.shape),
        "step_sizes": poison("float32", step_sizes.shape),
        "projections": projections,
        "weight": np.ascontiguousarray(weights.convolution.T),
        "bias": weights.bias,
        "rates": weights.rates,
        "time_bias": weights.time_bias,
        "token_rows": token_rows(rows),
        "states": states,
    }
    expected = {
        "convolved": judged("float32", convolved),
        "step_sizes": judged("float32", step_sizes),
        "states": judged("float32", expected_states),
    }
    return _in_one_and_two(variant.name, arrays, rows, launch, expected)


def draw_scan(variant: SelectiveScanVariant, seed: int) -> list[Case]:
    """One token, a new row, one of several stages."""
    rows = (
        Row(4, False, 0, 1),
        Row(2, True, 1, 1),
        Row(1, True, 0, 0),
        Row(0, False, 3, variant.stage_tokens),
    )
    return [
        scan_case(variant, rows, 2, seed),
        scan_case(variant, rows[:2], 6, seed, num_groups=3),
    ]


def scan_case(
    variant: SelectiveScanVariant,
    rows: Sequence[Row],
    num_heads: int,
    seed: int,
    num_groups: int = 1,
) -> Case:
    """Return a case of all tokens in one step; its part has them in two."""
    rng = np.random.default_rng(seed)
    head_dim, state_size, num_tokens = variant.head_dim, variant.state_size, tokens_of(rows)
    inner = num_heads * head_dim
    of_groups = num_groups * state_size
    convolved = rng.standard_normal((num_tokens, 2 * of_groups + inner)).astype("f4")
    times = rng.uniform(0, 2, (num_tokens, num_heads)).astype("f4")
    decays = rng.uniform(0, 1, times.shape).astype("f4")
    times[:2, 0], decays[:2, 0] = [0.0, 30.0], [1.0, 0.0]
    skips = rng.standard_normal(num_heads).astype("f4")
    layer_floats = BEHIND + inner * state_size  # of inputs that are kept some floats
    states = poison("float32", (NUM_STATES, LAYERS * layer_floats))
    memory_start = LAYER * layer_floats + BEHIND
    for row, _ in rows_with_tokens(rows):
        if not row.is_new:
            own = states[row.state, memory_start:]
            own[:] = rng.standard_normal(own.shape)
    expected_states = to_float64("float32", states)
    out = np.full((num_tokens, inner), np.nan)
    exact = to_float64("float32", convolved)
    c, b, x = np.split(exact, [of_groups, 2 * of_groups], axis=1)
    b, c = (part.reshape(num_tokens, num_groups, state_size) for part in (b, c))
    for row, some in rows_with_tokens(rows):
        own = expected_states[row.state, memory_start:]
        if row.is_new:
            own[:] = 0
        memory = own.reshape(num_heads, state_size, head_dim)
        heads = x[some].reshape(-1, num_heads, head_dim)
        found = reference.scan(heads, b[some], c[some], times[some], decays[some], skips, memory)
        out[some] = found.reshape(-1, inner)

    def launch(step: int | None) -> Launch:
        arguments = (
            "out", "convolved", "step_sizes", "skips", f"rows{step}", "states", states.shape[1],
            memory_start, num_heads,
        )  # fmt: skip
        return Launch(variant, variant.grid(len(rows) + 2, num_heads, num_groups), arguments)

    arrays = {
        "out": poison("float32", out.shape),
        "convolved": convolved,
        "step_sizes": np.concatenate([times, decays], 1),
        "skips": skips,
        "states": states,
    }
    expected = {"out": judged("float32", out), "states": judged("float32", expected_states)}
    return _in_one_and_two(variant.name, arrays, rows, launch, expected)


def draw_row_norm(variant: GatedRowNormVariant, seed: int) -> list[Case]:
    """Rows of magnitudes from 1e-3 to 30, and of zeros; gates from -1e4 to 80; a token alone.

    The padding has numbers, and its output stays what it was. One group, and three.
    """
    return [row_norm_case(variant, num_groups, seed) for num_groups in (1, 3)]


def row_norm_case(variant: GatedRowNormVariant, num_groups: int, seed: int) -> Case:
    """Return a case of all tokens; its part is one of them."""
    rng = np.random.default_rng(seed)
    size = num_groups * variant.size
    rows = (Row(3, False, 2, 0), Row(0, True, 0, 0), Row(1, True, 2, 0))
    num_tokens = tokens_of(rows)
    magnitudes = np.array([[1.0], [1e-3], [0.0], [30.0], [1.0]])
    heads = (rng.standard_normal((num_tokens, size)) * magnitudes).astype("f4")
    gates = rng.standard_normal((num_tokens, size + BEHIND))
    gates[0, :4] = [-1e4, -200.0, 80.0, -88.0]
    gates[:, size:] = np.nan
    stored = to_stored(variant.dtype, gates)
    weight = rng.uniform(0.5, 1.5, size).astype("f4")
    exact, own_gates = heads.astype(np.float64), to_float64(variant.dtype, stored)[:, :size]
    if variant.is_normed:
        out = reference.gated_norm(exact, own_gates, weight, EPS, num_groups)
    else:
        out, weight = exact * silu(own_gates), np.full_like(weight, np.nan)
    out[-1] = np.nan
    arguments = (
        "out", "heads", "gates", stored.shape[1], "weight", EPS, "token_rows", "rows",
    )  # fmt: skip

    def case(some: slice, table: Array, own_rows: Array) -> Case:
        arrays = {
            "out": poison(variant.dtype, out[some].shape),
            "heads": heads[some],
            "gates": stored[some],
            "weight": weight,
            "token_rows": own_rows,
            "rows": table,
        }
        launch = Launch(variant, variant.grid(len(out[some]), num_groups), arguments)
        return Case(variant.name, arrays, (launch,), {"out": judged(variant.dtype, out[some])})

    whole = case(slice(None), row_table(rows, None), token_rows(rows))
    last = slice(3, 4)
    alone = case(last, np.array([[0, 1, 1, 0]], np.int32), np.zeros(1, np.int32))

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"out": outputs["out"][last]}

    return dataclasses.replace(whole, part=(alone, select))


def _in_one_and_two(
    name: str,
    arrays: Mapping[str, Array],
    rows: Sequence[Row],
    launch: Callable[[int | None], Launch],
    expected: Mapping[str, Expected],
) -> Case:
    """Return a case of all tokens in one step; its part has them in two."""

    def case(of: str, steps: Sequence[int | None]) -> Case:
        tables = {f"rows{step}": row_table(rows, step) for step in steps}
        return Case(of, {**arrays, **tables}, tuple(launch(step) for step in steps), expected)

    return dataclasses.replace(case(name, [None]), part=(case(f"{name} in two", [0, 1]), dict))
