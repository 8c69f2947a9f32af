"""Drawn weights of tiny models."""

from __future__ import annotations

import numpy as np

from compute_plane.model import (
    delta_net_layout,
    latent_layout,
    layer_inputs_layout,
    layout,
)
from compute_plane.model.expert_layout import (
    ROUTER,
    bias_shapes,
    mixture_shapes,
    own_norm_shapes,
    shared_shapes,
)
from compute_plane.model.recurrence_layout import CONVOLUTIONS, recurrence_shapes
from compute_plane.model.spec import ModelSpec
from tests.compute_plane.model.llama_weights import LlamaLayer, LlamaWeights


def tiny_weights(spec: ModelSpec, seed: int = 0) -> LlamaWeights:
    """Return weights of a size at which logits differ clearly from token to token."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)

    def norm(size: int = spec.hidden_size) -> np.ndarray:
        return random.uniform(0.5, 1.5, size).astype(np.float32)

    def changes(layer: int) -> dict[str, np.ndarray]:
        """What some architectures have besides; of Llama's other weights nothing changes."""
        sizes = {"q_bias": spec.query_size, "k_bias": spec.kv_size, "v_bias": spec.kv_size}
        heads = ("query_norm", "key_norm")
        found = {name: matrix(n) * 4 for name, n in sizes.items()} if spec.has_qkv_bias else {}
        if spec.has_head_norms:
            together = (spec.query_size, spec.kv_size)
            widths = (spec.heads_of(layer).head_dim,) * 2
            widths = together if spec.norms_heads_together else widths
            found |= {name: norm(width) for name, width in zip(heads, widths, strict=True)}
        if spec.has_output_norms:
            found |= {"attn_output_norm": norm(), "mlp_output_norm": norm()}
        return found

    def named(layer: int) -> dict[str, np.ndarray]:
        """Sinks, and vectors of mixtures and of models with all biases."""
        shapes = dict.fromkeys(layout.sinks(spec, layer), (spec.num_heads,))
        shapes |= dict.fromkeys(layout.output_bias(spec, layer), (spec.hidden_size,))
        of = spec.mixture_of(layer)
        if of is not None:
            for role, shape in bias_shapes(spec, of).items():
                shapes[layout.layer_tensor(layer, role, layout.BIAS)] = shape
        found = {name: matrix(*shape) * 4 for name, shape in shapes.items()}
        found |= own_weights(spec, layer, random)
        return found | mixer_weights(spec, layer, random)

    def inner(layer: int) -> int:
        return spec.mlp_size_of(layer) or spec.intermediate_size

    def attended(layer: int) -> int:
        return spec.heads_of(layer).query_size if spec.latents is None else spec.attended_size

    embedding = matrix(spec.vocab_size, spec.hidden_size) * 4
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LlamaLayer(
                attn_norm=norm(),
                q=matrix(spec.heads_of(index).query_size, spec.hidden_size),
                k=matrix(spec.heads_of(index).kv_size, spec.hidden_size),
                v=matrix(spec.heads_of(index).kv_size, spec.hidden_size),
                o=matrix(spec.hidden_size, attended(index)),
                mlp_norm=norm(),
                gate=matrix(inner(index), spec.hidden_size),
                up=matrix(inner(index), spec.hidden_size),
                down=matrix(spec.hidden_size, inner(index)),
                **changes(index),
                mixture=mixture_weights(spec, index, random),
                named=named(index),
            )
            for index in range(spec.num_layers)
        ),
        final_norm=norm(),
        lm_head=embedding if spec.tie_embeddings else matrix(spec.vocab_size, spec.hidden_size),
    )


def mixture_weights(
    spec: ModelSpec, layer: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return router and experts; the router's logits differ enough for weights not all alike."""
    of = spec.mixture_of(layer)
    if of is None:
        return {}
    shapes = mixture_shapes(spec, of) | shared_shapes(spec, of)
    return {
        role: random.standard_normal(shape, dtype=np.float32)
        * np.float32(0.15 * (2 if role == ROUTER else 1))
        for role, shape in shapes.items()
    }


def own_weights(spec: ModelSpec, layer: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Return by canonical names what few architectures have: of Gemma 4 alone, yet."""
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(layout.layer_scale(spec, layer), (1,))
    roles = layer_inputs_layout.layer_shapes(spec)
    shapes |= {layout.layer_tensor(layer, role): shape for role, shape in roles.items()}
    if layer == 0:
        shapes |= layer_inputs_layout.global_shapes(spec)
    mixture = spec.mixture_of(layer)
    if mixture is not None:
        vectors = own_norm_shapes(spec, mixture).items()
        shapes |= {f"{layout.PREFIX}layers.{layer}.{name}": shape for name, shape in vectors}
    return {
        name: random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)
        if len(shape) > 1
        else random.uniform(0.5, 1.5, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def mixer_weights(
    spec: ModelSpec, layer: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return the gate of a layer's attention, if it has one, or what it has in its place."""

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)

    recurrence = spec.recurrence_of(layer)
    if spec.latents is not None:
        shapes = latent_layout.latent_shapes(spec.latents, spec.num_heads, spec.hidden_size)
        return {
            layout.layer_tensor(layer, role): random.uniform(0.5, 1.5, shape).astype(np.float32)
            if len(shape) == 1
            else matrix(*shape) * 2
            for role, shape in shapes.items()
        }
    if recurrence is None:
        if not spec.gates_attention:
            return {}
        name = layout.layer_tensor(layer, delta_net_layout.QUERY_GATE)
        return {name: matrix(spec.query_size, spec.hidden_size)}
    found = {}
    for name, shape in recurrence_shapes(spec, recurrence).items():
        values = matrix(*shape)
        if name.endswith(delta_net_layout.RATES):  # some forget fast, some slowly
            values = -random.uniform(0.02, 2, shape).astype(np.float32)
        elif "norm" in name:
            values = random.uniform(0.5, 1.5, shape).astype(np.float32)
        elif len(shape) == 1 or any(role in name for role in CONVOLUTIONS):
            values *= 4
        found[f"{layout.PREFIX}layers.{layer}.{name}"] = values
    return found
