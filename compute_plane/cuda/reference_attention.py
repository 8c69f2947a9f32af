"""Paged attention on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compute_plane.cuda.operands import PLAIN, LayerAttention
from compute_plane.cuda.reference_blocks import block_size_of, floats, read_blocks
from kernels.reference.paged_attention import paged_attention

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Queries:
    """Which tokens attend to what: [T] each.

    `tokens`: of the query. `rows`: theirs. Each sees the positions up to its own, or with a
    `window` the last of them.
    """

    tokens: Array
    rows: Array
    positions: Array
    window: int | None

    def are_read(self, block_tables: Array, block_size: int) -> Array:
        """Return which entries of the tables [S, M] are blocks that some token sees."""
        firsts = np.zeros_like(self.positions)
        if self.window is not None:
            firsts = np.maximum(self.positions + 1 - self.window, 0)
        num_rows, width = block_tables.shape
        first_blocks = np.full(num_rows, width, dtype=np.int64)
        end_blocks = np.zeros(num_rows, dtype=np.int64)
        np.minimum.at(first_blocks, self.rows, firsts // block_size)
        np.maximum.at(end_blocks, self.rows, self.positions // block_size + 1)
        places = np.arange(width)
        return (places >= first_blocks[:, None]) & (places < end_blocks[:, None])


def attend(
    out: Tensor,
    query: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Array,
    queries: Queries,
    own: LayerAttention = PLAIN,
) -> None:
    """Attend with some tokens of `query`. `own`: what the layer has; its window is in `queries`.

    The blocks that are read become a pool of one layer in float32, and tables of their numbers
    there: a converted copy of the whole pool would be too much.
    """
    tokens = queries.tokens
    if not len(tokens):
        return
    num_kv_heads, head_dim = pool.shape[3], query.shape[2]
    is_read = queries.are_read(block_tables, block_size_of(pool, head_dim))
    blocks, numbers = np.unique(block_tables[is_read], return_inverse=True)
    tables = np.zeros(block_tables.shape, dtype=np.int32)
    tables[is_read] = numbers
    few = read_blocks(pool, layer, blocks, head_dim)
    attended = np.empty((len(tokens), *query.shape[1:]), dtype=np.float32)
    index = torch.from_numpy(tokens).long()
    paged_attention(
        floats(query[index]),
        few,
        0,
        tables,
        queries.rows,
        queries.positions.astype(np.int32),
        1 / math.sqrt(head_dim),
        0,
        len(tokens) * num_kv_heads,
        attended,
        queries.window,
        None if own.sinks is None else own.sinks.numpy(),
        own.cap,
    )
    out[index] = torch.from_numpy(attended).to(out.dtype)
