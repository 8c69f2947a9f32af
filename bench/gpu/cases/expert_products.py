"""Products of pairs of tokens and experts, with quantised and with dense weights.

Experts that no token goes through have weights of NaN, and tiles without pairs name experts far
away. Rows of y go on behind N, where they must stay NaN. One pair's product is also made alone, by
the kernel for rows of one matrix: that must give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from bench.gpu.cases import dense_matmul as dense_cases
from bench.gpu.cases import quantized_matmul as quantized_cases
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.expert_tiles import TILE_NUMBERS, most_tiles
from kernels.cuda.quantized_formats import FORMATS, TILE_INPUTS
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.reference.dense_matmul import dense_matmul, gated
from kernels.reference.mixture import sort_pairs
from kernels.reference.quantized_matmul import quantized_matmul

NUM_EXPERTS = 5
CHOSEN = 2
NOBODY = 3
"""The expert that no token goes through."""
COLUMNS_BEHIND = 2
FAR_EXPERT = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Of a case: tokens, outputs N, spans or tiles of K, log2 of strands; pairs of a row of x."""

    num_tokens: int
    num_outputs: int
    length: int
    strand_bits: int
    share: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Pairs:
    """Who goes where. `experts`: of each pair; `order`, `tiles`: for the kernel."""

    experts: Array
    order: Array
    tiles: Array

    @classmethod
    def of(cls, rng: np.random.Generator, num_tokens: int, tile_pairs: int) -> _Pairs:
        """Draw them; most tokens go through expert 0, nobody through `NOBODY`."""
        others = [expert for expert in range(1, NUM_EXPERTS) if expert != NOBODY]
        chosen = np.zeros((num_tokens, CHOSEN), np.int32)
        chosen[:, 1] = rng.choice(others, num_tokens)
        chosen[::4, 0] = others[0]
        chosen[::4, 1] = others[1]
        num_tiles = most_tiles(chosen.size, NUM_EXPERTS, tile_pairs)
        order, tiles = np.empty(chosen.size, np.int32), np.empty((num_tiles, TILE_NUMBERS), "i4")
        sort_pairs(chosen, NUM_EXPERTS, tile_pairs, order, tiles)
        tiles[tiles[:, 2] == 0, 0] = FAR_EXPERT
        return cls(chosen.reshape(-1), order, tiles)


def draw_quantized_experts(variant: QuantizedMatmulVariant, seed: int) -> list[Case]:
    """Rows of tokens, in tiles that overflow; rows of pairs, with 8 short strands."""
    longest, panel = 2 * variant.round_units + 1, variant.panel_outputs
    return [
        quantized_experts_case(
            variant, Shape(variant.columns + 5, 2 * panel, longest, 1, CHOSEN), seed
        ),
        quantized_experts_case(variant, Shape(3, panel, 3, 3, 1), seed + 1),
    ]


def quantized_experts_case(variant: QuantizedMatmulVariant, shape: Shape, seed: int = 0) -> Case:
    """Draw x and all experts' matrices [N, K], N being whole panels and K so many units."""
    rng = np.random.default_rng(seed)
    pairs = _Pairs.of(rng, shape.num_tokens, variant.columns)
    num_products = 2 * shape.num_outputs if variant.gates else shape.num_outputs
    matrices = [
        quantized_cases.draw_matrix(rng, variant.weights, num_products, shape.length)
        for _ in range(NUM_EXPERTS)
    ]
    matrices[NOBODY].scales[:] = np.nan
    packed = np.stack([quantized_cases.packed_in_poison(variant.weights, m) for m in matrices])
    biases = _draw_biases(rng, variant, num_products)

    def product(rows: Array, expert: int) -> Array:
        out: Array = np.empty((len(rows), num_products))
        one = matrices[expert]
        quantized_matmul(rows, *one.operands, out)
        out += to_float64(variant.dtype, biases[expert])
        return quantized_cases.gated_in_turns(out, variant.activation) if variant.gates else out

    num_inputs = FORMATS[variant.weights].unit * shape.length
    return _product_case(variant, shape, num_inputs, pairs, (packed, biases), product, rng)


def _draw_biases(
    rng: np.random.Generator, variant: QuantizedMatmulVariant | DenseMatmulVariant, num_rows: int
) -> Array:
    """Return those of all experts [E, N]; NaN of the one that no token goes through."""
    biases = [quantized_cases.draw_biases(rng, variant, num_rows) for _ in range(NUM_EXPERTS)]
    biases[NOBODY][:] = to_stored(variant.dtype, np.full(num_rows, np.nan))
    return np.stack(biases)


