"""What layers with attention over latents have, and how it lies in each kind of file.

Letters: `compute_plane.model.latents`; H heads. Canonical names are those of Hugging Face
checkpoints, but that keys and values are two matrices, as in GGUF files.

    canonical, model.layers.N.self_attn.…   GGUF, blk.N.…          shape
    q_proj.weight                           attn_q.weight          [H·(N+P), hidden]   or
      q_a_proj.weight                       attn_q_a.weight        [query rank, hidden]
      q_a_layernorm.weight                  attn_q_a_norm.weight   [query rank]
      q_b_proj.weight                       attn_q_b.weight        [H·(N+P), query rank]
    kv_a_proj_with_mqa.weight               attn_kv_a_mqa.weight   [R+P, hidden]
    kv_a_layernorm.weight                   attn_kv_a_norm.weight  [R]
    k_b_proj.weight                         attn_k_b.weight        [H·R, N], there [H, R, N]
    v_b_proj.weight                         attn_v_b.weight        [H·V, R], there [H, V, R]
    o_proj.weight                           attn_output.weight     [hidden, H·V]

Directories and older GGUF files have the last but one two in one, of each head N rows that a key is
made by, the transpose of k_b_proj, and V that a value is made by:

    kv_b_proj.weight                        attn_kv_b.weight       [H·(N+V), R]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from compute_plane.model.latents import Latents
from compute_plane.model.tensor import IntArray
from compute_plane.model.tensor_parts import RowRuns, RowsOfPart
from compute_plane.model.turned_heads import TurnedHeads

QUERY: Final = "self_attn.q_proj"
QUERY_FIRST: Final = "self_attn.q_a_proj"
QUERY_NORM: Final = "self_attn.q_a_layernorm"
QUERY_SECOND: Final = "self_attn.q_b_proj"
LATENT: Final = "self_attn.kv_a_proj_with_mqa"
LATENT_NORM: Final = "self_attn.kv_a_layernorm"
KEYS: Final = "self_attn.k_b_proj"
VALUES: Final = "self_attn.v_b_proj"
_BOTH: Final = "self_attn.kv_b_proj"

GGUF_NAMES: Final = {
    QUERY_FIRST: "attn_q_a",
    QUERY_NORM: "attn_q_a_norm",
    QUERY_SECOND: "attn_q_b",
    LATENT: "attn_kv_a_mqa",
    LATENT_NORM: "attn_kv_a_norm",
    KEYS: "attn_k_b",
    VALUES: "attn_v_b",
    _BOTH: "attn_kv_b",
}


def latent_shapes(of: Latents, num_heads: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the roles of a layer's matrices and norms but for its output, and their shapes."""
    queries = num_heads * of.head_size
    shapes: dict[str, tuple[int, ...]] = {QUERY: (queries, hidden_size)}
    if of.query_rank:
        shapes = {
            QUERY_FIRST: (of.query_rank, hidden_size),
            QUERY_NORM: (of.query_rank,),
            QUERY_SECOND: (queries, of.query_rank),
        }
    return shapes | {
        LATENT: (of.row_size, hidden_size),
        LATENT_NORM: (of.rank,),
        KEYS: (num_heads * of.rank, of.plain),
        VALUES: (num_heads * of.value_size, of.rank),
    }


def stored_latents(of: Latents, num_heads: int) -> Iterator[tuple[str, RowsOfPart | TurnedHeads]]:
    """Yield the tensors of a layer that files hold in others, by name in the layer."""
    rank, plain, size = of.rank, of.plain, of.value_size
    if not of.joins_keys_values:
        for role, rows, columns in ((KEYS, rank, plain), (VALUES, size, rank)):
            whole = (RowRuns(0, num_heads * rows),)
            yield (
                f"{role}.weight",
                RowsOfPart(f"{role}.weight", whole, (num_heads, rows, columns)),
            )
        return
    step = plain + size
    shape = num_heads * step, rank
    yield f"{KEYS}.weight", TurnedHeads(f"{_BOTH}.weight", shape, num_heads, plain)
    runs = RowRuns(plain, size, step, num_heads)
    yield f"{VALUES}.weight", RowsOfPart(f"{_BOTH}.weight", (runs,), shape)


def latent_orders(of: Latents) -> dict[str, IntArray]:
    """Return the order of rows in a head where neighbours turn (`RawTensor.head_order`), by role.

    The model turns element i of those that turn with element i + P/2, files 2i with 2i + 1. They
    are the last of a query head, and behind the latent.
    """
    pairs = np.arange(of.turning).reshape(-1, 2).T.reshape(-1)

    def behind(size: int) -> IntArray:
        return np.concatenate([np.arange(size), size + pairs])

    queries = QUERY_SECOND if of.query_rank else QUERY
    return {queries: behind(of.plain), LATENT: behind(of.rank)}
