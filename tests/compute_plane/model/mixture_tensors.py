"""The router and the experts of tiny models, as directories and as GGUF files have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

MIXTURES = ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss")
"""Architectures with experts."""


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
    is_mixtral = model.architecture == "mixtral"
    prefix = "block_sparse_moe" if is_mixtral else "mlp"
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    shapes = (inner, hidden), (inner, hidden), (hidden, inner)
    found: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (count, hidden)}
    for expert in range(count):
        for name, shape in zip(names, shapes, strict=True):
            found[f"{prefix}.experts.{expert}.{name}.weight"] = shape
    return found


def experts_in_gguf(model: Any) -> dict[str, np.ndarray]:
    """Return routers and experts by the file's names."""
    if model.architecture == "gpt_oss":
        return dict(_of_gpt_oss(model.weights))
    found: dict[str, list[np.ndarray]] = {}
    parts = {
        "gate": "gate_inp", "layer": "gate_inp", "w1": "gate_exps", "w3": "up_exps",
        "w2": "down_exps", "gate_proj": "gate_exps", "up_proj": "up_exps",
        "down_proj": "down_exps", "output_linear": "down_exps",
    }  # fmt: skip
    for name, values in model.weights.items():
        if not (".block_sparse_moe." in name or ".mlp." in name):
            continue
        layer, role = name.split(".")[2], name.split(".")[-2]
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
