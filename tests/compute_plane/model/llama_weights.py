"""A Llama model's weights in float32, all of them at once: for models that tests make up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from compute_plane.model import layout
from compute_plane.model.loader import LoadedModel
from compute_plane.model.spec import ModelSpec

Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class LlamaLayer:
    """One decoder layer; matrices are [output features, input features], so y = x @ w.T.

    `attn_norm`, `mlp_norm`: [hidden]. `q`: [H·D, hidden], `k`, `v`: [G·D, hidden],
    `o`: [hidden, H·D]. `gate`, `up`: [intermediate, hidden], `down`: [hidden, intermediate].
    The rows of `q` and `k` are in the half-split order (`compute_plane.model.rope`). The biases are
    Qwen2's, [H·D] and [G·D]; `query_norm`, `key_norm`, [D], Qwen3's, as wide as the biases OLMo
    2's; `attn_output_norm`, `mlp_output_norm`, [hidden], Gemma 3's. `mixture`: router and experts
    by their roles (`compute_plane.model.expert_layout`), in place of `gate`, `up` and `down`.
    `named`: what else a layer has, by canonical names.
    """

    attn_norm: Float32Array
    q: Float32Array
    k: Float32Array
    v: Float32Array
    o: Float32Array
    mlp_norm: Float32Array
    gate: Float32Array
    up: Float32Array
    down: Float32Array
    q_bias: Float32Array | None = None
    k_bias: Float32Array | None = None
    v_bias: Float32Array | None = None
    query_norm: Float32Array | None = None
    key_norm: Float32Array | None = None
    mixture: Mapping[str, Float32Array] = field(default_factory=dict)
    attn_output_norm: Float32Array | None = None
    mlp_output_norm: Float32Array | None = None
    named: Mapping[str, Float32Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """`embedding`, `lm_head`: [V, hidden]; the same array if the embeddings are tied."""

    embedding: Float32Array
    layers: tuple[LlamaLayer, ...]
    final_norm: Float32Array
    lm_head: Float32Array


_ROLES = {
    layout.ATTN_NORM: "attn_norm",
    layout.QUERY: "q",
    layout.KEY: "k",
    layout.VALUE: "v",
    layout.OUTPUT: "o",
    layout.MLP_NORM: "mlp_norm",
    layout.GATE: "gate",
    layout.UP: "up",
    layout.DOWN: "down",
}
"""A tensor's role in a layer → the layer's field."""


def layer_fields(spec: ModelSpec, layer: int) -> dict[str, str]:
    """Return the canonical names of a layer's tensors, each with the field of `LlamaLayer`."""
    fields = {layout.layer_tensor(layer, role): field for role, field in _ROLES.items()}
    biases, norms = layout.qkv_biases(spec, layer), layout.head_norms(spec, layer)
    fields |= dict(zip(biases, ("q_bias", "k_bias", "v_bias"), strict=False))
    fields |= dict(zip(norms, ("query_norm", "key_norm"), strict=False))
    outputs = layout.output_norms(spec, layer)
    return fields | dict(zip(outputs, ("attn_output_norm", "mlp_output_norm"), strict=False))


def decoded_weights(model: LoadedModel) -> LlamaWeights:
    """Decode every tensor of a model. Raises ModelFileError if a weight is not finite."""
    arrays = {name: model.source.tensor(name).to_float32() for name in model.source.names}
    return LlamaWeights(
        embedding=arrays[layout.EMBEDDING],
        layers=tuple(
            LlamaLayer(
                **{field: arrays[name] for name, field in layer_fields(model.spec, n).items()}
            )
            for n in range(model.spec.num_layers)
        ),
        final_norm=arrays[layout.FINAL_NORM],
        lm_head=arrays.get(layout.LM_HEAD, arrays[layout.EMBEDDING]),
    )
