"""The router and the experts of tiny models, as directories and as GGUF files have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

OF_QWEN = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
"""Architectures whose shared MLP has a gate."""
OF_GLM = ("glm4_moe", "dots1", "exaone_moe", "solar_open")
"""Architectures that choose experts as DeepSeek-V3 does."""
SHARING = (*OF_QWEN, *OF_GLM, "ernie4_5_moe")
"""Architectures with experts and an MLP beside them."""
LIKE_MIXTRAL = ("mixtral", "minimax_m2")
MIXTURES = (*LIKE_MIXTRAL, "qwen3_moe", "granitemoe", "gpt_oss", "olmoe", *SHARING)
"""Architectures with experts."""
SHARED = dict.fromkeys(OF_QWEN, "mlp.shared_expert")
SHARED_SIZE = 48


def mixture_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the router's and the experts' tensors of a layer, as directories have them."""
    count, hidden, inner = model.num_experts, model.hidden_size, model.intermediate_size
    if model.architecture == "granitemoe":
        return {
            "block_sparse_moe.router.layer.weight": (count, hidden),
            "block_sparse_moe.input_linear.weight": (count, 2 * inner, hidden),
            "block_sparse_moe.output_linear.weight": (count, hidden, inner),
        }
    if model.architecture == "gpt_oss":
        return {
            "mlp.router.weight": (count, hidden),
            "mlp.router.bias": (count,),
            "mlp.experts.gate_up_proj": (count, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (count, 2 * inner),
            "mlp.experts.down_proj": (count, inner, hidden),
            "mlp.experts.down_proj_bias": (count, hidden),
        }
    is_mixtral = model.architecture in LIKE_MIXTRAL
    prefix = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    found: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (count, hidden)}
    for expert in range(count):
        for name, shape in zip(names, shapes, strict=True):
            found[f"{prefix}.experts.{expert}.{name}.weight"] = shape
    if model.architecture == "minimax_m2":
        found[f"{prefix}.e_score_correction_bias"] = (count,)
    return found | _shared_shapes(model)


def _shared_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the tensors of what all tokens of a layer go through, and corrections."""
    if model.architecture not in SHARING:
        return {}
    count, hidden = model.num_experts, model.hidden_size
    size = SHARED_SIZE if model.architecture in OF_QWEN else 2 * model.intermediate_size
    prefix = SHARED.get(model.architecture, "mlp.shared_experts")
    found: dict[str, tuple[int, ...]] = {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }
    if model.architecture in OF_QWEN:
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    elif model.architecture == "ernie4_5_moe":
        found["mlp.moe_statics.e_score_correction_bias"] = (1, count)
    elif model.architecture == "exaone_moe":
        found["mlp.e_score_correction_bias"] = (count,)
    else:
        found["mlp.gate.e_score_correction_bias"] = (count,)
    return found


def config_of(model: Any) -> dict[str, Any]:
    """Return what a config.json says of a model's experts."""
    config: dict[str, Any] = {
        "num_local_experts": model.num_experts, "num_experts_per_tok": 2,
    }  # fmt: skip
    if model.architecture in ("qwen3_moe", *SHARING):
        config |= {"moe_intermediate_size": model.intermediate_size, "norm_topk_prob": True}
    of_glm = {
        "n_routed_experts": model.num_experts, "n_shared_experts": 2,
        "routed_scaling_factor": 1.75, "first_k_dense_replace": model.dense_layers,
        "pad_token_id": 0,
    }  # fmt: skip
    of_qwen = {"shared_expert_intermediate_size": SHARED_SIZE, "num_experts": model.num_experts}
    own: dict[str, dict[str, Any]] = {
        **dict.fromkeys(OF_QWEN, of_qwen),
        "glm4_moe": {
            "attention_bias": model.has_extras, "use_qk_norm": model.has_extras,
            "num_nextn_predict_layers": 0, **of_glm,
        },
        "dots1": of_glm,
        "solar_open": of_glm,
        "exaone_moe": {
            "num_experts": model.num_experts, "num_shared_experts": 2,
            "routed_scaling_factor": 1.75, "first_k_dense_replace": model.dense_layers,
            "pad_token_id": 0,
        },
        "olmoe": {"num_experts": model.num_experts, "pad_token_id": 0},
        "ernie4_5_moe": {
            "moe_num_experts": model.num_experts, "moe_k": 2, "moe_num_shared_experts": 2,
            "moe_layer_start_index": model.dense_layers, "moe_layer_end_index": -1,
        },
    }  # fmt: skip
    if model.architecture in own:
        del config["num_local_experts"]
        config |= own[model.architecture]
    return config