def draw_dense_experts(variant: DenseMatmulVariant, seed: int) -> list[Case]:
    """Rows of tokens, in tiles that overflow; rows of pairs, with 8 short strands."""
    panel = variant.panel_outputs
    longest = 2 * variant.ring + 1
    return [
        dense_experts_case(
            variant, Shape(variant.columns + 5, panel + panel // 2 - 3, longest, 1, CHOSEN), seed
        ),
        dense_experts_case(variant, Shape(3, panel - 11, 9, 3, 1), seed + 1),
    ]


def dense_experts_case(variant: DenseMatmulVariant, shape: Shape, seed: int = 0) -> Case:
    """Draw x and all experts' matrices, K being so many tiles of 32."""
    rng = np.random.default_rng(seed)
    pairs = _Pairs.of(rng, shape.num_tokens, variant.columns)
    num_inputs = TILE_INPUTS * shape.length
    rows_of_expert = 2 * shape.num_outputs if variant.gates else shape.num_outputs
    weights = rng.standard_normal((NUM_EXPERTS, rows_of_expert, num_inputs)) / np.sqrt(num_inputs)
    weights[NOBODY] = np.nan
    stored = to_stored(variant.dtype, weights)
    biases = _draw_biases(rng, variant, rows_of_expert)

    def product(rows: Array, expert: int) -> Array:
        found: Array = dense_matmul(rows, to_float64(variant.dtype, stored[expert]))
        found += to_float64(variant.dtype, biases[expert])
        return gated(found, variant.activation) if variant.gates else found

    return _product_case(variant, shape, num_inputs, pairs, (stored, biases), product, rng)


def _product_case(
    variant: QuantizedMatmulVariant | DenseMatmulVariant,
    shape: Shape,
    num_inputs: int,
    pairs: _Pairs,
    of_experts: tuple[Array, Array],
    product: Callable[[Array, int], Array],
    rng: np.random.Generator,
) -> Case:
    """Draw x; `of_experts`: matrices and biases; `product`: of rows with an expert's, exact.

    The last pair is the part.
    """
    matrices, biases = of_experts
    num_pairs = len(pairs.experts)
    num_rows = num_pairs // shape.share
    magnitudes = np.resize([1.0, 3.0, 0.1], (num_rows, 1))
    x = to_stored(variant.dtype, rng.standard_normal((num_rows, num_inputs)) * magnitudes)
    row_of_pair = np.arange(num_pairs) // shape.share
    rows = to_float64(variant.dtype, x)
    exact: Array = np.empty((num_pairs, shape.num_outputs))
    for expert in range(NUM_EXPERTS):
        own = pairs.experts == expert
        if own.any():
            exact[own] = product(rows[row_of_pair[own]], expert)
    tolerance = TOLERANCES[variant.out_dtype] * max(1.0, float(np.abs(exact).max()) / 4)
    expected = np.pad(exact, ((0, 0), (0, COLUMNS_BEHIND)), constant_values=np.nan)
    sizes = (shape.num_outputs, num_inputs, shape.strand_bits)
    name = f"{variant.name} {num_pairs} × {num_inputs} × {shape.num_outputs}"
    width = expected.shape[1]
    arguments = ("out", "x", "weights", "tiles", "order", shape.share, *sizes, width, "biases")
    whole = Case(
        name,
        {
            "out": poison(variant.out_dtype, expected.shape),
            "x": x,
            "weights": matrices,
            "tiles": pairs.tiles,
            "order": pairs.order,
            "biases": biases,
        },
        (Launch(variant, variant.experts_grid(len(pairs.tiles), *sizes), arguments),),
        {"out": Expected(variant.out_dtype, expected, tolerance)},
    )

    one = pair_alone(variant)
    is_dense = isinstance(one, DenseMatmulVariant)
    norm, eps = (("weights",), (0.0,)) if is_dense else ((), ())
    part = Case(
        name,
        {
            "out": poison(variant.out_dtype, expected[-1:].shape),
            "x": x[row_of_pair[-1:]],
            "weights": matrices[pairs.experts[-1]],
            "biases": biases[pairs.experts[-1]],
        },
        (
            Launch(
                one,
                one.grid(1, *sizes),
                ("out", "x", "weights", *norm, 1, *sizes, width, *eps, "biases"),
            ),
        ),
        {"out": Expected(variant.out_dtype, expected[-1:], tolerance)},
    )

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"out": outputs["out"][-1:]}

    return dataclasses.replace(whole, part=(part, select))


def pair_alone(
    variant: QuantizedMatmulVariant | DenseMatmulVariant,
) -> QuantizedMatmulVariant | DenseMatmulVariant:
    """Return the kernel that multiplies a row with one matrix, as others do pairs."""
    if isinstance(variant, DenseMatmulVariant):
        return dense_cases.of_few_rows(dataclasses.replace(variant, of_experts=False))
    return quantized_cases.of_few_rows(dataclasses.replace(variant, of_experts=False))
