"""Products with quantised weights: ragged in every direction, a row's bits its own.

Weights and zero points take every value of their format, scales change sign and size from span to
span, rows of x have magnitudes of their own. The outputs between N and the end of the last panel
have NaN scales, and so would whatever took the bytes behind a panel's spans for one. Rows of y go
on behind N, where they must stay NaN.
One row is also multiplied alone, by the variant for few rows: that must give the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from kernels.cuda.activation import SILU
from kernels.cuda.dense_matmul import DenseMatmulVariant
from kernels.cuda.eight_bit_floats import VALUES
from kernels.cuda.four_bit_floats import DOUBLED
from kernels.cuda.quantized_formats import FORMATS, GATE_TURN, PANEL_ROWS, TILE_INPUTS, WeightFormat
from kernels.cuda.quantized_layout import pack_matrix
from kernels.cuda.quantized_matmul import QuantizedMatmulVariant
from kernels.cuda.quantized_matrix import QuantizedMatrix
from kernels.cuda.quantized_rows import TILES, QuantizedRowsVariant
from kernels.cuda.quantized_strands import COLUMNS
from kernels.reference.gate_mul import GATE_MUL
from kernels.reference.quantized_matmul import dequantized, quantized_matmul

COLUMNS_BEHIND = 2


def draw_cases(variant: QuantizedMatmulVariant, seed: int) -> list[Case]:
    """Two strands that go round the ring, in a block with panels to spare; and 8 short strands."""
    longest = 2 * variant.round_units + 1
    columns = variant.columns
    many, few = (48, 16) if variant.gates else (40, 20)
    return [
        draw_case(variant, columns - 1, many, longest, 1, alone=columns - 3, seed=seed),
        draw_case(variant, columns + 3, few, 3, 3, alone=columns + 1, seed=seed + 1),
    ]


def draw_case(
    variant: QuantizedMatmulVariant,
    num_rows: int,
    num_outputs: int,
    num_units: int,
    strand_bits: int,
    *,
    alone: int,
    seed: int = 0,
) -> Case:
    """Draw x [M, K], K being so many units, and W; row `alone` is the part."""
    rng = np.random.default_rng(seed)
    num_products = 2 * num_outputs if variant.gates else num_outputs
    padded = -(-num_products // PANEL_ROWS) * PANEL_ROWS
    matrix = draw_matrix(rng, variant.weights, padded, num_units)
    num_inputs = matrix.quants.shape[1]
    for values in (matrix.scales, matrix.minima):
        if values is not None:
            values[num_products:] = np.nan
    packed = packed_in_poison(variant.weights, matrix)

    magnitudes = np.resize([1.0, 3.0, 0.1], (num_rows, 1))
    x = to_stored(variant.dtype, rng.standard_normal((num_rows, num_inputs)) * magnitudes)
    exact: Array = np.empty((num_rows, num_products))
    quants, scales, minima = (
        None if numbers is None else numbers[:num_products] for numbers in matrix.operands
    )
    assert quants is not None
    assert scales is not None
    quantized_matmul(to_float64(variant.dtype, x), quants, scales, minima, exact)
    biases = draw_biases(rng, variant, num_products)
    exact += to_float64(variant.dtype, biases)
    if variant.gates:
        exact = gated_in_turns(exact, variant.activation)
    tolerance = TOLERANCES[variant.out_dtype] * max(1.0, float(np.abs(exact).max()) / 4)
    expected = np.pad(exact, ((0, 0), (0, COLUMNS_BEHIND)), constant_values=np.nan)
    out_width = expected.shape[1]

    def case(one: QuantizedMatmulVariant, rows: slice) -> Case:
        count = len(expected[rows])
        grid = one.grid(count, num_outputs, num_inputs, strand_bits)
        scalars = (count, num_outputs, num_inputs, strand_bits, out_width)
        return Case(
            f"{variant.name} {num_rows} × {num_inputs} × {num_outputs}, {1 << strand_bits} strands",
            {
                "out": poison(one.out_dtype, (count, out_width)),
                "x": x[rows],
                "packed": packed,
                "biases": biases,
            },
            (Launch(one, grid, ("out", "x", "packed", *scalars, "biases")),),
            {"out": Expected(one.out_dtype, expected[rows], tolerance)},
        )

    def select(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {"out": outputs["out"][alone : alone + 1]}

    part = case(of_few_rows(variant), slice(alone, alone + 1))
    return dataclasses.replace(case(variant, slice(None)), part=(part, select))


def draw_biases(
    rng: np.random.Generator, variant: QuantizedMatmulVariant | DenseMatmulVariant, num_rows: int
) -> Array:
    """Return biases of so many rows of W as they are stored; zeros where there are none."""
    values = rng.standard_normal(num_rows) if variant.biased else np.zeros(num_rows)
    return to_stored(variant.dtype, values)


def gated_in_turns(product: Array, activation: str = SILU) -> Array:
    """Return the activation of each 16 columns times the 16 beside them."""
    out: Array = np.empty((len(product), product.shape[1] // 2))
    GATE_MUL[activation](product, out, turn=GATE_TURN)
    return out


def of_few_rows(variant: QuantizedMatmulVariant) -> QuantizedMatmulVariant:
    """Return the kernel that multiplies a row alone, as others do many."""
    return dataclasses.replace(variant, columns=COLUMNS[0])


def draw_rows(variant: QuantizedRowsVariant, seed: int) -> list[Case]:
    """All rows in order, ragged in both directions; and some, scattered, one of them twice."""
    rng = np.random.default_rng(seed)
    num_outputs, unit_tiles = PANEL_ROWS + 9, FORMATS[variant.weights].unit // TILE_INPUTS
    matrix = draw_matrix(rng, variant.weights, num_outputs, max(2, TILES // unit_tiles + 1))
    # Nothing of these is multiplied with anything: their size is that of the tolerance's data.
    for values in (matrix.scales, matrix.minima):
        if values is not None:
            values *= np.float16(8)
    exact: Array = np.empty(matrix.quants.shape)
    dequantized(*matrix.operands, exact)
    packed = packed_in_poison(variant.weights, matrix)

    def case(rows: Array) -> Case:
        shape = (len(rows), exact.shape[1])
        # A row behind the last one must stay as it is.
        expected = np.pad(exact[rows], ((0, 1), (0, 0)), constant_values=np.nan)
        tolerance = TOLERANCES[variant.dtype] * max(1.0, float(np.abs(exact).max()) / 4)
        return Case(
            f"{variant.name} {len(rows)} × {shape[1]}",
            {
                "out": poison(variant.dtype, expected.shape),
                "packed": packed,
                "rows": rows.astype(np.int32),
            },
            (Launch(variant, variant.grid(*shape), ("out", "packed", "rows", *shape)),),
            {"out": Expected(variant.dtype, expected, tolerance)},
        )

    return [case(np.arange(num_outputs)), case(np.array([40, 3, 19, 3, 0]))]


def draw_matrix(
    rng: np.random.Generator, label: str, num_outputs: int, num_units: int
) -> QuantizedMatrix:
    """Draw a matrix [N, K] whose products with normally distributed rows are of size 1."""
    fmt = FORMATS[label]
    shape, num_inputs = (num_outputs, num_units), fmt.unit * num_units
    if fmt.shares:
        return _draw_shared(rng, fmt, shape)
    if fmt.is_float and fmt.bits == 8:
        return _draw_float8(rng, shape, num_inputs)
    if fmt.is_float:
        wide = rng.choice(DOUBLED, (num_outputs, num_inputs))
        powers = rng.integers(-6, -2, shape)  # times 3 or so, the size of what is scaled
        halves = np.ldexp(np.float32(1), powers) / 2 ** np.round(np.log2(num_inputs) / 2)
        return QuantizedMatrix(wide, halves.astype(np.float32))
    lowest = -128 if fmt.bits == 8 else -fmt.offset
    highest = lowest + 2**fmt.bits
    quants = rng.integers(lowest, highest, (num_outputs, num_inputs), np.int8)
    size = np.sqrt(num_inputs)
    typical = 2.0 ** (fmt.bits - 2)
    scales = rng.uniform(0.2, 2.0, shape) * rng.choice([-1, 1], shape) / (typical * size)
    minima = rng.standard_normal(shape) / size if fmt.has_minimum else None
    return QuantizedMatrix(
        quants,
        scales.astype(np.float16),
        None if minima is None else minima.astype(np.float16),
        rng.integers(lowest, highest, shape, np.int8) if fmt.has_zeros else None,
    )


def _draw_shared(
    rng: np.random.Generator, fmt: WeightFormat, shape: tuple[int, int]
) -> QuantizedMatrix:
    """Draw every integer and every whole scale, the least and the largest among them."""
    num_outputs, num_units = shape
    num_spans, size = num_units * fmt.unit_spans, np.sqrt(num_units * fmt.unit)
    quants = rng.integers(
        -fmt.offset, 2**fmt.bits - fmt.offset, (num_outputs, fmt.unit * num_units), np.int8
    )
    d = rng.uniform(0.2, 2.0, shape) * rng.choice([-1, 1], shape) / (2.0 ** (fmt.bits - 2) * size)
    if fmt.runs == 2:
        whole = rng.integers(-128, 128, (num_outputs, 2 * num_spans), np.int8)
        return QuantizedMatrix(quants, (d / 64).astype(np.float16), whole_scales=whole)
    whole, whole_minima = rng.integers(0, 64, (2, num_outputs, num_spans), np.uint8)
    m = rng.standard_normal(shape) / (32 * size)
    return QuantizedMatrix(
        quants, (d / 32).astype(np.float16), m.astype(np.float16), None, whole, whole_minima
    )


def _draw_float8(
    rng: np.random.Generator, shape: tuple[int, int], num_inputs: int
) -> QuantizedMatrix:
    """Draw codes up to a largest one for each row, subnormal or any, and scales that fit them."""
    below = rng.choice([8, 16, 64, 127], (shape[0], 1))
    magnitudes = rng.integers(0, below, (shape[0], num_inputs), np.uint8)
    values = VALUES[magnitudes | rng.choice(np.array([0, 128], np.uint8), magnitudes.shape)]
    size = np.sqrt(np.square(values).sum(axis=1, keepdims=True))
    scales = rng.uniform(0.2, 2.0, shape) * rng.choice([-1, 1], shape) / size
    return QuantizedMatrix(values, scales.astype(np.float32))


def packed_in_poison(label: str, matrix: QuantizedMatrix) -> Array:
    """Return a matrix packed, the bytes behind the spans of its panels NaN."""
    fmt, num_inputs = FORMATS[label], matrix.quants.shape[1]
    packed = pack_matrix(label, matrix)
    panels = packed.reshape(-1, fmt.panel_bytes(num_inputs))
    panels[:, fmt.scales_at(num_inputs) + fmt.numbers_bytes(num_inputs) :] = 0xFF
    return packed
