"""Others' prefill attention on the same rows: torch's two, and FlashInfer where it is installed.

A rival is made from a `prefill_speed.Problem` and gives what queues the attention of all rows once
and returns it, as [S, H, query tokens, D] or [T, H, D]. What a library needs beforehand is not in
the time. Any exception says that the rival cannot be had here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeAlias

from bench.gpu.device import compiled

Problem: TypeAlias = Any  # prefill_speed.Problem, which imports this module
Tensor: TypeAlias = Any
Rival: TypeAlias = Callable[[Problem], Callable[[], Tensor]]

FLASHINFER_WORKSPACE_BYTES = 128 * 2**20


def torch_sdpa(problem: Problem) -> Callable[[], Tensor]:
    """torch's scaled_dot_product_attention, keys and values repeated for each query head."""
    import torch
    from torch.nn.attention.bias import causal_lower_right

    shape = problem.shape
    query = problem.queries_by_row()
    keys, values = (x.repeat_interleave(shape.variant.group, 1) for x in problem.gathered())
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if shape.context == 0:
        return lambda: sdpa(query, keys, values, is_causal=True, scale=problem.scale)
    bias = causal_lower_right(shape.query_len, shape.seq_len)
    return lambda: sdpa(query, keys, values, attn_mask=bias, scale=problem.scale)


def torch_flex(problem: Problem) -> Callable[[], Tensor]:
    """torch's flex_attention, compiled, on keys and values gathered beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = problem.query.device
    if device.type != "cuda":
        raise RuntimeError("compiled for CUDA devices only")
    context = problem.shape.context

    def is_visible(_row: Tensor, _head: Tensor, token: Tensor, key: Tensor) -> Tensor:
        return token + context >= key

    mask = create_block_mask(
        is_visible, None, None, problem.shape.query_len, problem.shape.seq_len, str(device)
    )
    attend = compiled(flex_attention)
    query, (keys, values) = problem.queries_by_row(), problem.gathered()
    return lambda: attend(
        query, keys, values, block_mask=mask, scale=problem.scale, enable_gqa=True
    )


def flashinfer(problem: Problem) -> Callable[[], Tensor]:
    """FlashInfer's paged batch prefill, on the pool itself."""
    import torch

    library = importlib.import_module("flashinfer")
    shape, variant = problem.shape, problem.shape.variant
    device, dtype = problem.query.device, problem.query.dtype
    workspace = torch.empty(FLASHINFER_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    rows = torch.arange(shape.rows + 1, dtype=torch.int32, device=device)
    in_last_block = torch.full_like(problem.seq_lens, (shape.seq_len - 1) % variant.block_size + 1)
    wrapper.plan(
        problem.cu_query_lens, rows * problem.blocks_of_row, problem.tables.flatten(),
        in_last_block, shape.num_heads, shape.num_kv_heads, variant.head_size, variant.block_size,
        causal=True, sm_scale=problem.scale, q_data_type=dtype, kv_data_type=dtype,
    )  # fmt: skip
    pool = problem.pool[:, 0]  # [N, K|V, G, B, D]
    return lambda: wrapper.run(problem.query, pool)


RIVALS: dict[str, Rival] = {
    "torch_sdpa": torch_sdpa,
    "torch_flex": torch_flex,
    "flashinfer": flashinfer,
}
