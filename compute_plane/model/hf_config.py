"""The numbers of a model in a Hugging Face directory: config.json."""

from __future__ import annotations

from dataclasses import replace

from compute_plane.model.architectures import ARCHITECTURES
from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.exact_context import exact_length, with_long_contexts
from compute_plane.model.hf_gemma import with_gemma
from compute_plane.model.hf_gemma4 import with_config_of_gemma4
from compute_plane.model.hf_granite4 import SHARED_SIZE, has_experts
from compute_plane.model.hf_granite_swa import with_own_bases
from compute_plane.model.hf_latents import config_latents
from compute_plane.model.hf_lfm2 import lfm2_intermediate_size, refuse_other_lfm2
from compute_plane.model.hf_minimax import minimax_rotary_share, refuse_other_minimax
from compute_plane.model.hf_model_types import (
    DEEPSEEK3,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    GRANITE4,
    GRANITE_SWA,
    KIMI_K2,
    LFM2,
    LFM2_MOE,
    MINIMAX_M2,
    MINISTRAL3,
    MODEL_TYPES,
    NEMOTRON_H,
    OLMO3,
    OLMOE,
    PHI3,
    SMOLLM3,
    ModelType,
)
from compute_plane.model.hf_multipliers import with_config_multipliers
from compute_plane.model.hf_nemotron import nemotron_intermediate_size, nemotron_layers
from compute_plane.model.hf_olmo3 import with_own_windows
from compute_plane.model.hf_recurrence import config_recurrence
from compute_plane.model.hf_rope import (
    OF_GPT_OSS,
    OF_MINISTRAL3,
    of_layer_type,
    rope_scaling,
    rope_theta,
    rotary_share,
    with_defaults,
)
from compute_plane.model.hf_text_part import WHOLE_MODELS
from compute_plane.model.hf_windows import FULL_ATTENTION, SLIDING_ATTENTION, read_windows
from compute_plane.model.json_file import JsonObject
from compute_plane.model.mixture import EXPERT_WIDTH, OWN_WIDTHS, config_mixture
from compute_plane.model.spec import (
    MAX_LAYERS,
    ModelSpec,
)
from compute_plane.model.windows import turning_in_windows, with_windows
from kernels.reference.clamped_mul import LIMIT, SLOPE

NO_ROPE_INTERVAL = 4
"""Every so many layers of a SmolLM3 one has no rotary positions, unless it says otherwise."""
POSITIONS = {MINISTRAL3: OF_MINISTRAL3, GPT_OSS: OF_GPT_OSS}
"""Of models that say nothing of their rotary positions and mean something."""
CLAMPED = {"swiglu_limit": LIMIT, "swiglu_alpha": SLOPE}
"""The numbers of a clamped SwiGLU, and the only ones that there are kernels for."""


