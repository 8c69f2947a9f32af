"""Operations that work row by row: norms, gates, embedding; and copies of whole blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from bench.gpu.case import TOLERANCES, Array, Case, Expected, Launch, poison, to_float64, to_stored
from kernels.cuda.copy_blocks import WORDS_A_THREAD, CopyBlocksVariant
from kernels.cuda.embedding import EmbeddingVariant
from kernels.cuda.fetched_weights import plan_fetch
from kernels.cuda.gate_apart import GateApartVariant
from kernels.cuda.gate_attended import GateAttendedVariant
from kernels.cuda.gate_mul import GateMulVariant
from kernels.cuda.gated_norm import GatedNormVariant
from kernels.cuda.instructions.elements import VECTOR_LENGTHS
from kernels.cuda.joint_norms import JointNormsVariant
from kernels.cuda.quantized_formats import GATE_TURN
from kernels.cuda.relu2 import Relu2Variant
from kernels.cuda.rms_norm import RmsNormVariant
from kernels.reference.delta_net import gate_attended, gated_norm
from kernels.reference.embedding import embedding
from kernels.reference.gate_mul import GATE_MUL
from kernels.reference.relu2 import relu2
from kernels.reference.rms_norm import rms_norm

NEXT_CHUNKS, NEXT_INPUTS = 601, 72
"""Chunks of weights that the next launch would multiply with, and how long each is."""
SUMS_FACTOR = 0.7071
"""Of a norm's sums that are scaled."""
BEHIND = 32
"""Elements of a token behind its gates that are not read."""


def draw_gate_mul(variant: GateMulVariant, seed: int) -> list[Case]:
    """Rows that take one block of threads and a bit; gates from -10⁴ to 80; the last row alone."""
    rng = np.random.default_rng(seed)
    features = VECTOR_LENGTHS[variant.dtype] * (variant.threads + 4)
    turn = GATE_TURN if variant.in_turns else None
    gate_up = rng.standard_normal((3, 2 * features))
    gate_up[0, :4] = [-1e4, -200.0, 80.0, -88.0]
    stored = to_stored(variant.dtype, gate_up)
    next_weights = poison(variant.dtype, (NEXT_CHUNKS, NEXT_INPUTS))
    fetched = plan_fetch(NEXT_CHUNKS, NEXT_INPUTS, next_weights.itemsize)

    def case(rows: Array) -> Case:
        out: Array = np.empty((len(rows), features))
        GATE_MUL[variant.activation](to_float64(variant.dtype, rows), out, turn=turn)
        grid = variant.grid(len(rows), features, fetched)
        arguments = ("out", "gate_up", features, "next_weights", *fetched.arguments)
        return Case(
            variant.name,
            {
                "out": poison(variant.dtype, out.shape),
                "gate_up": rows,
                "next_weights": next_weights,
            },
            (Launch(variant, grid, arguments),),
            {"out": _expected(variant.dtype, out)},
        )

    return [_with_last_row(case(stored), case(stored[-1:]))]


def draw_gate_apart(variant: GateApartVariant, seed: int) -> list[Case]:
    """Pieces of longer rows, one block of threads and a bit; the last row alone.

    What lies beside them is poison.
    """
    rng = np.random.default_rng(seed)
    length = VECTOR_LENGTHS[variant.dtype]
    features, first = length * (variant.threads + 4), 3 * length
    gates = rng.standard_normal((3, features))
    gates[0, :4] = [-1e4, -200.0, 80.0, -88.0]
    stored = to_stored(variant.dtype, gates)
    ups = poison(variant.dtype, (3, first + features + BEHIND))
    pieces = ups[:, first : first + features]
    pieces[:] = to_stored(variant.dtype, rng.standard_normal(pieces.shape))

    def case(rows: slice) -> Case:
        gate_up = np.concatenate([stored[rows], pieces[rows]], axis=1)
        exact: Array = np.empty((len(gate_up), features))
        GATE_MUL[variant.activation](to_float64(variant.dtype, gate_up), exact)
        arguments = ("out", "gates", "ups", features, first, ups.shape[1])
        return Case(
            variant.name,
            {
                "out": poison(variant.dtype, exact.shape),
                "gates": stored[rows],
                "ups": ups[rows],
            },
            (Launch(variant, variant.grid(len(exact), features), arguments),),
            {"out": _expected(variant.dtype, exact)},
        )

    return [_with_last_row(case(slice(None)), case(slice(-1, None)))]


def draw_relu2(variant: Relu2Variant, seed: int) -> list[Case]:
    """Rows that take one block of threads and a bit; the last row alone."""
    rng = np.random.default_rng(seed)
    features = VECTOR_LENGTHS[variant.dtype] * (variant.threads + 4)
    values = 4 * rng.standard_normal((3, features))
    values[0, :5] = [-200.0, 200.0, 0.0, -0.0, 1e-6]
    stored = to_stored(variant.dtype, values)
    next_weights = poison(variant.dtype, (NEXT_CHUNKS, NEXT_INPUTS))
    fetched = plan_fetch(NEXT_CHUNKS, NEXT_INPUTS, next_weights.itemsize)

    def case(rows: Array) -> Case:
        exact = to_float64(variant.dtype, rows)
        out: Array = np.empty_like(exact)
        relu2(exact, out)
        grid = variant.grid(len(rows), features, fetched)
        arguments = ("out", features, "next_weights", *fetched.arguments)
        return Case(
            variant.name,
            {"out": rows, "next_weights": next_weights},
            (Launch(variant, grid, arguments),),
            {"out": _expected(variant.dtype, out)},
        )

    return [_with_last_row(case(stored), case(stored[-1:]))]


