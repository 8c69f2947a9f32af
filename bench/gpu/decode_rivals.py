"""Others' decode attention on the same rows: torch's two, and FlashInfer where it is installed.

A rival is made from a `decode_bandwidth.Problem` and gives what queues the attention of every layer
once, and the bytes of keys and values that this reads. What a library needs beforehand is not in
the time. Any exception says that the rival cannot be had here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

from bench.gpu.device import compiled

Problem: TypeAlias = Any  # decode_bandwidth.Problem, which imports this module
Tensor: TypeAlias = Any
Rival: TypeAlias = Callable[[Problem], tuple[Callable[[], None], int]]

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20


def torch_sdpa(problem: Problem) -> tuple[Callable[[], None], int]:
    """torch's scaled_dot_product_attention on keys and values gathered beforehand."""
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    layers, num_bytes = _gather_equal_rows(problem)
    query = problem.query[:, :, None]

    def visit_layers() -> None:
        for keys, values in layers:
            sdpa(query, keys, values, scale=problem.scale, enable_gqa=True)

    return visit_layers, num_bytes


def torch_flex(problem: Problem) -> tuple[Callable[[], None], int]:
    """torch's flex_attention, compiled, on keys and values gathered beforehand."""
    from torch.nn.attention.flex_attention import flex_attention

    if problem.query.device.type != "cuda":
        raise RuntimeError("compiled for CUDA devices only")
    attend = compiled(flex_attention)
    layers, num_bytes = _gather_equal_rows(problem)
    query = problem.query[:, :, None]

    def visit_layers() -> None:
        for keys, values in layers:
            attend(query, keys, values, scale=problem.scale, enable_gqa=True)

    return visit_layers, num_bytes


def flashinfer(problem: Problem) -> tuple[Callable[[], None], int]:
    """FlashInfer's paged batch decode, on the pool itself and with all rows' true lengths."""
    import torch

    library = importlib.import_module("flashinfer")
    shape, variant = problem.shape, problem.shape.variant
    device, dtype = problem.query.device, problem.query.dtype
    blocks_of_row = (problem.seq_lens + variant.block_size - 1) // variant.block_size
    first = torch.zeros(shape.rows + 1, dtype=torch.int32, device=device)
    first[1:] = blocks_of_row.cumsum(0)
    blocks = torch.cat(
        [row[:count] for row, count in zip(problem.tables, blocks_of_row.tolist(), strict=True)]
    )
    in_last_block = (problem.seq_lens - 1) % variant.block_size + 1
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=variant.group >= 4
    )
    wrapper.plan(
        first, blocks, in_last_block,
        shape.num_kv_heads * variant.group, shape.num_kv_heads, variant.head_size,
        variant.block_size, q_data_type=dtype, kv_data_type=dtype, sm_scale=problem.scale,
    )  # fmt: skip

    def visit_layers() -> None:
        for layer in range(problem.layers):
            wrapper.run(problem.query, problem.pool[:, layer])

    return visit_layers, problem.bytes_read


RIVALS: dict[str, Rival] = {
    "torch_sdpa": torch_sdpa,
    "torch_flex": torch_flex,
    "flashinfer": flashinfer,
}


def _gather_equal_rows(problem: Problem) -> tuple[list[list[Tensor]], int]:
    """Return keys and values of each layer, [S, G, tokens, D], and their bytes.

    All rows are cut to the shortest, since torch takes one length; the bytes are counted so.
    """
    import torch

    length = int(problem.seq_lens.min())
    layers = []
    for layer in range(problem.layers):
        rows = [problem.gathered(row, layer) for row in range(problem.shape.rows)]
        layers.append(
            [torch.stack([row[i][:, :length] for row in rows]).contiguous() for i in (0, 1)]
        )
    return layers, problem.shape.rows * length * problem.token_bytes * problem.layers
