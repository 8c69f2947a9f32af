"""Tiny models, one for each thing that layers of some architectures have and a Llama's have not.

Sizes are the least that kernels are written for, and no two are equal by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from compute_plane.model import layout
from compute_plane.model.delta_net import DeltaNet
from compute_plane.model.gemma4 import turning_divisors
from compute_plane.model.heads import Heads
from compute_plane.model.latents import Latents
from compute_plane.model.mamba2 import Mamba2
from compute_plane.model.rope_scaling import FrequencyDivisors
from compute_plane.model.short_convolution import ShortConvolution
from compute_plane.model.spec import Mixture, ModelSpec
from compute_plane.model.tensor import TensorFormat

WINDOW: Final = 24
"""Shorter than the longest prompt."""
LLAMA: Final = ModelSpec(
    name="llama", architecture="llama", vocab_size=131, num_layers=2, num_heads=6, num_kv_heads=2,
    head_dim=64, hidden_size=96, intermediate_size=160, context_length=512, rope_theta=10_000.0,
    rope_scaling=None, rms_norm_eps=1e-5, tie_embeddings=False, num_parameters=0,
    weight_format="BF16",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Architecture:
    """A shape and the `formats` of its matrices, by a part of their names; others are bfloat16."""

    spec: ModelSpec
    formats: Mapping[str, TensorFormat] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the thing that it has."""
        return self.spec.name


def _of(name: str, architecture: str, **numbers: object) -> ModelSpec:
    return replace(LLAMA, name=name, architecture=architecture, **numbers)  # type: ignore[arg-type]


FIRST: Final = frozenset({0})
FIRST_TWO: Final = frozenset({0, 1})
LATENTS: Final = Latents(256, 32, 32, 96, 64, 0.2)
OVER_LATENTS: Final = {
    "latents": LATENTS, "num_kv_heads": 1, "rotary_dim": 32, "head_dim": LATENTS.row_size,
}  # fmt: skip
IN_GROUPS: Final = Mixture(
    8, 3, True, "sigmoid", 1.5, True, shared_size=96, dense_layers=1, dense_size=64, num_groups=4,
    groups_per_token=2,
)  # fmt: skip


DRAWN_SCALE: Final = 1 / 16
"""Of Gemma 4's scores, which it is not: beside drawn norms 1 leaves a query one key, and rounding
decides which."""


def of_gemma4(local: frozenset[int]) -> dict[str, object]:
    """Return the numbers of heads of 256 elements in layers with windows, and of 512 in others."""
    layers = frozenset(range(5 if len(local) > 1 else 2))
    return {
        "head_dim": 256, "global_heads": Heads(6, 1, 512),
        "layers_with_global_heads": layers - local, "score_scale": DRAWN_SCALE, "logits_cap": 5.0,
        "window": WINDOW, "layers_with_window": local, "layers_with_local_rope": local,
        "local_rope_theta": 100.0,
        "rope_scaling": FrequencyDivisors(turning_divisors(512, 0.25, 1.0)),
    }  # fmt: skip


SINGLE: Final = "M-*ME"
"""Layers of Nemotron-H: Mamba-2, attention, an MLP, experts; each is one thing."""

SHAPES: Final = (
    Architecture(
        _of(
            "Gated DeltaNet", "qwen35", num_layers=3,
            recurrence=DeltaNet(2, 4, 32, 64, 4, FIRST_TWO),
        )
    ),
    Architecture(
        _of("LFM2", "lfm2", num_layers=3, recurrence=ShortConvolution(96, 3, FIRST_TWO))
    ),
    Architecture(
        _of(
            "Mamba-2", "granitehybrid", num_layers=3,
            recurrence=Mamba2(8, 32, 64, 4, 1e-6, FIRST_TWO),
        )
    ),
    Architecture(
        _of(
            "Falcon-H1", "falcon-h1", num_layers=2,
            recurrence=Mamba2(8, 32, 64, 4, 1e-6, FIRST_TWO, num_groups=2, has_norm=False),
        )
    ),
    Architecture(
        _of(
            "Nemotron-H", "nemotron_h", num_layers=len(SINGLE),
            layers_without_rope=frozenset(range(len(SINGLE))),
            layers_without_mixer=frozenset({1, 4}), layers_without_mlp=frozenset({0, 2, 3}),
            mixture=Mixture(
                7, 3, scores="sigmoid", corrects_choice=True, shared_size=96, dense_layers=2,
                dense_size=160,
            ),
            recurrence=Mamba2(8, 32, 64, 4, 1e-6, frozenset({0, 3}), num_groups=2),
        )
    ),
    Architecture(_of("latents", "deepseek2", **OVER_LATENTS)),
    Architecture(
        _of("latents, experts of groups", "deepseek2", mixture=IN_GROUPS, **OVER_LATENTS)
    ),
    Architecture(
        _of(
            "gpt-oss", "gpt-oss", mixture=Mixture(7, 3), window=WINDOW, layers_with_window=FIRST
        ),
        {"mlp.experts": TensorFormat.MXFP4},
    ),
    Architecture(
        # Of 128 inputs scales are kept for all of them, of 160 for 32.
        _of("Qwen3 in float8", "qwen3moe", hidden_size=128, mixture=Mixture(7, 3)),
        {"_proj": TensorFormat.FP8},
    ),
    Architecture(
        _of("Q4_K_M", "llama", num_heads=4, hidden_size=256, intermediate_size=512),
        {
            "v_proj": TensorFormat.Q6_K, "down_proj": TensorFormat.Q6_K,
            layout.EMBEDDING: TensorFormat.Q6_K, "": TensorFormat.Q4_K,
        },
    ),
    Architecture(
        _of("experts in Q5_K", "qwen3moe", num_heads=4, hidden_size=256, intermediate_size=256,
            mixture=Mixture(7, 3)),
        {"_proj": TensorFormat.Q5_K},
    ),
    Architecture(
        _of(
            "Gemma 2", "gemma2", num_heads=4, num_kv_heads=2, head_dim=256, scores_cap=0.7,
            logits_cap=5.0, window=WINDOW, layers_with_window=FIRST,
        )
    ),
    Architecture(
        _of(
            "Gemma 3", "gemma3", num_heads=4, num_kv_heads=2, head_dim=256, window=WINDOW,
            layers_with_window=FIRST, local_rope_theta=100.0, layers_with_local_rope=FIRST,
        )
    ),
    Architecture(
        _of(
            "Gemma 4", "gemma4", num_layers=5, num_kv_heads=3, kv_sources=(0, 1, 2, 2, 1),
            late_mlp_size=192, layer_input_size=32, **of_gemma4(frozenset({0, 2, 3})),
        )
    ),
    Architecture(
        _of(
            "Gemma 4, experts", "gemma4", layers_without_values=frozenset({1}),
            mixture=Mixture(7, 3, shared_size=96, has_own_norms=True), **of_gemma4(FIRST),
        )
    ),
    Architecture(_of("OLMo 2", "olmo2")),
    Architecture(
        _of(
            "shared experts", "qwen2moe",
            mixture=Mixture(7, 3, shared_size=96, gates_shared=True),
        )
    ),
    Architecture(
        _of(
            "EXAONE 4", "exaone4", window=WINDOW, layers_with_window=FIRST,
            layers_without_rope=frozenset({1}),
        )
    ),
)  # fmt: skip