def draw_gate_attended(variant: GateAttendedVariant, seed: int) -> list[Case]:
    """Rows that take one block of threads and a bit; gates from -200 to 90; the last row alone."""
    rng = np.random.default_rng(seed)
    features = VECTOR_LENGTHS[variant.dtype] * (variant.threads + 3)
    attended = to_stored(variant.dtype, rng.standard_normal((3, features)))
    gates = rng.standard_normal((3, features + BEHIND))
    gates[0, :4] = [-200.0, 90.0, 0.0, -0.0]
    gates[:, features:] = np.nan
    stored = to_stored(variant.dtype, gates)

    def case(rows: slice) -> Case:
        own = attended[rows]
        own_gates = to_float64(variant.dtype, stored[rows])[:, :features]
        exact = gate_attended(to_float64(variant.dtype, own), own_gates)
        arguments = ("attended", "gates", features, stored.shape[1])
        return Case(
            variant.name,
            {"attended": own.copy(), "gates": stored[rows]},
            (Launch(variant, variant.grid(len(own), features), arguments),),
            {"attended": _expected(variant.dtype, exact)},
        )

    return [_with_last_row(case(slice(None)), case(slice(-1, None)))]


def draw_gated_norm(variant: GatedNormVariant, seed: int) -> list[Case]:
    """Heads of magnitudes from 1e-3 to 30, and of zeros; gates from -1e4 to 80; the last row."""
    rng = np.random.default_rng(seed)
    num_heads, size = 5, variant.value_size
    width = num_heads * size
    magnitudes = np.array([[1.0], [1e-3], [0.0], [30.0]])
    heads = (rng.standard_normal((4, width)) * magnitudes).astype(np.float32)
    gates = rng.standard_normal((4, width + BEHIND))
    gates[0, :4] = [-1e4, -200.0, 80.0, -88.0]
    gates[:, width:] = np.nan
    stored = to_stored(variant.dtype, gates)
    weight = rng.uniform(0.5, 1.5, size).astype(np.float32)
    eps = 1e-6

    def case(rows: slice) -> Case:
        shape = (-1, num_heads, size)
        own_gates = to_float64(variant.dtype, stored[rows])[:, :width].reshape(shape)
        own_heads = to_float64("float32", heads[rows]).reshape(shape)
        exact = gated_norm(own_heads, own_gates, weight, eps)
        arguments = ("out", "heads", "gates", stored.shape[1], "weight", eps, num_heads)
        return Case(
            variant.name,
            {
                "out": poison(variant.dtype, exact.shape),
                "heads": heads[rows],
                "gates": stored[rows],
                "weight": weight,
            },
            (Launch(variant, variant.grid(len(exact), num_heads), arguments),),
            {"out": _expected(variant.dtype, exact)},
        )

    return [_with_last_row(case(slice(None)), case(slice(-1, None)))]


def draw_joint_norms(variant: JointNormsVariant, seed: int) -> list[Case]:
    """Rows of magnitudes from 1e-3 to 30, and one of zeros; values are left as they are."""
    rng = np.random.default_rng(seed)
    sizes = variant.query_size, variant.key_size
    width = sizes[0] + 2 * sizes[1]
    magnitudes = np.array([[1.0], [1e-3], [0.0], [30.0]])
    qkv = to_stored(variant.dtype, rng.standard_normal((4, width)) * magnitudes)
    norms = [to_stored(variant.dtype, rng.uniform(0.5, 1.5, size)) for size in sizes]
    eps = 1e-5

    def case(rows: slice) -> Case:
        exact = to_float64(variant.dtype, qkv[rows])
        first = 0
        for norm, size in zip(norms, sizes, strict=True):
            part = exact[:, first : first + size]
            normed: Array = np.empty((len(exact), size))
            rms_norm(part, to_float64(variant.dtype, norm), eps, normed)
            part[:] = normed
            first += size
        arguments = ("qkv", "query_norm", "key_norm", eps)
        return Case(
            variant.name,
            {"qkv": qkv[rows].copy(), "query_norm": norms[0], "key_norm": norms[1]},
            (Launch(variant, variant.grid(len(exact)), arguments),),
            {"qkv": _expected(variant.dtype, exact)},
        )

    return [_with_last_row(case(slice(None)), case(slice(-1, None)))]


