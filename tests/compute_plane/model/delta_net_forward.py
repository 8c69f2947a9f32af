"""The logits of a text from a model's tensors, by the formulas of `kernels.reference` alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compute_plane.model import delta_net_layout, expert_layout, layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.loader import LoadedModel
from compute_plane.model.rope import inverse_frequencies
from compute_plane.model.spec import Mixture
from kernels.reference.delta_net import (
    DeltaNetState,
    DeltaNetWeights,
    delta_net,
    gate_attended,
    silu,
)
from kernels.reference.mixture import add_experts, add_shared, route
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import normed, rotate

Array = np.ndarray


class Forward:
    """Computes what a model with Gated DeltaNet says of a text."""

    def __init__(self, model: LoadedModel) -> None:
        self._source, self._spec = model.source, model.spec

    def logits(self, tokens: Sequence[int]) -> Array:
        """Return the logits behind each token, [T, V]."""
        spec = self._spec
        hidden = self._get(layout.EMBEDDING)[list(tokens)]
        for layer in range(spec.num_layers):
            x = self._normed(hidden, layout.layer_tensor(layer, layout.ATTN_NORM))
            of = spec.recurrence_of(layer)
            if of is not None:
                hidden = hidden + self.delta_net(layer, of, x)
            if spec.attends(layer):
                hidden = hidden + self._attention(layer, x)
            x = self._normed(hidden, layout.layer_tensor(layer, layout.MLP_NORM))
            mixture = spec.mixture_of(layer)
            if mixture is None:
                hidden = hidden + self._mlp(layer, (layout.GATE, layout.UP, layout.DOWN), x)
            else:
                hidden = hidden + self._mixture(layer, mixture, x)
        head = layout.EMBEDDING if spec.tie_embeddings else layout.LM_HEAD
        return self._normed(hidden, layout.FINAL_NORM) @ self._get(head).T

    def delta_net(self, layer: int, of: DeltaNet, x: Array) -> Array:
        """Return what keeps a state makes of rows [T, hidden]."""

        def get(role: str, part: str = layout.WEIGHT) -> Array:
            return self._of(layer, role, part)

        order = np.arange(of.num_value_heads)
        if of.value_heads_tiled:  # head j of the tensors has key head j mod Hk
            order = order.reshape(-1, of.num_key_heads).T.reshape(-1)
        values = (order[:, None] * of.value_dim + np.arange(of.value_dim)).reshape(-1)
        channels = np.concatenate([np.arange(2 * of.key_size), 2 * of.key_size + values])
        rows = (
            x
            @ np.concatenate(
                [get(delta_net_layout.IN_QKV)[channels], get(delta_net_layout.IN_Z)[values]]
            ).T
        )
        gates = (
            x
            @ np.concatenate(
                [get(delta_net_layout.IN_B)[order], get(delta_net_layout.IN_A)[order]]
            ).T
        )
        weights = DeltaNetWeights(
            convolution=get(delta_net_layout.CONVOLUTION)[channels],
            rates=get(delta_net_layout.MIXER, delta_net_layout.RATES)[order],
            time_bias=get(delta_net_layout.MIXER, delta_net_layout.TIME_BIAS)[order],
            norm=get(delta_net_layout.NORM),
            eps=self._spec.rms_norm_eps,
            num_key_heads=of.num_key_heads,
        )
        out = delta_net(rows, gates, weights, DeltaNetState.empty(weights))
        return out @ get(delta_net_layout.OUT)[:, values].T

    def _attention(self, layer: int, x: Array) -> Array:
        spec, num_tokens = self._spec, len(x)
        roles = layout.QUERY, layout.KEY, layout.VALUE
        q, k, v = (
            (x @ self._of(layer, role).T).reshape(num_tokens, -1, spec.head_dim) for role in roles
        )
        angles = np.arange(num_tokens)[:, None] * inverse_frequencies(spec)
        cosines, sines = np.cos(angles), np.sin(angles)
        norms = [self._get(name) for name in layout.head_norms(spec, layer)]
        if norms:
            q, k = (
                normed(heads.astype(np.float32), norm, spec.rms_norm_eps)
                for heads, norm in zip((q, k), norms, strict=True)
            )
        q, k = (rotate(heads.astype(np.float32), cosines, sines) for heads in (q, k))
        k, v = (np.repeat(heads, spec.num_heads // spec.num_kv_heads, axis=1) for heads in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(spec.head_dim)
        scores[:, np.triu(np.ones((num_tokens, num_tokens), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out = np.einsum("hts,shd->thd", weights, v).reshape(num_tokens, -1)
        gates = x @ self._of(layer, layout.QUERY_GATE).T
        return gate_attended(out, gates) @ self._of(layer, layout.OUTPUT).T

    def _mlp(self, layer: int, roles: Sequence[str], x: Array) -> Array:
        gate, up, down = (self._of(layer, role) for role in roles)
        return (silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _mixture(self, layer: int, mixture: Mixture, x: Array) -> Array:
        parts = expert_layout.GATE, expert_layout.UP, expert_layout.DOWN
        shape = len(x), mixture.experts_per_token
        chosen, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        logits = (x @ self._of(layer, expert_layout.ROUTER).T).astype(np.float32)
        route(logits, normalises=mixture.normalises_weights, chosen=chosen, weights=weights)
        given = np.stack(
            [
                self._mlp(layer, [expert_layout.expert_role(expert, part) for part in parts], x)
                for expert in range(mixture.num_experts)
            ],
            axis=1,
        )
        out = np.zeros(x.shape, np.float32)
        add_experts(np.take_along_axis(given, chosen[:, :, None], axis=1), weights, out)
        shared = self._mlp(layer, [f"{expert_layout.SHARED}.{part}" for part in parts], x)
        add_shared(shared, (x @ self._of(layer, expert_layout.SHARED_GATE).T)[:, 0], out)
        return out

    def _normed(self, x: Array, name: str) -> Array:
        out = np.empty(x.shape, np.float32)
        rms_norm(x.astype(np.float32), self._get(name), self._spec.rms_norm_eps, out)
        return out

    def _of(self, layer: int, role: str, part: str = layout.WEIGHT) -> Array:
        return self._get(layout.layer_tensor(layer, role, part))

    def _get(self, name: str) -> Array:
        return self._source.tensor(name).to_float32()
