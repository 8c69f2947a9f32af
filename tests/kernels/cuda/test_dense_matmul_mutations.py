"""The kernel of products with dense weights, broken in one place: each time it is noticed."""

from __future__ import annotations

import pytest

from bench.gpu.case import Case
from bench.gpu.cases.dense_matmul import draw_case
from kernels.cuda import dense_matmul_tensor, dense_sums
from kernels.cuda.dense_matmul import DenseMatmulVariant
from tests.kernels.cuda.simulation import Kernel, Source, Sources, simulate
from tests.simt import Fault, OutOfBounds, Race

GATED = DenseMatmulVariant("bfloat16", 8, "gated", normalises=True)
NORMED = DenseMatmulVariant("bfloat16", 16, "rounded", normalises=True, panel_rows=16)
ADDED = DenseMatmulVariant("bfloat16", 8, "added", panel_rows=16)
LOGITS = DenseMatmulVariant("float16", 16, "float32")
VARIANTS = (GATED, NORMED, ADDED, LOGITS)


def source_of(variant: DenseMatmulVariant, library=None) -> Source:
    return Source(dense_matmul_tensor, "make_dense_matmul", variant, library)


SOURCES = {
    variant: Sources(source_of(variant), source_of(variant, dense_sums)) for variant in VARIANTS
}


def narrow_case(variant: DenseMatmulVariant) -> Case:
    """Two blocks of rows, two strands and a panel that is not full, in a block of four panels."""
    return draw_case(variant, variant.columns + 3, variant.panel_outputs - 5, 3, 1, alone=0)


def long_case(variant: DenseMatmulVariant) -> Case:
    """One strand that fills its ring twice and starts anew."""
    return draw_case(variant, 3, 5, 2 * variant.ring + 1, 0, alone=0)


def wide_case(variant: DenseMatmulVariant) -> Case:
    """Four panels a block, one and a bit in the second block; two strands of a tile."""
    return draw_case(variant, 3, 5 * variant.panel_outputs + 5, 2, 1, alone=0)


@pytest.mark.parametrize(
    ("make", "variant"),
    [
        pytest.param(make, variant, marks=() if variant is quick else pytest.mark.slow)
        for make, quick in ((narrow_case, GATED), (long_case, NORMED), (wide_case, ADDED))
        for variant in VARIANTS
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_unbroken_kernel_is_right(make, variant):
    case = make(variant)
    assert case.faults(simulate(case, kernels=SOURCES[variant].unbroken())) == []


def test_there_is_one_barrier_and_it_can_not_be_left_out():
    case, source = narrow_case(NORMED), source_of(NORMED, dense_sums)
    (barrier,) = source.synchronisations()

    for seed in range(2):
        with pytest.raises(Race, match="shared memory"):
            simulate(case, kernels=source.without(barrier), seed=seed)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if tile < tiles_left:", "if True:"),
        ("row = min(row, num_outputs - 1)", "pass"),
        ("min(first_row + 8 * c + group, end_row - 1)", "first_row + 8 * c + group"),
        ("if row < end_row and output", "if output"),
        ("row < end_row and output < num_outputs", "row < end_row"),
    ],
)
def test_what_lies_outside_an_array_is_not_touched_unnoticed(old, new):
    with pytest.raises((OutOfBounds, Race)):  # Race: behind a row of y is the next one's first
        simulate(narrow_case(ADDED), kernels=SOURCES[ADDED].with_replaced(old, new))


