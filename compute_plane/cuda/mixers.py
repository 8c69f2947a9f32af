"""What lets a token see those before it, layer by layer: attention, or Gated DeltaNet.

    attention   norm → QKV, gates → biases, norms of heads, rotate, write K and V
                → attention, with the layer's window → · sigmoid(gates)
    DeltaNet    norm → Q, K, V, Z, B, A → convolution, delta rule, norm, gate: through the states

What they give is the input of the product behind them. Layers with attention have keys and values
in the pool, by their number among those; the others have states, likewise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from compute_plane.cuda.operands import HeadChanges, LayerAttention, LayerDeltaNet
from compute_plane.cuda.weights import DeviceDeltaNet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.layer_products import Hidden, LayerProducts
    from compute_plane.cuda.operands import StateRows
    from compute_plane.cuda.weights import DeviceAttention, DeviceLayer
    from compute_plane.model.delta_net import DeltaNet
    from compute_plane.model.spec import ModelSpec

Angles: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, float32 [positions, D/2] each."""
Turns: TypeAlias = tuple[Angles, Tensor]
"""Angles, and each token's place among them."""


class AttentionMixer:
    """Attention of the layer that is `number` among those of `pool`.

    `changes`: of heads. `own`: what attention of the layer has of its own.
    """

    def __init__(
        self,
        products: LayerProducts,
        spec: ModelSpec,
        weights: DeviceAttention,
        pool: Tensor,
        number: int,
        changes: HeadChanges,
        own: LayerAttention,
    ) -> None:
        self._products = products
        self._spec = spec
        self._weights = weights
        self._pool = pool
        self._number = number
        self._changes = changes
        self._own = own

    def run(self, hidden: Hidden, norm: Tensor | None, step: StepTensors, turns: Turns) -> Tensor:
        """Queue it; return heads side by side, [T, H·D]. `norm`: weights of that before it."""
        products, weights = self._products, self._weights
        if weights.gate is None:
            return self._attended(products.normed(hidden, norm, weights.qkv), step, turns)
        qkv, gates = products.both_normed(hidden, norm, weights.qkv, weights.gate)
        attended = self._attended(qkv, step, turns)
        products.operations.gate_attended(attended, gates)
        return attended

    def _attended(self, qkv: Tensor, step: StepTensors, turns: Turns) -> Tensor:
        spec, pool, number, own = self._spec, self._pool, self._number, self._own
        operations = self._products.operations
        num_tokens, num_decode = qkv.shape[0], step.num_decode
        queries = torch.empty(
            (num_tokens, spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device
        )
        operations.rope_write_kv(queries, pool, number, qkv, *turns, step.kv_slots, self._changes)
        attended = torch.empty_like(queries)
        if num_decode:
            operations.attention_decode(
                attended[:num_decode],
                queries[:num_decode],
                pool,
                number,
                step.decode_tables,
                step.decode_lens,
                step.longest,
                own,
            )
        if step.prefill is not None:
            operations.attention_prefill(
                attended[num_decode:], queries[num_decode:], pool, number, step.prefill, own
            )
        return attended.view(num_tokens, spec.query_size)


class DeltaNetMixer:
    """Gated DeltaNet of the layer that is `number` among those of `states`. `eps`: of its norm."""

    def __init__(
        self,
        products: LayerProducts,
        sizes: DeltaNet,
        weights: DeviceDeltaNet,
        states: Tensor,
        number: int,
        eps: float,
    ) -> None:
        self._products = products
        self._weights = weights
        self._states = states
        self._number = number
        self._own = LayerDeltaNet(
            weights.convolution, weights.rates, weights.time_bias, weights.norm, eps, sizes
        )

    def run(
        self, hidden: Hidden, norm: Tensor | None, rows: StateRows, out: Tensor | None
    ) -> Tensor:
        """Queue it; return value heads side by side, [T, Hv·Dv]. `norm`: as above.

        `out`: where they are to lie, if that is given; a token in no row has there what it had.
        """
        products, own = self._products, self._own
        inputs = products.normed(hidden, norm, self._weights.inputs)
        if out is None:
            shape = len(inputs), own.sizes.value_size
            out = torch.empty(shape, dtype=inputs.dtype, device=inputs.device)
        products.operations.delta_net(out, self._states, self._number, inputs, rows, own)
        return out


def mixers_of(
    products: LayerProducts,
    spec: ModelSpec,
    layers: Sequence[DeviceLayer],
    pools: BlockPools,
    growth: tuple[Tensor, int] | None,
) -> list[AttentionMixer | DeltaNetMixer]:
    """Return those of a model's layers. `growth`: of queries, as in `HeadChanges`."""
    made: list[AttentionMixer | DeltaNetMixer] = []
    num_attending = num_with_state = 0
    for layer, weights in enumerate(one.mixer for one in layers):
        if isinstance(weights, DeviceDeltaNet):
            if spec.delta_net is None or pools.states is None:
                raise ValueError("a model with states needs a pool of them")
            sizes, eps = spec.delta_net, spec.rms_norm_eps
            made.append(
                DeltaNetMixer(products, sizes, weights, pools.states.device, num_with_state, eps)
            )
            num_with_state += 1
            continue
        changes = HeadChanges(weights.qkv_bias, weights.head_norms, spec.rms_norm_eps, growth)
        own = LayerAttention(spec.window_of(layer), weights.sinks)
        made.append(
            AttentionMixer(products, spec, weights, pools.device, num_attending, changes, own)
        )
        num_attending += 1
    return made