def keys_of(model: Any) -> dict[str, Any]:
    """Return what a GGUF file says of a model's experts."""
    keys: dict[str, Any] = {
        "expert_count": model.num_experts,
        "expert_used_count": 2,
        "expert_feed_forward_length": model.intermediate_size,
    }
    if model.architecture in OF_GLM:
        keys |= {"expert_weights_norm": True, "expert_weights_scale": 1.75}
        keys |= {"expert_gating_func": 2, "expert_shared_count": 2}
    if model.dense_layers:
        keys["leading_dense_block_count"] = model.dense_layers
    return keys


def is_of_experts(model: Any, name: str) -> bool:
    """Whether a weight of a directory is a router's or an expert's, or beside them."""
    parts = name.split(".")
    is_of_mlp = ".block_sparse_moe." in name or ".mlp." in name
    return is_of_mlp and int(parts[2]) >= model.dense_layers


def experts_in_gguf(model: Any) -> dict[str, np.ndarray]:
    """Return routers and experts by the file's names."""
    if model.architecture == "gpt_oss":
        return dict(_of_gpt_oss(model.weights))

    def flat(values: np.ndarray) -> np.ndarray:
        """A row is left by converters, and taken away by quantisers."""
        return values if model.leaves_rows else values.reshape(-1)

    found: dict[str, list[np.ndarray]] = {}
    parts = {
        "gate": "gate_inp", "layer": "gate_inp", "w1": "gate_exps", "w3": "up_exps",
        "w2": "down_exps", "gate_proj": "gate_exps", "up_proj": "up_exps",
        "down_proj": "down_exps", "output_linear": "down_exps",
    }  # fmt: skip
    for name, values in model.weights.items():
        if not is_of_experts(model, name):
            continue
        layer, role = name.split(".")[2], name.split(".")[-2]
        if name.endswith("e_score_correction_bias"):
            found[f"blk.{layer}.exp_probs_b.bias"] = [flat(values)]
            continue
        if "shared_expert" in name:
            part = role.removesuffix("_proj") if role.endswith("_proj") else "gate_inp"
            found[f"blk.{layer}.ffn_{part}_shexp.weight"] = [
                values if role.endswith("_proj") else flat(values)
            ]
            continue
        if role == "input_linear":
            gate, up = values[:, : model.intermediate_size], values[:, model.intermediate_size :]
            found[f"blk.{layer}.ffn_gate_exps.weight"] = [*gate]
            found[f"blk.{layer}.ffn_up_exps.weight"] = [*up]
        else:
            rows = [*values] if role == "output_linear" else [values]
            found.setdefault(f"blk.{layer}.ffn_{parts[role]}.weight", []).extend(rows)
    return {name: np.stack(v) if "exps" in name else v[0] for name, v in found.items()}


def _of_gpt_oss(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what gate and up, which are in turns, and down are in a file, outputs first."""
    for name, values in weights.items():
        prefix, _, part = name.partition(".mlp.")
        layer = prefix.removeprefix("model.layers.")
        if part.startswith("router."):
            yield f"blk.{layer}.ffn_gate_inp.{part.removeprefix('router.')}", values
        elif part:
            kind = "bias" if part.endswith("_bias") else "weight"
            rows = values if kind == "bias" else values.swapaxes(1, 2)
            if part.startswith("experts.down_proj"):
                yield f"blk.{layer}.ffn_down_exps.{kind}", np.ascontiguousarray(rows)
            else:
                yield f"blk.{layer}.ffn_gate_exps.{kind}", np.ascontiguousarray(rows[:, 0::2])
                yield f"blk.{layer}.ffn_up_exps.{kind}", np.ascontiguousarray(rows[:, 1::2])
