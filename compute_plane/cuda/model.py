"""The walk of a step's tokens through a model.

    embedding → for each layer:  norm → QKV → biases, norms of heads, rotate, write K and V
                                 → attention → O
                                 add, norm → gate, up → SiLU · up → down
              → for the tokens whose logits are wanted:  add, norm → logits

All tokens of the step go through a layer together, so all keys and values of a layer are written
before any is read. Products with dense matrices are torch's, with quantised ones the operations'
(`matrices`); what a row's product gives may depend on how many rows there are, so bits hold for
equal batches only (the numerics id names the library).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.matrices import Projection, project
from compute_plane.cuda.operations import HeadChanges
from compute_plane.model.rope import attention_factor, inverse_frequencies

if TYPE_CHECKING:
    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceLayer, DeviceWeights
    from compute_plane.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Hidden:
    """What the layers leave, [T, E] each: the residual stream is the sum of both."""

    residual: Tensor
    added: Tensor


class LlamaModel:
    """Weights, pool and operations of one device, put together.

    `pool`: of the device, as in `block_pools`. `max_positions`: tokens of the longest sequence
    there can be.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        pool: Tensor,
        operations: DeviceOperations,
        max_positions: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._pool = pool
        self._operations = operations
        self._angles = rotary_angles(spec, max_positions, pool.device)
        self._changes = [
            HeadChanges(layer.qkv_bias, layer.head_norms, spec.rms_norm_eps)
            for layer in weights.layers
        ]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._spec.vocab_size

    def run(self, step: StepTensors) -> Hidden:
        """Queue all layers over the tokens of a step."""
        weights, operations, eps = self._weights, self._operations, self._spec.rms_norm_eps
        num_tokens = step.token_ids.shape[0]
        residual = self._empty(num_tokens, self._spec.hidden_size)
        operations.embedding(residual, weights.embedding, step.token_ids)
        normed = torch.empty_like(residual)
        added: Tensor | None = None
        for index, layer in enumerate(weights.layers):
            if added is None:
                operations.rms_norm(normed, residual, layer.attn_norm, eps)
            else:
                operations.add_rms_norm(normed, residual, added, layer.attn_norm, eps)
            attended = self._attention(index, layer, normed, step)
            operations.add_rms_norm(normed, residual, attended, layer.mlp_norm, eps)
            gate_up = self._project(normed, layer.gate_up)
            gated = self._empty(num_tokens, self._spec.intermediate_size)
            operations.silu_mul(gated, gate_up)
            del gate_up  # its memory serves what follows
            added = self._project(gated, layer.down)
        if added is None:
            raise ValueError("a model has at least one layer")
        return Hidden(residual, added)

    def logits(self, hidden: Hidden, tokens: Tensor | None) -> Tensor:
        """Queue the logits behind some tokens, float32 [R, V].

        `tokens`: [R]; None: all, and `hidden` is used up, for the normalisation adds in place.
        """
        residual, added = hidden.residual, hidden.added
        if tokens is not None:
            residual, added = residual.index_select(0, tokens), added.index_select(0, tokens)
        normed = torch.empty_like(residual)
        weight = self._weights.final_norm
        self._operations.add_rms_norm(normed, residual, added, weight, self._spec.rms_norm_eps)
        # 16-bit logits would tie where the model does not.
        return project(normed, self._weights.lm_head, self._operations, torch.float32)

    def _attention(
        self, index: int, layer: DeviceLayer, normed: Tensor, step: StepTensors
    ) -> Tensor:
        """Queue the attention of a layer; return what it adds, [T, E]."""
        spec, operations, pool = self._spec, self._operations, self._pool
        num_tokens, num_decode = normed.shape[0], step.num_decode
        qkv = self._project(normed, layer.qkv)
        queries = self._empty(num_tokens, spec.num_heads, spec.head_dim)
        operations.rope_write_kv(
            queries, pool, index, qkv, self._angles, step.positions, step.kv_slots,
            self._changes[index],
        )  # fmt: skip
        attended = torch.empty_like(queries)
        if num_decode:
            operations.attention_decode(
                attended[:num_decode],
                queries[:num_decode],
                pool,
                index,
                step.decode_tables,
                step.decode_lens,
                step.longest,
            )
        if step.prefill is not None:
            operations.attention_prefill(
                attended[num_decode:], queries[num_decode:], pool, index, step.prefill
            )
        return self._project(attended.view(num_tokens, spec.query_size), layer.o)

    def _project(self, x: Tensor, projection: Projection) -> Tensor:
        return project(x, projection, self._operations, x.dtype)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._weights.dtype, device=self._pool.device)


def rotary_angles(
    spec: ModelSpec, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of all positions, float32 [positions, D/2] each.

    They have the attention factor in them. Computed on the host, so that every device has the same
    ones.
    """
    frequencies, factor = torch.from_numpy(inverse_frequencies(spec)), attention_factor(spec)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().mul_(factor).to(device), angles.sin().mul_(factor).to(device)
