"""Which layers of a model find room on a device whose memory is capped: the first ones.

    device   │ working memory, embedding │ layer 0 │ layer 1 │ … │ layer k − 1 │
    host                                                       │ layer k │ … │ final norm, head │

A layer takes its weights and its share of the KV pool or of states, of which there are the same on
both sides. If all of it fits, head and all, nothing runs on the host; otherwise at least the last
layer does.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from compute_plane.cuda.expert_products import expert_working_bytes
from compute_plane.cuda.sampling_columns import LOGITS_ROWS
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.mamba2 import Mamba2
from planes.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from compute_plane.cuda.weight_plan import WeightPlan
    from compute_plane.model.heads import Heads
    from compute_plane.model.spec import ModelSpec

GIB: Final = 1 << 30
FLOAT_BYTES: Final = 4
RESERVED_BYTES: Final = 128 << 20
"""Set aside for what is small or not ours to size: inputs of a step, workspaces of the matrix
library."""


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """What a model takes of a device's memory.

    `first`: what is there before any layer, working memory and embedding. `layers`: weights and
    blocks of each layer. `last`: what is there only behind the last layer, final norm, head,
    logits and decode graphs.
    """

    first: int
    layers: tuple[int, ...]
    last: int

    @property
    def whole(self) -> int:
        """Bytes of the whole model."""
        return self.first + sum(self.layers) + self.last

    @property
    def least(self) -> int:
        """Bytes of the smallest part that the device can take."""
        if len(self.layers) == 1:
            return self.whole
        return min(self.first + self.layers[0], self.whole)


def layers_within(needs: DeviceBytes, limit_bytes: int) -> int:
    """Return how many layers, the first ones, a device takes within a limit.

    All of them only if what lies behind them fits too. Raises ConfigError, naming
    `gpu_memory_limit` and the smallest limit that would do, if not even one layer fits.
    """
    if needs.whole <= limit_bytes:
        return len(needs.layers)
    if needs.least > limit_bytes:
        raise ConfigError(
            "gpu_memory_limit: the embedding, the working memory of a step and one layer with its "
            f"part of the KV pool take at least {in_gib(needs.least)} GiB, got "
            f"{limit_bytes / (1 << 30):.3g} "
            "(fewer --max-num-blocks or --max-tokens-per-batch take less)",
            field="gpu_memory_limit",
        )
    ends = itertools.accumulate(needs.layers[:-1], initial=needs.first)
    return sum(end <= limit_bytes for end in ends) - 1


def device_bytes(
    spec: ModelSpec,
    weights: WeightPlan,
    *,
    item_bytes: int,
    layer_bytes: Mapping[Heads, int],
    max_tokens: int,
    num_states: int = 1,
    more_bytes: int = 0,
    whole_bytes: int = 0,
) -> DeviceBytes:
    """Return what a model takes whose steps have a dtype of `item_bytes`.

    `layer_bytes`: of the part of the KV pool that a layer with keys of its own has, by its heads.
    `num_states`: of those that have states. `more_bytes`: of what a step takes whatever its tokens,
    block tables and scratch memory of attention. `whole_bytes`: of what only whole models have,
    penalties' histories and decode graphs.
    """
    of_layer = {layer: layer_bytes[spec.heads_of(layer)] for layer in spec.layers_with_keys()}
    if spec.recurrence is not None:
        of_states = num_states * FLOAT_BYTES * spec.recurrence.state_floats
        for layer in spec.layers_with_state():
            of_layer[layer] = of_layer.get(layer, 0) + of_states
    head = weights.final_norm.num_bytes
    if weights.lm_head is not weights.embedding:
        head += weights.lm_head.num_bytes
    # A sample's adjusted logits are a copy of a row; kernels take eight bytes for each beside.
    logits = 4 * FLOAT_BYTES * LOGITS_ROWS * spec.vocab_size
    working = working_bytes(spec, item_bytes, max_tokens) + more_bytes
    return DeviceBytes(
        first=weights.embedding.num_bytes + weights.layer_inputs_bytes + working,
        layers=tuple(
            layer.num_bytes + of_layer.get(index, 0) for index, layer in enumerate(weights.layers)
        ),
        last=head + logits + whole_bytes,
    )


def working_bytes(spec: ModelSpec, item_bytes: int, max_tokens: int) -> int:
    """Return what a step of so many tokens takes beside weights and blocks, at most at once.

    It counts the tensors that live at the same time in `compute_plane.cuda.model`, and cosines and
    sines of all positions.
    """
    hidden, queries = spec.hidden_size, spec.query_size
    attention = 4 * hidden + max(
        heads.query_size + 2 * heads.kv_size + 2 * heads.query_size for heads in spec.kinds_of_heads
    )
    attention += queries if spec.gates_attention else 0
    if spec.latents is not None:
        of = spec.latents
        given = spec.num_heads * (of.head_size + of.rank) + spec.attended_size
        attention = 4 * hidden + 2 * of.query_rank + of.row_size + queries + given
    recurrence = _recurrence_bytes(spec, item_bytes) // item_bytes
    feed_forward = 5 * hidden + 3 * max(spec.mlp_sizes)
    # What goes to the host is summed in float32, out of both parts of the hidden states.
    handed_over = 2 * hidden + 3 * hidden * FLOAT_BYTES // item_bytes
    inputs = spec.num_layers * spec.layer_input_size
    of_inputs = 4 * hidden + 2 * inputs  # while they are made; then they are there in all layers
    if spec.attends_beside_states:  # what both make of the same rows is there at once
        attention += recurrence
    widest = max(attention, recurrence, feed_forward, handed_over, of_inputs) + inputs
    angles = FLOAT_BYTES * spec.context_length * _turning_elements(spec)
    of_experts = expert_working_bytes(spec, item_bytes, max_tokens)
    return RESERVED_BYTES + angles + max_tokens * widest * item_bytes + of_experts


def _turning_elements(spec: ModelSpec) -> int:
    """Return the elements of a head of all kinds of layers that turn each their own way."""
    kinds = {
        (spec.heads_of(layer), layer in spec.layers_with_local_rope)
        for layer in spec.attending_layers()
        if layer not in spec.layers_without_rope
    }
    return sum(heads.head_dim for heads, _ in kinds)


def _recurrence_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """Return what a token takes in a layer with states."""
    of = spec.recurrence
    if of is None:
        return 0
    elements = 4 * spec.hidden_size + of.num_inputs + of.out_size
    floats = 0
    if isinstance(of, DeltaNet):  # what comes out of its convolution and, at most, of its heads
        floats = of.channels + 2 * of.num_value_heads + of.value_size
    elif isinstance(of, Mamba2):  # what is made of its inputs, and what comes out of its heads
        floats = of.channels + 2 * of.num_heads + of.inner_size
    return item_bytes * elements + FLOAT_BYTES * floats


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Return the model that a model's first layers are for a device: without a head of its own."""
    return replace(spec, num_layers=num_layers, tie_embeddings=True)


def first_weights(weights: WeightPlan, num_layers: int) -> WeightPlan:
    """Return the weights of such a model."""
    return replace(weights, layers=weights.layers[:num_layers], lm_head=weights.embedding)


def in_gib(num_bytes: int) -> str:
    """Return bytes as GiB, rounded up so that what is named is enough."""
    return f"{math.ceil(num_bytes * 1000 / GIB) / 1000:.3f}"
