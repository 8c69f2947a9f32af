"""Which models Hugging Face directories may hold: `model_type`, and what each means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LLAMA = "llama"
MISTRAL = "mistral"
MINISTRAL3 = "ministral3"
MIXTRAL = "mixtral"
QWEN2 = "qwen2"
QWEN2_MOE = "qwen2_moe"
QWEN3 = "qwen3"
QWEN3_MOE = "qwen3_moe"
QWEN3_NEXT = "qwen3_next"
QWEN3_5 = "qwen3_5_text"
QWEN3_5_MOE = "qwen3_5_moe_text"
PHI3 = "phi3"
GLM4 = "glm4"
GLM4_MOE = "glm4_moe"
DOTS1 = "dots1"
ERNIE = "ernie4_5"
ERNIE_MOE = "ernie4_5_moe"
SEED_OSS = "seed_oss"
EXAONE4 = "exaone4"
EXAONE_MOE = "exaone_moe"
SMOLLM3 = "smollm3"
OLMO2 = "olmo2"
OLMO3 = "olmo3"
OLMOE = "olmoe"
MINIMAX_M2 = "minimax_m2"
SOLAR_OPEN = "solar_open"
GRANITE = "granite"
GRANITE4 = "granitemoehybrid"
GRANITE_MOE = "granitemoe"
GRANITE_SWA = "granite_swa"
GEMMA2 = "gemma2"
GEMMA3 = "gemma3_text"
GEMMA4 = "gemma4_text"
GPT_OSS = "gpt_oss"
LFM2 = "lfm2"
LFM2_MOE = "lfm2_moe"
DEEPSEEK2 = "deepseek_v2"
DEEPSEEK3 = "deepseek_v3"
KIMI_K2 = "kimi_k2"
GLM4_MOE_LITE = "glm4_moe_lite"
YOUTU = "youtu"
NEMOTRON_H = "nemotron_h"
FALCON_H1 = "falcon_h1"


@dataclass(frozen=True, slots=True)
class ModelType:
    """What a `model_type` stands for, and what its configurations mean where they say nothing.

    `architecture`: ours. `class_name`: of the model in transformers, `older_class_name` where files
    from before have another one. `num_kv_heads`: None: as many as there are heads. `head_dim`:
    None: hidden_size / heads. `ties`: the embedding is the output matrix too. `rope_theta`,
    `rms_norm_eps`: as in `ModelSpec`. `turns_in_part`: some of a head's elements may be left
    unrotated, `rotary_share`: and are where nothing is said. `activation`: the key of the gate's
    function, and what it is. `has_qkv_bias`: of an architecture that may lack it.
    `epsilon_key`: of the norms' epsilon.
    """

    architecture: str
    class_name: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    ties: bool = False
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    turns_in_part: bool = False
    rotary_share: float = 1.0
    activation: tuple[str, str] = ("hidden_act", "silu")
    older_class_name: str | None = None
    has_qkv_bias: bool = True
    epsilon_key: str = "rms_norm_eps"


MODEL_TYPES: Final = {
    LLAMA: ModelType("llama", "LlamaForCausalLM"),
    MISTRAL: ModelType("llama", "MistralForCausalLM", num_kv_heads=8),
    MINISTRAL3: ModelType(
        "mistral3",
        "Ministral3ForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
    ),
    QWEN2: ModelType("qwen2", "Qwen2ForCausalLM", num_kv_heads=32),
    QWEN3: ModelType("qwen3", "Qwen3ForCausalLM", num_kv_heads=32, head_dim=128),
    PHI3: ModelType("phi3", "Phi3ForCausalLM", rms_norm_eps=1e-5, turns_in_part=True),
    GLM4: ModelType(
        "glm4",
        "Glm4ForCausalLM",
        num_kv_heads=2,
        head_dim=128,
        rms_norm_eps=1.5625e-7,
        turns_in_part=True,
        rotary_share=0.5,
    ),
    ERNIE: ModelType(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        num_kv_heads=2,
        head_dim=128,
        ties=True,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        older_class_name="Ernie4_5_ForCausalLM",
    ),
    SEED_OSS: ModelType("seed_oss", "SeedOssForCausalLM", num_kv_heads=8, head_dim=128),
    EXAONE4: ModelType("exaone4", "Exaone4ForCausalLM", num_kv_heads=32, rms_norm_eps=1e-5),
    OLMO2: ModelType("olmo2", "Olmo2ForCausalLM", rms_norm_eps=1e-5),
    OLMO3: ModelType("olmo2", "Olmo3ForCausalLM", rope_theta=500000.0, rms_norm_eps=1e-5),
    SMOLLM3: ModelType("smollm3", "SmolLM3ForCausalLM", num_kv_heads=4, ties=True, rope_theta=2e6),
    GRANITE: ModelType("granite", "GraniteForCausalLM"),
    GEMMA2: ModelType(
        "gemma2",
        "Gemma2ForCausalLM",
        num_kv_heads=4,
        head_dim=256,
        ties=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    GEMMA3: ModelType(
        "gemma3",
        "Gemma3ForCausalLM",
        num_kv_heads=4,
        head_dim=256,
        ties=True,
        rope_theta=1e6,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    GEMMA4: ModelType(
        "gemma4",
        "Gemma4ForCausalLM",
        num_kv_heads=4,
        head_dim=256,
        ties=True,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
    ),
    GRANITE4: ModelType("granitehybrid", "GraniteMoeHybridForCausalLM"),
    GRANITE_SWA: ModelType(
        "granite_swa", "GraniteSWAForCausalLM", num_kv_heads=4, ties=True, rms_norm_eps=1e-5
    ),
    MIXTRAL: ModelType(
        "mixtral", "MixtralForCausalLM", num_kv_heads=8, rope_theta=1e6, rms_norm_eps=1e-5
    ),
    QWEN2_MOE: ModelType("qwen2moe", "Qwen2MoeForCausalLM", num_kv_heads=16),
    QWEN3_MOE: ModelType("qwen3moe", "Qwen3MoeForCausalLM", num_kv_heads=4),
    QWEN3_NEXT: ModelType(
        "qwen3next",
        "Qwen3NextForCausalLM",
        num_kv_heads=2,
        head_dim=256,
        turns_in_part=True,
        rotary_share=0.25,
    ),
    QWEN3_5: ModelType(
        "qwen35",
        "Qwen3_5ForCausalLM",
        num_kv_heads=4,
        head_dim=256,
        turns_in_part=True,
        rotary_share=0.25,
    ),
    QWEN3_5_MOE: ModelType(
        "qwen35moe",
        "Qwen3_5MoeForCausalLM",
        num_kv_heads=2,
        head_dim=256,
        turns_in_part=True,
        rotary_share=0.25,
    ),
    GLM4_MOE: ModelType(
        "glm4moe",
        "Glm4MoeForCausalLM",
        num_kv_heads=8,
        rms_norm_eps=1e-5,
        turns_in_part=True,
        rotary_share=0.5,
        has_qkv_bias=False,
    ),
    SOLAR_OPEN: ModelType(
        "glm4moe",
        "SolarOpenForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        turns_in_part=True,
        has_qkv_bias=False,
    ),
    DOTS1: ModelType("dots1", "Dots1ForCausalLM", num_kv_heads=32),
    EXAONE_MOE: ModelType(
        "exaone-moe",
        "ExaoneMoeForCausalLM",
        num_kv_heads=32,
        rms_norm_eps=1e-5,
        older_class_name="ExaoneMoEForCausalLM",
    ),
    OLMOE: ModelType("olmoe", "OlmoeForCausalLM", rms_norm_eps=1e-5),
    MINIMAX_M2: ModelType(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        rope_theta=5e6,
        turns_in_part=True,
    ),
    ERNIE_MOE: ModelType(
        "ernie4_5-moe",
        "Ernie4_5_MoeForCausalLM",
        num_kv_heads=4,
        ties=True,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
    ),
    LFM2: ModelType(
        "lfm2",
        "Lfm2ForCausalLM",
        num_kv_heads=8,
        ties=True,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        epsilon_key="norm_eps",
    ),
    LFM2_MOE: ModelType(
        "lfm2moe",
        "Lfm2MoeForCausalLM",
        num_kv_heads=8,
        ties=True,
        rope_theta=1e6,
        rms_norm_eps=1e-5,
        epsilon_key="norm_eps",
    ),
    DEEPSEEK2: ModelType("deepseek2", "DeepseekV2ForCausalLM"),
    DEEPSEEK3: ModelType("deepseek2", "DeepseekV3ForCausalLM"),
    KIMI_K2: ModelType("deepseek2", "DeepseekV3ForCausalLM"),
    GLM4_MOE_LITE: ModelType("deepseek2", "Glm4MoeLiteForCausalLM", rms_norm_eps=1e-5),
    YOUTU: ModelType("deepseek2", "YoutuForCausalLM", ties=True),
    NEMOTRON_H: ModelType(
        "nemotron_h",
        "NemotronHForCausalLM",
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        activation=("mlp_hidden_act", "relu2"),
        epsilon_key="layer_norm_epsilon",
    ),
    FALCON_H1: ModelType("falcon-h1", "FalconH1ForCausalLM", num_kv_heads=8, rms_norm_eps=1e-5),
    GRANITE_MOE: ModelType("granitemoe", "GraniteMoeForCausalLM"),
    GPT_OSS: ModelType(
        "gpt-oss",
        "GptOssForCausalLM",
        num_kv_heads=8,
        head_dim=64,
        rope_theta=150000.0,
        rms_norm_eps=1e-5,
    ),
}
