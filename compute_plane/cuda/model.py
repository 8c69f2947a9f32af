"""The walk of a step's tokens through a model.

    embedding → for each layer:  norm → attention, what is in its place, or both  (`mixers`)
                                 → O (norm), add
                                 norm → gate, up → gated → down (norm), add  (`expert_products`)
                                 of some models one of the two, without a gate
                                 of some a part of a second embedding, add  (`layer_inputs`)
              → for the tokens whose logits are wanted:  norm → logits
              → for those whose hidden states are wanted:  norm in float32  (`embeddings`)

All tokens of the step go through a layer together, so all keys and values of a layer are written
before any is read. Once the last ones are, those tokens go on alone whose output somebody wants, if
the step says so (`batch_layout`). Products of few rows with dense matrices are the operations',
with norm, gate and addition in them (`layer_products`), of many rows torch's; those with quantised
matrices are the operations' (`matrices`). What adapters add comes behind a product of its own
(`adapted_products`). What a row's product gives may depend on how many rows there are, so bits hold
for equal batches only (the numerics id names the library).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compute_plane.cuda.adapted_products import AdaptedProducts
from compute_plane.cuda.expert_products import ExpertProducts
from compute_plane.cuda.layer_inputs import LayerInputs
from compute_plane.cuda.layer_products import Hidden, LayerProducts, normed_rows
from compute_plane.cuda.mixers import Angles, LayerStep, Turns, mixers_of
from compute_plane.cuda.weights import DeviceMlp
from compute_plane.model.late_layers import first_late_layer
from compute_plane.model.rope import (
    attention_factors,
    inverse_frequencies,
    local_rope,
    of_heads,
    query_growth,
    score_factor,
)

if TYPE_CHECKING:
    from compute_plane.cuda.batch_layout import StepTensors
    from compute_plane.cuda.block_pools import BlockPools
    from compute_plane.cuda.operations import DeviceOperations
    from compute_plane.cuda.weights import DeviceLayer, DeviceWeights
    from compute_plane.model.heads import Heads
    from compute_plane.model.spec import ModelSpec


class DecoderModel:
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
        self.first_late = first_late_layer(spec)
        """The layer from which on tokens may go on alone; None: there is none."""
        self.has_states = pools.states is not None
        """Whether its steps have rows that go on from states."""
        self._angles = angles_of_layers(spec, max_positions, self._device)
        # Rotation reads it before its wait, so no launch of a step may write it (ADR 0031).
        num_still = max_tokens if spec.layers_without_rope else 0
        self._no_positions = torch.zeros(num_still, dtype=torch.int32, device=self._device)
        self._final_norm = weights.final_norm
        if spec.logits_scale != 1:
            self._final_norm = weights.final_norm * spec.logits_scale
        self._products = _products(spec, weights, operations)
        self._experts = None
        if spec.mixture is not None:
            self._experts = ExpertProducts(operations, self._products, spec.mixture)
        growth = query_growth(spec)
        grows = None
        if growth is not None:
            grows = torch.from_numpy(growth[0]).to(self._device), growth[1]
        self._mixers = mixers_of(self._products, spec, weights.layers, pools, grows)
        self._inputs = None
        if weights.layer_inputs is not None:
            self._inputs = LayerInputs(self._products, spec, weights.layer_inputs)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._spec.vocab_size

    def run(self, step: StepTensors) -> Hidden:
        """Queue all layers over the tokens of a step; return those that have gone through all."""
        weights = self._weights
        out = self._out_of_states(step)
        residual = self._empty(step.token_ids.shape[0], self._spec.hidden_size)
        self._operations.embedding(residual, weights.embedding, step.token_ids)
        if self._spec.embedding_scale != 1:
            residual.mul_(self._spec.embedding_scale)
        inputs = None if self._inputs is None else self._inputs.made(residual, step.token_ids)
        hidden, turns = Hidden(residual, adapters=step.adapters), self._turns(step)
        for number, (layer, mixer) in enumerate(zip(weights.layers, self._mixers, strict=True)):
            after_mixer, after_mlp = layer.output_norms or (None, None)
            late = step.late if number == self.first_late else None
            mixed: tuple[Tensor, ...] = ()
            if mixer is not None:
                given = LayerStep(step, turns[number], late, out)
                mixed = mixer.run(hidden, layer.attn_norm, given)
            if late is not None:
                hidden = hidden.rows(late.tokens)
                if not len(late.tokens):
                    return hidden
                inputs = None if inputs is None else inputs.index_select(0, late.tokens)
                step = late.step
                hidden.adapters = step.adapters
                turns = self._turns(step)
            self._add_mixed(hidden, mixed, layer, after_mixer)
            del mixed  # their memory serves what follows
            self._feed_forward(hidden, layer, after_mlp)
            if self._inputs is not None and inputs is not None and layer.layer_input is not None:
                self._inputs.add(hidden, inputs, number, layer.layer_input)
            if layer.scale != 1:
                hidden.multiply(layer.scale)
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
        still, positions = self._spec.layers_without_rope, step.positions
        without = self._no_positions[: len(positions)]
        return [
            (angles, without if layer in still else positions)
            for layer, angles in enumerate(self._angles)
        ]

    def _add_mixed(
        self, hidden: Hidden, mixed: tuple[Tensor, ...], layer: DeviceLayer, norm: Tensor | None
    ) -> None:
        if layer.mixer is None:
            return
        if layer.beside is None:
            (rows,) = mixed
            self._products.add(hidden, rows, layer.mixer.o, norm, layer.mixer.o_bias)
            return
        attended, gone = mixed
        self._products.add_both(hidden, (gone, layer.beside.o), (attended, layer.mixer.o))

    def _feed_forward(self, hidden: Hidden, layer: DeviceLayer, output_norm: Tensor | None) -> None:
        part, norm = layer.feedforward, layer.mlp_norm
        if isinstance(part, DeviceMlp):
            gated = self._products.gated(hidden, norm, part.gate_up, part.down)
            self._products.add(hidden, gated, part.down, output_norm)
        elif part is not None and self._experts is not None:
            self._experts.add(hidden, norm, part, output_norm)

    def logits(self, hidden: Hidden, tokens: Tensor | None) -> Tensor:
        """Queue the logits behind some tokens, float32 [R, V].

        `tokens`: [R]; None: all, and `hidden` is used up, for the normalisation adds in place.
        """
        if tokens is not None:
            hidden = hidden.rows(tokens)
        # 16-bit logits would tie where the model does not.
        logits = self._products.logits(hidden, self._final_norm, self._weights.lm_head)
        if self._spec.logits_cap is not None:
            self._operations.cap_logits(logits, self._spec.logits_cap)
        return logits

    def embedded(self, hidden: Hidden) -> Tensor:
        """Queue rows of hidden states behind the final norm, not scaled as logits, float32 [R, E].

        In float32 whatever the layers compute in.
        """
        weight = self._weights.final_norm.float()
        return normed_rows(hidden.sums(), weight, self._spec.rms_norm_eps)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._weights.dtype, device=self._device)


def _products(
    spec: ModelSpec, weights: DeviceWeights, operations: DeviceOperations
) -> LayerProducts:
    if weights.adapters is None:
        return LayerProducts(operations, spec.rms_norm_eps, gates_mlps=spec.gates_mlps)
    return AdaptedProducts(
        operations, spec.rms_norm_eps, weights.adapters, gates_mlps=spec.gates_mlps
    )


def angles_of_layers(spec: ModelSpec, num_positions: int, device: torch.device) -> list[Angles]:
    """Return by which angles each layer turns; those that turn alike have the same tensors.

    Of layers that turn nothing those of one position, at which all tokens are.
    """
    if not spec.turns:  # which positions there are makes no difference
        num_positions = 1
    made: dict[tuple[Heads, str], Angles] = {}

    def of(layer: int) -> Angles:
        heads = spec.heads_of(layer)
        is_still, is_local = (
            layer in layers for layers in (spec.layers_without_rope, spec.layers_with_local_rope)
        )
        key = heads, "still" if is_still else "local" if is_local else "turned"
        if key not in made:
            own = of_heads(spec, heads)
            if is_still:
                one = torch.full((1, heads.head_dim // 2), float(score_factor(own)), device=device)
                made[key] = one, torch.zeros_like(one)
            else:
                own = local_rope(own) if is_local else own
                made[key] = rotary_angles(own, num_positions, device)
        return made[key]

    return [of(layer) for layer in range(spec.num_layers)]


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
