"""Which kernels multiply few rows in models with latents: all that there are, and no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compute_plane.cuda import matrices
from compute_plane.cuda.dense_kernels import DenseKernels
from compute_plane.cuda.layer_products import LayerProducts
from compute_plane.cuda.matrices import DenseMatrix, Projection
from compute_plane.cuda.operands import Around
from compute_plane.cuda.reference_operations import ReferenceOperations
from compute_plane.cuda.weights import DTYPES
from kernels.cuda.dense_matmul import COLUMNS
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.steps_on_kernels import BLOCK_SIZE, NUM_BLOCKS, operations_on
from tests.compute_plane.cuda.test_latent_models_run_on_kernels import FORMATS, LATENTS, SPEC
from tests.compute_plane.cuda.torch_executors import RecordingDriver, torch_executor

QUERIES = SPEC.num_heads * LATENTS.head_size


@pytest.mark.parametrize("formats", FORMATS)
@pytest.mark.parametrize("query_rank", [0, LATENTS.query_rank])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_make_all_products_of_few_rows_and_no_other_is_prepared(
    dtype: str, query_rank: int, formats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of queries with the latent that they are made of, too."""
    for name in ("dense_product", "write_product"):
        monkeypatch.setattr(matrices, name, None)  # cannot be called
    spec = replace(SPEC, latents=replace(LATENTS, query_rank=query_rank))
    launcher, stored = SimulatedLauncher(runs=False), FORMATS[formats]
    made = torch_executor(
        spec, RecordingDriver(), dtype=DTYPES[dtype], num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE,
        operations=operations_on(launcher, spec, stored, dtype), formats=stored,
    )  # fmt: skip
    for num_rows in COLUMNS:
        made.capture_decode_graph(num_rows)

    launched = [name for name, _ in launcher.launched if "matmul" in name]
    of_layer = 6 if query_rank else 5
    assert len(launched) == len(COLUMNS) * (of_layer * spec.num_layers + 1)
    prepared = {name for name in launcher.prepared if name.startswith("dense")}
    assert prepared == {name for name in launched if name.startswith("dense")}
    assert bool(prepared) == (formats == "dense")


@pytest.mark.parametrize(
    ("query_rank", "expected"), [(0, {True}), (64, {False}), (QUERIES, {True, False})]
)
def test_queries_are_normalised_by_their_product_where_they_are_made_of_hidden_states(
    query_rank: int, expected: set[bool]
) -> None:
    """And where a latent has as many elements as queries, there are both products."""
    spec = replace(SPEC, latents=replace(LATENTS, query_rank=query_rank))
    launcher = SimulatedLauncher(runs=False)
    kernels = DenseKernels(launcher, spec, "bfloat16")
    launcher.prepare(kernels.variants)
    assert {normed for _, size, normed in kernels._products if size == QUERIES} == expected
    for num_rows, columns in ((1, 8), (8, 8), (9, 16), (16, 16)):
        x = torch.zeros((num_rows, 64), dtype=torch.bfloat16)
        out, weight = x.new_empty((num_rows, QUERIES)), x.new_zeros((QUERIES, 64))
        for is_normed in expected:
            kernels.matmul(out, x, weight, Around(weight[0] if is_normed else None, 1e-6))
            name, _ = launcher.launched[-1]
            assert name.startswith("dense_matmul_" + ("normed_" if is_normed else "rounded_"))
            assert f"_m{columns}_" in name


@pytest.mark.parametrize("num_rows", [COLUMNS[-1], COLUMNS[-1] + 1])
def test_rows_of_another_kind_are_multiplied_as_they_are(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a kernel if they are few, otherwise by the library."""
    operations = ReferenceOperations()
    weight = torch.randn((48, 32), generator=torch.Generator().manual_seed(1))
    x = torch.randn((num_rows, 32), generator=torch.Generator().manual_seed(2))
    by_kernel: list[Around] = []
    multiply = operations.dense_matmul

    def note(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, around: Around) -> None:
        by_kernel.append(around)
        multiply(out, x, weight, around)

    monkeypatch.setattr(operations, "dense_matmul", note)
    found = LayerProducts(operations, 1e-6).product(x, Projection((DenseMatrix(weight),)))
    torch.testing.assert_close(found, x @ weight.t())
    assert by_kernel == ([Around()] if num_rows == COLUMNS[-1] else [])
