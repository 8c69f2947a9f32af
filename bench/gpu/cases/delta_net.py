"""Gated DeltaNet: ragged rows that go on and that are new, cut in two; rows and tokens of padding.

States lie apart, in an array that others' are in, which are NaN, as is the state of a row that is
new, and the other layer's part of each. A layer is run as it is in a step, launch after launch; the
same tokens in two steps must have the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

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
from kernels.cuda.delta_rule import DeltaRuleVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.recurrent_states import layer_floats, num_channels
from kernels.cuda.short_convolution import ShortConvolutionVariant
from kernels.reference import delta_net as reference

EPS = 1e-6
HEADS = (2, 4)
"""Key and value heads."""
NUM_STATES, LAYERS, LAYER = 5, 2, 1
MANY_ELEMENTS = 1 << 11
"""Of a head's memory, from which on fewer tokens are enough."""
BEHIND = 32
"""Elements of a token behind its z, or behind its a."""


class Layer:
    """A drawn layer, tokens and states, and what must become of them.

    `variant`: a kernel's, for dtype and sizes. `are_tiled`: as in `reference.DeltaNetWeights`.
    """

    def __init__(
        self,
        variant: ShortConvolutionVariant | DeltaRuleVariant,
        rows: Sequence[Row],
        seed: int,
        *,
        heads: tuple[int, int] = HEADS,
        are_tiled: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, width = variant.dtype, variant.width
        self.heads = num_key_heads, num_value_heads = heads
        self.sizes = *heads, variant.key_size, variant.value_size
        self.rows = tuple(rows)
        self.num_tokens = tokens_of(rows)
        self.channels = num_channels(*self.sizes)
        self.width = num_value_heads * variant.value_size
        stride = self.channels + self.width + BEHIND
        self.state_floats = layer_floats(*self.sizes, width)
        self.projections = to_stored(self.dtype, rng.standard_normal((self.num_tokens, stride)))
        gates = 2 * rng.standard_normal((self.num_tokens, 2 * num_value_heads + BEHIND))
        gates[0, :4] = [-200.0, 90.0, 0.0, -0.0]
        gates[0, num_value_heads : num_value_heads + 4] = [-100.0, 60.0, 0.0, 5.0]
        rates = -np.exp(rng.uniform(-3, 1.5, num_value_heads))
        rates[1] = -4.0  # of the time 60: nothing stays
        self.gates = to_stored(self.dtype, gates)
        self.weights = reference.DeltaNetWeights(
            rng.standard_normal((self.channels, width)).astype(np.float32),
            rates.astype(np.float32),
            rng.uniform(-3, 1, num_value_heads).astype(np.float32),
            rng.uniform(0.5, 1.5, variant.value_size).astype(np.float32),
            EPS,
            num_key_heads,
            are_tiled,
        )
        self.states = poison("float32", (NUM_STATES, LAYERS * self.state_floats))
        for row, _ in rows_with_tokens(rows):
            if not row.is_new:
                own = self.states[row.state, LAYER * self.state_floats :]
                own[:] = rng.standard_normal(self.state_floats)

    def expected(self) -> dict[str, Expected]:
        """Return what the launches of a layer leave, by name."""
        states = self.states.astype(np.float64)
        convolved = np.full((self.num_tokens, self.channels), np.nan)
        sizes = np.full((self.num_tokens, 2 * self.heads[1]), np.nan)
        heads, out = np.full((2, self.num_tokens, self.width), np.nan)
        tokens = to_float64(self.dtype, self.projections)
        gates = to_float64(self.dtype, self.gates)[:, : 2 * self.heads[1]]
        gated = tokens[:, self.channels : self.channels + self.width]
        key_heads = reference.key_heads(self.heads[1], self.weights)
        for row, some in rows_with_tokens(self.rows):
            state = self._state(states[row.state, LAYER * self.state_floats :], row)
            made = (
                *reference.convolved(tokens[some, : self.channels], self.weights, state),
                *reference.step_sizes(gates[some], self.weights),
            )
            q, k, v, factors, decays = (to_float64("float32", one) for one in made)
            queries, keys = q[:, key_heads], k[:, key_heads]
            out_of_heads = reference.delta_rule(queries, keys, v, factors, decays, state.memory)
            count = len(q)
            convolved[some] = np.concatenate([part.reshape(count, -1) for part in (q, k, v)], 1)
            sizes[some] = np.concatenate([factors, decays], 1)
            heads[some] = out_of_heads.reshape(count, -1)
            gates_of_heads = gated[some].reshape(out_of_heads.shape)
            out[some] = reference.gated_norm(out_of_heads, gates_of_heads, self.weights.norm, EPS)
        return {
            "convolved": judged("float32", convolved),
            "step_sizes": judged("float32", sizes),
            "heads": judged("float32", heads),
            "out": judged(self.dtype, out),
            "states": judged("float32", states),
        }

    def _state(self, own: Array, row: Row) -> reference.DeltaNetState:
        """Return a row's state where it lies, emptied if it is new."""
        if row.is_new:
            own[:] = 0
        _, num_value_heads, key_size, value_size = self.sizes
        kept = self.state_floats - num_value_heads * key_size * value_size
        memory = own[kept:].reshape(num_value_heads, key_size, value_size)
        return reference.DeltaNetState(own[:kept].reshape(-1, self.channels), memory)

    def arrays(self) -> dict[str, Array]:
        """Return all that the launches are given, and the outputs before."""
        rows = {f"rows{step}": row_table(self.rows, step) for step in (None, 0, 1)}
        weight = np.ascontiguousarray(self.weights.convolution.T)
        width = (self.num_tokens, self.width)
        return {
            "convolved": poison("float32", (self.num_tokens, self.channels)),
            "step_sizes": poison("float32", (self.num_tokens, 2 * self.heads[1])),
            "heads": poison("float32", width),
            "out": poison(self.dtype, width),
            "projections": self.projections,
            "z": np.ascontiguousarray(self.projections[:, self.channels :]),
            "weight": weight,
            "gates": self.gates,
            "rates": self.weights.rates,
            "time_bias": self.weights.time_bias,
            "norm": self.weights.norm,
            "token_rows": token_rows(self.rows),
            "states": self.states,
            **rows,
        }

    def convolve(self, variant: ShortConvolutionVariant, step: int | None) -> Launch:
        """Return the launch of the first kernel."""
        places = self.states.shape[1], LAYER * self.state_floats
        return Launch(
            variant,
            variant.grid(self.num_tokens, *self.heads),
            (
                "convolved", "step_sizes", "projections", self.projections.shape[1], "weight",
                "gates", self.gates.shape[1], "rates", "time_bias", "token_rows", f"rows{step}",
                "states", *places, *self.heads,
            ),
        )  # fmt: skip

    def apply(self, variant: DeltaRuleVariant, step: int | None) -> Launch:
        """Return the launch that takes tokens through their states."""
        places = self.states.shape[1], LAYER * self.state_floats
        return Launch(
            variant,
            variant.grid(len(self.rows) + 2, *self.heads),
            (
                "out" if variant.normalises else "heads", "convolved", "step_sizes", "projections",
                self.projections.shape[1], f"rows{step}", "states", *places, *self.heads,
                int(self.weights.are_tiled), "norm", EPS,
            ),
        )  # fmt: skip


def draw_short_convolution(variant: ShortConvolutionVariant, seed: int) -> list[Case]:
    """A row as long as its state's inputs and a bit, a new one, one token; the last row alone."""
    rows = (Row(3, False, variant.width + 1, 0), Row(0, True, 2, 0), Row(1, False, 1, 0))
    layer = Layer(variant, rows, seed)
    written = ("convolved", "step_sizes")
    whole = _case(variant.name, layer, written, (layer.convolve(variant, None),))
    table = np.array([[0, 1, 1, 0]], np.int32)
    last = slice(-2, -1)
    alone = {
        **whole.arrays,
        "rowsNone": table,
        "token_rows": np.zeros(1, np.int32),
        **{name: whole.arrays[name][last] for name in (*written, "projections", "gates")},
    }
    (launch,) = whole.launches
    grid = variant.grid(1, *HEADS)
    expected = {
        name: dataclasses.replace(whole.expected[name], values=whole.expected[name].values[last])
        for name in written
    }
    part = Case(variant.name, alone, (dataclasses.replace(launch, grid=grid),), expected)

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: outputs[name][last] for name in written}

    return [dataclasses.replace(whole, part=(part, select))]


