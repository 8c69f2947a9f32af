"""The router and the experts of tiny models, as directories and as GGUF files have them."""

from __future__ import annotations

from typing import Any

import numpy as np

MIXTURES = ("mixtral", "qwen3_moe", "granitemoe")
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
