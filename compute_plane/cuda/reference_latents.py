"""Attention over latents on tensors of torch's CPU device, by `kernels.reference`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from compute_plane.cuda.reference_blocks import floats
from kernels.reference.latent_attention import latent_attention, write_latents
from kernels.reference.rms_norm import rms_norm

if TYPE_CHECKING:
    from compute_plane.cuda.latent_operations import LatentNorm
    from compute_plane.cuda.mixers import Turns
    from compute_plane.cuda.operands import PrefillRows

Array = npt.NDArray[Any]


class ReferenceLatents:
    """`LatentOperations` in NumPy; a pool is [N, L, 1, 1, B, R + P]."""

    def norm_queries(self, out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """Normalise rows."""
        normed = np.empty(x.shape, dtype=np.float32)
        rms_norm(np.ascontiguousarray(floats(x)), floats(weight), eps, normed)
        out.copy_(torch.from_numpy(normed))

    def write(
        self,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        inputs: Tensor,
        turning: Tensor,
        turns: Turns,
        kv_slots: Tensor,
        own: LatentNorm,
    ) -> None:
        """Write rows and queries; by way of a pool of one layer and B = 1."""
        num_tokens, size = inputs.shape
        angles, positions = turns
        cosines, sines = (table.numpy()[positions.numpy()] for table in angles)
        written = np.empty((num_tokens, 1, 1, size), dtype=np.float32)
        turned = np.zeros(queries.shape, dtype=np.float32)
        places = np.arange(num_tokens, dtype=np.int64)
        write_latents(
            floats(inputs), floats(turning), cosines, sines, floats(own.weight), own.eps,
            written, 0, places, turned,
        )  # fmt: skip
        rank = len(own.weight)
        queries[:, :, rank:] = torch.from_numpy(turned[:, :, rank:]).to(queries.dtype)
        is_kept = kv_slots >= 0
        slots, block_size = kv_slots[is_kept], pool.shape[4]
        rows = torch.from_numpy(written[is_kept.numpy(), 0, 0]).to(pool.dtype)
        pool[slots // block_size, layer, 0, 0, slots % block_size] = rows

    def attention_decode(
        self,
        out: Tensor,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        longest: int,
        scale: float,
    ) -> None:
        """Attend with one token a row."""
        lengths = seq_lens.numpy()
        if int(lengths.max(initial=0)) > longest:
            raise ValueError(f"a row has {lengths.max()} tokens, longest is {longest}")
        out.zero_()
        rows = np.flatnonzero(lengths).astype(np.int32)
        _attend(out, queries, pool, layer, block_tables, (rows, rows, lengths[rows] - 1), scale)

    def attention_prefill(
        self,
        out: Tensor,
        queries: Tensor,
        pool: Tensor,
        layer: int,
        rows: PrefillRows,
        scale: float,
    ) -> None:
        """Attend with the last tokens of each row."""
        firsts, lengths = rows.cu_query_lens.numpy(), rows.seq_lens.numpy()
        counts = np.diff(firsts)
        token_rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        tokens = np.arange(len(token_rows), dtype=np.int32)
        positions = tokens - firsts[token_rows] + (lengths - counts)[token_rows]
        places = tokens, token_rows, positions
        _attend(out, queries, pool, layer, rows.block_tables, places, scale)


def _attend(
    out: Tensor,
    queries: Tensor,
    pool: Tensor,
    layer: int,
    block_tables: Tensor,
    places: tuple[Array, Array, Array],
    scale: float,
) -> None:
    """Attend with some tokens. `places`: which, their rows and their positions.

    The blocks that are read become a pool of one layer in float32: all of it would be too much.
    """
    tokens, rows, positions = places
    if not len(tokens):
        return
    tables = block_tables.numpy()
    ends = np.zeros(len(tables), dtype=np.int64)
    np.maximum.at(ends, rows, positions // pool.shape[4] + 1)
    is_read = np.arange(tables.shape[1]) < ends[:, None]
    blocks, numbers = np.unique(tables[is_read], return_inverse=True)
    of_few = np.zeros(tables.shape, dtype=np.int32)
    of_few[is_read] = numbers
    few = floats(pool[torch.from_numpy(blocks).long(), layer, 0])
    index = torch.from_numpy(tokens).long()
    given = np.empty((len(tokens), *out.shape[1:]), dtype=np.float32)
    latent_attention(floats(queries[index]), few, 0, of_few, rows, positions, scale, given)
    out[index] = torch.from_numpy(given).to(out.dtype)