IN_A_PANEL = [
    (GATED, "row += v // 2 * num_outputs", "pass"),
    (LOGITS, "row += TILE_ROWS * (v // 2)", "pass"),
    (ADDED, "scaled[j] = word", "scaled[j] = input_ring[i, 0]"),
    (GATED, "second = multiply_float32(second, high(by))", "pass"),
    (NORMED, "row_squares, 2)", "row_squares, 0)"),
    (GATED, "other = add_float32(other, strand_sums[uint32(sum_at + tile_step)])", "pass"),
    (ADDED, "value = add_float32(to_float32(out[at]), value)", "pass"),
]  # fmt: skip
MORE_IN_A_PANEL = [
    (NORMED, "squares[c] = multiply_add(second, second, squares[c])", "pass"),
    (NORMED, "reciprocal_root(square / float32(num_inputs) + eps)",
     "reciprocal_root(square / float32(num_inputs))"),
    (GATED, "other = multiply_float32(other, factor)", "pass"),
    (LOGITS, "= int64(cuda.blockIdx.x) * columns, num_rows", "= int64(0), num_rows"),
    (ADDED, "first_tile = (warp & (strands - 1)) * strand_tiles", "first_tile = int64(0)"),
    (ADDED, "first_input += 8 * quad", "pass"),
    (ADDED, "first_output + 8 * (v % 2) + group", "first_output + group"),
    (NORMED, "norm_at[0] = first_input", "norm_at[0] = int64(8 * quad)"),
    (NORMED, "first_row + 8 * c + group, end_row", "first_row + group, end_row"),
    (NORMED, "squares[c] = multiply_add(first, first, squares[c])", "pass"),
    (NORMED, "first = multiply_float32(first, low(by))", "pass"),
    (NORMED, "by = norm_ring[tile, j]", "by = norm_ring[tile, 0]"),
    (NORMED, "word = pack(first, second)", "word = pack(second, first)"),
    (ADDED, "weight_ring[v + 1, j],", "weight_ring[v, j],"),
    (ADDED, "weight_ring[v, j + 1],", "weight_ring[v, j],"),
    (ADDED, "b = (scaled[j], scaled[j + 1])", "b = (scaled[j + 1], scaled[j])"),
    (LOGITS, "multiply_tiles(total, t * column_tiles + c, a, b)", "multiply_tiles(total, c, a, b)"),
    (LOGITS, "v = tile * num_vectors + 2 * t", "v = tile * num_vectors"),
    (ADDED, "+ j % 2 * row_step", ""),
    (LOGITS, "+ 4 * c * pair_pitch", ""),
    (GATED, "at += tile_step * t", "at += 16 * t"),
    (GATED, "+ column % 2 * row_step", ""),
    (ADDED, "+ 8 * (j // 2)", ""),
    (NORMED, "row_squares, 1)", "row_squares, 0)"),
    (NORMED, "warp * columns + 8 * c + group)] = ", "warp * columns + group)] = "),
    (ADDED, "value = add_float32(value, strand_sums[uint32(sum_at)])", "pass"),
    (NORMED, "square = add_float32(square, strand_squares[uint32(square_at)])", "pass"),
    (NORMED, "square_at = int32(square_at + columns)\n                    value", "value"),
    (NORMED, "value = multiply_float32(value, factor)", "pass"),
    (GATED, "gated(value, other)", "value * other"),
    (GATED, "gated(value, other)", "gated(other, value)"),
    (ADDED, "at = out_row * out_width + output", "at = out_row * num_outputs + output"),
    (LOGITS, "range(0, panel_items, 32 * WARPS)", "range(0, 32 * WARPS, 32 * WARPS)"),
    # Registers hold anything: without a tile, x must be zeros and all else finite.
    (NORMED, "clear(weight_ring, tile * num_vectors, num_vectors)",
     "weight_ring[tile * num_vectors, 0] = uint32(0x7FFF7FFF)"),
    (NORMED, "clear(norm_ring, tile, 1)", "norm_ring[tile, 0] = uint32(0x7FFF7FFF)"),
    (NORMED, "clear(input_ring, tile * column_tiles, column_tiles)\n                if",
     "input_ring[tile * column_tiles, 0] = uint32(0x3F803F80)\n                if"),
]  # fmt: skip
TURNS = [
    (NORMED, "int32(tiles_left - ring)", "int32(tiles_left - 2 * ring)"),
    (ADDED, "weights_at[v] += ring * TILE_INPUTS", "pass"),
    (GATED, "norm_at[0] + ahead * TILE_INPUTS", "norm_at[0]"),
    (ADDED, "if ahead < tiles_left:", "if False:"),
]
MORE_TURNS = [
    (ADDED, "inputs_at[c] += ring * TILE_INPUTS", "pass"),
    (NORMED, "norm_at[0] += ring * TILE_INPUTS", "pass"),
    (ADDED, "ahead = tile + ring", "ahead = tile + ring + 1"),
    (ADDED, "ask(weight_ring, tile * num_vectors, weights, weights_at, ahead)",
     "pass"),
    (ADDED, "ask_for_inputs(input_ring, tile * column_tiles, x, inputs_at, ahead)", "pass"),
    (ADDED, "clear(input_ring, tile * column_tiles, column_tiles)\n            tiles_left",
     "pass\n            tiles_left"),
]  # fmt: skip
PANELS = [
    (GATED, "output += panel_outputs", "pass"),
    (ADDED, "panel = int32(panel + strands)", "panel = int32(WARPS)"),
]
MORE_PANELS = [
    (ADDED, "output = first_panel * panel_outputs + item", "output = item"),
    (ADDED, "(first_panel + (warp >> strand_bits))", "first_panel"),
    (ADDED, "first_panel = int64(cuda.blockIdx.y) * (WARPS >> strand_bits)",
     "first_panel = int64(cuda.blockIdx.y)"),
    (ADDED, "sum_at = int32(sum_at + warp_sums)\n                square_at", "square_at"),
]  # fmt: skip
"""Those called `MORE_…` are noticed by the same comparison as the others: `make test-slow` does
them, and `make test` sees that they are pieces of the source still."""

KEPT = [
    *((narrow_case, *one) for one in IN_A_PANEL),
    *((long_case, *one) for one in TURNS),
    *((wide_case, *one) for one in PANELS),
]
MORE = [
    *((narrow_case, *one) for one in MORE_IN_A_PANEL),
    *((long_case, *one) for one in MORE_TURNS),
    *((wide_case, *one) for one in MORE_PANELS),
]


def test_every_breakage_is_of_a_piece_of_the_source():
    for _, variant, old, _ in [*KEPT, *MORE]:
        assert SOURCES[variant].count(old) == 1, old


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("make", "variant", "old", "new"),
    [*KEPT, *(pytest.param(*one, marks=pytest.mark.slow) for one in MORE)],
    ids=lambda value: value[:28] if isinstance(value, str) else "",
)
def test_a_broken_product_is_noticed(make, variant, old, new):
    assert is_noticed(make(variant), SOURCES[variant].with_replaced(old, new))


def is_noticed(case: Case, kernels: dict[str, Kernel]) -> bool:
    """Return whether broken kernels fault or give a wrong answer."""
    try:
        outputs = simulate(case, kernels=kernels)
    except Fault:
        return True
    return bool(case.faults(outputs))