def read_hf_spec(config: JsonObject, name: str, *, long_context: bool = False) -> ModelSpec:
    """Return the numbers of config.json, not yet checked against the tensors.

    `long_context`: as of `with_long_contexts`.

    `tie_embeddings` is what the configuration says, `num_parameters` and `weight_format` are empty:
    the reader of the tensors completes them. How its matrices are quantised is not looked at here
    (`compute_plane.model.group_config`). Raises ModelFileError for a missing or wrong value,
    UnsupportedModelError for a model that is none of the types, plain.
    """
    model_type = config.text("model_type")
    if model_type not in MODEL_TYPES:
        shown = "none" if model_type is None else printable(model_type)
        raise UnsupportedModelError(
            config.path,
            f"{config.name('model_type')} {shown} is not supported; supported are "
            f"{', '.join([*MODEL_TYPES, *WHOLE_MODELS])}",
        )
    kind = MODEL_TYPES[model_type]
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    context_length = config.integer("max_position_embeddings")
    layers = nemotron_layers(config) if model_type == NEMOTRON_H else None
    num_layers = config.integer("num_hidden_layers") if layers is None else len(layers.letters)
    has_types = model_type in (GEMMA3, OLMO3)
    turning = of_layer_type(config, FULL_ATTENTION) if has_types else config
    if model_type == GEMMA4:
        turning = of_layer_type(config, SLIDING_ATTENTION)
    if model_type in POSITIONS:
        turning = with_defaults(config, POSITIONS[model_type])
    scaling = rope_scaling(
        turning,
        context_length,
        yarn_is_longrope=model_type == PHI3,
        queries_may_grow=model_type == MINISTRAL3,
    )
    latents = config_latents(config, model_type, scaling)
    num_kv_heads, head_dim = 1, 0
    if latents is None:
        num_kv_heads = config.integer("num_key_value_heads", kind.num_kv_heads or num_heads)
        head_dim = _head_dim(config, kind, hidden_size, num_heads)
    norm_eps = config.number(kind.epsilon_key, kind.rms_norm_eps)
    # A model without a head has the embedding for one, as GGUF files of such models have it.
    ties = True if _is_headless(config, kind) else _ties(config, model_type)
    spec = ModelSpec(
        name=name,
        architecture=kind.architecture,
        vocab_size=config.integer("vocab_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim if latents is None else latents.row_size,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(config, model_type),
        context_length=exact_length(kind.architecture, context_length, scaling),
        rope_theta=rope_theta(turning, kind.rope_theta),
        rope_scaling=scaling,
        rms_norm_eps=norm_eps,
        tie_embeddings=kind.ties if ties is None else ties,
        num_parameters=0,
        weight_format="",
        rotary_dim=_rotary_dim(turning, kind, head_dim, model_type)
        if latents is None
        else latents.turning,
        layers_without_rope=_layers_without_rope(config, model_type, num_layers),
        mixture=config_mixture(config, model_type),
        lacks_qkv_bias=_lacks_qkv_bias(config, kind),
        lacks_head_norms=ARCHITECTURES[kind.architecture].may_lack_head_norms
        and not config.boolean("use_qk_norm"),
        layers_ahead=_layers_ahead(config, model_type),
        recurrence=config_recurrence(config, model_type, norm_eps),
        latents=latents,
    )
    _refuse_variants(config, model_type)
    spec = with_long_contexts(spec, config.path, are_wanted=long_context)
    window, with_window = read_windows(
        config, model_type, min(num_layers, MAX_LAYERS), spec.layers_without_rope
    )
    spec = with_windows(config.path, spec, window, with_window, "sliding_window")
    if layers is not None:
        spec = replace(
            spec,
            layers_without_rope=frozenset(range(num_layers)),
            layers_without_mixer=layers.without_mixer,
            layers_without_mlp=layers.without_mlp,
        )
    if ARCHITECTURES[kind.architecture].turns_in_windows:
        spec = turning_in_windows(spec, window, with_window)
    if model_type == GRANITE_SWA:
        spec = with_own_bases(config, spec)
    if model_type == OLMO3:
        spec = with_own_windows(config, spec, frozenset(with_window))
    if model_type in (GEMMA2, GEMMA3):
        spec = with_gemma(config, spec, frozenset(with_window))
    if model_type == GEMMA4:
        spec = with_config_of_gemma4(config, spec, with_window)
    return with_config_multipliers(config, model_type, spec)


def _ties(config: JsonObject, model_type: str) -> bool | None:
    """Return whether the embedding is the output matrix; None: it is not said.

    Older files of LFM2 name it otherwise, and it holds before the other, as in transformers.
    """
    ties = config.boolean("tie_embedding") if model_type in (LFM2, LFM2_MOE) else None
    return config.boolean("tie_word_embeddings") if ties is None else ties


def _intermediate_size(config: JsonObject, model_type: str) -> int:
    if model_type == GRANITE4 and not has_experts(config):
        return config.integer("shared_intermediate_size", SHARED_SIZE)
    if model_type == NEMOTRON_H:
        return nemotron_intermediate_size(config)
    if model_type == GEMMA4 and config.boolean("enable_moe_block"):
        return config.integer(EXPERT_WIDTH)
    if model_type == LFM2:
        return lfm2_intermediate_size(config)
    if model_type in OWN_WIDTHS:
        return config.integer(EXPERT_WIDTH)
    return config.integer("intermediate_size")


def _head_dim(config: JsonObject, kind: ModelType, hidden_size: int, num_heads: int) -> int:
    head_dim = config.optional_integer("head_dim")
    if head_dim is None:
        head_dim = kind.head_dim
    if head_dim is not None:
        return head_dim
    if num_heads < 1 or hidden_size % num_heads:
        raise ModelFileError(
            config.path,
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}",
        )
    return hidden_size // num_heads


def _rotary_dim(config: JsonObject, kind: ModelType, head_dim: int, model_type: str) -> int | None:
    """Return how many elements of a head turn; None: all."""
    meant = kind.rotary_share
    if model_type == MINIMAX_M2:
        meant = minimax_rotary_share(config, head_dim)
    share = rotary_share(config, meant)
    if share == 1.0:
        return None
    if not kind.turns_in_part:
        raise UnsupportedModelError(config.path, "partial rotary positions are not supported")
    if not 0 < share < 1:
        raise ModelFileError(
            config.path, f"partial_rotary_factor must be greater than 0 and at most 1, got {share}"
        )
    return int(head_dim * share)


