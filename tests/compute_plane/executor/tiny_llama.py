"""Seeded random models of two layers, small enough for a test."""

from __future__ import annotations

import numpy as np

from compute_plane.memory.kv_pool import KvPool
from compute_plane.model.spec import ModelSpec, RopeScaling
from compute_plane.model.weights import LlamaLayer, LlamaWeights


def tiny_spec(rope_scaling: RopeScaling | None = None, *, tied: bool = False) -> ModelSpec:
    """Return a shape in which no two sizes are equal by accident."""
    return ModelSpec(
        name="tiny",
        architecture="llama",
        vocab_size=131,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=72,
        intermediate_size=112,
        context_length=512,
        rope_theta=10_000.0,
        rope_scaling=rope_scaling,
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
        num_parameters=0,
        weight_format="F32",
    )


def tiny_weights(spec: ModelSpec, seed: int = 0) -> LlamaWeights:
    """Return weights of a size at which logits differ clearly from token to token."""
    random = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32) * np.float32(0.15)

    def norm() -> np.ndarray:
        return random.uniform(0.5, 1.5, spec.hidden_size).astype(np.float32)

    embedding = matrix(spec.vocab_size, spec.hidden_size) * 4
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(
            LlamaLayer(
                attn_norm=norm(),
                q=matrix(spec.query_size, spec.hidden_size),
                k=matrix(spec.kv_size, spec.hidden_size),
                v=matrix(spec.kv_size, spec.hidden_size),
                o=matrix(spec.hidden_size, spec.query_size),
                mlp_norm=norm(),
                gate=matrix(spec.intermediate_size, spec.hidden_size),
                up=matrix(spec.intermediate_size, spec.hidden_size),
                down=matrix(spec.hidden_size, spec.intermediate_size),
            )
            for _ in range(spec.num_layers)
        ),
        final_norm=norm(),
        lm_head=embedding if spec.tie_embeddings else matrix(spec.vocab_size, spec.hidden_size),
    )


def pool_for(spec: ModelSpec, num_blocks: int, block_size: int) -> KvPool:
    """Return a pool whose every slot holds NaN, as a previous owner might have left it."""
    pool = KvPool(
        num_blocks=num_blocks,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        block_size=block_size,
        head_dim=spec.head_dim,
    )
    pool.data[:] = np.nan
    return pool
