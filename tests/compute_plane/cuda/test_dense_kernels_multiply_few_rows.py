"""Which products with dense weights the kernels take, in how many parts, and what they give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute_plane.cuda.dense_kernels import MOST_ROWS, DenseKernels, num_product_parts
from compute_plane.cuda.operands import Around
from compute_plane.cuda.reference_operations import ReferenceOperations
from kernels.cuda.dense_matmul import columns_of, normalises
from tests.compute_plane.cuda.noted_products import EPS, FEATURES, SIZE, VOCAB, drawn
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.executor.tiny_llama import tiny_spec

SPEC = replace(
    tiny_spec(), hidden_size=SIZE, intermediate_size=FEATURES, vocab_size=VOCAB, num_heads=2,
    num_kv_heads=1, head_dim=16,
)  # fmt: skip


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "num_parts"),
    [
        (17, 4096, 4096, 2), (32, 4096, 4096, 2), (33, 4096, 4096, 1), (32, 4096, 14336, 2),
        (64, 4096, 14336, 4), (65, 4096, 14336, 1), (32, 2048, 2048, 2), (64, 2048, 2048, 1),
        (64, 2048, 8192, 4), (32, 576, 1536, 1), (32, 16384, 4096, 1), (64, 8192, 28672, 2),
    ],
)  # fmt: skip
def test_products_are_split_where_their_outputs_leave_room_on_the_device(
    num_rows, num_outputs, num_inputs, num_parts
):
    assert num_product_parts(num_rows, num_outputs, num_inputs, 132) == num_parts


def test_kernels_of_a_model_that_normalises_what_it_adds_neither_add_nor_normalise():
    spec = replace(SPEC, architecture="gemma3")
    kernels = DenseKernels(SimulatedLauncher(runs=False), spec, "bfloat16")

    assert normalises("bfloat16", SIZE, SIZE)  # other models' products of this size do
    assert not kernels.normalises(torch.empty(SIZE, SIZE))
    assert {variant.writes for variant in kernels.variants} == {"rounded", "gated", "float32"}
    assert not any(variant.normalises for variant in kernels.variants)
    assert {v.activation for v in kernels.variants if v.gates} == {"gelu"}


def run_products(kernels: DenseKernels, dtype: torch.dtype, num_rows: int, tolerance: float):
    """Compare every product of a model of so many rows with the reference's."""
    for writes, num_outputs, num_inputs in (
        ("rounded", 2 * SIZE, SIZE), ("added", SIZE, FEATURES), ("gated", FEATURES, SIZE),
        ("float32", VOCAB, SIZE),
    ):  # fmt: skip
        x, norm = drawn(num_rows, num_inputs, dtype=dtype), None
        weight = drawn(num_outputs * (2 if writes == "gated" else 1), num_inputs, dtype=dtype) / 8
        if kernels.normalises(weight) and writes != "added":
            norm = drawn(num_inputs, dtype=dtype)
        out_dtype = torch.float32 if writes == "float32" else dtype
        found = drawn(num_rows, num_outputs, dtype=out_dtype)
        expected, around = found.clone(), Around(norm, EPS, writes)
        assert kernels.takes(num_rows, weight)
        kernels.matmul(found, x, weight, around)
        ReferenceOperations().dense_matmul(expected, x, weight, around)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("dtype", "num_rows", "tolerance"),
    [
        (torch.bfloat16, 3, 0.06),
        pytest.param(torch.float16, 3, 0.006, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 11, 0.06, marks=pytest.mark.slow),
        pytest.param(torch.float16, 11, 0.006, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_what_the_reference_gives_for_every_product(dtype, num_rows, tolerance):
    launcher = SimulatedLauncher()
    kernels = DenseKernels(launcher, SPEC, str(dtype).removeprefix("torch."))
    launcher.prepare(kernels.variants)

    run_products(kernels, dtype, num_rows, tolerance)

    columns = columns_of(num_rows)
    wanted = {one.name for one in kernels.variants if one.columns == columns}
    assert {name for name, _ in launcher.launched} == wanted


def test_there_are_kernels_for_two_sixteen_bit_types_and_for_whole_tiles():
    weight = torch.zeros(VOCAB, SIZE)
    kernels = DenseKernels(SimulatedLauncher(), SPEC, "bfloat16")
    assert kernels.takes(MOST_ROWS, weight)
    assert not kernels.takes(MOST_ROWS + 1, weight)
    assert not kernels.takes(1, torch.zeros(VOCAB, SIZE + 8))
    for none in (
        DenseKernels(SimulatedLauncher(), SPEC, "float32"),
        DenseKernels(SimulatedLauncher(), SPEC, "bfloat16", is_dense=False),
    ):
        assert none.variants == []
        assert not none.takes(1, weight)


def test_a_large_matrix_has_its_norm_before_it_and_a_small_one_in_its_product():
    """In between is what was measured on an H200."""
    for rows, inputs, is_normed in ((3072, 2048, True), (6144, 4096, True), (16384, 2048, False)):
        assert normalises("bfloat16", rows, inputs) is is_normed
        assert not normalises("float16", rows, inputs)
    spec = replace(SPEC, hidden_size=2048, intermediate_size=8192, num_heads=32, num_kv_heads=8,
                   head_dim=64, vocab_size=128256)  # fmt: skip
    kernels = DenseKernels(SimulatedLauncher(), spec, "bfloat16")
    normed = {one.writes: one.normalises for one in kernels.variants if one.columns == 8}
    assert normed == {"rounded": True, "added": False, "gated": False, "float32": False}
    assert not kernels.normalises(torch.empty((2 * 8192, 2048), device="meta"))
    assert kernels.normalises(torch.empty((3072, 2048), device="meta"))