def draw_rms_norm(variant: RmsNormVariant, seed: int) -> list[Case]:
    """Rows of magnitudes from 1e-3 to 30, and one of zeros; the last row alone.

    Sums of parts are those of float32 in the order of the parts. Scaled sums of what is stored are
    rounded once in float32, once by the factor and once to the dtype.
    """
    rng = np.random.default_rng(seed)
    shape = (4, variant.hidden_size)
    magnitudes = np.array([[1.0], [1e-3], [0.0], [30.0]])
    x = to_stored(variant.dtype, rng.standard_normal(shape) * magnitudes)
    if variant.num_parts:
        parts = rng.standard_normal((variant.num_parts, *shape)) * magnitudes
        x = parts.astype(np.float32)
    residual = to_stored(variant.dtype, rng.standard_normal(shape) * magnitudes)
    weight, added_weight = (
        to_stored(variant.weight_dtype, rng.uniform(0.2, 1.5, variant.hidden_size)) for _ in "12"
    )
    eps = 1e-5
    factor = SUMS_FACTOR if variant.scales_sums else math.nan
    next_weights = poison(variant.dtype, (NEXT_CHUNKS, NEXT_INPUTS))
    fetched = plan_fetch(NEXT_CHUNKS, NEXT_INPUTS, next_weights.itemsize)
    numbers = ("weight", "added_weight", eps, factor)
    arguments = ("out", "residual", "x", *numbers, "next_weights", *fetched.arguments)

    def case(rows: slice) -> Case:
        given = x[..., rows, :]
        if variant.num_parts:
            total = sum(given[1:], given[0]).astype(np.float64)
        else:
            total = to_float64(variant.dtype, given)
        if variant.norms_added:
            normed = np.empty_like(total)
            rms_norm(total, to_float64(variant.weight_dtype, added_weight), eps, normed)
            total = normed
        if variant.adds_residual:
            total = total + to_float64(variant.dtype, residual[rows])
            if variant.scales_sums:
                total = total.astype(np.float32) * np.float32(factor)
            total = to_float64(variant.dtype, to_stored(variant.dtype, total))
        normed = np.empty_like(total)
        rms_norm(total, to_float64(variant.weight_dtype, weight), eps, normed)
        expected = {"out": _expected(variant.dtype, normed)}
        if variant.adds_residual:
            # Sums of what is stored are exact; of what was normalised, a rounding may differ.
            of_sums = _expected(variant.dtype, total) if variant.norms_added else None
            expected["residual"] = of_sums or Expected(variant.dtype, total, 0.0)
        return Case(
            variant.name,
            {
                "out": poison(variant.dtype, normed.shape),
                "residual": residual[rows].copy(),
                "x": given.copy(),
                "weight": weight,
                "added_weight": added_weight,
                "next_weights": next_weights,
            },
            (Launch(variant, variant.grid(len(total), fetched), arguments),),
            expected,
        )

    return [_with_last_row(case(slice(None)), case(slice(-1, None)))]


def draw_embedding(variant: EmbeddingVariant, seed: int) -> list[Case]:
    """Ids out of order and repeated, the first and the last of the table among them."""
    rng = np.random.default_rng(seed)
    hidden_size = VECTOR_LENGTHS[variant.dtype] * (variant.threads + 1)
    table = to_stored(variant.dtype, rng.standard_normal((7, hidden_size)))
    ids = np.array([6, 0, 3, 3], np.int32)
    exact: Array = np.empty((len(ids), hidden_size))
    embedding(to_float64(variant.dtype, table), ids, exact)
    grid = variant.grid(len(ids), hidden_size)
    return [
        Case(
            variant.name,
            {"out": poison(variant.dtype, exact.shape), "table": table, "token_ids": ids},
            (Launch(variant, grid, ("out", "table", "token_ids", hidden_size)),),
            {"out": Expected(variant.dtype, exact, 0.0)},
        )
    ]


def draw_copy_blocks(variant: CopyBlocksVariant, seed: int) -> list[Case]:
    """Between two pools: scattered blocks, padding pairs; blocks of no pair keep their bits."""
    rng = np.random.default_rng(seed)
    block_words = WORDS_A_THREAD * variant.threads + 20
    source = rng.integers(0, 2**32, (4, block_words), np.uint32)
    target = rng.integers(0, 2**32, (5, block_words), np.uint32)
    pairs = np.array([[3, 0], [-1, 2], [0, 4], [-1, -1]], np.int32)
    expected = target.copy()
    for from_block, to_block in pairs:
        if from_block >= 0:
            expected[to_block] = source[from_block]
    grid = variant.grid(len(pairs), block_words)
    return [
        Case(
            variant.name,
            {"target": target, "source": source, "pairs": pairs},
            (Launch(variant, grid, ("target", "source", "pairs", block_words)),),
            {"target": Expected("uint32", expected, 0.0)},
        )
    ]


def _expected(dtype: str, values: Array) -> Expected:
    """Judge by the dtype's tolerance, or its precision where values are large."""
    largest = max(1.0, float(np.abs(values).max()) / 4)
    return Expected(dtype, values, TOLERANCES[dtype] * largest)


def _with_last_row(whole: Case, alone: Case) -> Case:
    def last_row(outputs: Mapping[str, Array]) -> dict[str, Array]:
        return {name: outputs[name][-1:] for name in whole.expected}

    return dataclasses.replace(whole, part=(alone, last_row))
