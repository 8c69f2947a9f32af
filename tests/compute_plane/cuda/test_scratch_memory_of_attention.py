"""What decode attention takes beside its tensors is no more than the operations say before."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compute_plane.cuda.kernel_operations import KernelOperations
from compute_plane.model.spec import ModelSpec
from kernels.cuda.variant import Variant
from tests.compute_plane.cuda.simulated_launcher import SimulatedLauncher
from tests.compute_plane.cuda.test_latent_models_run_on_kernels import LATENTS, SPEC
from tests.compute_plane.executor.tiny_llama import tiny_spec

BLOCK_SIZE, LONGEST = 16, 100_000
HEADS = replace(tiny_spec(), num_heads=8, num_kv_heads=2, head_dim=64)
DEEPSEEK = replace(
    SPEC, num_heads=128, latents=replace(LATENTS, rank=512, turning=64), head_dim=576, rotary_dim=64
)
PARTIALS = 5
"""Of the arguments of both kernels."""


class NotesPartials(SimulatedLauncher):
    """Notes how many bytes a launch of decode attention has for partial results."""

    def __init__(self, num_multiprocessors: int) -> None:
        super().__init__(runs=False)
        self.num_multiprocessors = num_multiprocessors
        self.num_bytes: list[int] = []

    def launch(
        self, variant: Variant, grid: tuple[int, int, int], *arguments: Tensor | float
    ) -> None:
        super().launch(variant, grid, *arguments)
        partials = arguments[PARTIALS]
        assert isinstance(partials, Tensor)
        assert partials.dtype == torch.float32
        self.num_bytes.append(partials.nbytes)


@pytest.mark.parametrize("spec", [HEADS, SPEC, DEEPSEEK], ids=["heads", "latents", "128"])
@pytest.mark.parametrize("num_multiprocessors", [16, 132])
def test_decode_attention_takes_no_more_scratch_memory_than_is_said(
    spec: ModelSpec, num_multiprocessors: int
) -> None:
    launcher = NotesPartials(num_multiprocessors)
    operations = KernelOperations(launcher, spec, "bfloat16", BLOCK_SIZE)
    size, num_kv_heads = spec.head_dim, spec.num_kv_heads
    kinds = 1 if spec.latents else 2
    pool = torch.zeros((1, 1, kinds, num_kv_heads, BLOCK_SIZE, size), dtype=torch.bfloat16)
    most = operations.decode_scratch_bytes(200, LONGEST)
    for length in (50, 3000, LONGEST):
        for num_rows in (1, 4, 7, 13, 25, 40, 90, 200):
            queries = torch.zeros((num_rows, spec.num_heads, size), dtype=torch.bfloat16)
            tables = torch.zeros((num_rows, 1), dtype=torch.int32)
            given = torch.empty_like(queries), queries, pool, 0, tables, tables[:, 0], length
            if spec.latents is None:
                operations.attention_decode(*given)
            else:
                operations.latents.attention_decode(*given, 1.0)
            assert launcher.num_bytes[-1] <= operations.decode_scratch_bytes(num_rows, length)
            assert launcher.num_bytes[-1] <= most
    assert 2 * max(launcher.num_bytes) >= most


def test_where_all_layers_have_windows_scratch_memory_is_of_those() -> None:
    said = []
    for layers in (set(), {0}, set(range(HEADS.num_layers))):
        spec = replace(HEADS, window=1024, layers_with_window=frozenset(layers))
        operations = KernelOperations(SimulatedLauncher(runs=False), spec, "bfloat16", BLOCK_SIZE)
        said.append([operations.decode_scratch_bytes(20, length) for length in (500, LONGEST)])
    none, some, every = said
    assert none == some
    assert every[0] == none[0]
    assert 4 * every[1] < none[1]
