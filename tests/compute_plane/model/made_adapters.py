"""Random adapters as PEFT saves them and as llama.cpp's converter writes them."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as GgmlType
from safetensors.numpy import save_file

from tests.compute_plane.model.conftest import TURNED, interleave, name_in_gguf
from tests.compute_plane.model.tiny_model import TinyModel

RANK, ALPHA = 4, 6.0
Q, V = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
OF_ATTENTION = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "self_attn.out_proj", "self_attn.qkv_proj", "mixer.q_proj", "mixer.k_proj", "mixer.v_proj",
    "mixer.o_proj",
)  # fmt: skip
OF_MLPS = (
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate_up_proj", "feed_forward.gate_proj",
    "feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.w1", "feed_forward.w2",
    "feed_forward.w3", "shared_mlp.input_linear", "shared_mlp.output_linear", "mixer.up_proj",
    "mixer.down_proj",
)  # fmt: skip


@dataclass
class MadeAdapter:
    """Random pairs `a` [r, K] and `b` [N, r] by module; `config`: keys of the configuration."""

    a: dict[str, np.ndarray]
    b: dict[str, np.ndarray]
    config: dict[str, Any] = field(default_factory=dict)

    def merged(self, made: TinyModel) -> TinyModel:
        """The model with the adapter's products in its matrices."""
        merged = copy.copy(made)
        merged.weights = dict(made.weights)
        for module, b in self.b.items():
            product = ALPHA / RANK * (b.astype(np.float64) @ self.a[module].astype(np.float64))
            weights = made.weights[f"{module}.weight"] + product
            merged.weights[f"{module}.weight"] = weights.astype(np.float32)
        return merged

    def tensors(self, prefix: str = "base_model.model.") -> dict[str, np.ndarray]:
        halves = {"lora_A": self.a, "lora_B": self.b}
        return {
            f"{prefix}{module}.{half}.weight": values
            for half, of_half in halves.items()
            for module, values in of_half.items()
        }

    def save(self, directory: Path, tensors: dict[str, np.ndarray] | None = None) -> Path:
        """Write what PEFT does."""
        directory.mkdir(exist_ok=True)
        config = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
            "target_modules": sorted({module.rpartition(".")[2] for module in self.a}),
            "base_model_name_or_path": "somebody/else", "use_dora": False, "use_rslora": False,
            "fan_in_fan_out": False, "init_lora_weights": True, "rank_pattern": {},
            "alpha_pattern": {}, "modules_to_save": None, "loftq_config": {}, "lora_dropout": 0.05,
            "megatron_config": None, "megatron_core": "megatron.core", "task_type": "CAUSAL_LM",
            "layer_replication": None, "trainable_token_indices": None, "qalora_group_size": 16,
        } | self.config  # fmt: skip
        (directory / "adapter_config.json").write_text(json.dumps(config))
        save_file(self.tensors() if tensors is None else tensors, self.weights(directory))
        return directory

    @staticmethod
    def weights(directory: Path) -> Path:
        return directory / "adapter_model.safetensors"

    def save_gguf(self, path: Path, made: TinyModel, **changes: Any) -> Path:
        """Write what the converter of llama.cpp does, which turns `b` as it turns matrices."""
        like = copy.copy(made)
        like.weights = {f"{module}.weight": values for module, values in self.b.items()}
        tensors = {}
        for name, rows in like.weights_in_gguf().items():
            turns = {"q_proj.weight": made.num_heads, "k_proj.weight": made.num_kv_heads}
            for part, heads in turns.items():
                if made.in_gguf in TURNED and name.endswith(part):
                    rows = interleave(rows, heads)
            # Names of Falcon's MLPs are other models' there, in the same order.
            module = list(self.b)[list(like.weights_in_gguf()).index(name)]
            stored = name_in_gguf(name, made.in_gguf)
            tensors |= {f"{stored}.lora_a": self.a[module], f"{stored}.lora_b": rows}
        return write_gguf_adapter(path, made.in_gguf, tensors, **changes)


def write_gguf_adapter(
    path: Path,
    architecture: str,
    tensors: dict[str, np.ndarray],
    *,
    kind: str | None = "adapter",
    adapter_type: str = "lora",
    alpha: float | None = ALPHA,
    stored_as: GgmlType = GgmlType.F32,
    keys: dict[str, int] | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_string("adapter.type", adapter_type)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in (keys or {}).items():
        writer.add_uint32(key, value)
    for name, values in tensors.items():
        data = gguf.quants.quantize(np.ascontiguousarray(values), stored_as)
        writer.add_tensor(name, data, raw_dtype=stored_as)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def adapter_of(
    made: TinyModel, roles: tuple[str, ...] = OF_ATTENTION + OF_MLPS, rank: int = RANK
) -> MadeAdapter:
    """Return one that changes all matrices that adapters may change; K and N as the model's."""
    rng = np.random.default_rng(3)
    modules = [
        name.removesuffix(".weight") for name in made.weights if name.endswith(
            tuple(f".{role}.weight" for role in roles)
        )
    ]  # fmt: skip
    shapes = {module: made.weights[f"{module}.weight"].shape for module in modules}
    return MadeAdapter(
        {m: rng.standard_normal((rank, k)).astype(np.float32) for m, (_, k) in shapes.items()},
        {m: rng.standard_normal((n, rank)).astype(np.float32) for m, (n, _) in shapes.items()},
    )


def small(made: TinyModel, *modules: str) -> MadeAdapter:
    """Return one that changes some modules alone."""
    return adapter_of(made, tuple(module.partition(".layers.")[2] for module in modules or (Q, V)))
