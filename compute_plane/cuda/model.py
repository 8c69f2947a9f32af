"""The walk of a step's tokens through a model.

    embedding → for each layer:  norm → attention, or what is in its place  (`mixers`)
                                 → O (norm), add
                                 norm → gate, up → gated → down (norm), add  (`expert_products`)
                                 of some models one of the two, without a gate
              → for the tokens whose logits are wanted:  norm → logits
              → for those whose hidden states are wanted:  norm in float32  (`embeddings`)

All tokens of the step go through a layer together, so all keys and values of a layer are written
before any is read. Products of few rows with dense matrices are the operations', with norm, gate
and addition in them (`layer_products`), of many rows torch's; those with quantised matrices are the
operations' (`matrices`). What a row's product gives may depend on how many rows there are, so bits
hold for equal batches only (the numerics id names the library).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.expert_products import ExpertProducts
from compute_plane.cuda.latent_mixer import LatentMixer
from compute_plane.cuda.layer_products import Hidden, LayerProducts, normed_rows
from compute_plane.cuda.mixers import Angles, AttentionMixer, Turns, mixers_of
from compute_plane.cuda.weights import DeviceMlp
from compute_plane.model.rope import (
    attention_factors,
    inverse_frequencies,
    local_rope,
    query_growth,
    score_factor,
)

if TYPE_CHECKING:
    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceLayer, DeviceWeights
    from compute_plane.model.spec import ModelSpec


class LlamaModel:
    """Weights, pool and operations of one device, put together.

    `pools`: of the device. `max_positions`: tokens of the longest sequence there can be.
    `max_tokens`: of the largest step.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DeviceWeights,
        pools: BlockPools,
        operations: DeviceOperations,
        max_positions: int,
        max_tokens: int,
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._device = pools.device.device
        self._operations = operations
        self.has_states = pools.states is not None
        """Whether its steps have rows that go on from states."""
        if not spec.turns:  # which positions there are makes no difference
            max_positions = 1
        self._angles = rotary_angles(spec, max_positions, self._device)
        self._local_angles = self._angles
        if spec.layers_with_local_rope:
            self._local_angles = rotary_angles(local_rope(spec), max_positions, self._device)
        # Of layers that turn nothing: those of one position, at which all tokens are.
        one = torch.full((1, spec.head_dim // 2), float(score_factor(spec)), device=self._device)
        self._no_angles: Angles = one, torch.zeros_like(one)
        # Rotation reads it before its wait, so no launch of a step may write it (ADR 0031).
        num_still = max_tokens if spec.layers_without_rope else 0
        self._no_positions = torch.zeros(num_still, dtype=torch.int32, device=self._device)
        self._final_norm = weights.final_norm
        if spec.logits_scale != 1:
            self._final_norm = weights.final_norm * spec.logits_scale
        self._products = LayerProducts(operations, spec.rms_norm_eps, gates_mlps=spec.gates_mlps)
        self._experts = None
        if spec.mixture is not None:
            self._experts = ExpertProducts(operations, self._products, spec.mixture)
        growth = query_growth(spec)
        grows = None
        if growth is not None:
            grows = torch.from_numpy(growth[0]).to(self._device), growth[1]
        self._mixers = mixers_of(self._products, spec, weights.layers, pools, grows)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._spec.vocab_size

    def run(self, step: StepTensors) -> Hidden:
        """Queue all layers over the tokens of a step."""
        weights = self._weights
        out = self._out_of_states(step)
        residual = self._empty(step.token_ids.shape[0], self._spec.hidden_size)
        self._operations.embedding(residual, weights.embedding, step.token_ids)
        if self._spec.embedding_scale != 1:
            residual.mul_(self._spec.embedding_scale)
        hidden = Hidden(residual)
        for layer, mixer, turns in zip(
            weights.layers, self._mixers, self._turns(step), strict=True
        ):
            after_mixer, after_mlp = layer.output_norms or (None, None)
            if mixer is not None and layer.mixer is not None:
                if isinstance(mixer, AttentionMixer | LatentMixer):
                    mixed = mixer.run(hidden, layer.attn_norm, step, turns)
                else:
                    assert step.states is not None
                    mixed = mixer.run(hidden, layer.attn_norm, step.states, out)
                self._products.add(hidden, mixed, layer.mixer.o, after_mixer, layer.mixer.o_bias)
                del mixed  # its memory serves what follows
            self._feed_forward(hidden, layer, after_mlp)
        return hidden

    def _out_of_states(self, step: StepTensors) -> Tensor | None:
        """Return where layers with states write in a step that may have tokens in no row.

        Those have zeros there, so that they are alike.
        """
        states, of = step.states, self._spec.recurrence
        if states is None or of is None or states.num_long:
            return None
        return self._empty(len(step.token_ids), of.out_size).zero_()

    def _turns(self, step: StepTensors) -> list[Turns]:
        """Return how the tokens of a step turn, layer by layer."""
        spec, positions = self._spec, step.positions
        turned, local = (self._angles, positions), (self._local_angles, positions)
        still = turned
        if spec.layers_without_rope:
            still = (self._no_angles, self._no_positions[: len(positions)])

        def of(layer: int) -> Turns:
            if layer in spec.layers_without_rope:
                return still
            return local if layer in spec.layers_with_local_rope else turned

        return [of(layer) for layer in range(spec.num_layers)]

    def _feed_forward(self, hidden: Hidden, layer: DeviceLayer, output_norm: Tensor | None) -> None:
        part, norm = layer.feedforward, layer.mlp_norm
        if isinstance(part, DeviceMlp):
            gated = self._products.gated(hidden, norm, part.gate_up, part.down)
            self._products.add(hidden, gated, part.down, output_norm)
        elif part is not None and self._experts is not None:
            self._experts.add(hidden, norm, part)

    def logits(self, hidden: Hidden, tokens: Tensor | None) -> Tensor:
        """Queue the logits behind some tokens, float32 [R, V].

        `tokens`: [R]; None: all, and `hidden` is used up, for the normalisation adds in place.
        """
        if tokens is not None:
            hidden = hidden.rows(tokens)
        # 16-bit logits would tie where the model does not.
        return self._products.logits(hidden, self._final_norm, self._weights.lm_head)

    def embedded(self, hidden: Hidden) -> Tensor:
        """Queue rows of hidden states behind the final norm, not scaled as logits, float32 [R, E].

        In float32 whatever the layers compute in.
        """
        weight = self._weights.final_norm.float()
        return normed_rows(hidden.sums(), weight, self._spec.rms_norm_eps)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._weights.dtype, device=self._device)


def rotary_angles(
    spec: ModelSpec, num_positions: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the angles of all positions, float32 [positions, D/2] each.

    Over latents of what turns alone, [positions, P/2]. They have the attention factors in them.
    Computed on the host, so that every device has the same ones.
    """
    frequencies, factors = map(
        torch.from_numpy, (inverse_frequencies(spec), attention_factors(spec))
    )
    if spec.latents is not None:
        frequencies, factors = (of[: spec.latents.turning // 2] for of in (frequencies, factors))
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos().mul_(factors).to(device), angles.sin().mul_(factors).to(device)