def draw_delta_rule(variant: DeltaRuleVariant, seed: int) -> list[Case]:
    """A whole layer: one token, a new row shorter than the convolution, one of several stages.

    The same tokens in two steps.
    """
    stages = 1 if variant.key_size * variant.value_size >= MANY_ELEMENTS else 2
    tokens = stages * variant.stage_tokens
    rows = (Row(4, False, 0, 1), Row(2, True, 1, 1), Row(1, True, 0, 0), Row(0, False, 3, tokens))
    return [layer_case(variant, rows, seed, are_tiled=not variant.normalises)]


def layer_case(
    variant: DeltaRuleVariant,
    rows: Sequence[Row],
    seed: int,
    *,
    heads: tuple[int, int] = HEADS,
    are_tiled: bool = False,
) -> Case:
    """Return a case of all launches of a layer, in one step; its part has the tokens in two."""
    layer = Layer(variant, rows, seed, heads=heads, are_tiled=are_tiled)
    first = convolution_of(variant)
    norm = norm_of(variant)
    written = ["convolved", "step_sizes", "out", "states"]
    if norm is not None:
        written.append("heads")

    def launches(*steps: int | None) -> tuple[Launch, ...]:
        some = [
            launch
            for step in steps
            for launch in (layer.convolve(first, step), layer.apply(variant, step))
        ]
        if norm is not None:
            some.append(_norm_launch(norm, layer.num_tokens, layer.width + BEHIND, heads[1]))
        return tuple(some)

    whole = _case(variant.name, layer, written, launches(None))
    part = _case(f"{variant.name} in two steps", layer, written, launches(0, 1))
    return dataclasses.replace(whole, part=(part, dict))


def convolution_of(variant: DeltaRuleVariant) -> ShortConvolutionVariant:
    """Return the kernel that is launched ahead of one."""
    return ShortConvolutionVariant(
        variant.dtype, variant.key_size, variant.value_size, variant.width
    )


def norm_of(variant: DeltaRuleVariant) -> GatedNormVariant | None:
    """Return the kernel that is launched behind one, if there is any."""
    return None if variant.normalises else GatedNormVariant(variant.dtype, variant.value_size)


def _norm_launch(variant: GatedNormVariant, num_tokens: int, stride: int, num_heads: int) -> Launch:
    grid = variant.grid(num_tokens, num_heads)
    return Launch(variant, grid, ("out", "heads", "z", stride, "norm", EPS, num_heads))


def _case(name: str, layer: Layer, written: Sequence[str], launches: tuple[Launch, ...]) -> Case:
    """Return a case with the arrays that its launches are given."""
    named = {one for launch in launches for one in launch.arguments if isinstance(one, str)}
    arrays = {one: array for one, array in layer.arrays().items() if one in named}
    expected = layer.expected()
    return Case(name, arrays, launches, {one: expected[one] for one in written})
