"""Tensors of a second embedding, of which each layer reads a part of its own (Gemma 4 E2B, E4B).

L layers, P: `ModelSpec.layer_input_size`.

    canonical                                            GGUF                        shape
    model.embed_tokens_per_layer.weight                  per_layer_token_embd.weight [V, L·P]
    model.per_layer_model_projection.weight              per_layer_model_proj.weight [L·P, hidden]
    model.per_layer_projection_norm.weight               per_layer_proj_norm.weight  [P]
    model.layers.N.per_layer_input_gate.weight           blk.N.inp_gate.weight       [P, hidden]
    model.layers.N.per_layer_projection.weight           blk.N.proj.weight           [hidden, P]
    model.layers.N.post_per_layer_input_norm.weight      blk.N.post_norm.weight      [hidden]

What is computed, with norm(x) = rms_norm(x) times its weights, of a token and layer l:

    inputs_l = (norm(projection · embedding, part l) + √P · second embedding, part l) / √2
    hidden  += norm(output · (gelu(gate · hidden) · inputs_l))          behind the layer's MLP

Source: `Gemma4TextModel` and `Gemma4TextDecoderLayer` in transformers ("per-layer embeddings").
"""

from __future__ import annotations

from typing import Final

from compute_plane.model.spec import ModelSpec

EMBEDDING: Final = "model.embed_tokens_per_layer.weight"
PROJECTION: Final = "model.per_layer_model_projection.weight"
PROJECTION_NORM: Final = "model.per_layer_projection_norm.weight"
GATE: Final = "per_layer_input_gate"
OUTPUT: Final = "per_layer_projection"
OUTPUT_NORM: Final = "post_per_layer_input_norm"

GGUF_GLOBAL_NAMES: Final = {
    EMBEDDING: "per_layer_token_embd.weight",
    PROJECTION: "per_layer_model_proj.weight",
    PROJECTION_NORM: "per_layer_proj_norm.weight",
}
GGUF_NAMES: Final = {GATE: "inp_gate", OUTPUT: "proj", OUTPUT_NORM: "post_norm"}


def global_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the tensors of all layers together and their shapes; empty if there are none."""
    size = spec.layer_input_size
    if not size:
        return {}
    width = spec.num_layers * size
    return {
        EMBEDDING: (spec.vocab_size, width),
        PROJECTION: (width, spec.hidden_size),
        PROJECTION_NORM: (size,),
    }


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the roles of a layer's tensors and their shapes; empty if there are none."""
    size, hidden = spec.layer_input_size, spec.hidden_size
    if not size:
        return {}
    return {GATE: (size, hidden), OUTPUT: (hidden, size), OUTPUT_NORM: (hidden,)}
