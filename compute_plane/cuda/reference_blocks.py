"""Keys and values in the blocks of a pool on torch's CPU device, whatever the pool keeps them in.

They go in and come out as float32: what is written is rounded once, to the pool's dtype or, in
eight bits, to the codes and scales of `kernels.reference.quantized_kv`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compute_plane.cuda.block_pools import EIGHT_BITS
from kernels.cuda.quantized_kv import SCALE_BYTES, decode_heads
from kernels.reference.quantized_kv import quantize_rows

Array = npt.NDArray[Any]


def block_size_of(pool: Tensor, head_dim: int) -> int:
    """Return the tokens of a block, B."""
    if pool.dtype in EIGHT_BITS:
        return int(pool.shape[4]) // (head_dim + SCALE_BYTES)
    return int(pool.shape[4])


def write_tokens(pool: Tensor, layer: int, slots: Tensor, keys_values: Array) -> None:
    """Put the keys and values of some tokens into a layer.

    `slots`: int64 [T], block · B + offset. `keys_values`: float32 [T, 2, G, D].
    """
    head_dim = keys_values.shape[-1]
    block_size = block_size_of(pool, head_dim)
    blocks, offsets = slots // block_size, slots % block_size
    if pool.dtype not in EIGHT_BITS:
        pool[blocks, layer, :, :, offsets] = torch.from_numpy(keys_values).to(pool.dtype)
        return
    codes, scales = quantize_rows(EIGHT_BITS[pool.dtype], keys_values)
    heads = pool.view(torch.uint8).numpy()  # [N, L, 2, G, bytes]; what follows are views of it
    end = block_size * head_dim
    at = (blocks.numpy(), layer, slice(None), slice(None), offsets.numpy())
    heads[..., :end].reshape(*heads.shape[:-1], block_size, head_dim)[at] = codes
    of_scales = heads[..., end:].reshape(*heads.shape[:-1], block_size, SCALE_BYTES)
    of_scales[at] = np.ascontiguousarray(scales)[..., None].view(np.uint8)


def read_blocks(pool: Tensor, layer: int, blocks: Array, head_dim: int) -> Array:
    """Return a layer of some blocks [n] as a pool of that one layer, float32 [n, 1, 2, G, B, D]."""
    index = torch.from_numpy(blocks).long(), slice(layer, layer + 1)
    if pool.dtype not in EIGHT_BITS:
        values: Array = pool[index].float().numpy()
        return values
    return decode_heads(EIGHT_BITS[pool.dtype], pool.view(torch.uint8)[index].numpy(), head_dim)


def floats(tensor: Tensor) -> Array:
    """Return a tensor as float32: its own memory if it is float32, else converted."""
    array: Array = tensor.float().numpy()
    return array
