"""What a Gemma 4 is beside other decoders, as its config.json has it (`gemma4`)."""

from __future__ import annotations

import re
from collections.abc import Collection

from compute_plane.model.errors import ModelFileError, UnsupportedModelError, printable
from compute_plane.model.gemma4 import Gemma4, turning_divisors, with_gemma4
from compute_plane.model.heads import Heads
from compute_plane.model.hf_gemma import embedding_scale
from compute_plane.model.hf_rope import of_layer_type, rope_scaling, rope_theta
from compute_plane.model.hf_windows import FULL_ATTENTION, SLIDING_ATTENTION
from compute_plane.model.json_file import JsonObject
from compute_plane.model.spec import ModelSpec
from compute_plane.model.spec_faults import faults_of, faults_of_heads

GLOBAL_HEAD_DIM = 512
GLOBAL_THETA = 1e6
TURNING_SHARE = 0.25
LAYER_INPUT_SIZE = 256
VOCAB_SIZE = 262144
"""What a configuration means that says nothing of them."""
PROPORTIONAL = "proportional"


def with_config_of_gemma4(
    config: JsonObject, spec: ModelSpec, with_window: Collection[int]
) -> ModelSpec:
    """Return the spec of a Gemma 4; `spec`: as other decoders', of its local layers.

    `with_window`: the layers with windows. Raises ModelFileError, UnsupportedModelError. Numbers
    that no model has are left as they are: they are refused with the others.
    """
    if faults_of(spec):
        return spec
    if config.text("use_bidirectional_attention") == "all":
        raise UnsupportedModelError(
            config.path, "use_bidirectional_attention = all is not supported"
        )
    local = frozenset(with_window)
    has_values = not config.boolean("attention_k_eq_v")
    heads = _global_heads(config, spec, local, own_kv_heads=not has_values)
    if faults := faults_of_heads(heads):
        raise ModelFileError(config.path, "of layers without windows " + "; ".join(faults))
    size = config.integer("hidden_size_per_layer_input", LAYER_INPUT_SIZE)
    vocab_size = config.integer("vocab_size_per_layer_input", VOCAB_SIZE)
    if size and vocab_size != spec.vocab_size:
        raise UnsupportedModelError(
            config.path,
            f"vocab_size_per_layer_input must be vocab_size, {spec.vocab_size}, got {vocab_size}",
        )
    turning = of_layer_type(config, FULL_ATTENTION)
    cap = None
    if config.raw("final_logit_softcapping") is not None:
        cap = config.number("final_logit_softcapping")
    is_double = config.boolean("use_double_wide_mlp")
    sliding = of_layer_type(config, SLIDING_ATTENTION)
    if rope_scaling(sliding, spec.context_length) is not None:
        raise UnsupportedModelError(
            config.path, "RoPE scaling of layers with windows is not supported"
        )
    return with_gemma4(
        config.path,
        spec,
        Gemma4(
            local_layers=local,
            global_heads=heads,
            global_theta=rope_theta(turning, GLOBAL_THETA),
            divisors=_divisors(turning, heads.head_dim),
            has_values=has_values,
            num_sharing=config.integer("num_kv_shared_layers", 0),
            sharing_mlp_size=spec.intermediate_size * (2 if is_double else 1),
            layer_input_size=size,
            logits_cap=cap,
            embedding_scale=embedding_scale(config, spec.hidden_size),
        ),
    )


def _global_heads(
    config: JsonObject, spec: ModelSpec, local: frozenset[int], *, own_kv_heads: bool
) -> Heads:
    """Return the heads of layers without windows.

    Published configurations name them, those that transformers writes say what differs by layer.
    `own_kv_heads`: `num_global_key_value_heads` counts.
    """
    by_layer = config.member("per_layer_config")
    if by_layer is None:
        kv_heads = config.optional_integer("num_global_key_value_heads") if own_kv_heads else None
        return Heads(
            spec.num_heads,
            spec.num_kv_heads if kv_heads is None else kv_heads,
            config.integer("global_head_dim", GLOBAL_HEAD_DIM),
        )
    # transformers writes them as wide as the last: "05" of a model of thirty layers.
    keys = {int(key): key for key in by_layer.keys if re.fullmatch("[0-9]{1,9}", key)}
    found = set()
    for layer in range(spec.num_layers):
        own = by_layer.member(keys[layer]) if layer in keys else None
        size, kv_heads = spec.head_dim, spec.num_kv_heads
        if own is not None:
            size = own.integer("head_dim", size)
            kv_heads = own.integer("num_key_value_heads", kv_heads)
        is_local = layer in local
        if is_local and (size, kv_heads) != (spec.head_dim, spec.num_kv_heads):
            raise UnsupportedModelError(
                config.path, f"per_layer_config of layers with windows ({layer}) is not supported"
            )
        if not is_local:
            found.add(Heads(spec.num_heads, kv_heads, size))
    if len(found) != 1:
        raise UnsupportedModelError(
            config.path, "per_layer_config must be the same of all layers without windows"
        )
    return found.pop()


def _divisors(turning: JsonObject, head_dim: int) -> tuple[float, ...] | None:
    """Return what frequencies of layers without windows are divided by; None: nothing."""
    parameters = turning.member("rope_parameters")
    if parameters is None:
        return turning_divisors(head_dim, TURNING_SHARE, 1.0)
    kind = parameters.text("rope_type") or "default"
    if kind == "default":
        return None
    if kind != PROPORTIONAL:
        raise UnsupportedModelError(
            turning.path, f"rope_type must be {PROPORTIONAL} or default, got {printable(kind)}"
        )
    share, factor = (
        parameters.number("partial_rotary_factor", 1.0),
        parameters.number("factor", 1.0),
    )
    if not 0 < share <= 1:
        raise ModelFileError(
            turning.path, f"partial_rotary_factor must be greater than 0 and at most 1, got {share}"
        )
    return turning_divisors(head_dim, share, factor)