def _layers_without_rope(config: JsonObject, model_type: str, num_layers: int) -> frozenset[int]:
    """Return which layers have no rotary positions.

    Of SmolLM3 those where `no_rope_layers` says 0, of Granite 4 all, unless it says that it has
    them.
    """
    if model_type == GRANITE4 and config.text("position_embedding_type") != "rope":
        return frozenset(range(min(num_layers, MAX_LAYERS)))
    if model_type != SMOLLM3 or num_layers > MAX_LAYERS:  # too many are refused with the others
        return frozenset()
    turns = config.raw("no_rope_layers")
    if turns is None:
        interval = config.integer("no_rope_layer_interval", NO_ROPE_INTERVAL)
        if interval < 1:
            raise ModelFileError(
                config.path, f"no_rope_layer_interval must be at least 1, got {interval}"
            )
        return frozenset(range(interval - 1, num_layers, interval))
    if (
        not isinstance(turns, list)
        or len(turns) < num_layers
        or any(turn not in (0, 1) for turn in turns)
    ):
        raise ModelFileError(
            config.path, f"no_rope_layers must be 0 or 1 for each of {num_layers} layers"
        )
    return frozenset(layer for layer in range(num_layers) if not turns[layer])


def _layers_ahead(config: JsonObject, model_type: str) -> int:
    """Return how many layers files have behind the last one; ERNIE's are called otherwise."""
    if model_type not in (GLM4_MOE, GLM4_MOE_LITE, DEEPSEEK3, KIMI_K2):
        return 0
    return config.integer("num_nextn_predict_layers", config.integer("num_mtp_layers", 1))


def _refuse_variants(config: JsonObject, model_type: str) -> None:
    """Refuse what shares the model type but computes something else."""
    kind = MODEL_TYPES[model_type]
    architectures = config.raw("architectures")
    # Llama's and Mistral's classes compute the same; files name either.
    names = [
        other.class_name
        for other in MODEL_TYPES.values()
        if other.architecture == kind.architecture
    ]
    known = {*names, kind.older_class_name}
    if (
        architectures is not None
        and not (
            isinstance(architectures, list)
            and any(isinstance(name, str) and name in known for name in architectures)
        )
        and not _is_headless(config, kind)
    ):
        raise UnsupportedModelError(
            config.path,
            f"architectures must name {' or '.join(names)}, got {printable(repr(architectures))}",
        )
    if config.boolean("is_causal") is False:
        raise UnsupportedModelError(
            config.path, "attention that is not causal is not supported (is_causal = false)"
        )
    if model_type == GPT_OSS:
        _refuse_other_gpt_oss(config)
    if model_type in (LFM2, LFM2_MOE):
        refuse_other_lfm2(config)
    if model_type == MINIMAX_M2:
        refuse_other_minimax(config)
    if model_type == OLMOE and config.raw("clip_qkv") is not None:
        raise UnsupportedModelError(config.path, "clip_qkv is not supported")
    has_own_rules = _says_qkv_bias(kind) or model_type == GPT_OSS
    biases = "mlp_bias", "attention_out_bias", "use_bias"
    for key in biases if has_own_rules else ("attention_bias", *biases):
        if config.boolean(key):
            raise UnsupportedModelError(config.path, f"{key} = true is not supported")
    key, expected = kind.activation
    activation = config.text(key) or expected
    if activation != expected:
        raise UnsupportedModelError(
            config.path, f"{key} must be {expected}, got {printable(activation)}"
        )


def _says_qkv_bias(kind: ModelType) -> bool:
    """Whether `attention_bias` means queries, keys and values alone."""
    return ARCHITECTURES[kind.architecture].may_lack_qkv_bias


def _lacks_qkv_bias(config: JsonObject, kind: ModelType) -> bool:
    said = config.boolean("attention_bias")
    return _says_qkv_bias(kind) and not (kind.has_qkv_bias if said is None else said)


def _is_headless(config: JsonObject, kind: ModelType) -> bool:
    """Whether the files hold the model up to its final norm, as embedding models' may."""
    architectures = config.raw("architectures")
    if not isinstance(architectures, list):
        return False
    return any(
        other.class_name.replace("ForCausalLM", "Model") in architectures
        for other in MODEL_TYPES.values()
        if other.architecture == kind.architecture
    )


def _refuse_other_gpt_oss(config: JsonObject) -> None:
    """Refuse a gpt-oss without biases, or with other numbers in its gate."""
    if config.boolean("attention_bias") is False:
        raise UnsupportedModelError(config.path, "attention_bias must be true, got false")
    for key, expected in CLAMPED.items():
        given = config.number(key, expected)
        if given != expected:
            raise UnsupportedModelError(config.path, f"{key} must be {expected:g}, got {given:g}")
