"""Attention over latents, one of the `mixers`.

    norm → latents, (first queries → norm →) queries
         → each head's N elements · its keys → queries' R elements
         → latents normalised, what turns rotated, rows written
         → attention → each head's R elements · its values

Letters: `compute_plane.model.latents`. The products of heads are torch's batched ones, on matrices
that are not quantised: all heads' are a few hundredths of a layer's weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.latent_operations import LatentNorm

if TYPE_CHECKING:
    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.layer_products import Hidden, LayerProducts
    from compute_plane.cuda.mixers import LayerStep
    from compute_plane.cuda.weights import DeviceLatents
    from compute_plane.model.latents import Latents


class LatentMixer:
    """Attention of the layer that is `number` among those of `pool`. `eps`: of norms."""

    def __init__(
        self,
        products: LayerProducts,
        of: Latents,
        weights: DeviceLatents,
        pool: Tensor,
        number: int,
        eps: float,
    ) -> None:
        self._products = products
        self._of = of
        self._weights = weights
        self._pool = pool
        self._number = number
        self._eps = eps

    def run(self, hidden: Hidden, norm: Tensor | None, given: LayerStep) -> tuple[Tensor, ...]:
        """Queue it; return what heads give side by side, [R, H·V]."""
        of, weights, step = self._of, self._weights, given.step
        operations = self._products.operations
        made, inputs = self._made(hidden, norm)
        num_heads, rank, plain = len(weights.keys), of.rank, of.plain
        made = made.view(len(made), num_heads, of.head_size)
        queries = made.new_empty((len(made), num_heads, of.row_size))
        _by_heads(queries[:, :, :rank], made[:, :, :plain], weights.keys)
        operations.latents.write(
            queries, self._pool, self._number, inputs, made[:, :, plain:], given.turns,
            step.kv_slots, LatentNorm(weights.latent_norm, self._eps),
        )  # fmt: skip
        queries = given.going_on(queries)
        attended = self._attended(queries, step if given.late is None else given.late.step)
        out = made.new_empty((len(attended), num_heads, of.value_size))
        _by_heads(out, attended, weights.values)
        return (out.view(len(out), num_heads * of.value_size),)

    def _made(self, hidden: Hidden, norm: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return queries as their product gives them, and latents, [T, H·(N + P)], [T, R + P]."""
        products, weights = self._products, self._weights
        if weights.first_queries is None or weights.query_norm is None:
            return products.both_normed(hidden, norm, weights.queries, weights.latents)
        first, inputs = products.both_normed(hidden, norm, weights.first_queries, weights.latents)
        normed = torch.empty_like(first)
        products.operations.latents.norm_queries(normed, first, weights.query_norm, self._eps)
        return products.product(normed, weights.queries), inputs

    def _attended(self, queries: Tensor, step: StepTensors) -> Tensor:
        """Attend; [T, H, R]."""
        pool, number, scale = self._pool, self._number, self._of.score_scale
        latents, num_decode = self._products.operations.latents, step.num_decode
        attended = queries.new_empty((*queries.shape[:2], self._of.rank))
        if num_decode:
            latents.attention_decode(
                attended[:num_decode], queries[:num_decode], pool, number, step.decode_tables,
                step.decode_lens, step.longest, scale,
            )  # fmt: skip
        if step.prefill is not None:
            latents.attention_prefill(
                attended[num_decode:], queries[num_decode:], pool, number, step.prefill, scale
            )
        return attended


def _by_heads(out: Tensor, x: Tensor, weights: Tensor) -> None:
    """Write x[t, h] · Wᵀ of head h; `out`: [T, H, N], `x`: [T, H, K], `weights`: [H, N, K]."""
    torch.bmm(x.transpose(0, 1), weights.transpose(1, 2), out=out.transpose(0, 1))
